"""The exact keys of a mechanism alone, to see what its estimate for the others adds. Does not travel with converted folders."""

from typing import Any, ClassVar, Literal

from torch import Tensor

from approx.mechanisms.exact_part import ExactPart
from approx.mechanisms.mechanism import HeadGroups, Mechanism
from approx_kernels.ops.exact_part.reference import exact_keys
from approx_kernels.ops.near_keys.api import near_keys
from approx_kernels.ops.near_keys.reference import reach
from approx_kernels.runtime.pytorch import drop_keys
from approx_kernels.tokens import blank_padding, check_shapes, content, extended


def without_estimate(mechanism: Mechanism) -> Mechanism | None:
    """A mechanism with its `estimate` switched off: softmax attention to its exact keys alone.

    None if it has no estimate, or no exact key, so that nothing would be left. Of groups of heads, those that have one.
    """
    if isinstance(mechanism, HeadGroups):
        members = [(heads, one, without_estimate(one)) for heads, one in mechanism.members()]
        if not any(alone for *_, alone in members):
            return None
        every = range(mechanism.heads)
        named = ((list(every[of]) if isinstance(of, slice) else of, alone or one) for of, one, alone in members)
        return HeadGroups(list(named))
    if mechanism.estimate is None or not isinstance(mechanism, ExactPart) or not mechanism.has_exact_part:
        return None
    exact: dict[str, Any] = {
        name: getattr(mechanism, name) for name in ("window", "sinks", "global_tokens", "separator")
    }
    alone = ExactKeys(mechanism.heads, mechanism.head_dim, causal=mechanism.causal, scale=mechanism.scale, **exact)
    alone.exact_below = mechanism.exact_below
    return alone


class ExactKeys(ExactPart):
    """Softmax attention to the exact keys of another mechanism, without its estimate for the others; no plan names it.

    Args: as for `ExactPart`.
    """

    supports_decode: ClassVar[bool] = True
    decode_state: ClassVar[Literal["cache", "ring", "recurrent"]] = "ring"
    estimate: ClassVar[str | None] = None
    source: ClassVar[str] = "Beltagy et al. 2020, Longformer, arXiv 2004.05150"
    exact_when: ClassVar[str] = "window >= the length of the sequence."

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None = None,
        *,
        dropout: float = 0.0,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Attend; dropout drops whole keys in the numerator, as where there is an estimate."""
        check_shapes(q, k, v, key_mask)
        q, k, v = blank_padding(q, k, v, key_mask)
        exactly = self.exactly(k, key_mask, tokens)
        return near_keys(q, k, drop_keys(v, dropout), key_mask, exactly).out.to(q.dtype)

    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend from tokens that follow those in a state: a ring of the exact keys."""
        check_shapes(q, k, v, key_mask)
        ring = extended(state, *blank_padding(q, k, v, key_mask)[1:], key_mask)
        k, v, key_mask = content(ring)
        chosen = self.exactly(k, key_mask).chosen
        return self(q, k, v, key_mask), exact_keys(ring, chosen, self.sinks, reach(self.window, True)[0])

    def flops(self, length: int) -> int:
        """Two products over the near keys."""
        return 4 * self.heads * length * self.near_pairs(length) * self.head_dim

    def memory(self, length: int) -> int:
        """The outputs and their normalisers."""
        return 4 * self.heads * length * (self.head_dim + 3)
