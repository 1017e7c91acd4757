"""Docstrings as data: the description of a class and of its settings, so that the help never contradicts the code."""

import inspect
import re
from typing import Any

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(\w+): ", re.MULTILINE)


def description(thing: Any) -> list[str]:
    """The paragraphs before the first section, each in one line; empty without a docstring."""
    paragraphs = _SECTION.split(inspect.getdoc(thing) or "")[0].split("\n\n")
    return [" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip()]


def arguments(thing: Any, section: str = "Args") -> dict[str, str]:
    """Name -> meaning of the entries of a section of a docstring; a class also has those of its base classes."""
    found: dict[str, str] = {}
    for owner in reversed(thing.__mro__) if isinstance(thing, type) else [thing]:
        # inspect.getdoc would return an inherited docstring.
        sections = _SECTION.split(inspect.cleandoc(owner.__doc__ or ""))
        for title, text in zip(sections[1::2], sections[2::2], strict=True):
            if title == section:
                _, *entries = _ENTRY.split(text)
                found |= {
                    name: " ".join(words.split()) for name, words in zip(entries[::2], entries[1::2], strict=True)
                }
    return found
