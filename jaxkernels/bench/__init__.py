"""Benchmarks: what the kernels reach, against the fastest alternative in the same process.

`measure` times calls in turns and knows nothing of what they compute; `accuracy` says whether a result may be timed.
`cases` and `suites` are the tables of what is timed, `baselines` the alternatives; `runner` puts them together into
rows, `training` does so for training steps. `results` stores rows, `report` and `plots` show them, `cli` holds the
commands.
"""
