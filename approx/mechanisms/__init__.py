"""The attention mechanisms, each in a file of its own.

Letters of the shapes, here and in `approx_kernels`: B batch, H heads, L queries, S keys, D head size,
E value size, C clusters, K kept keys, T tile, n sequence length where L = S.
"""

from approx.mechanisms.full import FullAttention
from approx.mechanisms.mechanism import Mechanism
from approx.mechanisms.sdpa import SdpaAttention

MECHANISMS: dict[str, type[Mechanism]] = {
    "full": FullAttention,
    "sdpa": SdpaAttention,
}
