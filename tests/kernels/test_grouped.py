"""Key heads that query heads share: which belong together, and that kernels read them by their own strides."""

import pytest
import torch

from approx_kernels.cpu.structs import rows_of
from approx_kernels.dispatch.implementation import implementation
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.ops.fastest.ways import ways
from approx_kernels.ops.flash.api import flash
from approx_kernels.ops.linear.api import linear_decode
from approx_kernels.tokens import beside, heads_of, in_order, in_turns, summed, turns
from forms import draw, draw_mask, make

HEADS = 4
SHAPE = {"batch": 2, "heads": HEADS, "length": 19, "size": 16, "values": 16, "seed": 6}


def grouped(groups):
    q, _, _ = draw(**SHAPE)
    _, k, v = draw(**SHAPE | {"heads": groups, "seed": 7})
    return q, k, v


def repeated(*shared):
    return [x.repeat_interleave(HEADS // x.shape[1], 1) for x in shared]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_turns_pair_each_query_head_once_with_its_keys(groups):
    q, k, v = grouped(groups)
    numbers = torch.arange(HEADS)
    seen = [numbers[turn] for turn in turns(q, k)]
    assert all(turn.tolist() == [g * HEADS // groups + n for g in range(groups)] for n, turn in enumerate(seen))
    assert in_order([turn[None] for turn in seen]).tolist() == [[0, 1, 2, 3]]
    # Per-head arguments follow their head, and keys are views, not copies.
    shapes = []

    def attend(q, k, v, chosen):
        shapes.append(k)
        return (q + chosen[:, None, None]) * k

    out = in_turns(attend, q, k, v, numbers)
    torch.testing.assert_close(out, (q + numbers[:, None, None]) * repeated(k)[0])
    assert all(each is k for each in shapes)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_stacks_rows_and_sums_over_heads_that_share_keys(groups):
    q, k, _ = grouped(groups)
    scores = (beside(q, k) @ k.transpose(2, 3)).view(2, HEADS, 19, 19)
    torch.testing.assert_close(scores, q @ repeated(k)[0].transpose(2, 3))
    leaf = k.clone().requires_grad_()
    (expected,) = torch.autograd.grad((repeated(leaf)[0] * q).sum(), leaf)
    torch.testing.assert_close(summed(q, groups), expected)


@pytest.mark.parametrize(
    ("heads", "groups", "expected"),
    [
        (slice(0, 2), 2, slice(0, 1)),
        (slice(0, None, 2), 2, slice(0, 2)),
        ([1, 2], 1, slice(0, 1)),
        ([3, 0], 2, [1, 0]),
        ([0, 1, 2], 2, [0, 0, 1]),
        ([0, 3], 4, slice(0, 4, 3)),
    ],
)
def test_the_key_heads_of_some_query_heads(heads, groups, expected):
    q, k, _ = grouped(groups)
    index = heads_of(q, k, heads)
    chosen = torch.arange(groups)[index].tolist()
    assert chosen == torch.arange(groups)[expected].tolist()
    assert isinstance(index, slice) == isinstance(expected, slice)
    wanted = [head * groups // HEADS for head in torch.arange(HEADS)[heads].tolist()]
    assert [chosen[n * len(chosen) // len(wanted)] for n in range(len(wanted))] == wanted


def test_c_gets_the_number_of_heads_that_share_keys():
    q, k, v = grouped(2)
    assert [rows.shared for rows in rows_of(q, k, v)] == [1, 2, 2]


def test_every_way_of_exact_attention_reads_shared_heads(monkeypatch):
    q, k, v = (x.requires_grad_() for x in grouped(2))
    mask = draw_mask("right", **SHAPE)
    for causal in (False, True):
        form = {"causal": causal, "scale": 0.3}
        exact = exact_attention(q, *repeated(k, v), key_mask=mask, **form, impl="reference")
        expected = torch.autograd.grad(exact.transpose(1, 2)[mask].square().sum(), (q, k, v))
        for name, way in ways("cpu", padded=True, few=False).items():
            out = way(q, k, v, mask, **form)
            torch.testing.assert_close(out.transpose(1, 2)[mask], exact.transpose(1, 2)[mask], msg=name)
            grads = torch.autograd.grad(out.transpose(1, 2)[mask].square().sum(), (q, k, v))
            torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5, msg=name)
        with torch.no_grad():
            # One thread takes the heads that share keys together, many take each alone.
            for threads in (1, 64):
                monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
                for name, way in ways("cpu", padded=True, few=True).items():
                    few = way(q[:, :, -3:], k, v, mask, **form)
                    torch.testing.assert_close(
                        few, exact_attention(q[:, :, -3:], *repeated(k, v), key_mask=mask, **form), msg=name
                    )


# Kernels that read shared heads, and those that are launched in turns.
TRITON = [("local", False), ("adaptive-span", True)]
SLOW = [("strided", True), ("linear hedgehog window", False), ("performer relu", False), ("exact-topk", True)]
SLOW += [("clustered", False), ("improved-clustered", True), ("lsh", True)]
TRITON += [pytest.param(*each, marks=pytest.mark.slow) for each in SLOW]


@pytest.mark.parametrize(("name", "causal"), TRITON)
@pytest.mark.sample(1)
def test_kernels_treat_shared_heads_as_repeated_ones(name, causal):
    pytest.importorskip("triton")
    mechanism = make(name, causal, heads=HEADS, size=SHAPE["size"])
    # Triton's interpreter is slow for each sample and token; four heads are necessary.
    real = draw_mask("right", **SHAPE)[:1, :11]
    real[0, 8:] = False
    q, k, v = (x[:1, :, :11].clone().requires_grad_() for x in grouped(2))
    with implementation("triton"):
        out, other = mechanism(q, k, v, real), mechanism(q, *repeated(k, v), real)
        torch.testing.assert_close(out.transpose(1, 2)[real], other.transpose(1, 2)[real], rtol=1e-4, atol=1e-5)
        grads, expected = (torch.autograd.grad(x.transpose(1, 2)[real].square().sum(), (q, k, v)) for x in (out, other))
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("groups", [1, 2])
def test_flash_reads_shared_heads_at_any_stride(groups):
    pytest.importorskip("triton")
    q, k, v = grouped(groups)
    # Every other head in memory; those between must not be read.
    k, v = (torch.full((2, 3 * groups, 19, 16), torch.nan)[:, ::3].copy_(x) for x in (k, v))
    out, lse = flash(q, k, v, scale=0.25, right=0, impl="triton")
    expected, expected_lse = flash(q, *repeated(k, v), scale=0.25, right=0, impl="reference")
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("feature_map", ["elu", "hedgehog"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.sample(1)
def test_one_kernel_for_all_queries_of_the_sums_of_a_head(groups, feature_map):
    pytest.importorskip("triton")
    q, k, v = grouped(groups)
    generator = torch.Generator().manual_seed(2)
    maps = tuple(torch.randn(2, HEADS, 16, 16, generator=generator)) if feature_map == "hedgehog" else None
    ways = {"feature_map": feature_map, "maps": maps}
    results = {}
    for impl in ("triton", "reference"):
        outs, state = [], None
        for part in (slice(0, 16), slice(16, 17), slice(17, 18)):
            with torch.no_grad():
                out, state = linear_decode(q[:, :, part], k[:, :, part], v[:, :, part], None, state, **ways, impl=impl)
            outs.append(out)
        assert state is not None
        assert state["sums"].shape[1] == (groups if maps is None else HEADS)
        results[impl] = torch.cat(outs, 2), state["sums"]
    torch.testing.assert_close(results["triton"], results["reference"], rtol=1e-4, atol=1e-4)
