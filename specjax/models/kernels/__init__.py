"""Kernels for accelerators."""
