"""The C sources of the kernels: each file of c/ with its includes expanded into one text for the compiler."""

import re
from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).with_name("c")
_INCLUDE = re.compile(r'#include "([\w./]+)"')


def names() -> list[str]:
    """The files that are compiled separately, e.g. `topk/forward.c`."""
    return sorted(path.relative_to(_FOLDER).as_posix() for path in _FOLDER.rglob("*.c"))


@cache
def source(name: str) -> str:
    """The text of one file of c/ with its includes."""
    return expanded(f'#include "{name}"')


def expanded(text: str) -> str:
    """A text with each included file of c/ inserted once.

    `#include "..."` is relative to c/. `#line` lets compiler messages name the files.
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
