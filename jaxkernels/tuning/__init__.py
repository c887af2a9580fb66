"""Measures which configuration, and which backend, is fastest for a spec on a chip.

`tuner` measures, and `autotune` has the public functions. `core/winners.py` stores the winners. `core/dispatch.py`
reads them when a program is lowered. `calibration` fits the constants of cost models to times, which
`jaxkernels.bench.measured` reads.
"""
