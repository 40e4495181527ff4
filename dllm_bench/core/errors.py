"""The error of this package that a user can act on."""


class DllmBenchError(Exception):
    """A mistake that the user can correct.

    The message says what was asked for, what was found, and what to do.
    """
