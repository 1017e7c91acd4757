"""The attention mechanisms.

Letters in shapes, here and in `approx_kernels`: B batch, H heads, L queries, S keys, D head size,
E value size, C clusters, K kept keys, M random features, G any number of heads, n sequence length where L = S.
"""

from collections.abc import Mapping

from approx.mechanisms import mechanism
from approx.mechanisms.adaptive_span import AdaptiveSpanAttention
from approx.mechanisms.bigbird import BigBirdAttention
from approx.mechanisms.block import BlockAttention
from approx.mechanisms.clustered import ClusteredAttention, ImprovedClusteredAttention
from approx.mechanisms.exact import ExactAttention, FlashAttention, FullAttention, SdpaAttention
from approx.mechanisms.exact_topk import ExactTopkAttention
from approx.mechanisms.fixed import FixedAttention
from approx.mechanisms.full_information import LtrAttention, RtlAttention
from approx.mechanisms.linear import LinearAttention
from approx.mechanisms.local import LocalAttention
from approx.mechanisms.longformer import LongformerAttention
from approx.mechanisms.lsh import LshAttention
from approx.mechanisms.mechanism import Mechanism
from approx.mechanisms.performer import PerformerAttention
from approx.mechanisms.sinks import SinksAttention
from approx.mechanisms.strided import StridedAttention
from approx.registry import Registry
from approx_kernels.dispatch.opaque import attend_as_one_operator, register_kind

# Those whose code a converted folder can carry.
BUILT_IN: Mapping[str, type[Mechanism]] = {
    "full": FullAttention,
    "sdpa": SdpaAttention,
    "exact": ExactAttention,
    "flash": FlashAttention,
    "exact-topk": ExactTopkAttention,
    "clustered": ClusteredAttention,
    "improved-clustered": ImprovedClusteredAttention,
    "linear": LinearAttention,
    "performer": PerformerAttention,
    "local": LocalAttention,
    "block": BlockAttention,
    "strided": StridedAttention,
    "fixed": FixedAttention,
    "ltr": LtrAttention,
    "rtl": RtlAttention,
    "longformer": LongformerAttention,
    "bigbird": BigBirdAttention,
    "sinks": SinksAttention,
    "lsh": LshAttention,
    "adaptive-span": AdaptiveSpanAttention,
}


def _usable(kind: object) -> type[Mechanism]:
    """What another package calls a mechanism, if it is a complete one."""
    if not (isinstance(kind, type) and issubclass(kind, Mechanism)):
        raise TypeError(f"{kind!r} is not a subclass of approx.mechanisms.Mechanism")
    mechanism.refuse_incomplete(kind)
    register_kind(kind)
    return kind


# Those that a plan can name: of this package, of other packages with entry points `approx.mechanisms`, and what is
# added at run time, which works in memory only.
MECHANISMS: Registry[type[Mechanism]] = Registry("approx.mechanisms", "mechanism", BUILT_IN, _usable)
mechanism.MECHANISMS = MECHANISMS

Mechanism.as_one_operator = attend_as_one_operator  # pyright: ignore[reportAttributeAccessIssue]  # it names its arguments
for kind in BUILT_IN.values():
    # Exported programs name the classes that their operators run.
    register_kind(kind)
