"""The figures of a node over a run: what they are, and how they travel."""
