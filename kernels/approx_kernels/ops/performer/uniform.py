"""The share of uniform attention, towards which estimates of sharp attention are mixed."""

import torch
from torch import Tensor
from torch.nn import functional as F

from approx_kernels.runtime.autocast import without_autocast
from approx_kernels.tokens.grouped import sharing

# Name of its entry in a decoding state: sums of values and a one over all keys, [B, G, 1, E + 1].
SUMS = "values"


def mixed(
    out: Tensor, v: Tensor, key_mask: Tensor | None, share: Tensor, *, causal: bool, earlier: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(1 - share) of the outputs and share of the mean of the values that a query may see, and sums for later queries.

    Args:
        out: Outputs of L queries, [B, H, L, E].
        v: Values of S keys, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        share: From 0 to 1, [H].
        causal: Whether query i is at position S - L + i and sees no value after it.
        earlier: Sums of values and a one over keys before these, [B, G, 1, E + 1], in at least float32.

    Returns:
        [B, H, L, E] in the dtype of out, and the sums including these keys.
    """
    with without_autocast(out.device.type):
        wide = torch.promote_types(out.dtype, torch.float32)
        values = F.pad(v.to(wide), (0, 1), value=1.0)
        values = values if key_mask is None else values.masked_fill(~key_mask[:, None, :, None], 0.0)
        length, keys = out.shape[2], values.shape[2]
        if causal and length > 1:
            # Bottom-right: with L > S the first L - S queries see none of these.
            sums = F.pad(values, (0, 0, max(length - keys, 0), 0)).cumsum(2)
            sums = sums if earlier is None else sums + earlier
            # A state stores only the last sum.
            later, sums = sums[:, :, -1:].clone(), sums[:, :, -length:]
        else:
            later = values.sum(2, keepdim=True)
            later = sums = later if earlier is None else later + earlier
        mean = (sums[..., :-1] / sums[..., -1:].clamp(min=1)).repeat_interleave(sharing(out, v), 1)
        share = share.to(wide)[:, None, None]
        return (out + share * (mean - out)).to(out.dtype), later
