"""Kernels of Ascend NPUs: recorded schemas, which package provides which operator, and the operators made of them."""
