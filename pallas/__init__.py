"""Backend "pallas": Mosaic GPU kernels whose pipelines are written out, for Hopper GPUs."""
