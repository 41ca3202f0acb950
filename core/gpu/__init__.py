"""The health of GPUs, as NVML reports it. A child process reads it under a deadline, and one table judges it.

    python -m gpuwatch.core.gpu [--device UUID]... [--loaded]     one reading, as JSON lines
    python -m gpuwatch.core.gpu --watch                                  XIDs as they come; counters when asked

GPUs are named by UUID, never by index: NVML's order differs from CUDA's and ignores CUDA_VISIBLE_DEVICES.
"""
