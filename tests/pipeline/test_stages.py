"""What the stages of a study are given: the seed of the recipe, and the place of a mistake in its file."""

from pathlib import Path

import pytest
import torch

from approx import api, recipe
from approx.errors import ApproxError, Exit
from approx.pipeline.run import check, run
from tiny_classifier import WORDS, tiny_model, tiny_tokenizer
from tiny_study import SENTENCES
from typed import known

RECIPE = """title: A tiny study
checkpoint: {checkpoint}
variants: {{local: {{mechanism: local, settings: {{left: 0, right: 0}}}}}}
evaluate: {{task: glue/cola, data: {data}}}
seed: {seed}
device: cpu
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    torch.manual_seed(0)
    model = tiny_model(2, ["unacceptable", "acceptable"])
    with torch.no_grad():
        for parameter in model.parameters():
            # Small weights say the same of every text.
            parameter.mul_(8)
    model.save_pretrained(folder / "base")
    tiny_tokenizer().save_pretrained(folder / "base")
    (folder / "CoLA").mkdir()
    lines = [
        f"x\t{row % 3 % 2}\t\t{SENTENCES[row % len(SENTENCES)]} {' '.join(WORDS[4 + (7 * row + word * word) % 10] for word in range(row % 11))}"
        for row in range(150)
    ]
    (folder / "CoLA" / "dev.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def interval(study: Path, out: Path, seed: int) -> list[float]:
    file = study / f"{out.name}.yaml"
    file.write_text(RECIPE.format(checkpoint=study / "base", data=study / "CoLA", seed=seed), encoding="utf-8")
    return known(run(recipe.read(file), out).quality[0].variants[0].interval)


@pytest.mark.slow
def test_a_recipes_seed_is_that_of_the_bootstrap(study, tmp_path):
    first, second = (interval(study, tmp_path / f"run{seed}", seed) for seed in (0, 1))
    assert first != second
    again = api.evaluate(
        str(tmp_path / "run1" / "converted" / "local"),
        "glue/cola",
        against=str(study / "base"),
        data=str(study / "CoLA"),
        seed=1,
        device="cpu",
    )
    assert again.quality[0].variants[0].interval == second


def test_a_checkpoint_that_cannot_be_opened_is_a_mistake_in_its_line(study, tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.format(checkpoint=tmp_path / "nowhere", data=study / "CoLA", seed=0), encoding="utf-8")
    with pytest.raises(ApproxError) as caught:
        check(recipe.read(file), offline=True)
    assert str(caught.value).startswith(f"{file}, line 2: Checkpoint: {tmp_path / 'nowhere'}")
    assert caught.value.exit_code == Exit.UNAVAILABLE
