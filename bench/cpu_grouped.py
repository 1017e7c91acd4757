"""The contenders of `bench/cpu.py` with shared keys: one token of one attention layer of a Llama."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from approx.mechanisms import MECHANISMS
from approx.mechanisms.mechanism import Mechanism
from bench.cpu_cases import SDPA, Contender, cases

HEADS, GROUPS, LENGTHS, BATCHES = 32, 8, (1024, 4096), (1, 4)
# Head size by the name of the suite.
SIZES = {"attention-grouped-64": 64, "attention-grouped-128": 128}
REPEATED = "sdpa, keys repeated"


def contenders(suite: str, length: int, dtype: torch.dtype, batch: int) -> Iterator[Contender]:
    """One query per head with a cache or a state of `length` tokens: PyTorch's own grouped-query attention, which is the base,
    copies of the keys for every query head, and every mechanism that decodes.
    """
    size, generator = SIZES[suite], torch.Generator().manual_seed(length)
    q = torch.randn(batch, HEADS, 1, size, generator=generator).to(dtype)
    k, v = torch.randn(2, batch, GROUPS, length, size, generator=generator).to(dtype)
    yield Contender(SDPA, "base", lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))

    def repeated() -> Tensor:
        keys, values = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, keys, values)

    yield Contender(REPEATED, "variant", repeated)
    for case in cases(True, length, decoding=True):
        kind = MECHANISMS[case.mechanism]
        mechanism = kind(HEADS, size, causal=True, scale=size**-0.5, **case.whole).to(dtype).eval()
        if mechanism.takes_calibration:
            with torch.no_grad():
                # A few queries represent the prompt.
                prompt = torch.randn(batch, HEADS, 512, size, generator=generator).to(dtype)
                mechanism.calibrate(prompt, k[:, :, :512], v[:, :, :512])
        yield Contender(case.name, "variant", _step(mechanism, q, k, v))


def _step(mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], object]:
    if mechanism.decode_state != "cache":
        newest = k[:, :, -1:], v[:, :, -1:]
        _, state = mechanism.decode(q, k, v)

        def go_on() -> None:
            # As in generation, each step continues from the state of the last.
            nonlocal state
            _, state = mechanism.decode(q, *newest, None, state)

        return go_on
    if not mechanism.takes_notes:
        return lambda: mechanism(q, k, v)
    noted: dict[str, Any] = {}
    mechanism(q, k[:, :, :-1], v[:, :, :-1], notes=noted)

    def note() -> Tensor:
        # Restore what the last token overwrote in place.
        return mechanism(q, k, v, notes={name: x if name == "codes" else x.clone() for name, x in noted.items()})

    return note
