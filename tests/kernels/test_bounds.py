"""Every kernel in Triton's interpreter with its accesses checked: odd lengths, masks, heads of all sizes, 16 bits, shared heads.

Launches stay inside their tensors, no cell has two writers, and nothing is left out: results do not depend on what
stood in memory. A sample of the cases; all of them with the slow tests.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from approx_kernels.gpu.language import HEAD_SIZES, jit, obstacle, tl
from approx_kernels.ops.adaptive_span.api import adaptive_span_attention
from approx_kernels.ops.clustered.api import causal_clustered_attention, clustered_attention
from approx_kernels.ops.clustering.api import cluster_queries, draw_centroids, draw_planes
from approx_kernels.ops.flash.api import flash_attention
from approx_kernels.ops.linear.api import linear_attention, linear_decode
from approx_kernels.ops.lsh.api import draw_projections, lsh_attention
from approx_kernels.ops.patterns.api import local_attention, pattern_attention
from approx_kernels.ops.patterns.reference import Blocks, Listed, Strided, Summaries, Window, bigbird_lists, draw_blocks
from approx_kernels.ops.performer.api import draw_projection, performer_attention, performer_decode
from approx_kernels.ops.topk.api import topk_attention
from closeness import assert_close

pytest.importorskip("triton")
from bounds import checked_accesses

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only where there is no GPU")
HEADS, SHARED = 2, 1


def clustered(q, k, v, mask, *, topk, **how):
    planes, draws = draw_planes(q.shape[3], bits=20, bias=True, clusters=100, seed=0)
    return clustered_attention(
        q, k, v, mask, planes=planes, draws=draws, clusters=5, iterations=3, topk=topk, scale=0.3, **how
    )


def causal_clustered(q, k, v, mask, *, topk, **how):
    centroids, selectors = draw_centroids(HEADS, q.shape[3], clusters=3, seed=0)
    return causal_clustered_attention(
        q, k, v, mask, centroids=centroids, selectors=selectors, chunk=16, topk=topk, scale=0.3, **how
    )


def lsh(q, k, v, mask, *, variant, dedup, causal, **how):
    drawn = draw_projections(q.shape[3], rounds=2, variant=variant, causal=causal, seed=0)
    kind = {"variant": variant, "dedup": dedup, "causal": causal, "cluster": 8}
    return lsh_attention(q, k, v, mask, projections=drawn, **kind, scale=0.3, **how)


def performer(q, k, v, mask, **how):
    drawn = draw_projection(q.shape[3], features=24, orthogonal=True, seed=0)
    return performer_attention(q, k, v, mask, projection=drawn, scale=0.3, **how)


def window(q, k, v, mask, **how):
    maps = torch.randn(2, HEADS, q.shape[3], q.shape[3], generator=torch.Generator().manual_seed(0)) * 0.3
    learned = {"maps": tuple(maps), "mix": torch.ones(HEADS), "feature_map": "hedgehog", "window": 5, "eps": 1e-6}
    return linear_attention(q, k, v, mask, **learned, scale=0.3, **how)


ROWS = {"scale": 0.3}
DRAWS = draw_blocks(1, 0)


def patterned(pattern, **how):
    return partial(pattern_attention, pattern=pattern, **how, **ROWS)


OPS = {
    "flash": partial(flash_attention, causal=False, **ROWS),
    "flash causal": partial(flash_attention, causal=True, **ROWS),
    "local": partial(local_attention, left=7, right=3, **ROWS),
    "blocks": patterned(lambda tokens: Blocks(True, size=9, neighbours=1, shift=2)),
    "bigbird": patterned(lambda tokens: Listed(size=8, lists=bigbird_lists(-(-tokens // 8), DRAWS, False))),
    "global": patterned(lambda tokens: Window(left=3, right=3, tokens=(0, 5), see_all=True)),
    "strided": patterned(lambda tokens: Strided(True, stride=7), steps=(1, None)),
    "summaries": patterned(lambda tokens: Summaries(True, stride=7, summary=2, inside="past"), steps=(None, 2)),
    "spans": partial(adaptive_span_attention, spans=torch.tensor([5.5, 99.0]), ramp=4, causal=False, **ROWS),
    "topk": partial(topk_attention, topk=5, causal=False, **ROWS),
    "topk causal": partial(topk_attention, topk=5, causal=True, **ROWS),
    "linear": partial(linear_attention, causal=False, scale=0.3),
    "linear causal": partial(linear_attention, causal=True, scale=0.3),
    "window": partial(window, causal=False),
    "window causal": partial(window, causal=True),
    "performer": partial(performer, causal=False),
    "performer causal": partial(performer, causal=True),
    "clustered": partial(clustered, topk=None),
    "improved": partial(clustered, topk=4),
    "causal clustered": partial(causal_clustered, topk=None),
    "causal improved": partial(causal_clustered, topk=4),
    "lsh": partial(lsh, variant="asymmetric", dedup=False, causal=False),
    "lsh dedup": partial(lsh, variant="asymmetric", dedup=True, causal=False),
    "lsh causal": partial(lsh, variant="asymmetric", dedup=False, causal=True),
    "lsh shared": partial(lsh, variant="shared", dedup=False, causal=False),
}
# Queries, head and value sizes, dtype, mask: of each op the first or second is in the sample.
SHAPES = [
    (19, 16, 16, torch.float32, "right"),
    (21, 32, 64, torch.float16, "none"),
    (65, 64, 64, torch.float16, "none"),
    (1, 16, 16, torch.float32, "none"),
    (33, 80, 96, torch.float32, "arbitrary"),
    (50, 128, 128, torch.float16, "one row empty"),
    (64, 64, 32, torch.float32, "left"),
    (129, 16, 128, torch.float16, "right"),
]


def mask_of(kind, length):
    position, mask = torch.arange(length), torch.ones(2, length, dtype=torch.bool)
    if kind == "right":
        mask[0] = position < max(length // 2, 1)
    elif kind == "left":
        mask[0] = position >= length // 3
    elif kind != "none":
        mask[:, 1::3] = False
        mask[0] &= kind != "one row empty"
    return None if kind == "none" else mask


def drawn(length, size, values, dtype):
    generator = torch.Generator().manual_seed(length)
    shapes = (HEADS, size), (SHARED, size), (SHARED, values)
    return [torch.randn(2, length, n, d, generator=generator).to(dtype).transpose(1, 2) for n, d in shapes]


def steps(op, tensors, mask, impl):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = OPS[op](*leaves, mask, impl=impl)
    if mask is not None:
        # Outputs of padding have no meaning.
        out = out * mask[:, None, :, None]
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator).to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, grad, materialize_grads=True)]


# Other cases in the sample run the same kernels, and these take half of the time.
ONLY_SLOW = ("topk", "causal improved")
CASES = [
    pytest.param(
        op,
        shape,
        marks=[] if number == place % 2 and op not in ONLY_SLOW else [pytest.mark.slow],
        id=f"{op}-{number}",
    )
    for place, op in enumerate(OPS)
    for number, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize(("op", "shape"), CASES)
@pytest.mark.sample(2)
def test_kernels_stay_inside_their_tensors_and_write_all_of_them(op, shape):
    length, size, values, dtype, kind = shape
    tensors, mask = drawn(length, size, values, dtype), mask_of(kind, length)
    with checked_accesses() as launched:
        found = steps(op, tensors, mask, "triton")
    if length > 1:
        assert launched
    plain, exact = (steps(op, [x.to(wide) for x in tensors], mask, "reference") for wide in (dtype, torch.float64))
    for name, *each in zip(("out", "dq", "dk", "dv"), found, plain, exact, strict=True):
        # In 16 bits rounding may change the choice among nearly equal keys or clusters.
        if dtype == torch.float32 or not op.startswith(("topk", "causal improved", "improved", "lsh", "clustered")):
            assert_close(f"{op}: {name}", *each, factor=8.0)
        else:
            assert each[0].isfinite().all()


def test_decoding_and_clustering_stay_inside_their_tensors():
    q, k, v = drawn(9, 32, 16, torch.float32)
    projection = draw_projection(32, features=24, orthogonal=True, seed=0)
    planes, draws = draw_planes(32, bits=63, bias=False, clusters=7, seed=0)
    with checked_accesses() as launched, torch.no_grad():
        out, state = linear_decode(q, k, v, impl="triton")
        assert out.isfinite().all()
        out, _ = linear_decode(q[:, :, :1], k[:, :, :1], v[:, :, :1], None, state, impl="triton")
        assert out.isfinite().all()
        out, _ = performer_decode(q, k, v, projection=projection, scale=0.3, impl="triton")
        assert out.isfinite().all()
        cluster_queries(q[0], planes, draws, clusters=7, iterations=2, impl="triton")
    assert len(launched) > 5


def test_heads_beyond_the_largest_size_are_refused():
    assert obstacle(torch.zeros(1, 1, 4, max(HEAD_SIZES))) is None
    assert "the head size is 256" in str(obstacle(torch.zeros(1, 1, 4, 256)))


@jit
def copy_kernel(source, target, n: tl.constexpr, shift: tl.constexpr):
    place = tl.program_id(0) * n + tl.arange(0, n)
    tl.store(target + place, tl.load(source + place + shift))


@jit
def same_cell_kernel(target):
    tl.store(target, tl.program_id(0))


def launch(kernel, *arguments: Any, programs: int, **constants: Any) -> None:
    with checked_accesses():
        kernel[(programs,)](*arguments, **constants)


def test_detects_accesses_outside_a_tensor_even_inside_another():
    memory = torch.arange(24.0)
    source, target = memory[:8], torch.zeros(8)
    launch(copy_kernel, source, target, programs=2, n=4, shift=0)
    assert torch.equal(source, target)
    for shift in (1, -1):
        with pytest.raises(Exception, match=r"copy_kernel: a load at (8|-1) of the 8 cells"):
            launch(copy_kernel, source, target, programs=2, n=4, shift=shift)
    with pytest.raises(Exception, match=r"copy_kernel: a store at 11 of the 8 cells"):
        launch(copy_kernel, memory, memory[:8], programs=3, n=4, shift=0)


def test_a_cell_with_two_writers_is_noticed():
    launch(same_cell_kernel, torch.zeros(1, dtype=torch.int32), programs=1)
    with pytest.raises(AssertionError, match="1 cells are stored by two programs"):
        launch(same_cell_kernel, torch.zeros(1, dtype=torch.int32), programs=2)
