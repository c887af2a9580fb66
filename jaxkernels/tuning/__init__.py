"""Measured choices: which configuration, and which backend, is fastest for a spec on a chip.

`tuner` measures, `cache` keeps the winners, `autotune` is the public face, `cli` the command `jaxkernels tune`.
`dispatch` asks the cache whenever a program is lowered.
"""
