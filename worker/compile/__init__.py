"""Frames of regions that torch.compile made one graph of: what is traced into a graph, and how its numbers are read."""
