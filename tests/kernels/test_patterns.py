"""The sparse patterns as masks: the figures that the papers and the arithmetic give."""

import pytest
import torch

from approx_kernels.ops.patterns.reference import pattern_mask

FULL_INFORMATION = {"stride": None, "summary": 1}


def reached(steps):
    """Share of pairs (i, j) where i hears from j once the steps were taken, the first one in the lowest layer."""
    paths = steps[0].float()
    for step in steps[1:]:
        paths = ((step.float() @ paths) > 0).float()
    return float(paths.mean())


def test_left_to_right_has_its_known_figures():
    steps = pattern_mask("ltr", 1024, False, FULL_INFORMATION)
    merged = steps.any(0)
    assert int(steps.sum()) == 50_656
    assert (int(merged.sum(1).min()), int(merged.sum(1).max())) == (33, 63)
    assert round(float(merged.float().mean()), 3) == 0.047
    assert reached(steps) == 1.0
    assert round(reached(steps.flip(0)), 3) == 0.047


@pytest.mark.parametrize("name", ["ltr", "rtl"])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 512, 1024])
def test_two_steps_reach_everything_at_any_length(name, length):
    assert reached(pattern_mask(name, length, False, FULL_INFORMATION)) == 1.0


def test_without_a_summary_the_last_partial_block_would_be_lost():
    steps = pattern_mask("ltr", 512, False, FULL_INFORMATION)
    assert 512 % 22, "the root of 512 leaves a partial block"
    steps[1, :, 506:] &= torch.eye(512, dtype=torch.bool)[:, 506:]
    assert round(1 - reached(steps), 3) == 0.012


def test_right_to_left_mirrors_left_to_right():
    ltr, rtl = (pattern_mask(name, 1024, False, FULL_INFORMATION) for name in ("ltr", "rtl"))
    assert torch.equal(rtl, ltr.flip(1, 2))


@pytest.mark.parametrize("name", ["strided", "fixed"])
def test_two_causal_steps_reach_all_of_the_past(name):
    steps = pattern_mask(name, 200, True, {"stride": 16, "summary": 1})
    assert reached(steps) == pytest.approx(201 / 400)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("block", {"size": 7, "neighbours": 1, "shift": 3}),
        ("strided", {"stride": 9}),
        ("fixed", {"stride": 9, "summary": 2}),
        ("sinks", {"sinks": 4, "window": 6}),
        ("longformer", {"window": 6, "global_tokens": [0, 11]}),
    ],
)
def test_a_causal_pattern_does_not_change_as_the_sequence_grows(name, settings):
    assert torch.equal(pattern_mask(name, 50, True, settings)[:, :41, :41], pattern_mask(name, 41, True, settings))


def test_bigbird_draws_the_requested_number_of_blocks_by_seed():
    settings = {"block": 10, "random": 3, "compatible": False}
    one, two = (pattern_mask("bigbird", 640, False, {**settings, "seed": seed})[0] for seed in (0, 1))
    blocks = one[::10, ::10]
    assert torch.equal(blocks.repeat_interleave(10, 0).repeat_interleave(10, 1), one)
    assert blocks[[0, -1]].all()
    assert blocks[:, [0, -1]].all()
    assert blocks[2:-2].sum(1).eq(3 + 2 + 3).all()
    assert not torch.equal(one, two)


@pytest.mark.parametrize(
    ("name", "length", "causal", "words"),
    [
        ("spiral", 4, False, "unknown"),
        ("ltr", 0, False, "at least 1"),
        ("rtl", 4, True, "causal form"),
        ("sinks", 4, False, "bidirectional form"),
    ],
)
def test_rejects_invalid_patterns(name, length, causal, words):
    with pytest.raises(ValueError, match=words):
        pattern_mask(name, length, causal, {**FULL_INFORMATION, "sinks": 1, "window": 1})


def test_rejects_a_pattern_of_strings():
    with pytest.raises(ValueError, match="needs positions"):
        pattern_mask("longformer", 9, False, {"window": 4, "global_tokens": "question"})
