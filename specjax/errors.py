"""The error every bad input raises."""


class InputError(ValueError):
    """Bad input; the message names the field, the value and the remedy on one line.

    Command lines print it without a traceback and leave with exit code 2.
    """


def one_line(error: Exception) -> str:
    """Another library's message as a part of one of ours; its class's name where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
