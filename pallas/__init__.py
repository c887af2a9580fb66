"""The backend "pallas": Mosaic GPU kernels for Hopper GPUs, with explicit pipelines."""
