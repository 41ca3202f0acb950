"""The lines of benchmarks/gpu_acceptance.py: what each does on a device, and whether that is good enough."""
