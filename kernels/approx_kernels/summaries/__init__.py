"""Attention inside blocks and to the summary columns of all blocks: fixed and full-information patterns."""

from collections.abc import Sequence

from torch import Tensor

from approx_kernels.shapes import check_shapes
from approx_kernels.summaries.reference import Inside, root_below, summary_blocks
from approx_kernels.tokens import by_step, without_padding

__all__ = ["root_below", "summary_attention"]


def summary_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    stride: int | None,
    summary: int,
    inside: Inside,
    causal: bool,
    steps: Sequence[int | None] = (None,),
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention of each block to its own keys and c columns of every block, in O(L (l + c S / l) D).

    Step 1 is the own block; step 2 is the summaries and the query's own key. A summary is the last c columns of a
    block, the first c with `inside="future"`; a partial block has one too, unless `causal`, where blocks may still
    grow. Positions count real tokens, and query i is the token of key S - L + i. A query that is padding or stands
    before all keys gives 0.

    Source: Child, Gray, Radford, Sutskever, 2019, Generating Long Sequences with Sparse Transformers,
    arXiv 1904.10509, and Daras, Odena, Zhang, Dimakis, 2019, Your Local GAN, arXiv 1911.12287; departs from them in
    the summary of a partial block.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, H, S, D].
        v: Values, [B, H, S, E].
        key_mask: [B, S] bool, True at real keys, and with that at their queries; None when all are real.
        stride: Tokens of a block, l; None takes the root of each sample's number of real tokens, rounded down.
        summary: Columns of a summary, c.
        inside: What a query sees of its own block in step 1: all, the past with itself, the future with itself.
        causal: Whether a query sees only keys at or before its own position; only with `inside="past"`.
        steps: 1, 2 or None (both merged): what each head uses, repeated over the heads.
        scale: Factor of the scores.
        dropout: Probability with which an attention weight is dropped.

    Returns:
        [B, H, L, E] in the dtype of q.

    Raises:
        ValueError: if the shapes or dtypes do not fit together, or a causal pattern would look ahead or move.
    """
    check_shapes(q, k, v, key_mask)
    if causal and (inside != "past" or stride is None):
        raise ValueError(
            f"A causal pattern with inside={inside!r} and stride={stride}; expected inside='past' and a stride."
        )

    def attend(q: Tensor, k: Tensor, v: Tensor, step: int | None) -> Tensor:
        return summary_blocks(
            q,
            k,
            v,
            stride=stride or root_below(k.shape[2]),
            summary=summary,
            inside=inside,
            causal=causal,
            step=step,
            scale=scale,
            dropout=dropout,
        )

    return without_padding(lambda q, k, v: by_step(attend, q, k, v, steps), q, k, v, key_mask)
