"""`DllmBenchError`, the error for mistakes that the user can correct."""


class DllmBenchError(Exception):
    """A mistake that the user can correct.

    The message says what was asked for, what was found, and what to do.
    """
