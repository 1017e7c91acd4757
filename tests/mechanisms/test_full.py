"""The reference against the definition, pair by pair."""

import math

import torch

from approx.mechanisms import MECHANISMS


def test_it_is_the_definition():
    q, k, v = torch.randn(3, 1, 1, 6, 4, dtype=torch.float64).unbind()
    mask = torch.tensor([[True, False, True, True, True, False]])
    for causal in (False, True):
        out = MECHANISMS["full"](1, 4, causal=causal, scale=0.7)(q, k, v, mask)
        # Outputs of padded queries are undefined.
        for i in mask[0].nonzero()[:, 0].tolist():
            seen = [j for j in range(6) if mask[0, j] and (j <= i or not causal)]
            mass = {j: math.exp(0.7 * float(q[0, 0, i] @ k[0, 0, j])) for j in seen}
            expected = sum(mass[j] * v[0, 0, j] for j in seen) / sum(mass.values())
            torch.testing.assert_close(out[0, 0, i], expected)
