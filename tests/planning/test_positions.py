"""Longer position tables: short inputs give bit-identical outputs, longer ones run, and extension can be undone."""

import json

import pytest
import torch
import transformers

from approx.checkpoints import families
from approx.conversion import surgery
from approx.errors import ApproxError, Exit
from approx.planning import positions
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from approx.seam.internals import backbone_of
from zoo import FAMILIES, difference, outputs, tiny

LEARNED = (
    "BertForSequenceClassification",
    "RobertaForQuestionAnswering",
    "XLMRobertaForTokenClassification",
    "ElectraForSequenceClassification",
    "DistilBertForSequenceClassification",
    "GPT2LMHeadModel",
)
USABLE = 64


@pytest.mark.parametrize("length", [65, 128, 150])
@pytest.mark.parametrize("architecture", LEARNED)
@pytest.mark.sample(8)
def test_short_inputs_stay_the_same_to_the_last_bit_and_longer_ones_run(architecture, length, tmp_path):
    model = tiny(architecture)
    assert positions.limit(model.config) == USABLE
    short = [example_inputs(model, size, batch=2, padded=3, seed=size) for size in (8, USABLE)]
    before = [outputs(model, inputs) for inputs in short]
    table = {name: tensor.clone() for name, tensor in model.state_dict().items() if name.endswith(PLACES)}
    assert len(table) == 1
    receipt = surgery.convert(model, Plan.of("sdpa"), max_length=length)
    assert receipt.positions == (USABLE, length)
    assert positions.limit(model.config) == length
    for inputs, expected in zip(short, before, strict=True):
        assert difference(outputs(model, inputs), expected) == 0.0
    long = example_inputs(model, length, batch=2, padded=5)
    long_outputs = outputs(model, long)
    assert all(bool(tensor.isfinite().all()) for tensor in long_outputs)

    model.save_pretrained(tmp_path)
    auto = type(model).from_pretrained(tmp_path)
    assert difference(outputs(auto, long), long_outputs) == 0.0
    with pytest.raises((IndexError, RuntimeError)):
        outputs(model, example_inputs(model, length + 1))

    surgery.revert(model)
    assert positions.limit(model.config) == USABLE
    for name, tensor in table.items():
        assert torch.equal(model.state_dict()[name], tensor)
    for inputs, expected in zip(short, before, strict=True):
        assert difference(outputs(model, inputs), expected) == 0.0
    with pytest.raises((IndexError, RuntimeError)):
        outputs(model, example_inputs(model, USABLE + 1))


PLACES = ("position_embeddings.weight", "wpe.weight")


@pytest.mark.parametrize("architecture", ["RobertaForQuestionAnswering", "XLMRobertaForTokenClassification"])
def test_the_first_rows_of_roberta_belong_to_padding_and_are_kept(architecture):
    model = tiny(architecture)
    old = model.base_model.embeddings.position_embeddings
    surgery.convert(model, Plan.of("sdpa"), max_length=100)
    new = model.base_model.embeddings.position_embeddings
    offset = model.config.pad_token_id + 1
    assert new.padding_idx == old.padding_idx == offset - 1
    assert model.config.max_position_embeddings == new.num_embeddings == 100 + offset
    assert torch.equal(new.weight[: USABLE + offset], old.weight)
    assert torch.equal(new.weight[USABLE + offset :], old.weight[offset : 100 - USABLE + offset])


@pytest.mark.parametrize("architecture", ["BertForSequenceClassification", "RobertaForQuestionAnswering"])
def test_padding_on_the_left_uses_the_same_rows(architecture):
    model = tiny(architecture)
    inputs = example_inputs(model, 20)
    inputs["attention_mask"] = torch.ones(1, 20, dtype=torch.long)
    inputs["attention_mask"][:, :6] = 0
    inputs["input_ids"][:, :6] = model.config.pad_token_id
    before = outputs(model, inputs)
    surgery.convert(model, Plan.of("sdpa"), max_length=200)
    assert difference(outputs(model, inputs), before) == 0.0


def test_a_trainable_table_stays_trainable_and_a_frozen_one_frozen():
    for trainable in (True, False):
        model = tiny("BertModel")
        model.embeddings.position_embeddings.weight.requires_grad_(trainable)
        surgery.convert(model, Plan.of("sdpa"), max_length=100)
        assert model.embeddings.position_embeddings.weight.requires_grad is trainable


def test_gpt2_gets_its_own_name_of_the_setting(tmp_path):
    model = tiny("GPT2LMHeadModel")
    surgery.convert(model, Plan.of("sdpa"), max_length=100)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["n_positions"] == 100


@pytest.mark.parametrize("architecture", [name for name in FAMILIES if name not in LEARNED])
def test_refuses_families_without_a_learned_table(architecture):
    model = tiny(architecture)
    with pytest.raises(ApproxError, match="max-length") as caught:
        surgery.convert(model, Plan.of("linear"), max_length=4096)
    assert caught.value.exit_code == Exit.UNSUPPORTED
    assert type(model) is getattr(transformers, architecture)
    assert not any(".mechanism" in name for name, _ in model.named_modules())


@pytest.mark.parametrize("length", [1, 63, 64])
def test_a_table_is_not_cut_silently(length):
    with pytest.raises(ApproxError, match="already takes 64 positions") as caught:
        surgery.convert(tiny("BertModel"), Plan.of("sdpa"), max_length=length)
    assert caught.value.exit_code == Exit.USAGE


@pytest.mark.parametrize("family", ["wav2vec2", "hubert", "vit"])
def test_a_family_without_a_table_has_no_limit_whatever_else_its_config_says(family):
    kind = transformers.CONFIG_MAPPING[family]
    for config_class in (kind, families.config_class(kind)):
        assert positions.limit(config_class.from_dict({"max_position_embeddings": 512})) is None


@pytest.mark.parametrize(
    "family",
    [
        "bert",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
    ],
)
def test_the_longest_input_fits_the_position_table(family):
    rows = transformers.AutoConfig.for_model(
        family,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=32,
        vocab_size=50,
        max_position_embeddings=24,
    )
    model = backbone_of(type(rows))(rows).eval()
    longest = positions.limit(rows)
    assert longest is not None
    outputs(model, example_inputs(model, longest))
    with pytest.raises((IndexError, RuntimeError)):
        outputs(model, example_inputs(model, longest + 1))
