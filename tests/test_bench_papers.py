"""The experiments of the linear-transformer paper at their smallest, and what they rest on: decoding, gradients, memory."""

import json

import pytest
import torch
from transformers.cache_utils import DynamicCache

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


def kept(contender, depth, run):
    model = make(Model(depth, 16, 2), contender, positions=9, words=11, seed=0)
    with reversible.held_by_autograd(model.parameters()) as held:
        reversible.logits(model, papers.to_copy(TINY, 16, torch.Generator().manual_seed(0)), run).sum().backward()
    assert held.bytes == 0, "everything is released after the backward pass"
    return held.peak


@pytest.mark.parametrize("contender", [SOFTMAX, LINEAR], ids=lambda one: one.name)
def test_activations_of_reversible_blocks_do_not_grow_with_depth(contender):
    few, many = (kept(contender, depth, reversible.reversible) for depth in (2, 12))
    assert many == pytest.approx(few, rel=0.05)
    few, many = (kept(contender, depth, reversible.plain) for depth in (2, 12))
    assert many > 4 * few


def test_dropout_is_refused():
    model = make(Model(1, 16, 2), SOFTMAX, positions=9, words=11, seed=0).train()
    model.transformer.h[0].attn.resid_dropout.p = 0.1
    with pytest.raises(ValueError, match="Dropout differs"):
        reversible.gpt2_blocks(model)
    assert len(reversible.gpt2_blocks(model.eval())) == 1


def test_the_document_has_the_pages_and_names_what_is_not_measured(tmp_path):
    page = tmp_path / "papers" / "layer" / "report.md"
    page.parent.mkdir(parents=True)
    page.write_text("# One layer\n\n![time](time.svg)\n", encoding="utf-8")
    made = papers.in_docs("# Experiments\n\nAbout.\n\n## copy\n\nOld.\n", tmp_path)
    assert made.startswith("# Experiments\n\nAbout.\n\n## copy\n\nNot measured yet: `python bench/papers.py copy ")
    assert "## One layer\n\n![time](../reports/papers/layer/time.svg)\n" in made
    assert "Old." not in made
