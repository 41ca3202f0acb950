"""Readers of tensors on a device, whose numbers come late."""
