"""Frames of what torch.compile has made one graph of: what is traced into it, and how its numbers become frames."""
