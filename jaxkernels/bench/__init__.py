"""Benchmarks: the speed of the kernels, compared with the fastest alternative in the same process.

- `suites`: the problems of all operations, and shapes from the command line;
- `runner`: compiles, checks and times problems, and makes rows of them; `training` does so for training steps;
- `lowering`: lowers the programs, in this process or in others;
- `random_rows`: random problems; `losses`: those where `backend=None` is slower than the best peer;
- `measured`: the times of our kernels in such JSON, for `jaxkernels tune --calibrate`;
- `accuracy`: the error rule; a result that breaks it is not timed;
- `results`: rows, their JSON, and the comparison of two runs; `report` and `plots` make tables and pictures of them;
- `telemetry`: clock rate, power and temperature of the GPU;
- `timeline`: when the warps of one thread block load, wait and multiply, in each schedule of a GEMM;
- `study`: the effect of the pipeline's slots and clusters on a GEMM;
- `sgemm`: the rungs of the SGEMM ladder beside cuBLAS;
- `sgemm_profile`: what limits each rung, by Nsight Compute.

`jaxkernels.core.measure` times the calls. The suites and baselines of an operation are in its folder.
"""
