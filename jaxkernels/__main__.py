"""`python -m jaxkernels`: the command line."""

from jaxkernels.cli import main

main()
