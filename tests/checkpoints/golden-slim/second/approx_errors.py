# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else.
"""The error that users can fix, and the exit codes of the command line."""

import reprlib
import sys
from enum import IntEnum
from typing import Any


class Exit(IntEnum):
    """Exit codes of the command line; commands use no others."""

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
    """An error that the user can fix.

    The message says what was asked, what was found, what is allowed and how to fix it.

    Args:
        message: One or more plain sentences; several mistakes are on separate lines.
        exit_code: Exit code of the command line.
    """

    def __init__(self, message: str, exit_code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def shown(value: Any) -> str:
    """A value for a message, shortened if it is long."""
    # A value may repeat its parts many times over, so its whole text is never made.
    short = reprlib.Repr()
    short.maxlevel, short.maxlong = 4, 60
    short.maxstring = short.maxother = 200
    try:
        text = short.repr(value)
    except ValueError:
        # Python writes no more than 4,300 digits.
        text = f"a number of more than {sys.get_int_max_str_digits():,} digits"
    return text if len(text) <= 60 else text[:57] + "..."
