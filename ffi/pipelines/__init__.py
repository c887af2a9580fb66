"""One tensor-core product with several schedules of its loads, to measure what each hides."""

from jaxkernels.ffi.pipelines.gemm import STAMPS, Config, configs, matmul, timeline

__all__ = ["STAMPS", "Config", "configs", "matmul", "timeline"]
