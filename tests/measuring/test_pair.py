"""The two models of a comparison: what is the base, under which names, and what stays as it was."""

from typing import Any

import pytest
import torch

from approx.checkpoints import checkpoint
from approx.conversion import convert, surgery
from approx.errors import ApproxError
from approx.evaluation.options import BASE, CEILING
from approx.measuring import measure
from approx.measuring.measure import in_memory, label_of, open_pair, with_extended_base
from approx.planning.plan import Plan
from tiny_classifier import tiny_model, tiny_tokenizer
from tiny_study import tiny_checkpoint
from zoo import tiny

NARROW: dict[str, Any] = {"left": 0, "right": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base, and what was converted from it with longer positions."""
    folder = tmp_path_factory.mktemp("pair")
    base = tiny_checkpoint(folder / "base")
    convert.convert(base, folder / "converted", Plan.of("local", **NARROW), max_length=48)
    return str(base), str(folder / "converted")


def logits(model: Any, length: int = 20) -> torch.Tensor:
    ids = torch.arange(length)[None] % 10 + 4
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def opened(model: Any, against: Any = None, **more: Any) -> dict[str, checkpoint.Checkpoint]:
    return open_pair(model, against, "cpu", "auto", True, **more)


def test_a_converted_folder_is_compared_with_its_own_weights_under_exact_attention(folders):
    base, converted = folders
    made = opened(converted)
    assert list(made) == [BASE, "converted"]
    assert [one.source.converted for one in made.values()] == [False, True]
    exact, other = (logits(one.model) for one in made.values())
    torch.testing.assert_close(exact, logits(checkpoint.load(base).model), rtol=0, atol=1e-6)
    assert not torch.allclose(exact, other, rtol=0, atol=1e-6)


def test_a_named_base_is_used_for_any_model(folders):
    base, converted = folders
    made = opened(converted, base)
    assert [one.source.name for one in made.values()] == [base, converted]
    assert [one.source.converted for one in made.values()] == [False, True]
    assert list(opened(base)) == [BASE]
    assert list(opened(base, base)) == [BASE, "base"]
    with pytest.raises(ApproxError, match=r"--against .*converted is converted itself. Name the exact checkpoint"):
        opened(converted, converted)


def test_a_loaded_model_is_not_changed_by_its_comparison():
    torch.manual_seed(0)
    model = tiny_model(2)
    exact = logits(model)
    surgery.convert(model, Plan.of("local", **NARROW))
    before = logits(model)
    made = opened(model, processor=tiny_tokenizer())
    assert list(made) == [BASE, "ApproxBertForSequenceClassification"]
    assert made["ApproxBertForSequenceClassification"].model is model
    assert torch.equal(logits(model), before)
    torch.testing.assert_close(logits(made[BASE].model), exact, rtol=0, atol=1e-6)
    # Timing reads no text.
    with pytest.raises(ApproxError, match="needs its tokenizer"):
        opened(model)
    assert list(opened(model, reads=False)) == list(made)


def test_opens_both_models_with_the_same_options(folders, monkeypatch):
    asked, original = [], measure.open_all

    def note(names: dict[str, str], device: str, dtype: str, **more: Any) -> Any:
        asked.append((names, device, dtype, more))
        return original(names, "cpu", "auto", offline=True)

    monkeypatch.setattr(measure, "open_all", note)
    base, converted = folders
    for merge in (False, True):
        open_pair(converted, base, "cuda", "bfloat16", merge, merge_adapter=merge)
        more = {"quantize": None, "offline": merge, "merge_adapter": merge}
        assert asked == [
            ({BASE: base}, "cuda", "bfloat16", more),
            ({"converted": converted}, "cuda", "bfloat16", more),
        ]
        asked.clear()


@pytest.mark.parametrize(
    ("model", "label"),
    [
        ("some/where/name", "name"),
        ("name/", "name"),
        (BASE, f"{BASE} (converted)"),
        (f"runs/{CEILING}", f"{CEILING} (converted)"),
        (torch.nn.Linear(1, 1), "Linear"),
    ],
    ids=str,
)
def test_labels_a_model_by_its_folder_or_class(model, label):
    assert label_of(model) == label


def test_the_base_is_extended_to_the_longest_and_keeps_its_outputs(folders):
    base, converted = folders
    before = opened(converted, base)
    short = logits(before[BASE].model)
    made, note = with_extended_base(before)
    assert note == "positions of exact extended from 32 to 48"
    assert [one.model.config.max_position_embeddings for one in made.values()] == [48, 48]
    assert made["converted"] is before["converted"]
    assert torch.equal(logits(made[BASE].model), short)
    assert logits(made[BASE].model, 48).isfinite().all()
    assert before[BASE].model.config.max_position_embeddings == 32
    longer = {BASE: before["converted"], "a": before[BASE]}
    for several in (longer, {BASE: before[BASE]}, made):
        with pytest.raises(ApproxError, match=r"takes (32|48) positions, and nothing .* takes more. Leave out"):
            with_extended_base(several)
    unlimited = in_memory(tiny("Wav2Vec2ForCTC"), None, reads=False)
    with pytest.raises(ApproxError, match="takes any length, and nothing"):
        with_extended_base({BASE: unlimited, "a": before[BASE]})
    made, _ = with_extended_base({BASE: before[BASE], "b": unlimited, "a": before["converted"]})
    assert made[BASE].model.config.max_position_embeddings == 48
