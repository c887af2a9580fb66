"""CUDA kernels of attention."""
