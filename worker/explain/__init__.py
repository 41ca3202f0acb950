"""What is done once, after the first alarm: read again, run again, name the operation, capture, replay."""
