"""Backend "xla": every operation in plain JAX. The reference, the CPU path, and the last resort."""
