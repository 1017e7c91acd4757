"""What the layers of a model may become: defaults, ladders of settings, shares of heads, and clear names."""

from dataclasses import replace

import pytest

from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS
from approx.planning.anatomy import anatomy
from approx.planning.rule import Rule
from approx.searching.cost import candidates
from approx.searching.options import SearchStage
from zoo import tiny


def named(architecture="BertForSequenceClassification", **options):
    model = tiny(architecture)
    stage = SearchStage(**{"length": 48, "speed": "2x", **options})
    return candidates(stage, anatomy(model.config, type(model)))


_BOTH = ["fastest exact", "flash", "clustered 25", "clustered 100", "improved-clustered 25", "improved-clustered 100"]
_BOTH += ["performer", "local 32", "local 64", "local 128", "block", "longformer 128", "longformer 256", "longformer"]


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("BertForSequenceClassification", [*_BOTH, "bigbird"]),
        ("GPT2LMHeadModel", [*_BOTH, "sinks 128", "sinks 256", "sinks"]),
    ],
)
def test_by_default_whatever_runs_without_training_is_tried(architecture, names):
    found = named(architecture, length=1024)
    assert [one.name for one in found] == names
    assert all(one.heads is None for one in found)
    for one in found:
        assert one.rule.settings.keys() <= MECHANISMS[one.rule.mechanism].defaults().keys()


def test_windows_as_long_as_the_input_are_tried_only_by_name():
    # 32 tokens on either side are 64 in all.
    assert [one.name for one in named(length=65) if one.name.startswith("local")] == ["local 32"]
    assert not [one for one in named(length=64) if one.name.startswith("local")]
    assert [one.name for one in named("GPT2LMHeadModel", length=129) if one.name.startswith("sinks")] == [
        "sinks 128",
        "sinks",
    ]


def test_feature_maps_are_tried_only_after_fitting_or_by_name():
    fitted = [one.name for one in named(heal="transfer", length=1024) if one.name.startswith("linear")]
    assert fitted == ["linear", "linear 64"]
    assert [one.rule.settings for one in named(mechanisms="linear")] == list(MECHANISMS["linear"].candidates)


def test_tries_named_mechanisms_once_at_every_setting():
    found = named(mechanisms=["local", "block", "local"])
    assert [one.name for one in found] == ["local 32", "local 64", "local 128", "block"]
    assert [one.rule for one in found[:3]] == [
        Rule("local", settings=settings) for settings in MECHANISMS["local"].candidates
    ]


@pytest.mark.parametrize(
    ("rules", "names"),
    [
        ([Rule("local", settings={"left": 2, "right": 3}), Rule("block")], ["local 2 3", "block"]),
        ([Rule("local", settings={"left": 2, "right": 2})], ["local 2"]),
        # Short names that would be the same are written in full.
        (
            [Rule("clustered", settings={"clusters": 4}), Rule("clustered", settings={"iterations": 4})],
            ["clustered clusters=4", "clustered iterations=4"],
        ),
        ([Rule("exact"), Rule("full")], ["fastest exact", "full"]),
        ([Rule("linear", settings={"feature_map": "relu"})], ["linear feature_map=relu"]),
    ],
)
def test_names_say_mechanism_and_numbers(rules, names):
    assert [one.name for one in named(candidates=rules)] == names


def test_shares_of_the_heads_follow_the_whole_layers():
    found = named(mechanisms="block", granularity="heads")
    assert [(one.name, one.heads, one.whole) for one in found] == [
        ("block", None, "block"),
        ("block, 1 heads", 1, "block"),
        ("block, 2 heads", 2, "block"),
        ("block, 3 heads", 3, "block"),
    ]


def test_no_site_becomes_what_it_cannot_run():
    model = tiny("BertForSequenceClassification")
    (site, *_) = anatomy(model.config, type(model)).sites
    (block, one, two, three) = named(mechanisms="block", granularity="heads")
    assert all(candidate.on(site) for candidate in (block, one, two, three))
    assert not block._replace(heads=site.heads).on(site)
    assert not block._replace(rule=Rule("sinks")).on(site)
    # What looks for separators needs tokens, which sites of a fixed length do not have.
    separated = block._replace(rule=Rule("longformer", settings={"global_tokens": "separator"}))
    assert separated.on(site)
    assert not separated.on(replace(site, fixed_length=16))
    assert block.on(replace(site, fixed_length=16))
    # A layer that decodes with a cache cannot run it either.
    assert not separated.on(replace(site, causal=True))
    assert block.on(replace(site, causal=True))
    with pytest.raises(ApproxError, match="window"):
        block._replace(rule=Rule("longformer", settings={"window": 0})).on(site)


@pytest.mark.parametrize(
    ("options", "message", "code"),
    [
        ({"mechanisms": "locl"}, "Unknown mechanism 'locl'. Did you mean 'local'", Exit.USAGE),
        ({"mechanisms": "sinks"}, "sinks", Exit.UNSUPPORTED),
        ({"candidates": [Rule("local", settings={"lefft": 2})]}, "lefft", Exit.USAGE),
        ({"candidates": [Rule("block"), Rule("block")]}, "The candidate block is listed twice", Exit.USAGE),
    ],
)
def test_refuses_what_no_layer_can_become(options, message, code):
    with pytest.raises(ApproxError, match=message) as caught:
        named(**options)
    assert caught.value.exit_code == code
