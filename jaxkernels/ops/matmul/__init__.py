"""Products: `matmul` and `dot_general`."""
