"""LSH attention: more rounds reduce the error, the future has no effect, and the errors of the shared variant."""

import pytest
import torch

from approx.conversion import surgery
from approx.errors import ApproxError, Exit
from approx.mechanisms.exact import FullAttention
from approx.mechanisms.lsh import LshAttention
from approx.planning.plan import Plan
from approx.seam.dispatch import build
from zoo import tiny

SIZE = 16


def make(*, causal=False, **settings):
    return LshAttention(2, SIZE, causal=causal, scale=SIZE**-0.5, **settings)


def drawn(length, spread=2.0):
    q, k, v = torch.randn(3, 1, 2, length, SIZE).unbind()
    return q * spread, k * spread, v


def error(mechanism, q, k, v):
    exact = FullAttention(2, SIZE, causal=mechanism.causal, scale=SIZE**-0.5)(q, k, v)
    return ((mechanism(q, k, v) - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_more_rounds_and_larger_clusters_are_closer_to_exact(causal):
    tensors = drawn(300)
    by_rounds = [error(make(causal=causal, cluster=16, rounds=rounds), *tensors) for rounds in (1, 4, 16)]
    by_cluster = [error(make(causal=causal, cluster=cluster, rounds=2), *tensors) for cluster in (8, 32, 128)]
    assert by_rounds == sorted(by_rounds, reverse=True)
    assert by_cluster == sorted(by_cluster, reverse=True)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_hashing_finds_keys_that_chance_does_not(causal):
    q, k, _ = drawn(300)
    k = torch.where(torch.rand(300, 1) < 0.5, k, q)
    mechanism = make(causal=causal, cluster=16)
    weights = FullAttention(2, SIZE, causal=causal, scale=SIZE**-0.5).weights(q, k)
    # Hashing other tokens groups as many pairs, by chance.
    missed, missed_by_chance = (
        (weights * (mechanism.weights(*tokens) == 0)).sum(-1).mean()
        for tokens in ((q, k), torch.randn(2, 1, 2, 300, SIZE).unbind())
    )
    assert missed < 0.8 * missed_by_chance


@pytest.mark.parametrize("variant", ["asymmetric", "shared"])
def test_no_future_of_any_length_or_size_changes_the_past(variant):
    q, k, v = drawn(400)
    mechanism = make(causal=True, cluster=8, variant=variant)
    whole = mechanism(q, k, v)
    for length in (1, 16, 17, 129, 399):
        past = mechanism(*(x[:, :, :length] for x in (q, k, v)))
        torch.testing.assert_close(whole[:, :, :length], past)
        other = (torch.cat([x[:, :, :length], x[:, :, length:] * 50 + 9], 2) for x in (q, k, v))
        torch.testing.assert_close(mechanism(*other)[:, :, :length], past)


def test_every_token_of_the_causal_form_sees_itself():
    q, k, _ = drawn(400)
    assert (make(causal=True, cluster=4, rounds=1).weights(q, k).diagonal(dim1=-2, dim2=-1) > 0).all()


def test_the_shared_variant_sees_itself_only_where_it_sees_nothing_else():
    q, k, _ = drawn(40)
    diagonal = make(causal=True, cluster=4, variant="shared").weights(q, k).diagonal(dim1=-2, dim2=-1)
    assert diagonal[..., 0].eq(1).all()
    assert set(diagonal.unique().tolist()) <= {0.0, 1.0}
    assert make(cluster=4, variant="shared").weights(q, k).diagonal(dim1=-2, dim2=-1).eq(0).all()


def test_the_shared_variant_reads_no_keys_and_says_so():
    q, k, v = drawn(100)
    shared = make(variant="shared")
    assert torch.equal(shared(q, k, v), shared(q, k * 2 + 1, v))
    assert "fine-tuned" in (shared.warning or "")
    assert make().warning is None


def test_the_shared_variant_generates_without_a_cache_and_refuses_one():
    model = tiny("GPT2LMHeadModel")
    surgery.convert(model, Plan.of("lsh", variant="shared", cluster=4))
    tokens = torch.randint(3, 40, (2, 9))
    assert model.generate(tokens, max_new_tokens=3, min_new_tokens=3, pad_token_id=0, use_cache=False).shape == (2, 12)
    with pytest.raises(ApproxError, match="use_cache=False") as refusal:
        model.generate(tokens, max_new_tokens=3, pad_token_id=0)
    assert refusal.value.exit_code is Exit.UNSUPPORTED


@pytest.mark.parametrize(
    ("variant", "causal", "rounds", "once"),
    [
        ("asymmetric", False, 4, False),
        ("asymmetric", True, 4, True),
        ("asymmetric", True, 5, False),
        ("shared", False, 4, True),
        ("shared", False, 8, False),
        ("shared", True, 4, True),
    ],
)
def test_pairs_count_once_by_default_where_that_is_cheap(variant, causal, rounds, once):
    q, k, v = drawn(200)
    form = {"variant": variant, "causal": causal, "rounds": rounds, "cluster": 16}
    out, others = make(**form)(q, k, v), [make(**form, dedup=dedup)(q, k, v) for dedup in (False, True)]
    assert torch.equal(out, others[once])
    assert not torch.equal(out, others[not once])


def test_pairs_that_count_once_err_less():
    tensors = drawn(300)
    counted = [error(make(cluster=64, rounds=8, dedup=dedup), *tensors) for dedup in (False, True)]
    assert counted[1] < 0.8 * counted[0]


@pytest.mark.parametrize("dedup", [False, True])
def test_a_layer_of_an_earlier_version_keeps_its_buckets(dedup):
    site = {"heads": 2, "head_dim": SIZE, "causal": False, "scale": SIZE**-0.5, "mechanism": "lsh"}
    stated = {"variant": "shared", "rounds": 2, "cluster": 8, "seed": 3, "dedup": dedup}
    old, tensors = build({**site, "settings": stated}), drawn(200)
    assert torch.equal(old(*tensors), make(**stated, buckets=1)(*tensors))
    assert not torch.equal(old(*tensors), make(**stated)(*tensors))
