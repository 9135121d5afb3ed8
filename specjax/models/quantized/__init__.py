"""Kernels in fewer bits, and their products."""
