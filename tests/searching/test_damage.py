"""Predicted damage against divergences that are measured, and the heads that are converted first."""

import itertools

import numpy as np
import pytest
import torch

from approx.errors import ApproxError, Exit
from approx.searching.cost import Choice, Composer, Judge, load, measure_damage, of_heads, save
from approx.searching.options import SearchStage
from typed import known

from .conftest import CANDIDATES


@pytest.fixture(scope="module")
def found(base, facts, text):
    """Damages of two candidates, the judge, and the reported progress."""
    judge = Judge(base, SearchStage(length=24, budget="kl<=1", text=str(text), examples=12, calibration=12), 0)
    composer, reported = Composer(base, facts), []
    running = {one.name: composer.make(composer.everywhere(one)).model for one in CANDIDATES[:2]}
    for parameter in itertools.islice(base.model.parameters(), 3):
        parameter.requires_grad_(False)
    made = measure_damage(
        base.model, facts, running, judge.calibration.batches, 0, lambda *words: reported.append(words)
    )
    again = measure_damage(base.model, facts, running, judge.calibration.batches, 0, lambda *words: None)
    other = measure_damage(base.model, facts, running, judge.calibration.batches, 1, lambda *words: None)
    return made, again, other, judge, composer, reported


def test_damages_rank_layers_and_candidates_as_measurements_do(found, base):
    made, _, _, judge, composer, _ = found
    predicted, measured = [], []
    for one in CANDIDATES[:2]:
        for layer in range(3):
            predicted.append(of_heads(made[one.name][layer], None)[0])
            choices = [Choice(one if number == layer else None) for number in range(3)]
            measured.append(judge.measure(composer.make(choices).model, judge.calibration).divergence)
    assert np.corrcoef(np.argsort(np.argsort(predicted)), np.argsort(np.argsort(measured)))[0, 1] > 0.6
    # They are of the same size: half the squared gradient times the error, per example.
    ratios = np.array(predicted) / np.array(measured)
    assert 0.3 < np.exp(np.mean(np.log(ratios))) < 3


def test_damages_repeat_with_their_seed_and_leave_the_model_as_it_was(found, base):
    made, again, other, _, _, reported = found
    assert all(np.array_equal(x, y) for x, y in zip(made["local 1"], again["local 1"], strict=True))
    assert not all(np.array_equal(x, y) for x, y in zip(made["local 1"], other["local 1"], strict=True))
    assert reported == [*((number, 12) for number in range(12)), (12, 12)]
    assert [parameter.requires_grad for parameter in base.model.parameters()][:4] == [False, False, False, True]
    assert all(parameter.grad is None for parameter in base.model.parameters())
    for parameter in base.model.parameters():
        parameter.requires_grad_(True)


def test_products_of_heads_are_symmetric_and_a_sum_of_squares(found):
    for products in found[0]["local 1"]:
        assert products.shape == (4, 4)
        assert np.allclose(products, products.T)
        assert np.linalg.eigvalsh(products).min() > -1e-9


def test_where_a_candidate_cannot_be_used_there_is_no_damage(base, facts, text):
    composer = Composer(base, facts)
    mixed = composer.make([Choice(CANDIDATES[0]), Choice(None), Choice(CANDIDATES[0])]).model
    batches = Judge(base, SearchStage(length=24, budget="kl<=1", text=str(text), examples=2), 0).calibration.batches
    damages = measure_damage(base.model, facts, {"a": mixed}, batches[:1], 0, lambda *words: None)["a"]
    assert [one is None for one in damages] == [False, True, False]


def test_padding_and_the_number_of_inputs_change_no_mean(base, facts, sentences):
    """The damage is a mean per example: the same examples twice give the same."""
    stage = SearchStage(length=24, budget="loss<=1", task="glue/sst2", data=str(sentences), split="dev", examples=16)
    judge, composer = Judge(base, stage, 0), Composer(base, facts)
    running = {"a": composer.make(composer.everywhere(CANDIDATES[0])).model}
    batches = judge.calibration.batches[:2]
    once, twice = (
        np.mean(
            [
                of_heads(
                    known(measure_damage(base.model, facts, running, some, seed, lambda *words: None)["a"][0]), None
                )[0]
                for seed in range(2)
            ]
        )
        for some in (batches, batches * 2)
    )
    assert twice == pytest.approx(once, rel=0.4)


PRODUCTS = np.array([[4.0, -3.0, 0.5, 0.0], [-3.0, 3.0, 0.2, 0.1], [0.5, 0.2, 1.0, 2.0], [0.0, 0.1, 2.0, 5.0]])


def test_all_heads_cost_the_sum_of_their_products():
    assert of_heads(PRODUCTS, None) == (pytest.approx(PRODUCTS.sum()), [])
    # Errors may cancel, but a damage is not negative.
    assert of_heads(-PRODUCTS, None) == (0.0, [])


@pytest.mark.parametrize(("count", "heads"), [(1, [2]), (2, [1, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3])])
def test_heads_are_taken_in_the_order_in_which_they_add_least(count, heads):
    # After head 2 comes head 1 (3 + 2 * 0.2), and then head 0, whose error cancels that of head 1.
    damage, chosen = of_heads(PRODUCTS, count)
    assert chosen == heads
    assert damage == pytest.approx(PRODUCTS[np.ix_(heads, heads)].sum())


def test_of_equal_heads_the_first_is_taken():
    assert of_heads(np.eye(3), 2) == (2.0, [0, 1])


def test_sensitivities_are_read_back_for_the_same_search_only(tmp_path):
    damages = {"a": [PRODUCTS, None], "b": [None, np.eye(2)]}
    save(tmp_path / "s.json", "about", damages)
    read = load(tmp_path / "s.json", "about")
    assert list(read) == ["a", "b"]
    for name, sites in damages.items():
        for one, other in zip(read[name], sites, strict=True):
            assert (one is None) == (other is None)
            assert one is None or np.array_equal(one, other)
    with pytest.raises(ApproxError, match="was measured for another model") as caught:
        load(tmp_path / "s.json", "else")
    assert caught.value.exit_code == Exit.REFUSED


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]",
        "{}",
        '{"damages": {}}',
        '{"damages": [], "about": "a"}',
        '{"damages": {"a": 1}, "about": "a"}',
        '{"damages": {"a": [[["x"]]]}, "about": "a"}',
        '{"damages": {"a": [[[0.5]]]}, "about": "a", "sha256": "of others"}',
        '{"damages": {"a": [[[0.5]]',
        "[" * 100_000,
    ],
)
def test_a_file_without_sensitivities_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "s.json").write_text(text, encoding="utf-8")
    with pytest.raises(ApproxError, match=r"holds no sensitivities of a search.*Leave it out") as caught:
        load(tmp_path / "s.json", "a")
    assert (caught.value.exit_code, len(str(caught.value).splitlines())) == (Exit.UNAVAILABLE, 1)


def test_the_error_of_a_head_is_charged_to_that_head(base, facts, text):
    """With the output projection of one head at zero, nothing that it computes reaches the outputs."""
    judge = Judge(base, SearchStage(length=24, budget="kl<=1", text=str(text), examples=3), 0)
    weight = base.model.bert.encoder.layer[1].attention.output.dense.weight
    before = weight.detach().clone()
    composer = Composer(base, facts)
    running = {"a": composer.make(composer.everywhere(CANDIDATES[0])).model}
    try:
        with torch.no_grad():
            weight[:, 16:24] = 0
        products = known(
            measure_damage(base.model, facts, running, judge.search.batches, 0, lambda *words: None)["a"][1]
        )
    finally:
        with torch.no_grad():
            weight.copy_(before)
    assert products[2] == pytest.approx(np.zeros(4), abs=1e-12)
    assert np.all(np.delete(np.diag(products), 2) > 0)


def nearly(mechanism, scale):
    """Make of a mechanism exact attention with a small part of its error."""
    forward = mechanism.forward

    def mixed(q, k, v, mask=None, **more):
        seen = None if mask is None else mask[:, None, None]
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
        return exact + 0.05 * (forward(q, k, v, mask, **more) - exact)

    mechanism.forward = mixed


def test_the_damage_of_a_small_error_is_the_divergence_that_it_causes(base, facts, sentences):
    """To second order they are the same, so here the prediction has no excuse but the draws of labels."""
    stage = SearchStage(length=24, budget="loss<=1", task="glue/sst2", data=str(sentences), split="dev", examples=24)
    judge, composer = Judge(base, stage, 0), Composer(base, facts)
    ratios = []
    for layer in (0, 2):
        made = composer.make([Choice(CANDIDATES[0] if number == layer else None) for number in range(3)]).model
        nearly(made.bert.encoder.layer[layer].attention.self.mechanism, facts.sites[layer].scale)
        divergence = judge.measure(made, judge.search).divergence
        seeds = range(8)
        predicted = [
            of_heads(
                known(
                    measure_damage(base.model, facts, {"a": made}, judge.search.batches, seed, lambda *at: None)["a"][
                        layer
                    ]
                ),
                None,
            )[0]
            for seed in seeds
        ]
        ratios.append(np.mean(predicted) / divergence)
    # 8 seeds of 4 draws for each of 24 inputs.
    assert ratios == pytest.approx([1, 1], rel=0.3)
