"""Frames of regions that torch.compile made one graph of: tracing our code into a graph, and reading its numbers."""
