"""The store and the loop over stages, with stages that only record that they were computed."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch

from approx.errors import ApproxError, Exit
from approx.measuring import measure
from approx.pipeline.store import Here, Stage, Store, complete, stage_key


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path)


@pytest.fixture
def made() -> list[str]:
    return []


@pytest.fixture
def stage(made):
    def make(name: str, *inputs: Stage, result: object = None, **more) -> Stage:
        def work() -> object:
            made.append(name)
            if isinstance(result, Exception):
                raise result
            return result

        return Stage(name, f"key-{name}", work, inputs, **more)

    return make


def done(*stages: Stage, store: Store, keep_going: bool = True) -> dict:
    return complete(stages, store, Here(), keep_going=keep_going)


def test_a_finished_stage_is_read_and_not_computed_again(store, stage, made):
    one = stage("one", result={"x": [1, None]})
    assert store.state(one) == "missing"
    (outcome,) = done(one, store=store).values()
    assert (outcome.status, outcome.result, outcome.exit_code) == ("done", {"x": [1, None]}, 0)
    assert done(one, store=store) == {}
    assert made == ["one"]
    assert store.read(one) == outcome
    assert store.state(replace(one, key="another")) == "missing"


DAMAGES = {
    "empty": lambda text: b"",
    "half": lambda text: text[: len(text) // 2],
    "not text": lambda text: b"\xff" + text,
    "a list": lambda text: b"[]",
    "too deep": lambda text: b"[" * 100_000,
    "another stage": lambda text: text.replace(b"key-one", b"key-two"),
    "another figure": lambda text: text.replace(b"0.5", b"0.7"),
    "a result of another type": lambda text: text.replace(b'{"score": 0.5}', b"3"),
    "half of a surrogate pair": lambda text: text.replace(b"0.5", b'"\\ud800"'),
    "a status of another type": lambda text: text.replace(b'"done"', b"[]"),
    "another exit code": lambda text: text.replace(b'"exit_code": 0', b'"exit_code": "x"'),
    "a foreign field": lambda text: b'{"more": 1, ' + text[1:],
    "without its hash": lambda text: text[: text.index(b', "sha256"')] + b"}",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_outcome_is_an_unfinished_stage(store, stage, made, damage):
    one = stage("one", result={"score": 0.5})
    done(one, store=store)
    file = store.folder / "key-one.json"
    text = DAMAGES[damage](file.read_bytes())
    assert text != file.read_bytes()
    file.write_bytes(text)
    assert (store.read(one), store.state(one)) == (None, "missing")
    done(one, store=store)
    assert made == ["one", "one"]


def test_an_outcome_of_an_older_form_is_not_read(store, stage):
    one = stage("one")
    file = store.folder / "key-one.json"
    done(one, store=store)
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {"schema": 1}), encoding="utf-8")
    assert store.state(one) == "missing"


def test_recomputes_a_stage_whose_product_is_missing_or_different(store, tmp_path):
    """Two stages write the same file; each is done only while the file is its own product."""

    def writes(text: str) -> Stage:
        file = tmp_path / "outputs"
        return Stage(text, text, partial(file.write_text, text, encoding="utf-8"), product=file)

    first, second = writes("first"), writes("second")
    done(first, store=store)
    assert store.state(first) == "done"
    done(second, store=store)
    assert (store.state(first), store.state(second)) == ("missing", "done")
    (tmp_path / "outputs").unlink()
    assert store.state(second) == "missing"


def test_recognises_a_folder_by_its_manifest(store, tmp_path):
    folder = tmp_path / "converted"
    folder.mkdir()
    (folder / "approx_manifest.json").write_text("{}", encoding="utf-8")
    one = Stage("one", "one", lambda: None, product=folder)
    done(one, store=store)
    (folder / "__pycache__").mkdir()
    assert store.state(one) == "done"
    (folder / "approx_manifest.json").write_text("[]", encoding="utf-8")
    assert store.state(one) == "missing"


def test_runs_inputs_first_timed_stages_alone_and_equal_keys_once(store, stage, made):
    class Watched(Here):
        def __init__(self) -> None:
            self.waves: list[tuple[list[str], bool]] = []

        def map(self, work, items, *, alone: bool = False):
            self.waves.append(([item.name for item in items], alone))
            return super().map(work, items, alone=alone)

    folder, base = stage("folder"), stage("base")
    timed = stage("timed", folder, alone=True)
    scored = stage("scored", folder, base)
    executor, reported = Watched(), []
    stages = [timed, scored, replace(scored), base, folder]
    complete(stages, store, executor, keep_going=True, progress=lambda *where: reported.append(where))
    assert executor.waves == [(["base", "folder"], False), (["scored"], False), (["timed"], True)]
    assert reported[0] == ("", 0, 4)
    assert reported[-1] == ("timed", 4, 4)
    assert made == ["base", "folder", "scored", "timed"]


def test_skips_stages_that_only_finished_ones_need(store, stage, made, tmp_path):
    folder = tmp_path / "folder"
    needed = stage("needed", product=folder)
    folder.mkdir()
    report = stage("report", needed, stored=False)
    scored = stage("scored", needed)
    done(needed, scored, store=store)
    folder.rmdir()
    done(needed, scored, store=store)
    assert made == ["needed", "scored"]
    # A stage that is not stored is computed each time, with its missing inputs.
    done(needed, scored, report, store=store)
    done(needed, scored, report, store=store)
    assert made == ["needed", "scored", "needed", "report", "needed", "report"]
    assert not (store.folder / "key-report.json").exists()


def test_a_failure_stops_only_dependent_stages_and_is_retried(store, stage, made):
    broken = stage("broken", result=ApproxError("no room", Exit.MISSING), noun="conversion")
    lost, other = stage("lost", broken), stage("other")
    last = stage("last", lost)
    outcomes = done(broken, lost, last, other, store=store)
    assert {key: outcome.status for key, outcome in outcomes.items()} == {
        "key-broken": "failed",
        "key-other": "done",
    }
    assert made == ["broken", "other"]
    outcome = store.read(lost)
    assert outcome is not None
    assert (outcome.status, outcome.error) == ("failed", "Its conversion failed: no room")
    assert outcome.exit_code == Exit.MISSING
    assert store.state(last) == "failed"
    healed = stage("broken")
    done(healed, stage("lost", healed), store=store)
    assert made == ["broken", "other", "broken", "lost"]
    assert store.state(lost) == "done"


@pytest.mark.parametrize("result", [ZeroDivisionError(), object(), float("nan")])
def test_raises_a_fatal_error_and_stores_nothing(store, stage, made, result):
    with pytest.raises((ZeroDivisionError, ApproxError)):
        done(stage("one", result=result), stage("other"), store=store, keep_going=False)
    assert made == ["one"]
    assert not list(store.folder.glob("*"))


def test_errors_end_in_one_line(store, stage):
    (outcome,) = done(stage("one", result=RuntimeError("two\n  lines")), store=store).values()
    assert (outcome.error, outcome.exit_code) == ("RuntimeError: two lines", Exit.INTERNAL)
    assert "in work" in outcome.traceback
    assert store.state(stage("one")) == "failed"
    (outcome,) = done(stage("one", result=ApproxError("no")), store=store).values()
    assert (outcome.error, outcome.traceback) == ("no", None)


def test_a_stage_that_its_executor_lost_has_failed(store, stage):
    class Losing(Here):
        def map(self, work, items, *, alone: bool = False):
            yield from ((item, KeyError("lost")) for item in items)

    (outcome,) = complete([stage("one")], store, Losing(), keep_going=True).values()
    assert (outcome.status, outcome.error) == ("failed", "KeyError: 'lost'")


def test_removes_leftovers_of_killed_processes(store, stage):
    store.folder.mkdir()
    (store.folder / ".one.json.1.tmp").touch()
    done(stage("one"), store=store)
    assert [path.name for path in store.folder.iterdir()] == ["key-one.json"]


def test_computes_with_the_requested_threads(store, stage):
    class Sharing(Here):
        def map(self, work, items, *, alone: bool = False):
            yield from ((item, work(item, 2)) for item in items)

    before = torch.get_num_threads()
    try:
        complete([stage("one")], store, Sharing(), keep_going=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_key_depends_on_kind_settings_inputs_and_code(monkeypatch):
    known = stage_key("convert", ["base"], {"a": 1, "b": 2})
    assert stage_key("convert", ["base"], {"b": 2, "a": 1}) == known
    others = {stage_key("bench", ["base"], {"a": 1, "b": 2}), stage_key("convert", ["b"], {"a": 1, "b": 2})}
    others.add(stage_key("convert", ["base"], {"a": 1, "b": 3}))
    monkeypatch.setattr("approx.pipeline.store.code", lambda: "other code")
    others.add(stage_key("convert", ["base"], {"a": 1, "b": 2}))
    assert len(others - {known}) == 4
    assert len(measure.code()) == 64
