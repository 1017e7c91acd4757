"""The clustering's kernels put every query where the reference does; under Triton's interpreter, or on a GPU."""

import pytest
import torch
from torch.library import opcheck

from approx_kernels.gpu.launch import configuration
from approx_kernels.ops.clustering import triton as launching
from approx_kernels.ops.clustering.api import cluster_queries, draw_planes

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def draw(n, size, *, heads=2, dtype=torch.float32):
    q = torch.randn(heads, n, size)
    # Equal queries make ties and empty clusters.
    q[:, n // 2 : n // 2 + 8] = q[:, :1]
    return q.to(DEVICE, dtype)


def random(size, *, bits, clusters):
    return [x.to(DEVICE) for x in draw_planes(size, bits=bits, bias=True, clusters=clusters, seed=1)]


def check(n, clusters, size, bits, iterations):
    q, (planes, draws) = draw(n, size), random(size, bits=bits, clusters=clusters)
    computed, expected = (
        cluster_queries(q, planes, draws, clusters=clusters, iterations=iterations, impl=impl)
        for impl in ("triton", "reference")
    )
    assert torch.equal(computed, expected)


CASES = [(20, 4, 16, 5, 1), (60, 9, 80, 9, 4), (150, 128, 32, 31, 3), (300, 25, 64, 63, 10), (40, 39, 128, 2, 5)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.sample(2)
def test_clusters_are_those_of_the_reference(monkeypatch, case, parts):
    monkeypatch.setattr(launching, "parts_of", lambda *_: parts)
    check(*case)


@pytest.mark.parametrize(("case", "parts"), [((150, 100, 32, 31, 3), 1), ((150, 9, 80, 9, 4), 3)])
@pytest.mark.sample(1)
def test_tiles_for_smaller_cards(monkeypatch, case, parts):
    monkeypatch.setattr(launching, "parts_of", lambda *_: parts)
    with configuration(-1):
        check(*case)


def test_half_precision_and_strides():
    q = draw(50, 32, dtype=torch.float16)
    planes, draws = random(32, bits=20, clusters=6)
    expected = cluster_queries(q, planes, draws, clusters=6, iterations=4, impl="reference")
    for x in (q, q.transpose(0, 1).contiguous().transpose(0, 1), q.mT.contiguous().mT):
        assert torch.equal(cluster_queries(x, planes, draws, clusters=6, iterations=4, impl="triton"), expected)


@pytest.fixture(scope="module")
def batch():
    """Samples with holes, of no more queries than clusters, and without any; padding is NaN."""
    q, (planes, draws) = draw(45, 16, heads=6).view(3, 2, 45, 16).clone(), random(16, bits=20, clusters=7)
    position = torch.arange(45, device=DEVICE)
    real = torch.stack([position % 3 != 0, (position > 20) & (position < 26), position < 0])
    q.masked_fill_(~real[:, None, :, None], torch.nan)
    tokens = real.logical_not().byte().argsort(stable=True, dim=1).int()
    counts = real.sum(1)
    clusters = counts.clamp(max=7)
    return q, real, planes, draws, (tokens, counts, clusters)


@pytest.fixture(scope="module")
def groups(batch):
    q, _, planes, draws, (tokens, counts, clusters) = batch
    return launching.cluster_samples(q, tokens, counts, clusters, planes, draws, 7, 4)


def test_padding_is_left_out(batch, groups):
    q, real, planes, draws, _ = batch
    expected = cluster_queries(q[0][:, real[0]], planes, draws, clusters=7, iterations=4, impl="reference")
    assert torch.equal(groups[0, :, :30].long(), expected)
    assert torch.equal(groups[1, :, :5].cpu(), torch.arange(5, dtype=torch.int32).expand(2, 5))


def test_queries_are_sorted_by_cluster_and_place(batch, groups):
    order, begins = launching.sort_queries(groups, *batch[4], 7)
    for sample, (real, (tokens, count)) in enumerate(zip(batch[1], zip(*batch[4][:2], strict=True), strict=True)):
        for head in range(2):
            members = groups[sample, head, :count].long()
            places = real.nonzero().squeeze(1)[members.argsort(stable=True)]
            assert torch.equal(order[sample, head, :count].long(), places)
            ends = torch.bincount(members, minlength=7).cumsum(0)
            assert begins[sample, head].tolist() == [0, *ends.tolist()]
            assert torch.equal(tokens[:count].long(), real.nonzero().squeeze(1))


def test_singleton_clusters_keep_the_order_of_tokens(batch):
    _, real, _, _, (tokens, counts, _) = batch
    nothing = torch.zeros(3, 2, 45, dtype=torch.int32, device=DEVICE)
    order, begins = launching.sort_queries(nothing, tokens, counts, counts, 45)
    assert torch.equal(order[0, 1, :30].long(), real[0].nonzero().squeeze(1))
    assert begins[1, 0].tolist() == [*range(5), *[5] * 41]


@pytest.mark.slow
def test_operators_pass_opcheck(batch):
    q, _, planes, draws, (_, counts, clusters) = batch
    tests = ("test_schema", "test_faketensor")
    arguments = q[:1, :, :9], None, counts[1:2], clusters[1:2]
    opcheck(launching.cluster_samples.operator, (*arguments, planes, draws, 7, 1), test_utils=tests)
    whole = torch.zeros(1, 2, 9, dtype=torch.int32, device=DEVICE)
    opcheck(launching.sort_queries.operator, (whole, *arguments[1:], 7), test_utils=tests)


@pytest.mark.parametrize(
    ("size", "bits", "clusters", "said"),
    [
        (16, 5, 129, "at most 128 clusters, and 129"),
        (16, 64, 5, "at most 63 bits, and 64"),
        (24, 5, 5, "head size is 24"),
    ],
)
def test_names_cases_without_a_kernel(size, bits, clusters, said):
    planes, draws = random(size, bits=bits, clusters=clusters)
    with pytest.raises(ValueError, match=said):
        cluster_queries(draw(150, size), planes, draws, clusters=clusters, iterations=1, impl="triton")
