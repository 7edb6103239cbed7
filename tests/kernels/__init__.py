"""Kernels: the data contract, the rotation and the attention ops, against float64 NumPy."""
