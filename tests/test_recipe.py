from pathlib import Path

import pytest

from approx import grid, recipe
from approx.errors import ApproxError, Exit
from approx.evaluation.options import BenchStage, EvaluateStage

GOOD = """
title: A study
checkpoint: somewhere/else
variants:
  local 8: {mechanism: local, settings: {left: 8}}
  mixed: [{mechanism: linear}, {mechanism: local, layers: 0}]
evaluate: {task: glue/sst2, data: SST-2, margin: 1}
bench:
  - {lengths: 512}
  - {lengths: [1024, 2048], max_length: 2048, inputs: synthetic, seconds: 0.5}
"""


@pytest.fixture
def read(tmp_path):
    def read_text(text: str) -> recipe.Recipe:
        (tmp_path / "study.yaml").write_text(text, encoding="utf-8")
        return recipe.read(tmp_path / "study.yaml")

    return read_text


def test_reads_a_recipe_from_its_file(read):
    made = read(GOOD)
    assert made.mistakes == ()
    assert made.text == GOOD
    assert made.evaluate == [EvaluateStage(task="glue/sst2", data="SST-2", margin=1.0)]
    assert [stage.lengths for stage in made.bench] == [[512], [1024, 2048]]
    assert made.bench[0] == BenchStage(lengths=[512])
    assert (made.seed, made.device, made.dtype) == (0, "auto", "auto")


@pytest.mark.parametrize(
    ("change", "mistake"),
    [
        (("title: A study", "titel: A study"), "unknown key 'titel'. Did you mean 'title'?"),
        (("title: A study", ""), "the key 'title' is missing"),
        (("title: A study", "title: 3"), "study.yaml, line 2, recipe.title: text is needed, found 3"),
        (("title: A study", "title: x\nseed: 1\nseed: 2"), "'seed' is given twice"),
        (("title: A study", "title: x\nseed: -1"), "recipe.seed: a finite number of at least 0 is needed, found -1"),
        (("title: A study", "title: x\nseed: true"), "recipe.seed: a whole number is needed, found True"),
        (("title: A study", "title: x\ndevice: tpu"), "recipe.device: one of auto, cpu, cuda is needed, found 'tpu'"),
        (("title: A study", "title: x\ndtype: int8"), "recipe.dtype: one of auto, float32"),
        (("lengths: 512", "lengths: []"), "recipe.bench[0].lengths: at least one is needed"),
        (("lengths: 512", "lengths: [1, 0]"), "recipe.bench[0].lengths[1]: a finite number of at least 1"),
        (("lengths: 512", "length: 512"), "recipe.bench[0]: unknown key 'length'. Did you mean 'lengths'?"),
        (("seconds: 0.5", "seconds: .inf"), "recipe.bench[1].seconds: a finite number"),
        (("seconds: 0.5", "seconds: .nan"), "recipe.bench[1].seconds: a finite number"),
        (("inputs: synthetic", "inputs: fake"), "recipe.bench[1].inputs: one of real, synthetic"),
        (("margin: 1", "margin: much"), "recipe.evaluate.margin: a number is needed, found 'much'"),
        (("task: glue/sst2, ", ""), "recipe.evaluate: the key 'task' is missing"),
        (("evaluate:", "evaluate: glue\n#"), "recipe.evaluate: a mapping of keys and values is needed, found 'glue'"),
        (
            ("left: 8}", "left: 8}, headz: 1"),
            "line 5, recipe.variants.local 8: unknown key 'headz'. Did you mean 'heads'?",
        ),
        (("layers: 0}", "layers: [0]}"), "line 6, recipe.variants.mixed[1].layers: 'all', a number or ranges"),
        (("mixed: [", "mixed: [3, "), "recipe.variants.mixed[0]: a mapping of keys and values is needed, found 3"),
        (("mixed: [{mechanism", "mixed: [{mechanisms"), "recipe.variants.mixed[0]: the key 'mechanism' is missing"),
        (("mixed:", "'local-8':"), "would share a folder"),
        (("mixed:", "3:"), "names must be text, found 3"),
        (("mixed:", "exact:"), "'exact' is reserved for a line of every report"),
        (("mixed:", "attention-free:"), "'attention-free' is reserved for a line of every report"),
    ],
)
def test_a_mistake_is_named_with_its_place(read, change, mistake):
    assert change[0] in GOOD
    mistakes = read(GOOD.replace(*change)).mistakes
    assert any(mistake in text and "study.yaml" in text for text in mistakes), mistakes


def test_all_mistakes_are_found_at_once_and_nothing_is_clamped(read):
    made = read("titel: 3\nsed: 1\nvariants: {}\nbench: {lengths: [0], rounds: 1}\n")
    assert len(made.mistakes) >= 6
    assert made.bench == []


def test_parts_have_their_lines(read):
    made = read(GOOD)
    parts = [("checkpoint",), ("variants", "mixed"), ("evaluate", 0), ("bench", 1)]
    assert [made.at(*part).rpartition("study.yaml")[2] for part in parts] == [f", line {n}: " for n in (3, 6, 7, 10)]
    # Beside an invalid stage, the line of a valid one is that of its key.
    assert read(GOOD.replace("lengths: 512", "lengths: 0")).at("bench", 0).endswith("study.yaml, line 8: ")


def test_nothing_to_measure_and_nothing_to_compare_are_mistakes(read):
    head = "title: x\ncheckpoint: y\n"
    assert any("nothing is measured" in m for m in read(head + "variants: {a: {mechanism: linear}}\n").mistakes)
    assert any("at least one variant" in m for m in read(head + "variants: {}\n").mistakes)
    real = read(head + "variants: {a: {mechanism: linear}}\nbench: {lengths: 8}\n")
    assert any("real inputs come from a task" in m for m in real.mistakes)


@pytest.mark.parametrize("text", ["- a\n- b\n", "", "3", "a: [1", "\t"])
def test_rejects_files_that_are_not_recipes(read, text):
    with pytest.raises(ApproxError, match=r"study\.yaml") as caught:
        read(text)
    assert caught.value.exit_code == Exit.USAGE


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(ApproxError, match="No such file"):
        recipe.read(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ApproxError, match="not UTF-8"):
        recipe.read(tmp_path / "binary.yaml")


def test_recipes_are_found_by_path_and_by_name(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("title: x", encoding="utf-8")
    assert recipe.find(str(file)) == file
    assert recipe.find("minilm-sst2").name == "minilm-sst2.yaml"
    with pytest.raises(ApproxError, match="Did you mean 'minilm-sst2'"):
        recipe.find("minilm-sst3")


def test_the_recipes_of_the_package_are_short_and_without_mistakes():
    paths = sorted((Path(__file__).resolve().parent.parent / "recipes").glob("*.yaml"))
    assert paths
    for path in paths:
        what, read = ("grid", grid.read) if path.stem.endswith("-grid") else ("recipe", recipe.read)
        assert recipe.find(path.stem, what).samefile(path)
        schema, *lines = path.read_text("utf-8").splitlines()
        assert (path.parent / schema.removeprefix("# yaml-language-server: $schema=")).name == f"{what}.json"
        assert len(lines) <= 25
        assert read(path).mistakes == ()


@pytest.mark.parametrize(("written", "read_as"), [("auto", "auto"), ("8", 8)])
def test_batches_have_a_size_or_choose_one(tmp_path, written, read_as):
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"title: t\ncheckpoint: c\nvariants: {{linear: {{mechanism: linear}}}}\nevaluate: [{{task: needle, batch_size: {written}}}]\n"
    )
    read = recipe.read(path)
    assert (read.mistakes, read.evaluate[0].batch_size) == ((), read_as)
    path.write_text(path.read_text().replace(written, "large"))
    (mistake,) = recipe.read(path).mistakes
    assert "a whole number or auto is needed, found 'large'" in mistake
