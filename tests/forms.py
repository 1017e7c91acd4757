"""Every mechanism in all its forms, small enough to approximate, with inputs of any shape."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS

# Every mechanism and its variants, named by both, with settings small enough to approximate on a few dozen tokens.
KINDS = {f"{name} {variant}".strip(): kind for name, kind in MECHANISMS.items() for variant in kind.examples}
SMALL = {name: KINDS[name].examples[name.partition(" ")[2]] for name in KINDS}


def has_form(name, causal):
    """Whether a mechanism has this form, with the settings of its variant."""
    try:
        KINDS[name](2, 8, causal=causal, scale=0.5, **SMALL[name])
    except ApproxError as error:
        if error.exit_code == Exit.UNSUPPORTED:
            return False
        raise
    return True


FORMS = [(name, causal) for name in KINDS for causal in (False, True) if has_form(name, causal)]
# Keys are made from the queries, so there are as many, and no cache.
SELF_ONLY = ("lsh shared",)
CAUSAL = [name for name, causal in FORMS if causal]
MASKS = ["none", "right", "left", "arbitrary", "one row empty"]


def over(forms):
    ids = [f"{name}-{'causal' if causal else 'bidirectional'}" for name, causal in forms]
    return pytest.mark.parametrize(("name", "causal"), forms, ids=ids)


over_forms = over(FORMS)
over_two_lengths = over([(name, causal) for name, causal in FORMS if name not in SELF_ONLY])
few = settings(max_examples=4, deadline=None)
# Half of them are short, which covers most edge cases in little time.
lengths = st.integers(1, 20) | st.integers(1, 300)
sizes = st.sampled_from([24, 32, 64, 128, 1, 4])
shapes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "heads": st.integers(1, 3),
        "length": lengths,
        "size": sizes,
        "values": sizes,
        "seed": st.integers(0, 2**16),
    }
)


# What calibration made of a mechanism, by all that it depends on.
_FITTED: dict[str, dict[str, torch.Tensor]] = {}


def make(name, causal, *, heads, size, **changed):
    mechanism = KINDS[name](heads, size, causal=causal, scale=size**-0.5, **(SMALL.get(name, {}) | changed))
    if not mechanism.takes_calibration:
        return mechanism
    key = repr((name, causal, heads, size, changed))
    if key not in _FITTED:
        with torch.no_grad():
            mechanism.calibrate(*draw(batch=2, heads=heads, length=40, size=size, values=size, seed=7))
        _FITTED[key] = {part: x.clone() for part, x in mechanism.state_dict().items()}
    mechanism.load_state_dict(_FITTED[key])
    return mechanism


def draw(*, batch, heads, length, size, values, seed, keys=None):
    generator = torch.Generator().manual_seed(seed)
    keys = length if keys is None else keys
    # In the memory layout of a model, with heads adjacent.
    return (
        torch.randn(batch, n, heads, d, generator=generator).transpose(1, 2)
        for n, d in ((length, size), (keys, size), (keys, values))
    )


def draw_mask(kind, *, batch, length, seed, **_):
    """Mask [B, S] bool; rows are empty only in the kind that says so."""
    generator = torch.Generator().manual_seed(seed + 1)
    real = torch.randint(1, length + 1, (batch, 1), generator=generator)
    position = torch.arange(length)
    if kind == "none":
        return torch.ones(batch, length, dtype=torch.bool)
    if kind == "right":
        return position < real
    if kind == "left":
        return position >= length - real
    mask = torch.rand(batch, length, generator=generator) < 0.7
    mask[:, seed % length] = True
    if kind == "one row empty":
        mask[seed % batch] = False
    return mask


# Linear attention in its paper's form, and with learned features.
ELU = MECHANISMS["linear"].published
HEDGEHOG: dict[str, Any] = {**ELU, "feature_map": "hedgehog"}


def plain(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a mechanism over those of its paper's form."""
    return {**MECHANISMS[name].published, **settings}
