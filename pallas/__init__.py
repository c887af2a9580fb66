"""Backend "pallas": Mosaic GPU kernels with explicitly pipelined BlockSpecs, for Hopper GPUs."""
