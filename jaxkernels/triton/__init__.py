"""Backend "triton": kernels for every CUDA GPU, written in Triton and launched through jax-triton.

An operation is a folder. Modules that hold Triton code (`*_kernel.py`) import `triton`, and are imported when a kernel
is launched: the rest of a design works where Triton is not installed, and says what is missing.
"""
