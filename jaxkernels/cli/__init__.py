"""The command line: `jaxkernels`, or `python -m jaxkernels`."""

from jaxkernels.cli.app import app, main

__all__ = ["app", "main"]
