"""Readers of a tensor: abs min, abs max and what is non-finite, in host memory or on a device."""
