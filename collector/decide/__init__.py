"""All ranks: the verdict, in the order of its rules, and that of an overflow, a preflight and a clean run. Pure."""
