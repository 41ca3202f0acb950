"""What runs in the node agent: it reads the recorders and the GPUs of its node, and sends what is new."""
