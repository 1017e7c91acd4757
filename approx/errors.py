"""The error that users can fix, and the exit codes of the command line."""

import difflib
import reprlib
import sys
from collections.abc import Iterable
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
        allowed: What the setting may be whose value is wrong, in words.
    """

    def __init__(self, message: str, exit_code: Exit = Exit.USAGE, allowed: str = "") -> None:
        super().__init__(message)
        self.allowed = allowed
        self.exit_code = exit_code


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean …?` with the closest known name, or an empty text if none is close.

    Users often leave out the part before a slash, so the last parts of names are compared too.
    """
    whole = list(known)
    last = {one.rpartition("/")[2]: one for one in whole}
    close = difflib.get_close_matches(name, whole, n=1)
    close = close or [last[one] for one in difflib.get_close_matches(name.rpartition("/")[2], last, n=1)]
    return f" Did you mean '{close[0]}'?" if close else ""


def shown(value: Any) -> str:
    """A value for a message, shortened if it is long."""
    # YAML aliases can make a value huge, so its whole text is never built.
    short = reprlib.Repr()
    short.maxlevel, short.maxlong = 4, 60
    short.maxstring = short.maxother = 200
    try:
        text = short.repr(value)
    except ValueError:
        # Python writes no more than 4,300 digits.
        text = f"a number of more than {sys.get_int_max_str_digits():,} digits"
    return text if len(text) <= 60 else text[:57] + "..."
