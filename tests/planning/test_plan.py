"""Plans: parsing and resolving, and reporting all mistakes at once with the nearest known name."""

from pathlib import Path

import pytest
import transformers
import yaml
from hypothesis import given
from hypothesis import strategies as st

from approx.errors import ApproxError, Exit
from approx.planning.anatomy import anatomy
from approx.planning.plan import Plan, Rule, parse_layers
from zoo import error_of, tiny


def facts(architecture="BertModel", **changes):
    return anatomy(tiny(architecture, **changes).config, getattr(transformers, architecture))


@pytest.fixture(scope="module")
def bert():
    return facts(num_hidden_layers=12)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("all", list(range(12))),
        ("0", [0]),
        ("-1", [11]),
        ("0-5,8", [0, 1, 2, 3, 4, 5, 8]),
        (" 3 , 1-2 ", [1, 2, 3]),
        ("-3--1", [9, 10, 11]),
        ("0--1", list(range(12))),
        ("5,5,4-6", [4, 5, 6]),
    ],
)
def test_layers_are_numbers_and_ranges(text, layers):
    assert parse_layers(text, 12) == layers


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("14", "layers 0-11"),
        ("-13", "layers 0-11"),
        ("0-12", "Layer 12"),
        ("5-3", "3-5"),
        ("", "not a layer number"),
        ("first", "not a layer number"),
        ("1,,2", "not a layer number"),
        ("0-", "not a layer number"),
        ("--1", "not a layer number"),
        ("1.5", "not a layer number"),
        ("9" * 5000, "not a layer number"),
    ],
)
def test_rejects_bad_layer_numbers(text, word):
    with pytest.raises(ApproxError, match=word):
        parse_layers(text, 12)


def test_the_last_rule_that_matches_wins(bert):
    plan = Plan((Rule("local", "all", {"left": 4}), Rule("linear", "2-3"), Rule("sdpa", "3")))
    assignment = plan.resolve(bert)
    chosen = {site.layer: rule.mechanism for site, (rule,) in assignment.items()}
    assert chosen == {layer: {2: "linear", 3: "sdpa"}.get(layer, "local") for layer in range(12)}
    assert list(chosen) == sorted(chosen)


def test_layers_that_no_rule_names_stay_exact(bert):
    assert [site.layer for site in Plan.of("local", layers="0-1,-1").resolve(bert)] == [0, 1, 11]


def test_python_plans_accept_numbers_and_refuse_other_types(bert):
    assert [site.layer for site in Plan.of("local", layers=-1).resolve(bert)] == [11]
    with pytest.raises(ApproxError, match=r"rule 1.layers: 'all', a number .* found \[0, 1\]"):
        Plan.of("local", layers=[0, 1])  # pyright: ignore[reportArgumentType]  # what is tried


def test_settings_are_written_out_with_their_defaults(bert):
    ((rule,), *_) = Plan.of("improved-clustered", clusters=25).resolve(bert).values()
    assert rule.settings["clusters"] == 25
    assert rule.settings["bits"] == 63


rules = st.builds(
    Rule,
    mechanism=st.sampled_from(["local", "linear", "clustered"]),
    layers=st.sampled_from(["all", "0", "-1", "0-5,8"]),
    settings=st.dictionaries(
        st.sampled_from(["left", "clusters", "eps"]), st.integers(1, 99) | st.none() | st.booleans()
    ),
    exact_below=st.integers(0, 5000),
    heads=st.sampled_from(["all", "0", "-1", "0-1,3"]),
    recompute=st.booleans(),
)


@given(
    st.lists(rules, min_size=1, max_size=4).map(lambda chosen: Plan(tuple(chosen))), st.sampled_from(["yaml", "json"])
)
def test_a_plan_survives_its_file(tmp_path_factory, plan, form):
    path = tmp_path_factory.mktemp("plan") / f"plan.{form}"
    path.write_text(plan.to_yaml() if form == "yaml" else plan.to_json())
    assert Plan.read(path) == plan
    assert Plan.parse(plan.to_data()) == plan


@pytest.mark.parametrize(
    "data",
    [
        {"mechanism": "local"},
        [{"mechanism": "local"}],
        {"rules": [{"mechanism": "local"}]},
        [{"mechanism": "local", "layers": "all", "settings": None}],
    ],
)
def test_a_rule_a_list_and_a_mapping_of_rules_are_the_same_plan(data):
    assert Plan.parse(data) == Plan.of("local")


def test_a_layer_may_be_a_number_in_yaml():
    assert Plan.parse({"mechanism": "local", "layers": -1}).rules[0].layers == "-1"


def test_reports_all_mistakes_of_form_at_once():
    data = [
        {"mechanismm": "local"},
        {"mechanism": 3, "layers": [1], "settings": "left=3", "exact_below": -1},
        {"mechanism": "local", "settings": {1: 2}},
        "local",
    ]
    with pytest.raises(ApproxError) as caught:
        Plan.parse(data, "plan.yaml")
    assert caught.value.exit_code == Exit.USAGE
    lines = str(caught.value).splitlines()
    assert len(lines) == 8
    assert "rule 1: unknown key 'mechanismm'. Did you mean 'mechanism'?" in lines[0]
    assert all(line.startswith("plan.yaml, rule ") for line in lines)


def test_wrong_layers_hide_no_wrong_setting(bert):
    error = error_of(lambda: Plan.of("local", layers="14", left=-1).resolve(bert))
    assert error is not None
    assert "Layer 14" in str(error)
    assert "'left' is -1" in str(error)


def test_reports_all_mistakes_of_content_at_once(bert):
    plan = Plan(
        (
            Rule("cluster", "14"),
            Rule("improved-clustered", "all", {"cluster": 25}),
            Rule("local", "5-3", {"left": -1}),
            Rule("local", "0", {"left": "wide"}),
            Rule("sdpa", "0", {"left": 3}),
        )
    )
    with pytest.raises(ApproxError) as caught:
        plan.resolve(bert)
    assert caught.value.exit_code == Exit.USAGE
    text = str(caught.value)
    for words in (
        "Layer 14 does not exist: the model has layers 0-11",
        "Unknown mechanism 'cluster' in rule 1. Did you mean 'clustered'?",
        "'improved-clustered' has no setting 'cluster'. Did you mean 'clusters'? "
        "Settings of 'improved-clustered': clusters, topk, ",
        "'sdpa' has no setting 'left'. It has no settings.",
        "Layers '5-3' run backwards",
        "'left' is 'wide'",
    ):
        assert words in text


def test_distinguishes_unsupported_plans_from_invalid_ones():
    gpt2 = facts("GPT2Model")
    with pytest.raises(ApproxError, match="causal") as caught:
        Plan.of("ltr").resolve(gpt2)
    assert caught.value.exit_code == Exit.UNSUPPORTED
    with pytest.raises(ApproxError, match=r"(?s)no setting 'x'.*|causal") as caught:
        Plan((Rule("ltr"), Rule("local", settings={"x": 1}))).resolve(gpt2)
    assert caught.value.exit_code == Exit.USAGE


def test_settings_beyond_any_machine_are_refused(bert):
    for clusters in (10**13, 10**30):
        with pytest.raises(ApproxError, match=r"clusters|cannot be made"):
            Plan.of("clustered", clusters=clusters).resolve(bert)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"", "a plan is a list of rules"),
        (b"[]", "a plan is a list of rules"),
        (b"{rules: []}", "a plan is a list of rules"),
        (b"a: [", "not valid YAML"),
        (b"[" * 5000, "not valid YAML"),
        (b"{mechanism: local, exact_below: " + b"9" * 5000 + b"}", "not valid YAML"),
        (b"!!binary aGk=", "not valid YAML"),
        (b"? [a]\n: b", "not valid YAML|unknown key|list of rules"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"!!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_rejects_files_without_a_plan(text, word, tmp_path):
    (tmp_path / "plan.yaml").write_bytes(text)
    with pytest.raises(ApproxError, match=word) as caught:
        Plan.read(tmp_path / "plan.yaml")
    assert str(tmp_path / "plan.yaml") in str(caught.value)


def test_names_a_missing_plan_file():
    with pytest.raises(ApproxError, match="cannot be read"):
        Plan.read(Path("nowhere.yaml"))


nonsense = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["rules", "layers", "mechanism", "settings", "exact_below", "left", "clusters"])
            | st.integers(),
            inner | st.sampled_from(["local", "clustered", "all", "-1"]),
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(nonsense)
def test_any_data_give_a_plan_or_an_approx_error(bert, data):
    read = yaml.safe_load(yaml.safe_dump(data))
    error = error_of(lambda: Plan.parse(read).resolve(bert))
    assert error is None or error.exit_code in (Exit.USAGE, Exit.UNSUPPORTED)


@given(st.text(max_size=60))
def test_any_text_gives_a_plan_or_an_approx_error(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    path.write_text(text, encoding="utf-8", newline="")
    with pytest.raises(ApproxError):
        Plan.read(path)


def test_a_misspelt_key_for_the_rules_is_one_mistake():
    with pytest.raises(
        ApproxError, match=r"^plan: unknown key '?rule'?\. The rules of a plan are a list under the key 'rules'\.$"
    ):
        Plan.parse({"rule": [{"mechanism": "local"}]})


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Plan.of("lokal"), "Unknown mechanism 'lokal' in the plan. Did you mean 'local'?"),
        (lambda: Plan.of("clustered", clutsers=3), "'clustered' has no setting 'clutsers'. Did you mean 'clusters'?"),
    ],
)
def test_a_plan_of_one_rule_refuses_names_that_do_not_exist(make, sentence):
    with pytest.raises(ApproxError) as caught:
        make()
    assert sentence in str(caught.value)
