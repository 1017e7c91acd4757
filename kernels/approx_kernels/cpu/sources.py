"""The C sources of the kernels: the files of c/, each put together with what it includes into one text for the compiler."""

import re
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).with_name("c")
_INCLUDE = re.compile(r'#include "([\w./]+)"')


def names() -> list[str]:
    """The files that are compiled by themselves, e.g. `topk/forward.c`."""
    return sorted(path.relative_to(_FOLDER).as_posix() for path in _FOLDER.rglob("*.c"))


@cache
def source(name: str) -> str:
    """The text of one file of c/ and of those that it includes."""
    return expanded(f'#include "{name}"')


def expanded(text: str) -> str:
    """A text with each file of c/ that it includes in its place, once.

    `#include "..."` is relative to c/. `#line` lets the compiler name the files in its messages.
    """
    taken: set[str] = set()

    def expand(text: str, file: str) -> list[str]:
        lines = []
        for number, line in enumerate(text.splitlines(), 1):
            if line == "#pragma once":
                lines.append("")
            elif not (included := _INCLUDE.fullmatch(line)):
                lines.append(line)
            elif (name := included[1]) not in taken:
                taken.add(name)
                inner = expand((_FOLDER / name).read_text(encoding="utf-8"), name)
                lines += [f'#line 1 "{name}"', *inner, f'#line {number + 1} "{file}"']
        return lines

    return "\n".join([*expand(text, "source.c"), ""])
