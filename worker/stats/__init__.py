"""Readers of a tensor: abs min, abs max and non-finite kinds, in host memory or on a device."""
