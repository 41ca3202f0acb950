"""`gpuwatch run` and `gpuwatch join`: ranks that gpuwatch does not start."""
