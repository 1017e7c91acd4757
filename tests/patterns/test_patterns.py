"""Figures of sparse patterns: known values, and every figure against its definition at small lengths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS
from approx.patterns import LONGEST, figures, find_pattern, pattern_names
from approx.patterns.reach import reached

few = st.integers(1, 9)
SETTINGS = {
    "local": st.fixed_dictionaries({"left": st.integers(0, 9), "right": st.integers(0, 9)}),
    "block": st.fixed_dictionaries(
        {"size": st.integers(3, 9), "neighbours": st.integers(0, 2), "shift": st.integers(0, 2)}
    ),
    "strided": st.fixed_dictionaries({"stride": few}),
    "fixed": st.fixed_dictionaries({"stride": st.integers(3, 9), "summary": st.integers(1, 3)}),
    "ltr": st.fixed_dictionaries({"stride": st.none() | st.integers(3, 9)}),
    "rtl": st.fixed_dictionaries({"stride": st.integers(3, 9), "summary": st.integers(1, 3)}),
    "longformer": st.fixed_dictionaries({"window": few, "global_tokens": st.just("first") | st.just([1, 7])}),
    "bigbird": st.fixed_dictionaries({"block": few, "random": st.integers(0, 3), "seed": st.integers(0, 5)}),
    "sinks": st.fixed_dictionaries({"sinks": st.integers(0, 4), "window": few}),
}


@st.composite
def patterns(draw):
    name = draw(st.sampled_from(sorted(SETTINGS)))
    forms = [
        form for form in (False, True) if getattr(MECHANISMS[name], f"supports_{'causal' if form else 'bidirectional'}")
    ]
    return find_pattern(name, draw(st.integers(1, 40)), draw(st.sampled_from(forms)), draw(SETTINGS[name]))


def test_every_mechanism_that_chooses_keys_by_position_is_a_pattern():
    assert set(pattern_names()) == set(SETTINGS)


@given(patterns(), st.integers(1, 9))
@settings(max_examples=80, deadline=None)
def test_every_figure_follows_its_definition(pattern, block):
    counted, n = figures(pattern, block), pattern.length
    merged = pattern.steps.any(0)
    assert counted["edges"] == sum(step["edges"] for step in counted["steps"]) == pattern.steps.sum()
    for counts, mask in [*zip(counted["steps"], pattern.steps, strict=True), (counted["merged"], merged)]:
        degrees = [int(row.sum()) for row in mask]
        assert counts["edges"] == sum(degrees)
        assert counts["in_degree"] == {
            "min": min(degrees),
            "mean": pytest.approx(np.mean(degrees)),
            "max": max(degrees),
        }
        assert counts["density"] == pytest.approx(sum(degrees) / n**2)
        tiles = [mask[i : i + block, j : j + block].any() for i in range(0, n, block) for j in range(0, n, block)]
        assert counts["block_density"] == pytest.approx(np.mean(tiles))
        # In any layout, a tile holds at most block² pairs.
        assert sum(degrees) / block**2 / len(tiles) <= counts["rewritten"]["block_density"] <= counts["block_density"]
    within = np.tril(np.ones((n, n), bool)) if pattern.causal else np.ones((n, n), bool)

    def product(steps):
        paths = np.eye(n, dtype=int)
        for step in steps:
            paths = step.astype(int) @ paths
        return paths

    flow = counted["flow"]
    assert flow["coverage"] == pytest.approx((product(pattern.steps) > 0)[within].mean())
    assert flow["full_information"] == (product(pattern.steps) > 0)[within].all()
    if len(pattern.steps) > 1:
        assert flow["coverage_reversed"] == pytest.approx((product(pattern.steps[::-1]) > 0)[within].mean())
        # The number of edges limits what two steps can reach.
        first, second = (step["in_degree"]["max"] for step in counted["steps"])
        assert first * second >= n or pattern.causal or not flow["full_information"]
    for number, share in enumerate(flow["coverage_by_layer"], start=1):
        assert share == pytest.approx((product([merged] * number) > 0)[within].mean())
    before, after = (pattern.steps[0], pattern.steps[-1])
    load = before.sum(1) * after.sum(0) / n**2
    (through,) = counted["load"]
    assert (through["min"], through["max"]) == pytest.approx((load.min(), load.max()))
    assert load[through["at"]] == load.max()
    assert through["ways"] == pytest.approx(product([before, after])[within].mean())


@given(st.integers(1, 4), st.integers(1, 90), st.floats(0, 0.3), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_the_boolean_product_is_right_for_any_number_of_steps(count, length, density, seed):
    steps = np.random.default_rng(seed).random((count, length, length)) < density
    paths = np.eye(length, dtype=bool)
    for step, heard in zip(steps, reached(list(steps)), strict=True):
        paths = (step.astype(int) @ paths) > 0
        assert heard.tolist() == paths.sum(1).tolist()


def test_left_to_right_has_its_known_figures():
    counted = figures(find_pattern("ltr", 1024, False, {}))
    assert (counted["stride"], counted["edges"], counted["merged"]["edges"]) == (32, 50_656, 49_632)
    assert [counted["merged"]["in_degree"][end] for end in ("min", "max")] == [33, 63]
    assert round(counted["merged"]["density"], 3) == 0.047
    assert (counted["flow"]["coverage"], counted["flow"]["full_information"]) == (1.0, True)
    assert round(counted["flow"]["coverage_reversed"], 3) == 0.047
    assert figures(find_pattern("ltr", 512, False, {}))["flow"]["full_information"], "512 is no multiple of 22"


@pytest.mark.parametrize(
    ("name", "causal", "step", "touched", "rewritten"),
    [
        ("strided", True, 1, 0.51, 1 / 64),
        ("fixed", True, 1, 0.51, 2 / 64),
        ("ltr", False, 1, 1.0, 2 / 64),
        ("rtl", False, 1, 1.0, 2 / 64),
    ],
)
@pytest.mark.sample(1)
def test_element_sparsity_is_not_block_sparsity_until_it_is_rewritten(name, causal, step, touched, rewritten):
    summary = {} if name == "strided" else {"summary": 1}
    counts = figures(find_pattern(name, 4096, causal, {"stride": 64, **summary}))["steps"][step]
    assert counts["density"] < 0.02
    assert round(counts["block_density"], 2) == touched
    assert counts["rewritten"]["block_density"] <= rewritten


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_a_pattern_of_its_defaults_shrinks_to_be_drawn(name):
    causal = not MECHANISMS[name].supports_bidirectional
    pattern = find_pattern(name, 1024, causal, {})
    for length in (1, 16, 24, 1024):
        small = pattern.shrunk(length)
        assert small.steps.shape == (len(pattern.steps), length, length)
        assert np.diagonal(small.merged).all()
        if length > 1 and pattern.stride and small.stride:
            assert length / small.stride >= 4, "the strides can no longer be told apart"


def test_a_layer_of_one_step_is_a_pattern_of_one_step():
    both = find_pattern("ltr", 64, False, {})
    for number in (1, 2):
        (only,) = find_pattern("ltr", 64, False, {"step": number}).steps
        assert np.array_equal(only, both.steps[number - 1])


@pytest.mark.parametrize(
    ("name", "length", "causal", "settings", "code", "words"),
    [
        ("strded", 8, False, {}, Exit.USAGE, "Did you mean 'strided'?"),
        ("linear", 8, False, {}, Exit.UNSUPPORTED, "'linear' has no pattern"),
        ("ltr", 8, True, {}, Exit.UNSUPPORTED, "no causal form. Leave out --causal"),
        ("sinks", 8, False, {}, Exit.UNSUPPORTED, "no bidirectional form. Add --causal"),
        ("ltr", LONGEST + 1, False, {}, Exit.USAGE, f"1 to {LONGEST}"),
        ("ltr", 0, False, {}, Exit.USAGE, "1 to"),
        ("local", 8, False, {"lft": 1}, Exit.USAGE, "Did you mean 'left'? Settings of 'local': left, right."),
        ("local", 8, False, {"left": -1}, Exit.USAGE, "'left' is -1"),
        ("local", 8, False, {"left": 10**30}, Exit.USAGE, "from 0 to 281474976710656"),
        ("longformer", 8, False, {"global_tokens": "separator"}, Exit.USAGE, "positions instead"),
    ],
)
def test_rejects_patterns_that_cannot_be_counted(name, length, causal, settings, code, words):
    with pytest.raises(ApproxError) as caught:
        find_pattern(name, length, causal, settings)
    assert (caught.value.exit_code, words in str(caught.value)) == (code, True), caught.value
    assert "\n" not in str(caught.value)


def test_reports_all_wrong_settings_at_once():
    with pytest.raises(ApproxError) as caught:
        find_pattern("ltr", 8, False, {"strid": 1, "sumary": 1})
    assert [line[: line.index("?")] for line in str(caught.value).splitlines()] == [
        "'ltr' has no setting 'strid'. Did you mean 'stride'",
        "'ltr' has no setting 'sumary'. Did you mean 'summary'",
    ]
    with pytest.raises(ApproxError) as caught:
        find_pattern("fixed", 8, False, {"stride": 0, "summary": 1.5, "mode": "product", "step": 1})
    lines = str(caught.value).splitlines()
    assert [line.split("; allowed")[0] for line in lines] == [
        "Setting 'stride' is 0",
        "Setting 'summary' is 1.5",
        "Setting 'mode' is 'product'",
    ]
