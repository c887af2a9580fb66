"""Products in CUDA C++."""
