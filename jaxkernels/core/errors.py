"""Errors that the command line prints without a traceback, and how a message quotes another error."""

__all__ = ["InputError", "first_line"]


class InputError(ValueError):
    """The user's input cannot be used. The command line prints the message alone, without a traceback."""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or the error's type if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
