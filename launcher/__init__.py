"""`gpuwatch launch`: torchrun's own elastic agent, beside it one node agent and, on the head node, the collector."""
