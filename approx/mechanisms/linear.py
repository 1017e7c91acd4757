"""Linear attention: a feature map in place of the softmax."""

from typing import ClassVar

from torch import Tensor

from approx.mechanisms.mechanism import Mechanism, one_of, positive_number, true_or_false
from approx_kernels.linear import linear_attention


class LinearAttention(Mechanism):
    """Sum keys and values once and read the sums with each query, in O(n D E).

    There is no softmax to approximate: a pretrained model is nearly broken until it is fine-tuned.

    Source: Katharopoulos, Vyas, Pappas, Fleuret, 2020, Transformers are RNNs, arXiv 2006.16236; departs from
    it in nothing.

    Args:
        heads: Number of heads, H.
        head_dim: Size of a head, D.
        causal: Whether a query sees only keys at or before its own position.
        scale: Factor of the scores; used only with `scale_inputs`.
        feature_map: `elu`, which is elu(x) + 1.
        eps: Added to the normaliser, above 0.
        scale_inputs: Whether q and k are multiplied by the root of `scale` first; published without.

    Raises:
        ApproxError: if a setting is wrong.
    """

    supports_decode: ClassVar[bool] = True
    source: ClassVar[str] = "Katharopoulos et al. 2020, Transformers are RNNs, arXiv 2006.16236"
    exact_when: ClassVar[str] = "Never: no setting gives softmax attention back."

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        causal: bool,
        scale: float,
        feature_map: str = "elu",
        eps: float = 1e-6,
        scale_inputs: bool = False,
    ) -> None:
        super().__init__(heads, head_dim, causal=causal, scale=scale)
        self.feature_map = one_of("feature_map", feature_map, ("elu",))
        self.eps = positive_number("eps", eps)
        self.scale_inputs = true_or_false("scale_inputs", scale_inputs)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None = None, *, dropout: float = 0.0
    ) -> Tensor:
        """Attend; dropout acts on whole keys in the numerator, since no weights of single pairs exist."""
        input_scale = self.scale**0.5 if self.scale_inputs else 1.0
        return linear_attention(
            q, k, v, key_mask, causal=self.causal, eps=self.eps, input_scale=input_scale, dropout=dropout
        )

    @classmethod
    def exact_settings(cls, length: int) -> None:
        """None: it never equals softmax attention."""

    def flops(self, length: int) -> int:
        """Sums and readings of them, and in the causal form the pairs inside chunks of 64."""
        pairs = min(length, 64) if self.causal else 0
        return 4 * self.heads * length * self.head_dim * (self.head_dim + pairs)

    def memory(self, length: int) -> int:
        """Features of queries and keys, and the states: one, or one for each causal chunk of 64."""
        states = -(-length // 64) if self.causal else 1
        return 4 * self.heads * self.head_dim * (2 * length + states * self.head_dim)
