"""Faults that the checks of a conversion, the seam and the layer errors must detect, one at a time."""

import json

import pytest
import torch
from transformers.masking_utils import bidirectional_mask_function

from approx.conversion import convert, surgery, verify
from approx.conversion.verify import layer_damage
from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS
from approx.mechanisms.local import LocalAttention
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from approx.seam.dispatch import key_mask
from tiny_speech import recogniser
from zoo import FAMILIES, outputs, tiny

LOCAL = Plan.of("local", left=3, right=3)


def test_the_exact_limit_is_compared_in_the_row_that_is_padded_too(monkeypatch):
    kind = MECHANISMS["local"]
    honest = kind.forward
    assert verify.exact_limit(tiny("BertModel"), LOCAL).passed
    # The row without padding is still correct; only the largest difference shows the fault.
    monkeypatch.setattr(kind, "forward", lambda self, q, k, v, mask=None, **more: honest(self, q, k, v, **more))
    assert verify.exact_limit(tiny("BertModel"), LOCAL).passed is False


def test_non_finite_differences_are_infinite():
    expected = torch.ones(2, 3)
    assert verify.difference(expected * 1.5, expected) == 0.5
    for strange in (torch.nan, torch.inf, -torch.inf):
        actual = expected.clone()
        actual[1, 2] = strange
        assert verify.difference(actual, expected) == torch.inf
        assert max(0.0, verify.difference(actual, expected)) == torch.inf


def test_a_tensor_that_the_folder_lacks_is_missed(tmp_path):
    model = tiny("BertModel")
    before = dict(model.state_dict())
    surgery.convert(model, LOCAL)
    model.save_pretrained(tmp_path)
    assert verify.weights(tmp_path, before).passed
    check = verify.weights(tmp_path, before | {"pooler.third": torch.ones(3)})
    assert check.passed is False
    assert "pooler.third" in check.detail


def test_a_tensor_that_is_stored_under_another_name_is_not_missed(tmp_path):
    model = tiny("BertForMaskedLM", tie_word_embeddings=True)
    before = dict(model.state_dict())
    surgery.convert(model, LOCAL)
    model.save_pretrained(tmp_path)
    assert verify.weights(tmp_path, before).passed


def test_does_not_publish_a_folder_that_computes_something_else(tmp_path, monkeypatch):
    """Write the config with another window, which only the last check can detect."""
    honest = convert.write

    def write(folder, *arguments):
        honest(folder, *arguments)
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"left": 3', '"left": 2'))

    tiny("BertModel").save_pretrained(tmp_path / "base")
    monkeypatch.setattr(convert, "write", write)
    with pytest.raises(ApproxError, match="reload without approx is bit-equal: largest difference") as caught:
        convert.convert(tmp_path / "base", tmp_path / "out", LOCAL)
    assert caught.value.exit_code == Exit.VERIFICATION
    assert {path.name for path in tmp_path.iterdir()} == {"base", "out.failed"}
    results = json.loads((tmp_path / "out.failed" / convert.RECEIPT).read_text())["checks"]
    assert [check["passed"] for check in results] == [True, True, None, True, False]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_revert_gives_the_implementation_back_that_the_model_had(implementation):
    model = tiny("BertModel", attn_implementation=implementation)
    surgery.convert(model, LOCAL)
    surgery.revert(model)
    assert model.config._attn_implementation == implementation


def test_cuts_a_longer_mask_at_its_front():
    # The last columns belong to the current keys; the first of the two is padding here.
    mask = torch.tensor([[1, 1, 1, 0, 1]])
    visible = key_mask(1, 2, 2, mask_function=bidirectional_mask_function, attention_mask=mask)
    assert visible is not None
    assert visible.tolist() == [[False, True]]
    assert key_mask(1, 2, 2, mask_function=bidirectional_mask_function, attention_mask=mask[:, :3]) is None


def test_a_layer_that_was_made_for_another_scale_refuses():
    model = tiny("BertModel")
    surgery.convert(model, LOCAL)
    outputs(model)
    model.encoder.layer[1].attention.self.mechanism.scale *= 2
    with pytest.raises(ApproxError, match="scales its scores by") as caught:
        outputs(model)
    assert caught.value.exit_code == Exit.VERIFICATION


def test_padding_does_not_count_as_damage():
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("local", layers="0", left=3, right=3))
    inputs = example_inputs(model, 40, padded=15)
    alone = {name: tensor[:, :25] for name, tensor in inputs.items()}
    padded, single = layer_damage(model, inputs), layer_damage(model, alone)
    # Only for the first layer, whose inputs at real tokens are the same.
    assert padded[0].error == pytest.approx(single[0].error, rel=1e-4)
    assert padded[0].captured_mass == pytest.approx(single[0].captured_mass, rel=1e-4)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_is_checked_where_it_approximates(architecture):
    model = tiny(architecture)
    plan = Plan.of("local", left=33, right=33)
    surgery.convert(model, plan)
    longest = verify.trials(model)[-1]
    results = [verify.padding(model), verify.causality(model)]
    assert [check for check in results if check.passed is False] == []
    for check in results:
        if check.passed:
            assert check.lengths[-1] >= longest.real
            assert "exact" not in check.detail or architecture.startswith("Whisper")


def test_a_model_that_normalises_over_padding_says_why_it_is_not_compared():
    model = recogniser("group")
    surgery.convert(model, Plan.of("local", left=2, right=2))
    check = verify.padding(model)
    assert (check.passed, "padding changes this model's outputs" in check.detail) == (None, True)


def test_padding_that_reaches_a_decoder_is_found(monkeypatch):
    model = tiny("BartForConditionalGeneration")
    surgery.convert(model, Plan.of("local", left=3))
    trial = verify.trials(model)[0]
    assert verify.padding_by_layer(model, trial) < 1e-4
    attend = LocalAttention.forward
    monkeypatch.setattr(
        LocalAttention,
        "forward",
        lambda self, q, k, v, key_mask=None, **more: attend(self, q, k, v, None if self.causal else key_mask, **more),
    )
    assert verify.padding_by_layer(model, trial) > 1e-2
