"""A recipe whose variant is searched."""

import pytest

from approx import recipe
from approx.errors import ApproxError, Exit
from approx.pipeline.run import check, run

RECIPE = """\
title: A searched variant
checkpoint: quickstart
variants: {{local 32: {{mechanism: local, settings: {{left: 32, right: 32}}}}}}
search:
  mix: {{task: needle, settings: {{length: 512}}, length: 1024, {goal}, mechanisms: [local, clustered], limit: 90,
        calibration: 12, examples: 45, proof: 45, front: 0}}
evaluate: {{task: needle, settings: {{length: 512}}, limit: 60}}
device: cpu
"""


def written(folder, goal="budget: loss<=5"):
    file = folder / "study.yaml"
    file.write_text(RECIPE.format(goal=goal))
    return recipe.read(file)


@pytest.mark.slow
def test_a_searched_variant_is_converted_and_measured_with_the_others(tmp_path):
    made = run(written(tmp_path), tmp_path / "run")
    assert [one.name for one in made.variants] == ["local 32", "mix"]
    scores = {one.name: one.difference for one in made.quality[0].variants}
    assert scores["mix"] > -0.1 > scores["local 32"]
    assert (tmp_path / "run" / "search" / "mix.yaml").is_file()
    again = run(written(tmp_path), tmp_path / "run", resume=True)
    assert again.to_data() == made.to_data()


@pytest.mark.slow
def test_a_search_that_finds_nothing_ends_the_run(tmp_path):
    with pytest.raises(ApproxError, match="without any attention") as caught:
        run(written(tmp_path, "speed: 900x"), tmp_path / "run")
    assert caught.value.exit_code == Exit.THRESHOLD


def test_contradictions_and_names_are_mistakes_of_the_recipe(tmp_path):
    read = written(tmp_path, "speed: 2x, latency: 1ms")
    with pytest.raises(ApproxError, match=r"line 5, recipe.search.mix: Both a speed"):
        check(read, offline=True)
    (tmp_path / "same.yaml").write_text(RECIPE.format(goal="speed: 2x").replace("mix:", "local 32:"))
    assert "name of another variant" in recipe.read(tmp_path / "same.yaml").mistakes[0]
