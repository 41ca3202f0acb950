"""What one rank does in each stage of the preflight, in a separate process that can be killed."""
