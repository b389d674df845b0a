"""Operators on plain tensors, one plain version of each, and the kernel table."""
