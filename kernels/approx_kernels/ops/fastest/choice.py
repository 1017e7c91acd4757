"""Choice of a way to compute exact attention: the result of `approx doctor --probe`, or else fixed defaults.

Calls measure nothing, so processes on one machine take the same way and compute the same bits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from approx_kernels.dispatch.findings import found, instructions
from approx_kernels.ops.fastest.ways import COMPILED, DEFAULT, Way, ways

# Each covers inputs up to the next, the last all longer ones. Shorter inputs take so little time that whole models
# gain nothing, and lose a little in bfloat16.
LENGTHS = (128, 512, 2048)
FEW = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Default(NamedTuple):
    """A kind of input for which compiled C is the default.

    Args:
        few: Whether there are at most `FEW` queries.
        dtype: Dtype of queries, keys and values.
        least: Smallest number of keys.
        processors: Values of `instructions` of the processors.
    """

    few: bool
    dtype: torch.dtype
    least: int
    processors: tuple[str, ...]


_AVX512, _BF16, _AMX = "AVX512", "AVX512 and BF16", "AVX512 and AMX"
DEFAULTS = (
    # On both recorded kinds of processors 1.1 to 1.7 times as fast as SDPA, causal 1.3 to 2; more with a mask, since
    # padding is skipped. At 128 keys it is slower unless causal.
    Default(False, torch.float32, 512, (_AVX512, _BF16, _AMX)),
    # 1.3 to 2.2 times on AMX, recorded from 512 keys on, and 1.9 to 5 times on AVX512-BF16, 1.4 to 2.6 at 128 keys.
    Default(False, torch.bfloat16, 512, (_AMX,)),
    Default(False, torch.bfloat16, 128, (_BF16,)),
    # 3 to 5 times on AVX512-BF16; on AMX, and in float32 on either, the records show no clear gain for a few queries.
    Default(True, torch.bfloat16, 128, (_BF16,)),
)
"""Cases in which compiled C is the default on a CPU, if C compiles there; all others use PyTorch's SDPA.

Figures are for attention alone, from the records of `bench/cpu.py` and, at 128 keys and for a few queries, from
`approx doctor --probe`. On processors without AVX-512 C showed no clear gain; it has no float16.
"""


@dataclass(frozen=True)
class Case:
    """A kind of input.

    Args:
        device: `cpu` or `cuda`.
        dtype: Dtype of queries, keys and values.
        length: Number of keys, rounded down to one of `LENGTHS`.
        few: Whether there are at most `FEW` queries.
        causal: Whether a query sees only its past.
        padded: Whether there is a mask.
        training: Whether gradients are needed.
    """

    device: str
    dtype: torch.dtype
    length: int
    few: bool = False
    causal: bool = False
    padded: bool = False
    training: bool = False

    def __str__(self) -> str:
        said = [
            "exact attention",
            str(self.dtype).removeprefix("torch."),
            f"{self.length}{'+' if self.length == LENGTHS[-1] else ''} keys",
            *(name for name in ("few", "causal", "padded", "training") if getattr(self, name)),
        ]
        return ", ".join(said)


def case_of(q: Tensor, k: Tensor, key_mask: Tensor | None, *, causal: bool) -> Case | None:
    """The kind of an input; None if PyTorch's SDPA is always used for it."""
    keys = k.shape[2]
    if keys < LENGTHS[0] or q.device.type not in ("cpu", "cuda") or q.dtype not in DTYPES:
        return None
    few = q.shape[2] <= FEW
    training = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    length = max(length for length in LENGTHS if length <= keys)
    return Case(q.device.type, q.dtype, length, few, causal and not few, key_mask is not None, training)


def chosen(case: Case) -> tuple[str, Way]:
    """The name of the way for a case, and the way: from the probe, or else the default."""
    known = ways(case.device, padded=case.padded, few=case.few)
    name = found(case.device).get(str(case), {}).get("way")
    if name not in known:
        # Not measured, or by a version with other ways.
        name = default(case)
    # If C does not compile, SDPA remains.
    return (name, known[name]) if name in known else (DEFAULT, known[DEFAULT])


def default(case: Case) -> str:
    """The name of the way for cases that were not measured; see `DEFAULTS`."""
    compiled = case.device == "cpu" and any(
        (one.few, one.dtype) == (case.few, case.dtype) and one.least <= case.length and instructions() in one.processors
        for one in DEFAULTS
    )
    return COMPILED if compiled else DEFAULT
