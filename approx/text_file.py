"""Text files of users: their encoding, and their lines.

Lines end at "\\n" or "\\r\\n" only. `str.splitlines` and `str.split` also cut at characters that may be in a word, such
as U+2028, U+0085 and the no-break space.
"""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from pathlib import Path

from approx.errors import ApproxError, Exit

# UTF-32 comes first: its mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
# English in UTF-16 without a mark is valid UTF-8, in which every second character is NUL.
_NULS = 0.2
_AROUND = 12
_BLANKS = re.compile(r"[ \t\r\n]+")


def known_encoding(name: str) -> str | None:
    """Python's name of an encoding of texts; None if there is no such encoding."""
    try:
        "".encode(name)
        return codecs.lookup(name).name
    except (LookupError, UnicodeError, ValueError, TypeError):
        return None


def read_text(path: Path, encoding: str | None = None, *, settable: bool = True) -> str:
    """The text of a file, with its own line ends; a file whose name ends in .gz is decompressed.

    Args:
        path: The file.
        encoding: Its encoding; None is UTF-8, or UTF-16 or UTF-32 if the file begins with their byte order mark.
        settable: Whether an error may advise to set the encoding of a task.

    Raises:
        ApproxError: if it cannot be read or decoded; names the line, and an encoding that fits.
    """
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ApproxError(
            f"{path} is damaged ({error}). Compress it again, or download it again.", Exit.UNAVAILABLE
        ) from None
    except OSError as error:
        raise ApproxError(f"{path} cannot be read: {error.strerror}.", Exit.UNAVAILABLE) from None
    return decoded(data, str(path), encoding, settable=settable)


def decoded(data: bytes, name: str, encoding: str | None = None, *, settable: bool = True) -> str:
    """The text in bytes, without a byte order mark.

    Args:
        data: The content of a file.
        name: Its name in errors.
        encoding, settable: As for `read_text`.

    Raises:
        ApproxError: if it cannot be decoded.
    """
    marked = next((kind for mark, kind in _MARKS if data.startswith(mark)), None)
    chosen = encoding or marked or "utf-8"
    try:
        text = data.decode(chosen)
    except (UnicodeError, ValueError) as error:
        raise _undecodable(data, name, chosen, error, encoding is not None, settable) from None
    if encoding is None and marked is None and data.count(0) > _NULS * len(data):
        wide = "utf-16-le" if data[1::2].count(0) >= data[::2].count(0) else "utf-16-be"
        raise ApproxError(
            f"{name} seems to be UTF-16 without a byte order mark: {data.count(0):,} of {len(data):,} bytes are zero. "
            f"{_remedy(wide, settable)}",
            Exit.UNAVAILABLE,
        )
    return text.removeprefix("\ufeff")


def lines(text: str) -> list[str]:
    """The lines of a text without their ends; no empty line after the last end."""
    found = text.split("\n")
    if not found[-1]:
        found.pop()
    return [line.removesuffix("\r") for line in found]


def _undecodable(data: bytes, name: str, chosen: str, error: Exception, named: bool, settable: bool) -> ApproxError:
    if not isinstance(error, UnicodeDecodeError):
        return ApproxError(f"{name} is not text in {chosen} ({error}). Name another encoding.", Exit.UNAVAILABLE)
    place, byte = f"{name}, line {data.count(10, 0, error.start) + 1}", f"byte 0x{data[error.start]:02x}"
    if named:
        remedy = "Name the file's own encoding with --set encoding=, or leave it out for UTF-8."
        return ApproxError(f"{place}: {byte} is not {chosen}. {remedy}", Exit.UNAVAILABLE)
    if chosen != "utf-8":
        mark = "though the file begins with its byte order mark: it is cut off or damaged"
        return ApproxError(f"{place}: {byte} is not {chosen}, {mark}. Write it again.", Exit.UNAVAILABLE)
    around = data[max(error.start - _AROUND, 0) : error.start + _AROUND]
    fitting = next(one for one in ("cp1252", "latin-1") if _decodes(data, one))
    shown = " ".join(around.decode(fitting).split())
    return ApproxError(
        f"{place}: {byte} is not UTF-8; in {fitting} the place reads {shown!r}. {_remedy(fitting, settable)}",
        Exit.UNAVAILABLE,
    )


def _remedy(encoding: str, settable: bool) -> str:
    if not settable:
        return "Convert the file to UTF-8."
    return f"If that is right, name it with --set encoding={encoding}; otherwise convert the file to UTF-8."


def _decodes(data: bytes, encoding: str) -> bool:
    try:
        data.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def words(text: str) -> list[str]:
    """The words of a text between blanks, tabs and line ends; other spaces, such as no-break ones, are part of a word."""
    return [word for word in _BLANKS.split(text) if word]
