"""Whether ranks of this node rest, and where they stand."""
