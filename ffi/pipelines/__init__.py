"""One tensor core GEMM with several schedules of its pipeline, to measure what each of them hides."""

from jaxkernels.ffi.pipelines.gemm_mma import EVENTS, SCHEDULES, Config, Timeline, matmul, timeline

__all__ = ["EVENTS", "SCHEDULES", "Config", "Timeline", "matmul", "timeline"]
