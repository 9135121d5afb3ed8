"""The error every bad input raises."""


class InputError(ValueError):
    """Bad input; the message names the field, the value and the remedy on one line.

    Command lines print it without a traceback and leave with exit code 2.
    """
