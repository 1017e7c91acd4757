import pytest

from approx import grid
from approx.planning.rule import Rule

HEAD = "title: A grid\ncheckpoint: somewhere\nevaluate: {task: glue/sst2}\n"


@pytest.fixture
def read(tmp_path):
    def read_text(variants: str, head: str = HEAD) -> grid.Grid:
        (tmp_path / "grid.yaml").write_text(f"{head}variants:\n{variants}", encoding="utf-8")
        return grid.read(tmp_path / "grid.yaml")

    return read_text


def test_a_variant_stands_for_all_combinations_of_its_values(read):
    made = read(
        "  ic: {mechanism: improved-clustered, settings: {bits: 31}, grid: {clusters: [25, 100], topk: [16, 32]}}\n"
    )
    assert made.mistakes == ()
    assert list(made.points) == [f"ic clusters={c} topk={k}" for c in (25, 100) for k in (16, 32)]
    point = made.points["ic clusters=100 topk=16"]
    assert point.values == {"clusters": 100, "topk": 16}
    assert point.plan == [Rule("improved-clustered", settings={"bits": 31, "clusters": 100, "topk": 16})]
    assert made.recipe("a checkpoint").variants["ic clusters=100 topk=16"] == point.plan


def test_a_value_may_be_a_list_and_a_key_may_be_of_the_rule(read):
    made = read(
        "  far: {mechanism: longformer, grid: {global_tokens: [[0], [0, 1]], layers: [all, 0-1]}}\n"
        "  two: [{mechanism: local, grid: {left: [1, 2]}}, {mechanism: local, layers: 0, grid: {left: [3]}}]\n"
        "  one: {rules: [{mechanism: linear}]}\n"
    )
    assert made.mistakes == ()
    last = made.points["far global_tokens=[0, 1] layers=0-1"]
    assert last.plan == [Rule("longformer", "0-1", {"global_tokens": [0, 1]})]
    assert "two rule 1 left=2 rule 2 left=3" in made.points
    assert made.points["one"].plan == [Rule("linear")]


@pytest.mark.parametrize(
    ("variant", "mistake"),
    [
        ("{mechanism: local, grid: {left: 3}}", "grid.variants.x.grid.left: a list is needed, found 3"),
        ("{mechanism: local, grid: {left: []}}", "left: at least one is needed, found []"),
        ("{mechanism: local, grid: [1, 2]}", "x.grid: a mapping of keys and values is needed, found [1, 2]"),
        ("{mechanism: local, settings: {left: 1}, grid: {left: [1, 2]}}", "left: it is also given outside the grid"),
        ("{mechanism: local, grid: {layers: [0], mechanism: [local]}}", "mechanism: it is also given outside"),
        ("{mechanism: local, grid: {left: [1, 2, 1]}}", "left: 1 is listed twice"),
        ("{mechanism: local, grid: {left: [1]}}\n  'x left=1': {mechanism: local}", "are called 'x left=1'"),
    ],
)
def test_a_mistake_is_named_with_its_place(read, variant, mistake):
    mistakes = read(f"  x: {variant}\n").mistakes
    assert any(mistake in text and "grid.yaml" in text for text in mistakes), mistakes


def test_all_mistakes_are_found_at_once(read):
    made = read(
        "  x: {mechanism: local, grid: 3}\n", "titel: x\nseeds: [0, 1, 1]\ncheckpoint: [a, a]\nrevision: main\n"
    )
    for text in (
        "Did you mean 'title'",
        "seeds: 1 is given twice",
        "checkpoint: 'a' is given",
        "line 6, grid.variants.x.grid: a mapping of keys and values is needed, found 3",
    ):
        assert any(text in mistake for mistake in made.mistakes), made.mistakes
    assert any("nothing is measured" in mistake for mistake in made.mistakes)
    assert any("a revision needs a single checkpoint" in mistake for mistake in made.mistakes)
    assert any(
        "seeds[1]: a finite number" in mistake
        for mistake in read("  x: {mechanism: local}\n", HEAD + "seeds: [0, -1]\n").mistakes
    )


def test_names_a_malformed_rule_once(read):
    made = read(
        "  x: {mechanism: local, settings: 3, grid: {left: [1, 2], exact_below: [-1, 0]}}\n  y: {grid: {left: [1]}}\n"
    )
    assert len(made.mistakes) == 3
    for text, mistake in zip(
        ("x.settings: a mapping", "x.exact_below: a finite number of at least 0", "y: the key 'mechanism' is missing"),
        made.mistakes,
        strict=True,
    ):
        assert text in mistake, made.mistakes
