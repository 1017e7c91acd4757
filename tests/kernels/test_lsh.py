"""LSH attention against the oracle softmax(s + log C) V, with C counted token by token as the papers say it."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from approx_kernels.ops.lsh.api import draw_projections, lsh_attention
from c_sources import needs_compiler
from closeness import assert_close, with_float64
from forms import few

CLUSTER, ROUNDS, SCALE = 5, 3, 0.6
CASES = [
    pytest.param(variant, causal, dedup, id=f"{variant}-{'causal' if causal else 'bidirectional'}{'-dedup' * dedup}")
    for variant in ("asymmetric", "shared")
    for causal in (False, True)
    for dedup in (False, True)
]


def level_at(position):
    return max((position // CLUSTER).bit_length() - 1, 0)


def bits(x, directions, level):
    return sum(2**bit * int(x @ directions[:, bit] > 0) for bit in range(level))


def nearest(x, directions, level):
    products = x @ directions[:, : 2**level // 2]
    return int(torch.stack([products, -products], 1).flatten().argmax()) if level else 0


def clusters(count, total):
    """The tokens of sorted order that each of `count` clusters holds."""
    return [range(j * total // count, (j + 1) * total // count) for j in range(count)]


def pairs_of_all(q, k, directions, variant, buckets=1):
    """Pairs that one round brings together when all tokens are known."""
    count = min(-(-max(len(q), len(k)) // CLUSTER), len(q), len(k))
    if variant == "asymmetric":
        longest = q.square().sum(-1).max() + k.square().sum(-1).max()
        lifted = [(longest - x.square().sum(-1, keepdim=True)).clamp(min=0).sqrt() for x in (q, k)]
        nothing = [torch.zeros_like(x[:, :1]) for x in (q, k)]
        query_order = (torch.cat([q, nothing[0], lifted[0]], 1) @ directions).squeeze(1).argsort().tolist()
        key_order = (torch.cat([k, lifted[1], nothing[1]], 1) @ directions).squeeze(1).argsort().tolist()
        for mine, theirs in zip(clusters(count, len(q)), clusters(count, len(k)), strict=True):
            yield from ((query_order[i], key_order[j]) for i in mine for j in theirs)
        return
    level = min(level_at(len(q) - 1) + buckets.bit_length() - 1, 7)
    order = sorted(range(len(q)), key=lambda i: (nearest(q[i], directions, level), i))
    chunks = clusters(count, len(q))
    for number, mine in enumerate(chunks):
        theirs = [*(chunks[number - 1] if number else ()), *mine]
        yield from ((order[i], order[j]) for i in mine for j in theirs if i != j)


def pairs_of_past(q, k, directions, variant):
    """Pairs that one round brings together when tokens come one after another, except a query's own key."""
    before = len(k) - len(q)
    for query, x in enumerate(q):
        position = before + query
        level = level_at(position)
        bucket_of = bits if variant == "asymmetric" else nearest
        bucket = bucket_of(x, directions, level)
        hashed = [k[j] - k[: j + 1].mean(0) if variant == "asymmetric" else q[j] for j in range(position + 1)]
        inside = [j for j, key in enumerate(hashed) if bucket_of(key, directions, level) == bucket]
        chunk = max((len(inside) - 1) // CLUSTER - 1, 0)
        yield from ((query, j) for j in inside[chunk * CLUSTER :] if j != position)


def expected(q, k, v, projections, *, variant, causal, dedup, **finer):
    """One head of one sample, of real tokens only: q [L, D], k [S, D], v [S, E]."""
    hashed_q, hashed_k = q.detach(), k.detach()
    counts = torch.zeros(len(q), len(k), dtype=q.dtype)
    for directions in projections.to(q.dtype):
        for query, key in (pairs_of_past if causal else pairs_of_all)(hashed_q, hashed_k, directions, variant, **finer):
            counts[query, key] += 1
    diagonal = torch.eye(len(k), dtype=q.dtype)[len(k) - len(q) :]
    if variant == "shared":
        counts += diagonal * counts.eq(0).all(1, keepdim=True)
        k = q / q.norm(dim=1, keepdim=True) * q.shape[1] ** 0.5
    elif causal:
        counts += diagonal * len(projections)
    counts = counts.clamp(max=1) if dedup else counts
    return (SCALE * q @ k.T + counts.log()).softmax(-1) @ v


def drawn(length, keys, *, batch=1):
    return tuple(
        torch.randn(batch, 2, n, d, dtype=torch.float64, requires_grad=True)
        for n, d in ((length, 6), (keys, 6), (keys, 3))
    )


def attend(q, k, v, mask=None, *, variant, causal, dedup=False, **rest):
    projections = draw_projections(q.shape[3], rounds=ROUNDS, variant=variant, causal=causal, seed=4)
    settings = {"variant": variant, "causal": causal, "dedup": dedup, "cluster": CLUSTER, "scale": SCALE}
    return lsh_attention(q, k, v, mask, projections=projections, **settings, **rest), projections


@pytest.mark.parametrize(("variant", "causal", "dedup"), CASES)
@pytest.mark.parametrize("impl", ["auto", "reference"])
@pytest.mark.parametrize("keys", [11, 47])
@pytest.mark.parametrize("new", [0, 40, -2], ids=["all tokens", "the last ones", "fewer keys"])
@pytest.mark.sample(8)
def test_pairs_count_as_often_as_the_rounds_bring_them_together(variant, causal, dedup, impl, keys, new):
    # Shared keys are made from the queries, and without a key before it a causal query sees nothing.
    length = keys if variant == "shared" or (causal and new < 0) else max(keys - new, 1)
    q, k, v = drawn(length, keys)
    out, projections = attend(q, k, v, variant=variant, causal=causal, dedup=dedup, impl=impl)
    oracle = [
        expected(q[0, head], k[0, head], v[0, head], projections, variant=variant, causal=causal, dedup=dedup)
        for head in range(2)
    ]
    oracle = torch.stack(oracle)[None]
    torch.testing.assert_close(out, oracle)
    grad = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    wanted = torch.autograd.grad(oracle, (q, k, v), grad, materialize_grads=True, allow_unused=True)
    torch.testing.assert_close(grads, wanted)


@pytest.mark.parametrize(("variant", "causal", "dedup"), CASES)
@pytest.mark.sample(3)
def test_padded_tokens_equal_missing_ones(variant, causal, dedup):
    q, k, v = drawn(47, 47, batch=2)
    mask = torch.rand(2, 47) < 0.7
    out, projections = attend(q, k, v, mask, variant=variant, causal=causal, dedup=dedup)
    for sample, real in enumerate(mask):
        for head in range(2):
            tokens = [x[sample, head, real] for x in (q, k, v)]
            oracle = expected(tokens[0], tokens[1], tokens[2], projections, variant=variant, causal=causal, dedup=dedup)
            torch.testing.assert_close(out[sample, head, real], oracle)
    assert out.transpose(1, 2)[~mask].eq(0).all()


@pytest.mark.parametrize(("variant", "causal", "dedup"), CASES)
def test_how_many_heads_are_sorted_together_changes_nothing(variant, causal, dedup, monkeypatch):
    q, k, v = drawn(47, 47, batch=2)
    mask = torch.rand(2, 47) < 0.7
    together, _ = attend(q, k, v, mask, variant=variant, causal=causal, dedup=dedup)
    monkeypatch.setattr("approx_kernels.ops.lsh.reference._TOGETHER", 1)
    one_by_one, _ = attend(q, k, v, mask, variant=variant, causal=causal, dedup=dedup)
    torch.testing.assert_close(one_by_one, together)


@pytest.mark.parametrize(("variant", "causal", "dedup"), CASES)
def test_unused_levels_change_nothing(variant, causal, dedup, monkeypatch):
    # A compiler cannot read the number of levels from the mask, so it gets all of them.
    q, k, v = drawn(47, 47, batch=2)
    mask = torch.arange(47) < torch.tensor([[13], [31]])
    asked, _ = attend(q, k, v, mask, variant=variant, causal=causal, dedup=dedup)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    known, _ = attend(q, k, v, mask, variant=variant, causal=causal, dedup=dedup)
    torch.testing.assert_close(known, asked)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("variant", ["asymmetric", "shared"])
@pytest.mark.sample(1)
def test_the_backward_pass_drops_what_the_forward_pass_dropped(variant, causal):
    q, k, v = (x[:, :1].detach().requires_grad_() for x in drawn(11, 11))

    def dropped(q, k, v):
        torch.manual_seed(0)
        return attend(q, k, v, variant=variant, causal=causal, dropout=0.4)[0]

    assert torch.autograd.gradcheck(dropped, (q, k, v))


def test_identical_tokens_share_a_bucket_wherever_they_stand():
    # Keys less their mean are 0 up to rounding, which may not decide on which side of a plane they lie.
    q = torch.randn(1, 1, 1, 6).expand(1, 1, 100, 6)
    v = torch.rand(1, 1, 100, 1)
    out, _ = attend(q, q * 0.1, v, variant="asymmetric", causal=True)
    longer, keys, values = (F.pad(x, (0, 0, 17, 0)) for x in (q, q * 0.1, v))
    padded, _ = attend(longer, keys, values, (torch.arange(117) >= 17)[None], variant="asymmetric", causal=True)
    torch.testing.assert_close(padded[:, :, 17:], out)


def test_an_unsupported_explicit_choice_is_refused_at_every_length():
    q = torch.randn(1, 2, CLUSTER, 8, dtype=torch.float64)
    with pytest.raises(ValueError, match="'cpu' of lsh_attention cannot run"):
        attend(q, q, q, variant="asymmetric", causal=False, impl="cpu")


def test_shared_keys_need_a_query_for_each():
    with pytest.raises(ValueError, match="3 queries, 4 keys"):
        attend(*drawn(3, 4), variant="shared", causal=False)


@needs_compiler
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@given(
    length=st.sampled_from((1, 2, 13, 70)),
    keys=st.integers(1, 300),
    rounds=st.integers(1, 3),
    cluster=st.integers(1, 9),
    masked=st.booleans(),
    seed=st.integers(0, 9),
)
@few
def test_orders_in_c_bring_the_same_tokens_together(causal, length, keys, rounds, cluster, masked, seed):
    torch.manual_seed(seed)
    mask = torch.rand(2, keys) < 0.6 if masked and (causal or length == keys) else None
    q, k, v = torch.randn(2, 3, length, 8), torch.randn(2, 3, keys, 8), torch.rand(2, 3, keys, 5)
    drawn = draw_projections(8, rounds=rounds, variant="asymmetric", causal=causal, seed=seed)
    how = {"projections": drawn, "variant": "asymmetric", "cluster": cluster, "dedup": False, "causal": causal}
    actual, plain = (lsh_attention(q, k, v, mask, scale=0.5, impl=impl, **how) for impl in ("cpu", "reference"))
    torch.testing.assert_close(actual, plain)


@needs_compiler
@pytest.mark.parametrize(("variant", "causal", "dedup"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["", "padded"])
@pytest.mark.parametrize(
    ("queries", "keys", "cluster", "size"),
    [(200, 200, 16, 64), (70, 200, 5, 8), (1, 90, 9, 8), (30, 20, 4, 24), (13, 13, 1, 8)],
)
@pytest.mark.sample(20)
def test_c_equals_the_reference_in_every_form(variant, causal, dedup, dtype, masked, queries, keys, cluster, size):
    # Shared keys are made from the queries.
    queries = keys if variant == "shared" else queries
    q, k = (torch.randn(2, 3, n, size).to(dtype) for n in (queries, keys))
    v, grad = ((torch.rand(2, 3, n, size) + 0.1).to(dtype) for n in (keys, queries))
    # Where no query is known to be padded, bidirectional attention under a mask runs by tiles.
    mask = torch.rand(2, keys) < 0.7 if masked and (causal or queries == keys) else None
    drawn = draw_projections(size, rounds=3, variant=variant, causal=causal, seed=1)
    how = {"projections": drawn, "variant": variant, "causal": causal, "dedup": dedup, "cluster": cluster, "scale": 0.2}
    for name, *each in with_float64(partial(lsh_attention, key_mask=mask, **how), (q, k, v), grad, dtype):
        # Gradients are differences of sums, which round on both sides, from weights that round as their normalisers do.
        assert_close(name, *each, factor=2.0 if name == "out" else 8.0)


@needs_compiler
def test_equal_numbers_keep_the_order_of_their_tokens():
    # One half of the tokens repeats the other: sorted by anything else, other tokens would share the clusters.
    q, k, v = (torch.randn(1, 2, 60, 8).repeat(1, 1, 2, 1) for _ in range(3))
    drawn = draw_projections(8, rounds=2, variant="asymmetric", causal=False, seed=0)
    how = {"projections": drawn, "variant": "asymmetric", "cluster": 7, "dedup": False, "causal": False, "scale": 0.5}
    actual, plain = (lsh_attention(q, k, v, impl=impl, **how) for impl in ("cpu", "reference"))
    torch.testing.assert_close(actual, plain)


@needs_compiler
@pytest.mark.parametrize("dedup", [False, True], ids=["", "dedup"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "padded"])
@given(
    cuts=st.lists(st.integers(1, 119), max_size=6, unique=True), dtype=st.sampled_from([torch.float32, torch.bfloat16])
)
@few
def test_notes_change_nothing_but_what_is_hashed(masked, dedup, cuts, dtype):
    # Values of one sign, so that sums do not cancel.
    q, k, v = (draw(2, 2, 120, 8, dtype=dtype) for draw in (torch.randn, torch.randn, torch.rand))
    mask = torch.rand(2, 120) < 0.7 if masked else None
    notes, begin = {}, 0
    form = {"variant": "asymmetric", "causal": True, "dedup": dedup}
    whole, _ = attend(q, k, v, mask, **form)
    for end in (*sorted(cuts), 120):
        real = None if mask is None else mask[:, :end]
        tokens = q[:, :, begin:end], k[:, :, :end], v[:, :, :end]
        out, _ = attend(*tokens, real, **form, notes=notes)
        # Outputs of padding are undefined if all tokens attend to each other.
        seen = slice(None) if mask is None else mask[:, None, begin:end].expand(out.shape[:3])
        # The last digits: one way is exact attention, with other roundings, and weights are rounded for tiles.
        torch.testing.assert_close(
            out[seen], whole[:, :, begin:end][seen], rtol={torch.float32: 1e-4, torch.bfloat16: 2**-6}[dtype], atol=1e-5
        )
        begin = end
    assert notes["codes"].shape == (2, 2, ROUNDS, 120)


@needs_compiler
def test_noted_keys_are_not_hashed_again():
    q, k, v = torch.randn(3, 1, 2, 90, 8).unbind()
    notes = {}
    attend(q[:, :, :80], k[:, :, :80], v[:, :, :80], variant="asymmetric", causal=True, notes=notes)
    # Zero keys fall into other buckets than the stored hashes, which shows whether keys are hashed again.
    unseen = k.clone()
    unseen[:, :, :80] = 0
    attend(q[:, :, 80:], unseen, v, variant="asymmetric", causal=True, notes=notes)
    fresh = {}
    attend(q, k, v, variant="asymmetric", causal=True, notes=fresh)
    assert torch.equal(notes["codes"], fresh["codes"])


@needs_compiler
def test_notes_under_another_mask_are_recomputed():
    q, k, v = torch.randn(3, 2, 2, 90, 8).unbind()
    mask, notes = torch.rand(2, 90) < 0.6, {}
    for real in (None, mask, mask.roll(1, 1), None):
        out, _ = attend(q, k, v, real, variant="asymmetric", causal=True, notes=notes)
        torch.testing.assert_close(out, attend(q, k, v, real, variant="asymmetric", causal=True)[0])


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
    projections = draw_projections(16, rounds=3, variant="shared", causal=False, seed=1)
    how = {"projections": projections, "variant": "shared", "causal": False, "dedup": True, "cluster": 16, "scale": 0.2}
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
    projections = draw_projections(16, rounds=rounds, variant="shared", causal=False, seed=seed)
    everyone = torch.eye(1024).expand(1, 2, 1024, 1024)
    how = {
        "projections": projections,
        "variant": "shared",
        "cluster": 32,
        "dedup": True,
        "causal": False,
        "scale": 1e-6,
    }
    return float((weights * (lsh_attention(q, k, everyone, **how, buckets=buckets) > 0)).sum(-1).mean())


def test_more_buckets_capture_more_of_clustered_tokens():
    masses = [sum(captured(buckets, seed=seed) for seed in range(3)) / 3 for buckets in (1, 2, 4)]
    assert masses[0] + 0.01 < masses[1] < masses[2], masses


@pytest.mark.parametrize("buckets", [0, 3, 6])
def test_buckets_are_a_power_of_two(buckets):
    with pytest.raises(ValueError, match="power of two" if buckets else "expected 1 or more"):
        attend(*drawn(8, 8), variant="shared", causal=False, buckets=buckets)
