"""The rows of the real tokens of each sample in a batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from approx_kernels.tokens import check_least


def stretches(key_mask: Tensor | None, length: int, both: bool) -> Tensor | None:
    """The first and one past the last real row of queries and keys, and whether there are gaps, [B, 5] int32.

    It is computed on the device without synchronising. With `both`, queries are real where their keys are.
    """
    if key_mask is None:
        return None
    keys = key_mask.shape[1]
    count, real = key_mask.sum(1), key_mask.to(torch.int8)
    begin = real.argmax(1)
    end = torch.where(count > 0, keys - real.flip(1).argmax(1), begin)
    whole = torch.zeros_like(begin), torch.full_like(begin, length)
    queries = (begin, end) if both and length == keys else whole
    return torch.stack([*queries, begin, end, (count != end - begin).long()], 1).int()


def behind_each_other(q: Tensor, k: Tensor, key_mask: Tensor | None, lengths: Sequence[int]) -> Tensor:
    """The same for samples in one row."""
    if not isinstance(lengths, list | tuple) or not lengths:
        raise ValueError(
            f"lengths is of type {type(lengths).__name__}; expected a list with the tokens of each sample."
        )
    for length in lengths:
        check_least("a length", length, 1)
    total = sum(lengths)
    fits = q.shape[0] == 1 and q.shape[2] == k.shape[2] == total and key_mask is None
    if not fits:
        raise ValueError(
            f"lengths are {len(lengths)} that sum to {total}, q has shape {list(q.shape)}, k {list(k.shape)}; expected one "
            "row of samples, whose lengths are above 0 and sum to the number of queries and of keys, and no key_mask."
        )
    end = torch.tensor(lengths, dtype=torch.int32, device=q.device).cumsum(0, dtype=torch.int32)
    begin = torch.cat([end.new_zeros(1), end[:-1]])
    return torch.stack([begin, end, begin, end, torch.zeros_like(end)], 1)
