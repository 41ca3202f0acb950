"""The Python side of the stand-in for CUDA: it computes what torch and Triton launch (../README.md)."""
