"""Exact attention to a window and chosen keys, to be joined with estimates for all others."""

from torch import Tensor

from approx_kernels.dispatch.implementation import choose
from approx_kernels.ops.key_lists.cpu import obstacle
from approx_kernels.ops.near_keys.cpu import near_lists
from approx_kernels.ops.near_keys.reference import Exactly, Near, Part, check_exactly, first_keys, joined
from approx_kernels.ops.near_keys.reference import near_keys as plain_near_keys
from approx_kernels.tokens import check_shapes

__all__ = ["Exactly", "Near", "Part", "first_keys", "joined", "near_keys"]


def near_keys(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,
    exactly: Exactly,
    *,
    impl: str = "auto",
) -> Near:
    """The softmax over the keys in a window and the chosen ones.

    Args:
        q: Queries, [B, H, L, D], float.
        k: Keys, [B, G, S, D]; H / G query heads in turn share each of G key heads.
        v: Values, [B, G, S, E].
        key_mask: [B, S] bool, True at real keys; None when all are real.
        exactly: Which keys these are.
        impl: `reference`, or `cpu` in C, where only one of several near keys of the largest score gets its gradient from `total`.

    Returns:
        The softmax, with its normaliser.

    Raises:
        ValueError: if shapes or dtypes do not match, or `impl` cannot run.
    """
    check_shapes(q, k, v, key_mask)
    check_exactly(exactly, k)
    run = choose("near_keys", impl, {"cpu": obstacle(q), "reference": None})
    attend = near_lists if run == "cpu" else plain_near_keys
    return attend(q, k, v, key_mask, exactly)
