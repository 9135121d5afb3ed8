"""C++ kernels for CPUs, and the shared library that is built from them."""
