# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else.
"""The one error that a user can mend, and the exit codes of the command line."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of the command line; every command uses this list and no other number."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    UNSUPPORTED = 3
    MISSING = 4
    UNAVAILABLE = 5
    VERIFICATION = 6
    THRESHOLD = 7
    REFUSED = 8
    INTERRUPTED = 130


class ApproxError(ValueError):
    """Something the user can mend.

    The message says what was asked, what was found, what is allowed and how to mend it.

    Args:
        message: One or more plain sentences; several mistakes stand on lines of their own.
        exit_code: What the command line exits with.
    """

    def __init__(self, message: str, exit_code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
