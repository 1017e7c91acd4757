"""Recipes from the command line: written with comments, listed without computing, run with other files."""

import shutil

import numpy as np
import pytest

from approx import recipe as recipes
from approx.errors import Exit
from approx.evaluation.statistics import compare_correct, verdict
from tiny_study import small_recipe, tiny_checkpoint

from .conftest import call


def test_a_new_recipe_has_comments_and_no_mistakes(tmp_path):
    answer = call("init", "my study.yaml")
    assert (answer.code, answer.out) == (0, "Written to my study.yaml\n")
    assert answer.err == "Next: edit it, then approx run 'my study.yaml' --dry-run\n"
    made = recipes.read(tmp_path / "my study.yaml")
    assert made.mistakes == ()
    assert "# Base and variants are compared" in made.text
    listed = call("run", "my study.yaml", "--dry-run", "--json").json
    assert [stage["stage"] for stage in listed["stages"]] == ["convert", "convert", "evaluate", "bench"]
    assert not (tmp_path / "runs").exists()
    again = call("init", "my study.yaml")
    assert (again.code, "exists already" in again.err) == (Exit.REFUSED, True)


@pytest.mark.parametrize("task", [(), ("--task", "glue/sst2"), ("--task", "librispeech/test-clean")])
def test_a_new_recipe_takes_enough_examples_to_settle_its_margin(task, tmp_path):
    call("init", *task)
    made = recipes.read(tmp_path / "study.yaml")
    (stage,) = made.evaluate
    assert stage.margin
    assert stage.limit
    # A generated task makes as many.
    assert stage.settings.get("examples", stage.limit) == stage.limit
    base = np.ones(stage.limit, bool)
    one_lost = base.copy()
    one_lost[0] = False
    for converted in (base, one_lost):
        interval = compare_correct(base, converted).interval
        assert verdict(interval, stage.margin / 100, stage.limit) == ("no loss", None)


def test_a_new_recipe_of_another_metric_has_no_limit(tmp_path):
    call("init", "--task", "lm", "--data", "x.txt")
    made = recipes.read(tmp_path / "study.yaml")
    assert (made.evaluate[0].margin, made.evaluate[0].limit) == (1.0, None)
    assert "in percent of the base's bits per byte" in made.text


def test_a_new_recipe_names_the_requested_checkpoint_and_task(data, tmp_path):
    base = tiny_checkpoint(tmp_path / "model", positions=256)
    odd = shutil.copytree(data, tmp_path / "odd: #name")
    call("init", "--checkpoint", base, "--task", "glue/sst2", "--data", odd)
    made = recipes.read(tmp_path / "study.yaml")
    assert (made.checkpoint, made.evaluate[0].task, made.evaluate[0].data) == (str(base), "glue/sst2", str(odd))
    assert call("run", "study.yaml", "--dry-run").code == 0


def test_a_named_recipe_runs_on_other_files(data, tmp_path):
    outside = call("run", "minilm-sst2", "--dry-run")
    assert (outside.code, "Replace it with --checkpoint" in outside.err) == (Exit.UNAVAILABLE, True)
    assert "or replace it with --data" in outside.err
    base = tiny_checkpoint(tmp_path / "model", positions=512)
    answer = call("run", "minilm-sst2", "--checkpoint", base, "--data", data, "--limit", "8", "--dry-run")
    assert answer.code == 0, answer.err
    assert f"data {data}, the first 8 examples" in answer.out
    assert "Nothing was computed." in answer.out


@pytest.mark.parametrize("files", ["elsewhere=x", "x.txt"])
def test_files_of_several_tasks_are_named(files):
    answer = call("run", "heal-speech", "--data", files, "--dry-run")
    assert answer.code == Exit.USAGE
    assert "Give WHICH=PATH, where WHICH is one of librispeech/test-clean, " in answer.err


def test_a_record_names_what_was_replaced(base, data, tmp_path):
    file = small_recipe(tmp_path / "r.yaml", tmp_path / "nowhere", tmp_path / "nowhere either")
    made = recipes.read(file)
    other = recipes.replaced(made, checkpoint=str(base), data=[str(data)], limit=4)
    assert (other.checkpoint, other.evaluate[0].data, other.evaluate[0].limit) == (str(base), str(data), 4)
    assert other.text == f"{made.text}# Replaced: checkpoint {base}\n# Replaced: data {data}\n# Replaced: limit 4\n"
    assert (made.evaluate[0].limit, recipes.replaced(made) == made) == (None, True)
    named = recipes.replaced(made, data=[f"{tmp_path / 'nowhere either'}=x"])
    assert named.evaluate[0].data == "x"


def test_texts_and_calibration_are_replaced_by_their_paths():
    speech = recipes.read(recipes.named("recipe")["heal-speech"])
    made = recipes.replaced(speech, data=[f"{speech.calibrate}=a.flac", "librispeech/test-other=b"])
    assert (made.calibrate, made.evaluate[1].data) == ("a.flac", "b")
    assert made.evaluate[0].data == speech.evaluate[0].data
    spans = recipes.read(recipes.named("recipe")["heal-spans"])
    assert recipes.replaced(spans, data=["runs/gpt2/text.txt=mine.txt"]).heal[0].text == ["mine.txt"]
