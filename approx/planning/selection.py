"""Numbers of layers and heads as people write them: `all`, `-1`, `0-5,8`."""

from collections.abc import Iterable
from itertools import pairwise

from approx.errors import ApproxError


def parse_layers(text: str, count: int) -> list[int]:
    """Numbers of the layers that `text` names, e.g. `all`, `-1`, `0-5,8`.

    Args:
        text: Numbers and inclusive ranges, separated by commas; negative numbers count from the last layer.
        count: Number of layers of the model.

    Raises:
        ApproxError: if the text is not of this form or names a layer that does not exist.
    """
    return sorted(set(_numbers(text, count, "layer", "the model has")))


def parse_heads(text: str, count: int, owner: str) -> list[int]:
    """Numbers of the heads that `text` names, in the form of `parse_layers`.

    Args:
        text: Numbers and inclusive ranges; negative numbers count from the last head.
        count: Number of heads.
        owner: Start of a clause in messages, such as `layers 0-5 have`.

    Raises:
        ApproxError: also if a head is named twice.
    """
    heads = sorted(_numbers(text, count, "head", owner))
    twice = sorted({head for head, after in pairwise(heads) if head == after})
    if twice:
        raise ApproxError(f"Heads '{text}' name head {ranges(twice)} twice. Name each head once.")
    return heads


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers as text: `0-3,8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _numbers(text: str, count: int, noun: str, owner: str) -> list[int]:
    if text.strip() == "all":
        return list(range(count))
    chosen: list[int] = []
    for part in text.split(","):
        part = part.strip()
        first, dash, last = part[1:].partition("-") if part.startswith("-") else part.partition("-")
        sign = -1 if part.startswith("-") else 1
        try:
            low = sign * int(first)
            high = int(last) if dash else low
        except ValueError:
            raise ApproxError(
                f"{noun.capitalize()}s are '{text}', but '{part}' is not a {noun} number or range. "
                "Use 'all', or numbers and ranges such as '0-5,8' or '-1'."
            ) from None
        ends = [end + count if end < 0 else end for end in (low, high)]
        for asked, end in zip((low, high), ends, strict=True):
            if not 0 <= end < count:
                raise ApproxError(
                    f"{noun.capitalize()} {asked} does not exist: {owner} {noun}s 0-{count - 1}. "
                    f"Use '{noun}s: all' or numbers up to {count - 1}."
                )
        if ends[0] > ends[1]:
            raise ApproxError(
                f"{noun.capitalize()}s '{part}' run backwards. Write the lower number first, e.g. '{ends[1]}-{ends[0]}'."
            )
        chosen += range(ends[0], ends[1] + 1)
    return chosen
