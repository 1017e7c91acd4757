"""Mechanisms are fitted on what is searched, once, and the models keep what they may train."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from approx.conversion.calibration import mechanisms
from approx.errors import ApproxError, Exit
from approx.planning.rule import Rule
from approx.searching import search
from approx.searching.cost import Candidate, Composer, Judge
from approx.searching.options import SearchStage
from approx.searching.search import _training_data, fit
from forms import HEDGEHOG
from tiny_classifier import WORDS

from .conftest import CANDIDATES

CANDIDATE = Candidate("linear feature_map=hedgehog", Rule("linear", settings=HEDGEHOG))


@pytest.fixture
def judge(base, sentences):
    options = {"task": "glue/sst2", "data": str(sentences), "split": "dev", "examples": 40, "proof": 20}
    return Judge(base, SearchStage(length=24, budget="loss<=1", **options), 0)


def test_of_the_searched_examples_a_tenth_is_held_out(judge, base):
    task, read = judge.of_task(judge.search)
    data = _training_data(base.model, task, read, judge.processor)
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
    task, read = judge.of_task(judge.search)
    data = _training_data(base.model, task, read, judge.processor)
    assert data.rows == [(owner, window) for owner in range(36) for window in (0, 1)]
    assert len(data.encodings) == 72


def test_mechanisms_come_nearer_and_are_read_back_by_the_next_search(judge, base, facts, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "_STEPS", 12)
    reported = []

    def fitted(file):
        composer = Composer(base, facts)
        running = {one.name: composer.make(composer.everywhere(one)).model for one in (CANDIDATES[0], CANDIDATE)}
        before = judge.measure(running[CANDIDATE.name], judge.search).divergence
        fit(composer, judge, running, file, "about", 0, lambda *words: reported.append(words))
        return composer, running[CANDIDATE.name], before

    file = tmp_path / "out" / "fitted.safetensors"
    composer, model, before = fitted(file)
    assert judge.measure(model, judge.search).divergence < before
    assert reported[-1] == (12, 12)
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    # Local windows have nothing to fit.
    assert composer.fitted.keys() == {(layer, CANDIDATE.name) for layer in range(3)}
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    assert len(load_file(file)) == sum(len(state) for state in composer.fitted.values())
    reported.clear()
    again, other, _ = fitted(file)
    assert reported == []
    for (layer, _), state in again.fitted.items():
        for name, value in state.items():
            assert torch.equal(value, composer.fitted[layer, CANDIDATE.name][name])
            assert torch.equal(mechanisms(other)[layer].state_dict()[name], value)


def test_rejects_a_damaged_file_of_fitted_mechanisms_and_that_of_another_search(judge, base, facts, tmp_path):
    file, site = tmp_path / "fitted.safetensors", f"{CANDIDATE.name}/0/"
    composer = Composer(base, facts)
    running = {CANDIDATE.name: composer.make(composer.everywhere(CANDIDATE)).model}
    state = {
        f"{CANDIDATE.name}/{layer}/{key}": value.clone()
        for layer, one in enumerate(mechanisms(running[CANDIDATE.name]))
        for key, value in one.state_dict().items()
    }
    whole = save(state, {"about": "a"})
    wrong_shape = {key: value[:1].clone() if key.startswith(site) else value for key, value in state.items()}
    damages = {
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "not safetensors": b"{}" * 100,
        "a layer is missing": save(
            {key: value for key, value in state.items() if not key.startswith(site)}, {"about": "a"}
        ),
        "another shape": save(wrong_shape, {"about": "a"}),
    }
    for name, content in damages.items():
        file.write_bytes(content)
        with pytest.raises(ApproxError, match=r"fitted\.safetensors is damaged: .*Delete it") as caught:
            fit(Composer(base, facts), judge, running, file, "a", 0, lambda *words: None)
        assert (caught.value.exit_code, len(str(caught.value).splitlines())) == (Exit.UNAVAILABLE, 1), name
        assert file.read_bytes() == content
    for content in (save(state, {"about": "b"}), save(state)):
        file.write_bytes(content)
        with pytest.raises(ApproxError, match="was fitted for another model") as caught:
            fit(Composer(base, facts), judge, running, file, "a", 0, lambda *words: None)
        assert caught.value.exit_code == Exit.REFUSED


def test_without_parameters_nothing_is_fitted(judge, base, facts, tmp_path):
    composer = Composer(base, facts)
    running = {CANDIDATES[0].name: composer.make(composer.everywhere(CANDIDATES[0])).model}
    fit(composer, judge, running, tmp_path / "fitted.safetensors", "about", 0, lambda *words: None)
    assert composer.fitted == {}
    assert not list(tmp_path.iterdir())


def test_fits_on_the_text_that_compares_plans_and_not_on_that_of_the_proof(base, facts, tmp_path, monkeypatch):
    monkeypatch.setattr(search, "_STEPS", 4)
    words = np.random.default_rng(0).choice(WORDS[4:], 600)

    def fitted(name, text):
        (tmp_path / f"{name}.txt").write_text(" ".join(text), encoding="utf-8")
        stage = SearchStage(length=24, budget="kl<=1", text=str(tmp_path / f"{name}.txt"), examples=6)
        composer = Composer(base, facts)
        running = {CANDIDATE.name: composer.make(composer.everywhere(CANDIDATE)).model}
        reported: list[tuple[int, int]] = []
        file = tmp_path / f"{name}.safetensors"
        fit(composer, Judge(base, stage, 0), running, file, "about", 0, lambda *at: reported.append(at))
        assert reported[-1] == (4, 4)
        return load_file(file)

    # Six rows of 22 words, and their special tokens, compare plans.
    searched, rest = words[:132], words[132:]
    first = fitted("first", [*searched, *rest])
    other_proof = fitted("proof", [*searched, *rest[::-1]])
    other_search = fitted("search", [*searched[::-1], *rest])
    assert all(torch.equal(first[name], other_proof[name]) for name in first)
    assert not all(torch.equal(first[name], other_search[name]) for name in first)
