"""Attention to summaries refuses unknown patterns in every implementation."""

import pytest
import torch

from approx_kernels.ops.summaries.api import summary_attention


@pytest.mark.parametrize(
    ("inside", "causal", "words"),
    [
        ("before", False, "inside is 'before'; expected one of all, past, future, both"),
        (None, False, "inside is None"),
        ("all", True, "inside='all'; expected inside='past'"),
        ("future", True, "inside='future'; expected inside='past'"),
    ],
)
def test_rejects_unknown_patterns_and_those_that_look_ahead(inside, causal, words):
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind()
    with pytest.raises(ValueError, match=words):
        summary_attention(
            q, k, v, stride=lambda tokens: 3, summary=1, inside=inside, causal=causal, steps=(None,), scale=0.5
        )
