"""Kernels of Ascend NPUs: recorded schemas, and which package provides which operator."""
