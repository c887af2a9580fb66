"""Measured choices: which configuration, and which backend, is fastest for a spec on a chip.

`tuner` measures, and `autotune` is the public face. `core/winners.py` keeps the winners; `core/dispatch.py` reads them
whenever a program is lowered.
"""
