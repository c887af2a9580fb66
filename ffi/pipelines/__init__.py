"""One tensor core GEMM with several schedules of its pipeline, to measure what each of them hides."""
