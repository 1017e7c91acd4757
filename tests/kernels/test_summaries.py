"""Attention to summaries: patterns that it does not know are refused, whatever would run them."""

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
def test_a_pattern_that_is_none_or_would_look_ahead_is_refused(inside, causal, words):
    q, k, v = torch.randn(3, 1, 2, 9, 4).unbind()
    with pytest.raises(ValueError, match=words):
        summary_attention(
            q, k, v, stride=lambda tokens: 3, summary=1, inside=inside, causal=causal, steps=(None,), scale=0.5
        )
