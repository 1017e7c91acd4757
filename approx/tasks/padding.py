"""Texts of several lengths, and what a model is to say of them, as one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

IGNORED = -100
"""The label that transformers' losses leave out."""


def padded(encodings: Sequence[Mapping[str, Any]], processor: Any) -> dict[str, Any]:
    """Pad the inputs of a batch to the longest, [B, L], on the right, where padding moves no token from its place.

    Absolute positions are counted from the left, and a causal model sees nothing to the right of a token. Padding is masked,
    so any token may stand in for it where the tokenizer has none.
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
    """Labels of several lengths as one tensor, [B, L], padded on the right with what transformers' losses leave out."""
    import torch

    longest = max(map(len, rows))
    return torch.tensor([[*row, *[IGNORED] * (longest - len(row))] for row in rows])
