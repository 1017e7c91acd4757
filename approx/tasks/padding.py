"""Pad inputs and labels of different lengths to one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

IGNORED = -100
"""The label that transformers' losses ignore."""


def padded(encodings: Sequence[Mapping[str, Any]], processor: Any) -> dict[str, Any]:
    """Pad the inputs of a batch to the longest, [B, L], on the right.

    Padding on the right moves no token, and a causal model does not see it. It is masked, so any token will do if the
    tokenizer has no padding token.
    """
    import torch

    filler = {"input_ids": processor.pad_token_id or 0}
    lengths = [len(one["input_ids"]) for one in encodings]
    gaps = [max(lengths) - length for length in lengths]
    batch = {
        name: torch.tensor(
            [[*one[name], *[filler.get(name, 0)] * gap] for one, gap in zip(encodings, gaps, strict=True)]
        )
        for name in encodings[0]
    }
    mask = torch.tensor([[1] * length + [0] * gap for length, gap in zip(lengths, gaps, strict=True)])
    return {"attention_mask": mask} | batch


def padded_labels(rows: Sequence[Sequence[int]]) -> Any:
    """Labels of different lengths as one tensor, [B, L], padded on the right with `IGNORED`."""
    import torch

    longest = max(map(len, rows))
    return torch.tensor([[*row, *[IGNORED] * (longest - len(row))] for row in rows])
