"""Surgery on every family: exact layers give equal outputs, other tensors stay, and the conversion can be undone."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from approx.checkpoints import families
from approx.conversion import surgery
from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS
from approx.planning.anatomy import anatomy
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from forms import ELU
from zoo import FAMILIES, OTHER_HEADS, UNNAMED, difference, exact_plan, outputs, tiny

TOKEN_FAMILIES = [name for name in FAMILIES if not name.startswith(("Wav2Vec2", "Hubert", "ViT", "Whisper"))]


def real_outputs(model, inputs):
    """Outputs with padded positions set to 0, since outputs of padding are undefined."""
    mask = inputs.get("attention_mask")
    tensors = outputs(model, inputs)
    if mask is None:
        return tensors
    if "input_values" in inputs:
        return [tensor if tensor.dim() < 3 else tensor * frames_mask(model, mask, tensor) for tensor in tensors]
    return [
        tensor * mask.view(*mask.shape, *[1] * (tensor.dim() - 2)) if tensor.shape[:2] == mask.shape else tensor
        for tensor in tensors
    ]


def frames_mask(model, mask, tensor):
    if tensor.shape[-1] in model.config.conv_dim and tensor.shape[-1] != model.config.hidden_size:
        return 1
    return model._get_feature_vector_attention_mask(tensor.shape[1], mask)[..., None]


@pytest.mark.parametrize("architecture", [*FAMILIES, *OTHER_HEADS, *UNNAMED])
@pytest.mark.sample(4)
def test_an_exact_mechanism_in_all_layers_changes_nothing(architecture):
    model = tiny(architecture)
    inputs = example_inputs(model, 24, batch=2, padded=7)
    before, keys = real_outputs(model, inputs), set(model.state_dict())
    kept = [site.layer for site in anatomy(model.config, type(model)).sites if site.kept]
    tried = 0
    for mechanism in MECHANISMS:
        plan = exact_plan(model, mechanism)
        if plan is None:
            continue
        receipt = surgery.convert(model, plan, calibration=inputs)
        assert difference(real_outputs(model, inputs), before) < 1e-5, mechanism
        assert set(model.state_dict()) - keys == set(receipt.added)
        assert keys <= set(model.state_dict())
        assert all(".mechanism." in name for name in receipt.added)
        assert receipt.left == kept
        surgery.revert(model)
        tried += 1
    assert tried >= 3


@settings(max_examples=20)
@given(data=st.data())
def test_an_exact_mechanism_in_any_subset_of_layers_changes_nothing(data):
    architecture = data.draw(st.sampled_from(FAMILIES))
    model = tiny(architecture)
    facts = anatomy(model.config, type(model))
    rules = []
    for layer in data.draw(st.sets(st.sampled_from([site.layer for site in facts.convertible]), min_size=1)):
        mechanism = data.draw(st.sampled_from(sorted(MECHANISMS)))
        plan = exact_plan(model, mechanism, str(layer))
        rules += plan.rules if plan else [Rule("sdpa", str(layer))]
    length, padded = data.draw(st.integers(8, 24)), data.draw(st.integers(0, 5))
    inputs = example_inputs(model, length, batch=2, padded=padded, seed=length)
    before = real_outputs(model, inputs)
    receipt = surgery.convert(model, Plan(tuple(rules)), calibration=inputs)
    assert sorted([site.layer for site in receipt.swapped] + receipt.left) == list(range(len(facts.sites)))
    assert difference(real_outputs(model, inputs), before) < 1e-5


@settings(max_examples=20)
@given(data=st.data())
def test_every_form_of_padding_is_honoured(data):
    architecture = data.draw(st.sampled_from(TOKEN_FAMILIES))
    model = tiny(architecture)
    mechanism = data.draw(st.sampled_from(sorted(MECHANISMS)))
    plan = exact_plan(model, mechanism, data.draw(st.sampled_from(["all", "0", "-1", "0,2"])))
    inputs = example_inputs(model, 16, batch=3, padded=0)
    rows = [
        [True] * 16,
        data.draw(st.integers(1, 16).map(lambda n: [False] * (16 - n) + [True] * n), label="left"),
        data.draw(st.lists(st.booleans(), min_size=16, max_size=16).filter(any), label="any"),
    ]
    mask = torch.tensor(rows)
    if anatomy(model.config, type(model)).sites[0].causal:
        # Positions count from the first real token, as generate() does.
        inputs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp_min(0)
    inputs["attention_mask"] = mask.long()
    # Task heads that pool read the first position, which may be padding here.
    before = real_outputs(model.base_model, inputs)[0]
    surgery.convert(model, plan or Plan.of("sdpa"), calibration=inputs)
    assert difference([real_outputs(model.base_model, inputs)[0]], [before]) < 1e-5


@pytest.mark.parametrize("architecture", FAMILIES)
def test_revert_gives_the_base_back_to_the_last_bit(architecture):
    model = tiny(architecture)
    kind, config, implementation = type(model), model.config.to_dict(), model.config._attn_implementation
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = outputs(model)
    surgery.convert(model, Plan.of("linear", **ELU))
    assert difference(outputs(model), before) > 0
    assert families.is_converted(model)
    surgery.revert(model)
    assert type(model) is kind
    assert type(model.config) is kind.config_class
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == implementation
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}.keys() == tensors.keys()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tensors.items())
    assert difference(outputs(model), before) == 0.0


@pytest.mark.parametrize("architecture", FAMILIES)
def test_returns_attention_weights_of_all_layers(architecture):
    model = tiny(architecture)
    inputs = example_inputs(model, 12)
    eager = tiny(architecture, attn_implementation="eager")
    with torch.no_grad():
        expected = eager(**inputs, output_attentions=True)
    layers = len(anatomy(model.config, type(model)).sites)
    surgery.convert(model, Plan.of("local", layers=f"0,{layers - 1}", left=64, right=64))
    with torch.no_grad():
        actual = model(**inputs, output_attentions=True)
    for name in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"):
        if not expected.get(name):
            continue
        assert len(actual[name]) == len(expected[name]) > 0
        assert difference(list(actual[name]), list(expected[name])) < 1e-5


def gradients(model, inputs):
    # Dropout, layer drop and the masking of speech draw the same numbers in each run.
    torch.manual_seed(0)
    np.random.seed(0)
    model.zero_grad()
    tensors = [tensor for tensor in model(**inputs).to_tuple() if isinstance(tensor, torch.Tensor)]
    torch.stack([tensor.square().sum() for tensor in tensors]).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_gradients_flow_and_checkpointing_gives_the_same_ones(architecture):
    model = tiny(architecture)
    inputs = example_inputs(model, 12)
    surgery.convert(model, Plan((Rule("local", "all", {"left": 3, "right": 3}), Rule("linear", "0", ELU))))
    model.train()
    plain = gradients(model, inputs)
    assert all(bool(torch.isfinite(grad).all()) for grad in plain.values())
    for path in model.config.approx["sites"]:
        assert any(bool(p.grad.any()) for p in model.base_model.get_submodule(path).parameters() if p.grad is not None)
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        again = gradients(model, inputs)
        assert plain.keys() == again.keys()
        for name, grad in plain.items():
            torch.testing.assert_close(again[name], grad)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_copies_and_pickles_are_independent_converted_models(architecture):
    model = tiny(architecture)
    surgery.convert(model, Plan.of("local", left=2, right=2))
    before = outputs(model)
    twins = [copy.deepcopy(model)]
    if not architecture.startswith(("Wav2Vec2", "Hubert")):
        # PyTorch does not pickle parametrised modules, which these have, converted or not.
        twins.append(pickle.loads(pickle.dumps(model)))
    for twin in twins:
        assert type(twin) is type(model)
        assert difference(outputs(twin), before) == 0.0
        surgery.revert(twin)
        assert families.is_converted(model)
        assert difference(outputs(model), before) == 0.0


def test_projections_keep_the_names_that_adapters_look_for():
    names = {"BertModel": ("query", "value"), "GPT2Model": ("c_attn",), "LlamaForCausalLM": ("q_proj", "v_proj")}
    for architecture, targets in names.items():
        model = tiny(architecture)
        linear = {name for name, module in model.named_modules() if name.endswith(targets)}
        surgery.convert(model, Plan.of("local"))
        assert linear == {name for name, module in model.named_modules() if name.endswith(targets)} != set()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "GPT2LMHeadModel"])
def test_compiled_models_give_the_same(architecture):
    model = tiny(architecture)
    inputs = example_inputs(model, 24, batch=2, padded=7)
    surgery.convert(model, Plan.of("local", left=3, right=3))
    before = outputs(model, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    assert difference(outputs(compiled, inputs), before) < 1e-6


def test_a_site_checkpointed_by_hand_works():
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("improved-clustered", clusters=3))
    mechanism = model.encoder.layer[0].attention.self.mechanism
    q = torch.randn(1, 4, 10, 8, requires_grad=True)
    out = checkpoint(mechanism, q, q, q, None, use_reentrant=False)
    assert torch.equal(out, mechanism(q, q, q, None))


def test_half_precision_models_run_and_keep_the_mechanism_in_single():
    model = tiny("BertForSequenceClassification").to(torch.bfloat16)
    surgery.convert(model, Plan.of("improved-clustered", clusters=3))
    assert all(t.dtype == torch.float32 for n, t in model.state_dict().items() if n.endswith(".planes"))
    assert outputs(model)[0].dtype == torch.bfloat16


def test_exact_below_is_decided_for_each_call():
    model = tiny("BertModel")
    short, long = example_inputs(model, 15), example_inputs(model, 16)
    before = outputs(model, short), outputs(model, long)
    surgery.convert(model, Plan.of("linear", exact_below=16, **ELU))
    assert difference(outputs(model, short), before[0]) < 1e-6
    assert difference(outputs(model, long), before[1]) > 1e-4


def test_the_receipt_says_what_was_done():
    model = tiny("WhisperForConditionalGeneration")
    receipt = surgery.convert(model, Plan((Rule("clustered", "0", {"clusters": 4}), Rule("local", "2"))))
    assert [(site.layer, site.mechanism) for site in receipt.swapped] == [(0, "clustered"), (2, "local")]
    assert receipt.swapped[0].settings["clusters"] == 4
    assert receipt.left == [1, 3]
    assert receipt.cross_attention == 2
    assert len(receipt.added) == 2


def test_a_decoder_of_tokens_keeps_its_cross_attention():
    receipt = surgery.convert(tiny("BartForConditionalGeneration"), Plan.of("local"))
    assert receipt.cross_attention == 2
    assert [site.path.rpartition(".")[2] for site in receipt.swapped] == ["self_attn"] * 4


def test_a_plan_that_does_not_fit_leaves_the_model_as_it_was():
    model = tiny("GPT2LMHeadModel")
    keys, kind = set(model.state_dict()), type(model)
    with pytest.raises(ApproxError) as caught:
        surgery.convert(model, Plan.of("ltr"))
    assert caught.value.exit_code == Exit.UNSUPPORTED
    assert (set(model.state_dict()), type(model)) == (keys, kind)
    assert model.config._attn_implementation == "sdpa"


class _OfThisTest(MECHANISMS["local"]):
    """A mechanism that no release of the package knows."""


@pytest.mark.parametrize("name", ["of-this-test", "local"])
def test_a_mechanism_added_at_run_time_is_not_saved(name, tmp_path, monkeypatch):
    monkeypatch.setitem(MECHANISMS, name, _OfThisTest)
    model = tiny("BertModel")
    surgery.convert(model, Plan.of(name))
    with pytest.raises(ApproxError, match=f"The code of '{name}' cannot be saved.*added to MECHANISMS") as caught:
        model.save_pretrained(tmp_path / "out")
    assert caught.value.exit_code == Exit.UNSUPPORTED
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("mechanism", ["linear", "clustered", "lsh"])
def test_auto_keeps_the_question_exact_where_a_model_answers_questions(mechanism):
    for architecture, found in (("BertForQuestionAnswering", "question"), ("BertForSequenceClassification", "auto")):
        model = tiny(architecture, sep_token_id=2)
        receipt = surgery.convert(model, Plan.of(mechanism, window=2, global_tokens="auto"))
        assert {part.settings["global_tokens"] for part in receipt.swapped} == {found}


@pytest.mark.parametrize(
    ("architecture", "mechanism", "settings", "warned"),
    [
        ("BertForQuestionAnswering", "clustered", {"clusters": 25}, True),
        ("BertForQuestionAnswering", "clustered", {"clusters": 26}, False),
        ("BertForQuestionAnswering", "clustered", {}, False),
        ("BertForQuestionAnswering", "improved-clustered", {"clusters": 25}, False),
        ("BertForSequenceClassification", "clustered", {"clusters": 25}, False),
    ],
)
def test_recommends_improved_clusters_where_few_ones_would_lose_most_answers(architecture, mechanism, settings, warned):
    receipt = surgery.convert(tiny(architecture), Plan.of(mechanism, **settings))
    assert [line for line in receipt.warnings if "Take improved-clustered" in line] == [
        "clustered with 25 clusters loses most answers: with 25, MiniLM has an F1 of 20 on SQuAD, with "
        "improved-clustered of 57, and exact 60. Take improved-clustered, or more clusters."
    ] * warned
