"""Linear cross entropy in Triton."""
