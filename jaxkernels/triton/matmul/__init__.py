"""Matmul in Triton."""
