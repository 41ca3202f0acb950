"""The verdict of a run that overflowed: which rank and module was first, why, and in which words. Pure."""
