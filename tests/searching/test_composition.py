"""Models with any mix of mechanisms: the plan that says so, the weights that they share, the state that was fitted."""

import torch

from approx.conversion.calibration import mechanisms
from approx.planning.plan import Plan
from approx.planning.rule import Rule
from approx.searching import cost
from approx.searching.cost import Candidate, Choice, Composer
from tiny_classifier import WORDS

from .conftest import CANDIDATES

LOCAL, WIDE, BLOCK = CANDIDATES
HEDGEHOG = Candidate("linear feature_map=hedgehog", Rule("linear", settings={"feature_map": "hedgehog"}))


def choices(*chosen):
    return [one if isinstance(one, Choice) else Choice(one) for one in chosen]


def test_a_choice_becomes_the_rule_of_its_site(facts):
    site = facts.sites[2]
    assert Choice(None).rule(site) is None
    assert (Choice(None).name, Choice(LOCAL).name) == ("exact", "local 1")
    assert Choice(LOCAL).rule(site) == Rule("local", "2", {"left": 1, "right": 1})
    assert Choice(LOCAL, [3, 1]).rule(site) == Rule("local", "2", {"left": 1, "right": 1}, heads="1,3")


def test_a_plan_has_one_rule_for_layers_that_are_alike(base, facts):
    plan = Composer(base, facts).plan(choices(LOCAL, Choice(LOCAL, [0, 1]), LOCAL))
    assert plan == Plan(
        (
            Rule("local", "0,2", {"left": 1, "right": 1}),
            Rule("local", "1", {"left": 1, "right": 1}, heads="0-1"),
        )
    )
    assert Composer(base, facts).plan(choices(None, None, None)) is None


def test_everywhere_is_every_site_that_can_become_it(base, facts):
    composer = Composer(base, facts)
    half = Candidate("local 1, 2 heads", LOCAL.rule, 2)
    assert [(one.name, one.heads) for one in composer.everywhere(half)] == [("local 1, 2 heads", (0, 1))] * 3
    sinks = Candidate("sinks", Rule("sinks"))
    assert [one.name for one in composer.everywhere(sinks)] == ["exact"] * 3


def test_a_made_model_shares_the_weights_and_leaves_the_base_alone(base, facts):
    composer = Composer(base, facts)
    made = composer.make(choices(LOCAL, None, BLOCK))
    assert made.source.converted
    assert not base.source.converted
    assert not hasattr(base.model.config, "approx")
    names = [type(one.mechanism).__name__ for one in (made.model.bert.encoder.layer[n].attention.self for n in (0, 2))]
    assert names == ["LocalAttention", "BlockAttention"]
    shared, changed = dict(base.model.named_parameters()), dict(made.model.named_parameters())
    assert all(changed[name] is shared[name] for name in shared)
    assert not made.model.training
    assert made.source.raw["approx"]["sites"].keys() == made.model.config.approx["sites"].keys()
    assert composer.make(choices(None, None, None)) is base


def test_models_with_other_state_have_other_identities(base, facts):
    composer = Composer(base, facts)
    drawn = Candidate("performer", Rule("performer", settings={"features": 8}))
    hashes = {composer.make(composer.everywhere(one)).weights_sha256 for one in (LOCAL, BLOCK)}
    # Neither adds tensors.
    assert len(hashes) == 1
    assert composer.make(composer.everywhere(drawn)).weights_sha256 not in hashes


def test_fitted_state_goes_where_its_candidate_was_chosen(base, facts):
    composer = Composer(base, facts)
    plain = composer.make(composer.everywhere(HEDGEHOG))
    for layer, mechanism in enumerate(mechanisms(plain.model)):
        state = {name: torch.full_like(value, float(layer + 1)) for name, value in mechanism.state_dict().items()}
        composer.fitted[layer, HEDGEHOG.name] = state
    made = composer.make(choices(LOCAL, HEDGEHOG, HEDGEHOG))
    values = {
        layer: {
            float(value.mean())
            for value in made.model.bert.encoder.layer[layer].attention.self.mechanism.state_dict().values()
        }
        for layer in (1, 2)
    }
    assert values == {1: {2.0}, 2: {3.0}}
    assert made.weights_sha256 != plain.weights_sha256


def test_what_a_conversion_calibrates_is_calibrated(base, facts, monkeypatch):
    calibrated = []
    original = cost.calibrate
    monkeypatch.setattr(cost, "calibrate", lambda model, inputs: calibrated.append(inputs) or original(model, inputs))
    frozen = Candidate("frozen", Rule("clustered", settings={"clusters": 2, "bits": 8, "frozen": True}))
    made = Composer(base, facts).make([Choice(frozen), Choice(LOCAL), Choice(None)])
    assert len(calibrated) == 1
    assert [mechanism.takes_calibration for mechanism in mechanisms(made.model)] == [True, False]
    Composer(base, facts).make([Choice(LOCAL)] * 3)
    assert len(calibrated) == 1


def test_a_plan_names_the_separator_of_the_tokenizer(base, facts):
    separated = Candidate(
        "longformer separator", Rule("longformer", settings={"window": 4, "global_tokens": "separator"})
    )
    plan = Composer(base, facts).plan(choices(separated, None, None))
    assert plan is not None
    assert plan.rules[0].settings["separator"] == WORDS.index("[SEP]")
