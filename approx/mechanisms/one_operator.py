"""Attention of a mechanism as one operator, for observers that cannot follow its steps; it stays behind when a folder is written."""

from typing import Any

from torch import Tensor
from torch.compiler import assume_constant_result

from approx.mechanisms.mechanism import Mechanism
from approx_kernels.dispatch.one_operator import attend_opaquely, is_one_operator
from approx_kernels.dispatch.opaque import name_kind, told


def attend_as_one_operator(
    mechanism: Mechanism,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None = None,
    *,
    dropout: float = 0.0,
    tokens: Tensor | None = None,
    **notes: Any,
) -> Tensor | None:
    """What `Mechanism.as_one_operator` is in this package: the output, [B, H, L, E], or None if the steps can be followed."""
    if not is_one_operator(q, whole=mechanism.compiles == "whole", runs_c=mechanism.runs_c):
        return None
    return attend_opaquely(mechanism, described(mechanism), q, k, v, key_mask, dropout, tokens)


@assume_constant_result
def described(mechanism: Mechanism) -> str:
    """The mechanism as text, from which the operator builds it again."""
    kind = type(mechanism)
    name_kind(kind)
    form = {name: getattr(mechanism, name) for name in ("heads", "head_dim", "causal", "scale")}
    return told(kind, form | mechanism.settings)
