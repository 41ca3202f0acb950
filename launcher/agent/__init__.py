"""The node agent: reads the recorders and the GPUs of its node, and sends every change to the collector."""
