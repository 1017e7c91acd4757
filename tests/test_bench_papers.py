"""The experiments of papers at their smallest, and what they rest on: decoding, gradients, memory."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache

from approx.mechanisms import MECHANISMS
from approx.publishing.plots import colour_of
from bench import papers, reversible
from bench.papers import LINEAR, SIZES, SOFTMAX, Model, Painter, make, roomy

TINY = SIZES["tiny"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("papers")


def run(monkeypatch, experiment, folder, *more):
    monkeypatch.setattr("sys.argv", ["papers.py", experiment, "--size", "tiny", "-o", str(folder), *more])
    threads = torch.get_num_threads()
    try:
        assert papers.main() == 0
    finally:
        torch.set_num_threads(threads)
    return (folder / experiment / "report.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("experiment", "rows", "pictures"),
    [
        ("copy", ["softmax", "linear"], []),
        ("convergence", ["softmax", "linear", "lsh"], ["steps", "time"]),
        ("generation", ["softmax, KV cache", "softmax, KV cache with room", "linear, state", "softmax, stateless"], []),
        ("layer", [*papers.LAYERS], ["time", "memory"]),
        ("reversible", ["softmax", "linear"], []),
        ("modes", ["softmax", "strided merged", "fixed interleave", "ltr heads", "rtl heads, as many keys"], ["keys"]),
    ],
)
def test_a_command_writes_record_page_and_pictures(monkeypatch, folder, experiment, rows, pictures):
    page = run(monkeypatch, experiment, folder)
    assert all(f"| {row} |" in page for row in rows)
    for picture in pictures:
        assert (folder / experiment / f"{picture}.svg").read_text("utf-8").startswith("<?xml")
    record = json.loads((folder / experiment / "record.json").read_text("utf-8"))
    assert record["command"] == f"python bench/papers.py {experiment} --size tiny"
    assert run(monkeypatch, experiment, folder, "--redraw") == page


def test_lines_have_the_colours_of_the_mechanisms(monkeypatch, folder):
    run(monkeypatch, "convergence", folder)
    drawn = (folder / "convergence" / "steps.svg").read_text("utf-8")
    assert all(f"stroke: {colour_of(name)}" in drawn for name in ("linear", "lsh"))
    assert f"stroke: {MECHANISMS['full'].colour}" in drawn
    assert "stroke: #1f77b4" not in drawn


def test_a_command_goes_on_with_what_is_kept(monkeypatch, tmp_path):
    first = run(monkeypatch, "copy", tmp_path)
    parts = sorted((tmp_path / "parts" / "tiny").iterdir())
    assert len(parts) == TINY.seeds * 2 * len(TINY.heads)
    monkeypatch.setattr(papers, "train", lambda *of: pytest.fail("trains again"))
    assert run(monkeypatch, "copy", tmp_path) == first
    parts[0].unlink()
    with pytest.raises(pytest.fail.Exception, match="trains again"):
        run(monkeypatch, "copy", tmp_path)


def test_a_record_that_is_not_there_is_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["papers.py", "layer", "--redraw", "-o", str(tmp_path)])
    assert papers.main() == 5
    assert "record.json is not there" in capsys.readouterr().err


def test_sequences_repeat_their_symbols_behind_the_separator():
    ids = papers.to_copy(TINY, 8, torch.Generator().manual_seed(0))
    assert ids.shape == (8, 9)
    assert (ids[:, 4] == papers.SYMBOLS).all()
    assert (ids[:, :4] == ids[:, 5:]).all()


def a_training(right, seed=0):
    return {"name": "softmax", "seed": seed, "sequences_by_right": right}


def test_accuracy_counts_symbols_and_its_interval_whole_sequences():
    share, (low, high), shares = papers.accuracy([a_training([0, 0, 50]), a_training([0, 50, 0], seed=1)])
    assert (share, shares) == (0.75, [1.0, 0.5])
    assert 0.65 < low < 0.75 < high < 0.85


def test_all_right_is_not_certain():
    _, (low, high), _ = papers.accuracy([a_training([0, 0, 50])])
    assert low < 0.99 < high == 1


@pytest.mark.parametrize("contender", [SOFTMAX, LINEAR], ids=lambda one: one.name)
def test_weights_depend_on_the_seed_alone(contender):
    one, same, other = (
        make(TINY.copier, contender, positions=9, words=11, seed=seed).transformer.wte.weight for seed in (0, 0, 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(one, make(TINY.copier, SOFTMAX, positions=9, words=11, seed=0).transformer.wte.weight)


@pytest.mark.parametrize("contender", [SOFTMAX, LINEAR], ids=lambda one: one.name)
@pytest.mark.parametrize("room", [False, True])
def test_step_by_step_logits_are_those_of_the_whole_sequence(contender, room):
    model = make(Model(2, 16, 2), contender, positions=12, words=11, seed=0).eval()
    ids = torch.randint(11, (2, 12), generator=torch.Generator().manual_seed(0))
    cache = roomy(model, 12) if room and contender is SOFTMAX else DynamicCache()
    with torch.inference_mode():
        steps = [model(ids[:, n : n + 1], past_key_values=cache, use_cache=True).logits for n in range(12)]
        torch.testing.assert_close(torch.cat(steps, 1), model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-5)


def test_images_do_not_depend_on_the_cache():
    model = make(Model(2, 16, 2), SOFTMAX, positions=20, words=257, seed=0).eval()
    grown, fixed = Painter(model, DynamicCache, 3), Painter(model, lambda: roomy(model, 20), 3)
    assert grown.paint(20) > 0 < fixed.paint(20)
    assert torch.equal(grown._word, fixed._word)


def test_an_image_takes_the_median_of_each_turn():
    assert papers.of_image([[1.0, 5.0], [3.0, 2.0], [2.0, 9.0]]) == (7.0, [6.0, 5.0, 11.0])


@pytest.mark.parametrize("contender", [SOFTMAX, LINEAR], ids=lambda one: one.name)
def test_reversible_gradients_are_exact(contender):
    model = make(Model(6, 16, 2), contender, positions=9, words=11, seed=0).double()
    # One for the weights of two layers, whose gradients then add up.
    model.transformer.h[4].mlp = model.transformer.h[1].mlp
    ids = papers.to_copy(TINY, 4, torch.Generator().manual_seed(0))
    losses = [reversible.logits(model, ids, run).square().mean() for run in (reversible.plain, reversible.reversible)]
    torch.testing.assert_close(*losses, rtol=0, atol=0)
    parameters = dict(model.named_parameters())
    plain, again = (torch.autograd.grad(loss, list(parameters.values())) for loss in losses)
    assert all(one.abs().max() > 0 for one in plain)
    for name, one, other in zip(parameters, plain, again, strict=True):
        assert (one - other).abs().max() <= 1e-10 * one.abs().max(), name


def test_frozen_parameters_get_no_gradient():
    model = make(Model(2, 16, 2), SOFTMAX, positions=9, words=11, seed=0)
    model.transformer.h[0].attn.requires_grad_(False)
    ids = papers.to_copy(TINY, 4, torch.Generator().manual_seed(0))
    reversible.logits(model, ids, reversible.reversible).sum().backward()
    assert model.transformer.h[0].attn.c_attn.weight.grad is None
    assert model.transformer.h[0].mlp.c_fc.weight.grad is not None


def kept(contender, depth, logits):
    model = make(Model(depth, 16, 2), contender, positions=9, words=11, seed=0)
    with reversible.held_by_autograd(model.parameters()) as held:
        logits(model, papers.to_copy(TINY, 16, torch.Generator().manual_seed(0))).sum().backward()
    assert held.bytes == 0, "everything is released after the backward pass"
    return held.peak


@pytest.mark.parametrize("contender", [SOFTMAX, LINEAR], ids=lambda one: one.name)
def test_activations_of_reversible_blocks_do_not_grow_with_depth(contender):
    few, many = (kept(contender, depth, papers._BLOCKS["reversible"]) for depth in (2, 12))
    assert many == pytest.approx(few, rel=0.05)
    few, many = (kept(contender, depth, papers._BLOCKS["plain"]) for depth in (2, 12))
    assert many > 4 * few


@pytest.mark.parametrize("contender", [SOFTMAX, LINEAR], ids=lambda one: one.name)
def test_with_recomputation_a_layer_more_keeps_one_more_input(contender):
    few, many = (kept(contender, depth, papers.recomputed_logits) for depth in (2, 12))
    of_input = 4 * 16 * 9 * 16
    assert (many - few) / 10 == pytest.approx(of_input, rel=0.05)
    assert many < kept(contender, 12, papers.plain_logits) / 3


@pytest.mark.parametrize("contender", [SOFTMAX, LINEAR], ids=lambda one: one.name)
def test_recomputed_gradients_are_exact(contender):
    row = papers.backward(TINY, contender, 3)
    assert max(row["differences"].values()) < 1e-12


def sparse_transformer(model, ids):
    """The residual blocks of Child et al. 2019, section 5.2, and the logits, from the weights of a GPT-2."""

    def norm(weights, x):
        return (x - x.mean(-1, keepdim=True)) / (
            x.var(-1, keepdim=True, correction=0) + 1e-5
        ).sqrt() * weights.weight + weights.bias

    def linear(weights, x):
        return x @ weights.weight + weights.bias

    def attention(layer, x):
        heads, length = layer.attn.num_heads, x.shape[1]
        q, k, v = (
            each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in linear(layer.attn.c_attn, x).chunk(3, -1)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5 + torch.full((length, length), -torch.inf).triu(1)
        return linear(layer.attn.c_proj, (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    body = model.transformer
    h = body.wte.weight[ids] + body.wpe.weight[: ids.shape[1]]
    for layer in body.h:
        a = attention(layer, norm(layer.ln_1, h))
        inner = linear(layer.mlp.c_fc, norm(layer.ln_2, h + a))
        h = h + a + linear(layer.mlp.c_proj, inner * torch.sigmoid(1.702 * inner))
    return norm(body.ln_f, h) @ body.wte.weight.T


def test_a_gpt2_with_their_activation_is_a_sparse_transformer():
    model = make(Model(3, 16, 2, activation=papers.SPARSE), SOFTMAX, positions=9, words=11, seed=0).double()
    for each in model.parameters():
        # Biases and gains too, which are 0 and 1 at first.
        torch.nn.init.normal_(each, std=0.5)
    ids = papers.to_copy(TINY, 4, torch.Generator().manual_seed(0))
    torch.testing.assert_close(papers.plain_logits(model, ids), sparse_transformer(model, ids), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("layers", [2, 8])
def test_last_weights_of_a_branch_begin_smaller_by_the_root_of_their_number(layers):
    model = make(Model(layers, 128, 2, activation=papers.SPARSE), SOFTMAX, positions=9, words=11, seed=0)
    for layer in model.transformer.h:
        assert layer.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.05)
        for last in (layer.attn.c_proj, layer.mlp.c_proj):
            assert last.weight.std().item() == pytest.approx(0.02 / (2 * layers) ** 0.5, rel=0.05)


def test_dropout_is_refused():
    model = make(Model(1, 16, 2), SOFTMAX, positions=9, words=11, seed=0).train()
    model.transformer.h[0].attn.resid_dropout.p = 0.1
    with pytest.raises(ValueError, match="Dropout differs"):
        reversible.gpt2_blocks(model)
    assert len(reversible.gpt2_blocks(model.eval())) == 1


def test_an_encoder_sees_both_sides():
    ids = torch.arange(9)[None]
    for causal in (True, False):
        for contender in (SOFTMAX, papers.Contender("fixed", "fixed", {"stride": 9})):
            model = make(replace(TINY.modes.model, causal=causal), contender, positions=9, words=11, seed=0).eval()
            first, other = (
                papers.plain_logits(model, each)[0, 0] for each in (ids, ids.index_fill(1, torch.tensor(8), 0))
            )
            assert torch.equal(first, other) == causal


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", papers.STEPPED)
def test_a_symbol_reaches_its_mask_by_two_steps_and_not_by_one(size, name):
    how, length = size.modes, 2 * size.modes.length + 1
    settings = {"stride": how.stride} | ({} if name == "strided" else {"summary": how.summary})
    mechanism: Any = MECHANISMS[name](2, 8, causal=False, scale=1.0, **settings)
    pattern = mechanism.over(length)
    place = torch.arange(length)
    one, two = (pattern.allowed(place[:, None], place, length, step).float() for step in (1, 2))
    symbols = torch.arange(how.length)
    masks = symbols + how.length + 1
    assert ((two @ one)[masks, symbols] > 0).all()
    assert not one[masks, symbols].any()
    # Columns of a summary are seen by all.
    assert two[masks, symbols].mean() <= (0 if name == "strided" else 1.5 * how.summary / how.stride)


def test_modes_are_compared_at_as_many_keys():
    how = SIZES["small"].modes
    keys = {one.name: papers.keys_seen(how, one) for one in papers.of_modes(how)}
    assert keys["softmax"] == 2 * how.length + 1
    for name in papers.STEPPED:
        for mode in ("interleave", "heads"):
            assert keys[f"{name} {mode}"] < 0.75 * keys[f"{name} merged"]
            assert keys[f"{name} {mode}, as many keys"] == pytest.approx(keys[f"{name} merged"], rel=0.15)


def test_the_interval_over_seeds_is_students():
    assert papers.over_seeds([1.0, 2.0, 3.0]) == pytest.approx((2, 2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=1e-3)


def test_the_best_mode_is_named_with_its_lead():
    right = {"merged": [0, 0, 40, 10], "interleave": [0, 0, 10, 40], "heads": [0, 40, 10, 0]}
    cells = {
        f"{name} {mode}{keys}": [a_training(right[mode]), a_training(right[mode], seed=1)]
        for name in papers.STEPPED
        for mode in papers.MODES
        for keys in ("", ", as many keys")
    }
    made = papers._answer(cells)
    assert "**With the same settings, interleave is best**: 20.0 points (+20.0 – +20.0) ahead of merged" in made
    assert "**With as many keys, interleave is best**" in made
    assert "| all four | as many keys | **+20.0 (+20.0 – +20.0)** | **-33.3" in papers._differences(cells)


def test_the_document_has_the_pages_and_names_what_is_not_measured(tmp_path):
    page = tmp_path / "papers" / "layer" / "report.md"
    page.parent.mkdir(parents=True)
    page.write_text("# One layer\n\n![time](time.svg)\n", encoding="utf-8")
    made = papers.in_docs("# Experiments\n\nAbout.\n\n## copy\n\nOld.\n", tmp_path)
    assert made.startswith("# Experiments\n\nAbout.\n\n## copy\n\nNot measured yet: `python bench/papers.py copy ")
    assert "## One layer\n\n![time](../reports/papers/layer/time.svg)\n" in made
    assert "Old." not in made
