"""Errors that the command line prints without a traceback."""

__all__ = ["InputError"]


class InputError(ValueError):
    """The user's input cannot be used. The command line prints the message alone, without a traceback."""
