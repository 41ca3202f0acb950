"""What is done once, after the first alarm, and what must be kept before it: read again, run again, name the operation,
capture, replay. `--explain N` does it for one batch without an alarm."""
