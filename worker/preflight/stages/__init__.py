"""What one rank does in each stage of the preflight, in a process of its own that can be ended."""
