import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import killable
from approx import recipe
from approx.checkpoints.atomic_folder import claim
from approx.errors import ApproxError, Exit
from approx.evaluation import record
from approx.evaluation.record import Record
from approx.pipeline.run import run
from tiny_study import small_recipe, tiny_checkpoint, tiny_data, tiny_recipe

BOTH = "local 2, linear"
STAGES = {"convert local 2", "convert linear", f"evaluate {BOTH} on glue/sst2"}
STAGES |= {f"bench {BOTH} at {lengths} tokens" for lengths in ("8, 16", "64")}
TIMES = {"median_ms", "p10_ms", "p90_ms", "first_ms", "ratio", "interval", "share_of_ceiling", "verdict", "samples"}
TIMES |= {"rejected", "peak_mb", "baseline", "crowded", "status", "chosen"}


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    """A recipe with its checkpoint and data."""
    folder = tmp_path_factory.mktemp("study")
    return small_recipe(folder / "small.yaml", tiny_checkpoint(folder / "base"), tiny_data(folder))


@pytest.fixture(scope="module", autouse=True)
def no_repository(tmp_path_factory):
    """Fix the hash of the code, since the checkout may be edited while tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GIT_DIR", str(tmp_path_factory.mktemp("no repository")))
        yield


def without_times(made: Record) -> dict[str, Any]:
    """A record without the values that differ between two runs on the same machine."""
    data = made.to_data()
    for row in data["speed"]:
        # It depends on times: it exists if another exact attention was faster.
        del row["default"]
        for entry in (row, row["base"], row["ceiling"], row["spread"], *row["variants"]):
            for key in TIMES & entry.keys():
                del entry[key]
    for row in data["crossover"]:
        del row["length"]
    return data


def finished(out: Path) -> dict[str, int]:
    """The finished stages of a run, with the time of their last completion."""
    files = sorted(out.glob("stages/*.json"), key=lambda path: path.stat().st_mtime_ns)
    return {json.loads(path.read_text("utf-8"))["name"]: path.stat().st_mtime_ns for path in files}


def check(made: Record, study: Path, out: Path) -> None:
    assert record.load(out / "record.json") == made
    assert made.recipe is not None
    assert made.recipe.text == study.read_text("utf-8")
    assert made.command == "approx run small"
    assert [variant.name for variant in made.variants] == ["local 2", "linear"]
    assert all(variant.verified for variant in made.variants)
    assert [layer.layer for layer in made.variants[1].layers] == [1]
    assert [row.length for row in made.speed] == [8, 16, 64]
    assert [row.inputs for row in made.speed] == ["real", "real", "synthetic"]
    for row in made.speed:
        local, linear = (set(entry.chosen or {}) for entry in row.variants)
        # The second plan leaves a layer exact.
        assert (local, linear) == ({"local_attention"}, {"linear_attention", "fastest_attention", "exact_attention"})
    # One crossover per variant, over all grids.
    assert [row.name for row in made.crossover] == ["local 2", "linear"]
    assert (out / str(made.quality[0].outputs)).is_file()
    assert (out / "report" / "index.html").is_file()
    assert finished(out).keys() == STAGES


@pytest.mark.slow
def test_resumes_to_the_same_record_after_a_kill_at_any_stage(study, tmp_path):
    """Kill the run twice as soon as a stage is finished; finished stages are not computed again."""
    whole = run(recipe.read(study), tmp_path / "whole", command="approx run small")
    check(whole, study, tmp_path / "whole")
    out, seen = tmp_path / "run", {}
    for stage in ("convert local 2", f"evaluate {BOTH} on glue/sst2"):
        process = killable.start("run", study, "-o", out, "--resume", errors=tmp_path / "errors")
        while stage not in finished(out) and process.is_alive():
            time.sleep(0.005)
        assert killable.ended(process, signal.SIGKILL) == -signal.SIGKILL, (tmp_path / "errors").read_text("utf-8")
        assert not (out / "record.json").exists()
        assert seen.items() <= finished(out).items()
        seen = finished(out)
    reported = []
    made = run(
        recipe.read(study),
        out,
        resume=True,
        command="approx run small",
        progress=lambda stage, done, total: reported.append(stage),
    )
    assert seen.items() <= finished(out).items()
    assert not [stage for stage in reported if stage.startswith(("evaluate", "convert to"))]
    check(made, study, out)
    assert without_times(made) == without_times(whole)


@pytest.mark.slow
def test_resumes_after_a_stop_before_any_stage(study, tmp_path):
    read = recipe.read(tiny_recipe(tmp_path / "tiny.yaml", study.parent / "base", study.parent / "SST-2"))
    out, seen = tmp_path / "run", []

    def stop(stage: str, done: int, total: int) -> None:
        if stage not in seen:
            seen.append(stage)
            raise KeyboardInterrupt

    for _ in range(10):
        try:
            run(read, out, resume=out.exists(), progress=stop)
        except KeyboardInterrupt:
            assert not (out / "record.json").exists()
            continue
        break
    assert (out / "record.json").is_file()
    assert {stage.split(" ")[0] for stage in seen} == {"open", "convert", "evaluate", "bench"}


def test_repeats_only_stages_whose_files_changed(study, tmp_path):
    data, out = tiny_data(tmp_path), tmp_path / "run"
    (tmp_path / "seen.txt").write_text("the film is good " * 40, encoding="utf-8")
    file = tiny_recipe(tmp_path / "tiny.yaml", study.parent / "base", data)
    text = file.read_text("utf-8").replace(
        "linear: {mechanism: linear,", "frozen: {mechanism: clustered, settings: {frozen: true, clusters: 3},"
    )
    file.write_text(f"{text}calibrate: {tmp_path / 'seen.txt'}\n", encoding="utf-8")

    def stages() -> tuple[float, set[str]]:
        """The base's score, and the computed stages."""
        before = finished(out)
        made = run(recipe.read(file), out, resume=out.exists())
        after = {name.split()[0] for name, _ in finished(out).items() - before.items()}
        return made.quality[0].base.scores["accuracy"], after

    score, first = stages()
    assert first == {"convert", "evaluate", "bench"}
    assert stages() == (score, set())
    rows = (data / "dev.tsv").read_text("utf-8").splitlines()
    turned = [f"{row[:-1]}{1 - int(row[-1])}" for row in rows[1:]]
    (data / "dev.tsv").write_text("\n".join([rows[0], *turned]) + "\n", encoding="utf-8")
    assert stages() == (pytest.approx(1 - score), {"evaluate", "bench"})
    (tmp_path / "seen.txt").write_text("not very dull bad fine " * 40, encoding="utf-8")
    # Other centroids are other weights, so earlier results are invalid.
    assert stages()[1] == {"convert", "evaluate", "bench"}


def test_never_touches_a_folder_of_the_user(study, tmp_path):
    def refused(text: str, out: Path, **more) -> str:
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")} if out.is_dir() else None
        (tmp_path / "this.yaml").write_text(text, encoding="utf-8")
        with pytest.raises(ApproxError) as caught:
            run(recipe.read(tmp_path / "this.yaml"), out, **more)
        assert caught.value.exit_code == Exit.REFUSED
        if before is not None:
            assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        return str(caught.value)

    text = study.read_text("utf-8")
    claim(tmp_path / "earlier", "run", "a run")
    (tmp_path / "earlier" / "stages").mkdir()
    (tmp_path / "earlier" / "recipe.yaml").write_text(text, encoding="utf-8")
    assert "Continue it with --resume" in refused(text, tmp_path / "earlier")
    assert "a run of another recipe" in refused(text + "seed: 1\n", tmp_path / "earlier", resume=True)
    with pytest.raises(ApproxError, match="Give one of them"):
        run(recipe.read(study), tmp_path / "earlier", resume=True, force=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    for more in ({}, {"resume": True}, {"force": True}):
        assert "not a run of approx" in refused(text, tmp_path / "mine", **more)
    assert "is a file" in refused(text, tmp_path / "mine" / "thesis.tex", force=True)


def test_force_removes_only_files_of_a_run(study, tmp_path):
    out = tmp_path / "run"
    text = study.read_text("utf-8").partition("variants:")[0] + "variants: {linear: {mechanism: linear}}\n"
    text += "bench: {lengths: 8, inputs: synthetic, rounds: 3, seconds: 0}\n"
    (tmp_path / "short.yaml").write_text(text, encoding="utf-8")
    claim(out, "run", "a run")
    (out / "stages").mkdir()
    for name in ("recipe.yaml", "outputs-0.parquet", "stages/0.json", "notes.txt"):
        (out / name).write_text("earlier", encoding="utf-8")
    made = run(recipe.read(tmp_path / "short.yaml"), out, force=True)
    assert made.quality == []
    assert not (out / "outputs-0.parquet").exists()
    assert (out / "notes.txt").read_text("utf-8") == "earlier"


MISTAKES = {
    "sed: 1\n": "unknown key 'sed'. Did you mean 'seed'?",
    "  far: {mechanism: local, layers: 14}\n": "Variant 'far': In the plan: Layer 14 does not exist: the model has layers 0-1",
    "  odd: {mechanism: clusterd}\n": "Variant 'odd': Unknown mechanism 'clusterd' in the plan. Did you mean 'clustered'?",
    "  two: [{mechanism: local, settings: {lft: 1}}, 3]\n": "recipe.variants.two[1]: a mapping of keys and values is needed, found 3",
    "  - {task: glue/sst, data: nowhere}\n": "Unknown task 'glue/sst'. Did you mean 'glue/sst2'?",
    "  - {task: glue/sst2, data: nowhere}\n": "Data nowhere of task glue/sst2 does not exist",
    "  - {lengths: 99}\n": "length 99 is too long: BertForSequenceClassification takes 32 positions",
}


def test_names_all_mistakes_before_any_work(study, tmp_path):
    variants, tasks, grids = (
        "".join(line for line in MISTAKES if line.startswith(start)) for start in ("  ", "  - {task", "  - {lengths")
    )
    variants = "".join(line for line in variants.splitlines(keepends=True) if not line.startswith("  - "))
    text = study.read_text("utf-8").replace("evaluate:\n", variants + "evaluate:\n" + tasks)
    text = text.replace("bench:\n", "bench:\n" + grids) + "sed: 1\n"
    (tmp_path / "wrong.yaml").write_text(text, encoding="utf-8")
    reported = []
    with pytest.raises(ApproxError) as caught:
        run(recipe.read(tmp_path / "wrong.yaml"), tmp_path / "out", progress=lambda *what: reported.append(what))
    lines = str(caught.value).splitlines()
    assert [text for text in MISTAKES.values() if not any(text in line for line in lines)] == []
    assert caught.value.exit_code == Exit.USAGE
    assert reported == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (("checkpoint: /", "checkpoint: ./nowhere/"), Exit.UNAVAILABLE, "relative to the current folder"),
        (("task: glue/sst2", "task: glue/cola"), Exit.UNSUPPORTED, "has the labels unacceptable, acceptable"),
        (("margin: 0.5", "split: test"), Exit.UNAVAILABLE, "looked for SST-2/test.tsv"),
        (("margin: 0.5", "max_length: 3"), Exit.USAGE, "the limit is 3"),
        (("device: cpu", "device: cuda"), Exit.MISSING, "torch sees no GPU"),
    ],
)
def test_finds_mismatches_before_any_conversion(study, tmp_path, change, code, text):
    import torch

    if code == Exit.MISSING and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert change[0] in study.read_text("utf-8")
    (tmp_path / "wrong.yaml").write_text(study.read_text("utf-8").replace(*change), encoding="utf-8")
    with pytest.raises(ApproxError, match=text) as caught:
        run(recipe.read(tmp_path / "wrong.yaml"), tmp_path / "out")
    assert caught.value.exit_code == code
    assert not (tmp_path / "out").exists()


def test_inputs_that_are_too_long_are_found_before_any_conversion(study, tmp_path):
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\n" + "good " * 40 + "\t1\n", encoding="utf-8")
    text = study.read_text("utf-8").replace(str(study.parent / "SST-2"), str(tmp_path / "dev.tsv"))
    (tmp_path / "long.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ApproxError, match="42 tokens, the limit is 32"):
        run(recipe.read(tmp_path / "long.yaml"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
