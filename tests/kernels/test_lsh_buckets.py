"""Shared keys in more buckets than clusters: every implementation sorts by them, and alike tokens come together."""

import pytest
import torch
from torch.nn import functional as F

from approx_kernels.ops.lsh.api import draw_projections, lsh_attention
from kernels.test_lsh import attend, drawn, expected


@pytest.mark.parametrize("impl", ["auto", "tiles", "reference"])
@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize(("tokens", "buckets"), [(11, 2), (47, 4), (47, 64)])
def test_tokens_are_sorted_by_finer_buckets(impl, dedup, tokens, buckets):
    q, k, v = drawn(tokens, tokens)
    form = {"variant": "shared", "causal": False, "dedup": dedup, "buckets": buckets}
    out, projections = attend(q, k, v, **form, impl=impl)
    oracle = [expected(q[0, head], k[0, head], v[0, head], projections, **form) for head in range(2)]
    torch.testing.assert_close(out, torch.stack(oracle)[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_c_and_tiles_sort_alike_under_masks(dtype):
    q, k, v = torch.randn(3, 2, 3, 300, 16).to(dtype).unbind()
    mask = torch.arange(300) < torch.tensor([[300], [150]])
    drawn = draw_projections(16, rounds=3, variant="shared", causal=False, seed=1)
    how = {"projections": drawn, "variant": "shared", "causal": False, "dedup": True, "cluster": 16, "scale": 0.2}
    actual = lsh_attention(q, k, v, mask, **how, buckets=4)
    plain = lsh_attention(q.double(), k.double(), v.double(), mask, **how, buckets=4, impl="reference")
    atol, rtol = (2e-5, 1e-4) if dtype == torch.float32 else (3e-2, 3e-2)
    torch.testing.assert_close(actual.double(), plain, atol=atol, rtol=rtol)


def captured(buckets, *, rounds=4, seed=0):
    """Share of the softmax of shared keys that rounds bring to the queries, on tokens around 40 centres."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(1, 2, 40, 16, generator=generator)
    which = torch.randint(40, (1024,), generator=generator)
    q = centres[:, :, which] + 0.5 * torch.randn(1, 2, 1024, 16, generator=generator)
    q = q - q.mean(2, keepdim=True)
    k = F.normalize(q, dim=-1) * 4
    weights = (q @ k.mT).masked_fill(torch.eye(1024, dtype=torch.bool), -torch.inf).softmax(-1)
    drawn = draw_projections(16, rounds=rounds, variant="shared", causal=False, seed=seed)
    everyone = torch.eye(1024).expand(1, 2, 1024, 1024)
    how = {"projections": drawn, "variant": "shared", "cluster": 32, "dedup": True, "causal": False, "scale": 1e-6}
    return float((weights * (lsh_attention(q, k, everyone, **how, buckets=buckets) > 0)).sum(-1).mean())


def test_more_buckets_capture_more_of_clustered_tokens():
    masses = [sum(captured(buckets, seed=seed) for seed in range(3)) / 3 for buckets in (1, 2, 4)]
    assert masses[0] + 0.01 < masses[1] < masses[2], masses


@pytest.mark.parametrize("buckets", [0, 3, 6])
def test_buckets_are_a_power_of_two(buckets):
    with pytest.raises(ValueError, match="power of two" if buckets else "expected 1 or more"):
        attend(*drawn(8, 8), variant="shared", causal=False, buckets=buckets)
