"""Kernels in C++ for CPUs, and the library that is built of them."""
