"""C++ kernels for CPUs, and the library built from them."""
