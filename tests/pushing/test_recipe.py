"""A push as the last stage of a recipe: checked first, done once, completed after a stop."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from approx import recipe
from approx.cli import app
from approx.errors import ApproxError, Exit
from approx.pipeline.run import run
from hub_state import Fault
from tiny_study import tiny_data
from tiny_training import ROWS, write_sst2

from .conftest import HOME

PUSH = "push: {repo: ada/study}\n"


@pytest.fixture(scope="module")
def study(converted, tmp_path_factory) -> str:
    """The text of a recipe without a push."""
    folder = tmp_path_factory.mktemp("recipe")
    return f"""title: A tiny study
checkpoint: {converted.parent / "base"}
variants: {{linear: {{mechanism: linear, layers: -1}}}}
evaluate: {{task: glue/sst2, data: {tiny_data(folder)}}}
device: cpu
"""


def read(folder: Path, text: str) -> recipe.Recipe:
    (folder / "study.yaml").write_text(text, encoding="utf-8")
    return recipe.read(folder / "study.yaml")


def test_a_run_pushes_its_variant_with_its_record_and_only_once(study, hub, tmp_path):
    asked, outcomes = read(tmp_path, study + PUSH), []
    made = run(asked, tmp_path / "run", command=f"approx run {HOME}/ada/study.yaml", pushed=outcomes.append)
    files = hub.repos["ada/study"].commits[outcomes[0].commit]
    assert hub.repos["ada/study"].private
    assert {"model.safetensors", "approx_mechanisms_linear.py", "records/record-1.json"} <= files.keys()
    pushed = json.loads(files["records/record-1.json"])
    assert pushed["quality"][0]["variants"][0]["scores"] == made.quality[0].variants[0].scores
    assert pushed["command"] == ""
    assert str(tmp_path).encode() not in files["records/record-1.json"]
    # The whole run again asks the hub nothing.
    hub.calls.clear()
    again = []
    run(asked, tmp_path / "run", resume=True, pushed=again.append)
    assert (again, hub.calls) == (outcomes, [])


@pytest.mark.parametrize("stop", ["cut", "interrupted"])
@pytest.mark.sample(1)
def test_resumes_a_run_that_stopped_while_pushing(study, hub, tmp_path, stop):
    asked, out = read(tmp_path, study + PUSH), tmp_path / "run"

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "push: downloading and comparing":
            raise KeyboardInterrupt

    if stop == "cut":
        # The commit arrives, its answer does not.
        hub.faults = [Fault("/commit/", after=True, times=6)]
        with pytest.raises(ApproxError, match=r"Continue it with --resume.*approx push .*--record .*record\.json") as e:
            run(asked, out)
        assert e.value.exit_code == Exit.UNAVAILABLE
        hub.faults = []
    else:
        with pytest.raises(KeyboardInterrupt):
            run(asked, out, progress=interrupt)
    assert (out / "record.json").is_file()
    steps, outcomes = [], []
    run(asked, out, resume=True, progress=lambda stage, *_: steps.append(stage), pushed=outcomes.append)
    assert not [stage for stage in steps if stage.startswith(("convert to", "evaluate"))]
    assert outcomes[0].check.startswith("largest difference 0.0e+00")
    commits = hub.repos["ada/study"].commits
    assert commits[hub.repos["ada/study"].refs["main"]]["records/record-1.json"]
    assert outcomes[0].identical == (stop == "interrupted")
    # Weights were sent once.
    assert sum(call.startswith("PUT /lfs/") for call in hub.calls) == 1


def test_reports_forbidden_pushes_before_any_work(study, hub, tmp_path, monkeypatch):
    def refused(push: str) -> tuple[str, Exit]:
        with pytest.raises(ApproxError) as caught:
            run(read(tmp_path, study + push), tmp_path / "run")
        assert not (tmp_path / "run").exists()
        assert hub.uploads() == []
        return str(caught.value), caught.value.exit_code

    hub.create("ada/public", private=False)
    hub.create("bob/open", private=False)
    text, code = refused("push:\n- {repo: ada/public}\n- {repo: bob/open, public: true}\n")
    first, second = text.splitlines()
    assert "study.yaml, line 7: Push: ada/public exists and is public" in first
    assert "study.yaml, line 8: Push: This token may not write to bob/open" in second
    assert code == Exit.UNAVAILABLE
    monkeypatch.setenv("HF_TOKEN", "hf_reader0123456789abcdefghijklmn")
    assert "its role is 'read'" in refused(PUSH)[0]
    monkeypatch.delenv("HF_TOKEN")
    assert "there is none. Run `hf auth login`" in refused(PUSH)[0]
    calls = len(hub.calls)
    text, code = refused("push: [{repo: nowhere}, {repo: ada/a, variant: liner}, {repo: ada/a, publc: true}]\n")
    assert "recipe.push: there is no variant 'liner'. Did you mean 'linear'?" in text
    assert "unknown key 'publc'. Did you mean 'public'?" in text
    assert "Push: 'nowhere' is not the name of a repository: it has no owner" in text
    assert (code, len(hub.calls)) == (Exit.USAGE, calls)
    assert "is pushed to twice" in refused("push: [{repo: ada/a}, {repo: ada/a}]\n")[0]
    two = study.replace("variants: {", "variants: {local: {mechanism: local}, ") + PUSH
    with pytest.raises(ApproxError, match=r"name the variant to push, e\.g\. 'variant: local'"):
        run(read(tmp_path, two), tmp_path / "run")


def test_without_a_push_the_folder_is_written_and_no_hub_is_asked(study, hub, tmp_path):
    read(tmp_path, study + PUSH)

    def call(*words: str):
        return CliRunner().invoke(app, ["run", str(tmp_path / "study.yaml"), "-o", str(tmp_path / "run"), *words])

    assert "ada/study, private" in call("--dry-run").stdout
    answer = call("--offline")
    assert (answer.exit_code, "Add --no-push" in answer.stderr) == (2, True)
    assert not (tmp_path / "run").exists()
    answer = call("--no-push", "--offline")
    assert answer.exit_code == 0, answer.stderr
    assert "run/push/ada--study; nothing was sent" in answer.stdout.replace("\n", "")
    assert (tmp_path / "run" / "push" / "ada--study" / "records" / "record-1.json").is_file()
    assert hub.calls == []
    # The same run pushes when it is allowed to.
    answer = call("--resume")
    assert "Pushed to " in answer.stdout
    assert "(private), commit " in answer.stdout
    read(tmp_path, study)
    assert "has no 'push'" in call("--no-push", "--force").stderr


@pytest.mark.sample(0)
def test_pushes_a_healed_variant_with_its_results_after_training(study, hub, tmp_path):
    data = Path(write_sst2(tmp_path))
    rows = [row.replace(" is", " is not very") for row in ROWS[:8]]
    (data / "dev.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n", encoding="utf-8")
    study = "".join(line for line in study.splitlines(keepends=True) if not line.startswith("evaluate"))
    study += f"evaluate: {{task: glue/sst2, data: {data}}}\n"
    heal = f"heal: {{recover: task, task: glue/sst2, data: {data}, steps: 20, batch_size: 8, learning_rate: 0.01}}\n"
    outcomes, out = [], tmp_path / "run"
    made = run(read(tmp_path, study + heal + PUSH), out, pushed=outcomes.append)
    files = hub.repos["ada/study"].commits[outcomes[0].commit]
    weights = {
        place: (out / place / "model.safetensors").read_bytes() for place in ("healed/linear-0", "converted/linear")
    }
    assert files["model.safetensors"] == weights["healed/linear-0"] != weights["converted/linear"]
    before, after = (one.scores["accuracy"] for one in made.quality[0].variants)
    assert before != after
    assert f"value: {after}\n" in files["README.md"].decode()
