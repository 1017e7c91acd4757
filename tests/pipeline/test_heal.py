"""Training as a stage of a recipe and of a sweep."""

import json
from pathlib import Path
from typing import Any

import pytest

from approx import grid, recipe
from approx.checkpoints import checkpoint
from approx.checkpoints.history import trainings
from approx.errors import ApproxError, Exit
from approx.pipeline.run import Study, run
from approx.pipeline.store import Here
from approx.pipeline.sweep import cells, sweep
from approx.planning.plan import Plan
from tiny_study import SENTENCES, tiny_checkpoint

HEAL = "{recover: task, task: glue/sst2, data: DATA, steps: 3, batch_size: 4, learning_rate: 0.001, evaluate_every: 2"


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("heal")
    tiny_checkpoint(folder / "base")
    (folder / "SST-2").mkdir()
    for split, start in (("train", 0), ("dev", 1)):
        lines = [
            f"{SENTENCES[row % len(SENTENCES)]} {'very ' * (row // 6 % 3)}{'long' * start}\t{row % 2}"
            for row in range(24)
        ]
        (folder / "SST-2" / f"{split}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n", encoding="utf-8")
    return folder


def written(study: Path, file: Path, heal: str, **more: str) -> Path:
    lines = {
        "title": "A tiny study",
        "checkpoint": str(study / "base"),
        "variants": "{linear: {mechanism: linear, settings: {feature_map: hedgehog}}, local: {mechanism: local}}",
        "heal": heal.replace("DATA", str(study / "SST-2")),
        "evaluate": f"{{task: glue/sst2, data: {study / 'SST-2'}}}",
        "device": "cpu",
        **more,
    }
    file.write_text("".join(f"{key}: {value}\n" for key, value in lines.items()), encoding="utf-8")
    return file


@pytest.mark.slow
def test_measures_variants_before_and_after_next_to_an_equally_trained_base(study, tmp_path):
    file = written(
        study,
        tmp_path / "r.yaml",
        "[{recover: transfer, task: glue/sst2, data: DATA, steps: 2, batch_size: 4, variants: [linear]}, "
        f"{HEAL}, exact: true}}]",
        bench="{lengths: 8, rounds: 3, seconds: 0}",
    )
    out = tmp_path / "run"
    made = run(recipe.read(file), out)
    names = [variant.name for variant in made.variants]
    assert names == ["linear", "local", "linear, healed", "local, healed", "exact, trained"]
    assert [entry.name for entry in made.quality[0].variants] == names
    assert [entry.name for entry in made.speed[0].variants] == ["linear, healed", "local, healed"]
    trained = {one.name: one for one in made.trainings}
    assert set(trained) == {"linear, healed", "local, healed", "exact, trained"}
    assert trained["exact, trained"].exact is None
    opened = checkpoint.load(out / "healed" / "linear-1")
    assert [step.recover for step in trainings(opened.model.config.approx)] == [["transfer"], ["task"]]
    page = (out / "report" / "index.html").read_text(encoding="utf-8")
    assert "Training</h2>" in page
    assert "linear, healed" in page
    assert "## Training" in (out / "report" / "report.md").read_text(encoding="utf-8")
    # Again nothing is computed, and another training is another stage.
    again = run(recipe.read(file), out, resume=True)
    assert again.trainings == made.trainings
    assert not (out / "training").exists() or not any((out / "training").iterdir())


@pytest.mark.slow
def test_copies_a_variant_that_meets_its_target_unchanged(study, tmp_path):
    heal = f"{HEAL}, variants: [local], budget: loss<=0}}"
    made = run(recipe.read(written(study, tmp_path / "r.yaml", heal)), tmp_path / "run")
    assert "local, healed" in [variant.name for variant in made.variants]
    (training,) = made.trainings
    assert training.phases == []
    assert training.before == training.after is not None
    page = (tmp_path / "run" / "report" / "index.html").read_text(encoding="utf-8")
    assert "It met its budget before training, so nothing was trained." in page
    healed, converted = (
        tmp_path / "run" / place / "model.safetensors" for place in ("healed/local-0", "converted/local")
    )
    assert healed.read_bytes() == converted.read_bytes()


@pytest.mark.sample(0)
def test_the_teacher_of_a_trained_model_is_the_base(study, tmp_path):
    heal = f"{HEAL}, variants: [local]}}"
    heals = f"[{heal}, {heal.replace('recover: task', 'recover: distill')}]"
    run(recipe.read(written(study, tmp_path / "r.yaml", heals)), tmp_path / "run")
    opened = checkpoint.load(tmp_path / "run" / "healed" / "local-1")
    steps = trainings(opened.model.config.approx)
    assert [step.recover for step in steps] == [["task"], ["distill"]]
    assert [step.teacher is not None for step in steps] == [False, True]


def test_a_training_by_other_code_is_another_stage(study, tmp_path, monkeypatch):
    asked = recipe.read(written(study, tmp_path / "r.yaml", f"{HEAL}, variants: [local]}}"))

    def keys() -> list[str]:
        study = Study(asked, asked.checkpoint, tmp_path / "run", offline=True, command="")
        (heal,) = asked.heal
        return [study.convert(Plan.of("local"), "local").key, study.heal(heal.training, "x", None).key]

    before = keys()
    monkeypatch.setattr("approx.pipeline.run.code", lambda rooms: "other")
    assert [one == other for one, other in zip(keys(), before, strict=True)] == [True, False]


@pytest.mark.parametrize(
    ("heal", "code", "message"),
    [
        (f"{HEAL}, variants: [lineal]}}", Exit.USAGE, "there is no variant 'lineal'. Did you mean 'linear'?"),
        ("{recover: task, task: needle, settings: {lenght: 128}}", Exit.USAGE, "lenght"),
        ("{recover: task}", Exit.USAGE, "give either 'task' or 'text'"),
        ("{recover: mlm, text: nowhere.txt}", Exit.UNAVAILABLE, "nowhere.txt does not exist"),
        (f"{HEAL}, splits: train}}", Exit.USAGE, "Did you mean 'split'?"),
        (f"{HEAL}, time_budget: soon}}", Exit.USAGE, "e.g. 90s, 30m or 2h"),
    ],
)
def test_mistakes_are_found_before_any_work(study, tmp_path, heal, code, message):
    with pytest.raises(ApproxError) as caught:
        run(recipe.read(written(study, tmp_path / "r.yaml", heal)), tmp_path / "run")
    assert message in str(caught.value)
    assert caught.value.exit_code == code
    assert not (tmp_path / "run").exists()


def test_refuses_to_train_on_evaluated_examples(study, tmp_path):
    file = written(study, tmp_path / "r.yaml", f"{HEAL}}}")
    text = file.read_text(encoding="utf-8").replace(
        f"evaluate: {{task: glue/sst2, data: {study / 'SST-2'}",
        f"evaluate: {{task: glue/sst2, data: {study / 'SST-2'}, split: train",
    )
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ApproxError, match="24 of the 24 examples") as caught:
        run(recipe.read(file), tmp_path / "run")
    assert caught.value.exit_code == Exit.REFUSED


def test_refuses_to_evaluate_on_a_trained_text(study, tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the film is good " * 100, encoding="utf-8")
    file = written(
        study, tmp_path / "r.yaml", f"{{recover: mlm, text: {corpus}}}", evaluate=f"{{task: mlm, data: {corpus}}}"
    )
    with pytest.raises(ApproxError, match="is trained on by 'heal'") as caught:
        run(recipe.read(file), tmp_path / "run")
    assert caught.value.exit_code == Exit.REFUSED


@pytest.mark.slow
def test_a_sweep_measures_its_healed_plans(study, tmp_path):
    rules = "{linear: {mechanism: linear, settings: {feature_map: hedgehog}, grid: {window: [0, 2]}}, local: {mechanism: local}}"
    file = written(study, tmp_path / "g.yaml", f"{HEAL}, variants: [linear]}}", variants=rules)
    read: Any = grid.read(file)
    todo = cells(read, tmp_path / "sweep")
    made = sweep(read, tmp_path / "sweep", todo, Here())
    assert sum(cell.kind == "heal" for cell in todo) == 2
    assert len(made.results.quality) == 3
    healed = list((tmp_path / "sweep" / "healed").iterdir())
    assert len(healed) == 2
    # A process may be killed when the folder is written, but not yet its stage.
    (lost,) = (cell for cell in todo if cell.product == healed[0])
    (tmp_path / "sweep" / "stages" / f"{lost.key}.json").unlink()
    again = sweep(read, tmp_path / "sweep", cells(read, tmp_path / "sweep"), Here())
    assert (again.results.failed, again.results.quality) == ([], made.results.quality)
    assert sweep(read, tmp_path / "sweep", cells(read, tmp_path / "sweep"), Here()).computed == 0
    json.dumps(made.data, allow_nan=False)
