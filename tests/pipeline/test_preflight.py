"""Mistakes reported before any work: paths that do not exist, and the folder they are relative to."""

from pathlib import Path
from typing import Any

import pytest

from approx.checkpoints import checkpoint
from approx.errors import ApproxError, Exit
from approx.pipeline.run import check, check_task
from approx.recipe import BenchStage, EvaluateStage, Recipe
from tiny_study import tiny_checkpoint, tiny_data

PLAN: dict[str, Any] = {"linear": {"mechanism": "linear"}}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return str(tiny_checkpoint(tmp_path_factory.mktemp("preflight") / "base"))


def mistakes(recipe: Recipe) -> tuple[str, Exit]:
    with pytest.raises(ApproxError) as caught:
        check(recipe, offline=True)
    return str(caught.value), caught.value.exit_code


@pytest.mark.parametrize("absolute", [False, True])
def test_names_missing_paths_and_the_folder_of_relative_ones(base, absolute):
    hint = "" if absolute else f" Paths in a recipe are relative to the current folder, {Path.cwd()}."
    path = "/no/where" if absolute else "no/where"
    text, code = mistakes(Recipe(title="a title", checkpoint=base, variants=PLAN, calibrate=path, device="cpu"))
    assert text.startswith(f"Calibrate: {path} cannot be read: ")
    assert text.endswith(hint or ".")
    assert ("current folder" in text, code) == (not absolute, Exit.UNAVAILABLE)
    text, code = mistakes(
        Recipe(
            title="a title",
            checkpoint=base,
            variants=PLAN,
            evaluate=[EvaluateStage(task="glue/sst2", data=path)],
            device="cpu",
        )
    )
    assert (
        text
        == f"Data {path} of task glue/sst2 does not exist. Fix the path in the recipe, or replace it with --data.{hint}"
    )
    assert code == Exit.UNAVAILABLE


def test_an_unusable_calibration_file_gets_no_hint_about_its_path(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    text, _ = mistakes(Recipe(title="a title", checkpoint=base, variants=PLAN, calibrate="empty.txt", device="cpu"))
    assert text.startswith("Calibrate: ")
    assert not text.endswith("None")
    assert "current folder" not in text


def test_a_valid_recipe_gives_plans_and_may_use_all_positions(base):
    fits = Recipe(
        title="a title",
        checkpoint=base,
        variants=PLAN,
        bench=[BenchStage(lengths=[32]), BenchStage(lengths=[64], max_length=64)],
        device="cpu",
    )
    assert list(check(fits, offline=True)) == ["linear"]
    for stage in (BenchStage(lengths=[8, 33]), BenchStage(lengths=[65], max_length=64)):
        text, code = mistakes(Recipe(title="a title", checkpoint=base, variants=PLAN, bench=[stage], device="cpu"))
        assert f"length {max(stage.lengths)} is too long" in text
        assert code == Exit.USAGE


def test_a_rehearsal_hashes_the_data_and_computes_nothing(base, tmp_path):
    opened, data = checkpoint.load(base), str(tiny_data(tmp_path))
    stages = [EvaluateStage(task="glue/sst2", data=data, limit=limit) for limit in (None, 4, 4)]
    hashes = [check_task(opened, stage) for stage in stages]
    assert hashes[0] != hashes[1] == hashes[2]
