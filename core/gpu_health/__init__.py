"""What the driver says of the health of GPUs, through NVML: read in a child with a deadline, judged by one table.

    python -m gpuwatch.core.gpu_health [--device UUID]... [--loaded]     one reading, as JSON lines
    python -m gpuwatch.core.gpu_health --watch                           XIDs as they come; counters when asked

GPUs are known by UUID, never by index: NVML counts them otherwise than CUDA does, and knows no CUDA_VISIBLE_DEVICES.
"""
