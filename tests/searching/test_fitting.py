"""Mechanisms are fitted on what is searched, once, and the models keep what they may train."""

import pytest
import torch
from safetensors.torch import load_file

from approx.conversion.calibration import mechanisms
from approx.planning.rule import Rule
from approx.searching import fitting
from approx.searching.candidates import Candidate
from approx.searching.composition import Composer
from approx.searching.fitting import _training_data, fit
from approx.searching.judging import Judge
from approx.searching.options import SearchStage

from .conftest import CANDIDATES

HEDGEHOG = Candidate("linear feature_map=hedgehog", Rule("linear", settings={"feature_map": "hedgehog"}))


@pytest.fixture
def judge(base, sentences):
    options = {"task": "glue/sst2", "data": str(sentences), "split": "dev", "examples": 40, "proof": 20}
    return Judge(base, SearchStage(length=24, budget="loss<=1", **options), 0)


def test_of_the_searched_examples_a_tenth_is_held_out(judge, base):
    data = _training_data(base.model, judge)
    searched = [example.id for example in judge.search.prepared.split.examples]
    assert [example.id for example in data.split.examples] == searched[:36]
    assert [example.id for example in data.held_out.examples] == searched[36:]
    assert data.rows == [(row, 0) for row in range(36)]
    assert data.encodings == judge.search.prepared.encodings[:36]
    assert not data.labelled


def test_examples_of_several_windows_keep_their_windows_in_order(judge, base):
    prepared = judge.search.prepared
    count = len(prepared.split.examples)
    owners = [owner for owner in range(count) for _ in range(2)]
    prepared.owners[:] = owners
    prepared.encodings[:] = [encoding for encoding in prepared.encodings for _ in range(2)]
    data = _training_data(base.model, judge)
    assert data.rows == [(owner, window) for owner in range(36) for window in (0, 1)]
    assert len(data.encodings) == 72


def test_mechanisms_come_nearer_and_are_read_back_by_the_next_search(judge, base, facts, tmp_path, monkeypatch):
    monkeypatch.setattr(fitting, "_STEPS", 12)
    said = []

    def fitted(file):
        composer = Composer(base, facts)
        running = {one.name: composer.make(composer.everywhere(one)).model for one in (CANDIDATES[0], HEDGEHOG)}
        before = judge.measure(running[HEDGEHOG.name], judge.search).divergence
        fit(composer, judge, running, file, 0, lambda *words: said.append(words))
        return composer, running[HEDGEHOG.name], before

    file = tmp_path / "out" / "fitted.safetensors"
    composer, model, before = fitted(file)
    assert judge.measure(model, judge.search).divergence < before
    assert said[-1] == (12, 12)
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    # Local windows have nothing to fit.
    assert composer.fitted.keys() == {(layer, HEDGEHOG.name) for layer in range(3)}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    assert len(load_file(file)) == sum(len(state) for state in composer.fitted.values())
    said.clear()
    again, other, _ = fitted(file)
    assert said == []
    for (layer, _), state in again.fitted.items():
        for name, value in state.items():
            assert torch.equal(value, composer.fitted[layer, HEDGEHOG.name][name])
            assert torch.equal(mechanisms(other)[layer].state_dict()[name], value)


def test_without_parameters_nothing_is_fitted(judge, base, facts, tmp_path):
    composer = Composer(base, facts)
    running = {CANDIDATES[0].name: composer.make(composer.everywhere(CANDIDATES[0])).model}
    fit(composer, judge, running, tmp_path / "fitted.safetensors", 0, lambda *words: None)
    assert composer.fitted == {}
    assert not list(tmp_path.iterdir())
