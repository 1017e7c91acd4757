"""Logits of a teacher that are kept: the loss is the same, the teacher rests, and what is left out is stated."""

from typing import Any

import pytest
import torch

from approx.conversion import surgery
from approx.errors import ApproxError, Exit
from approx.finetuning.finetune import prepare_training
from approx.finetuning.options import Distillation, FinetuneStage
from approx.finetuning.trainer import Distill, KeptLogits
from approx.planning.plan import Plan
from tiny_classifier import tiny_tokenizer
from tiny_decoder import tiny_gpt2
from tiny_training import interrupt, model_of, options_of, trained
from zoo import tiny

OUTPUTS = Distillation(logits=1.0, hidden=0.0, temperature=2.0)


def kept(count: int, *, several: bool = False, most: float = 1e9) -> KeptLogits:
    return KeptLogits(count, 2.0, several=several, most=most)


def batch_of(*lengths: int, left: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": torch.randint(4, 14, mask.shape), "attention_mask": (mask.flip(1) if left else mask).long()}


def varied(architecture: str, **changes: Any) -> tuple[Any, Any]:
    """Two models whose outputs differ clearly."""
    return tuple(tiny(architecture, seed, vocab_size=14, initializer_range=0.5, **changes) for seed in (0, 1))


@pytest.mark.parametrize(
    ("architecture", "changes", "left"),
    [
        ("BertForSequenceClassification", {"num_labels": 5}, False),
        # As many classes as tokens.
        ("BertForSequenceClassification", {"num_labels": 9}, False),
        ("BertForSequenceClassification", {"num_labels": 1}, False),
        ("BertForSequenceClassification", {"num_labels": 5, "problem_type": "multi_label_classification"}, False),
        ("BertForQuestionAnswering", {}, False),
        ("BertForTokenClassification", {"num_labels": 4}, False),
        ("GPT2LMHeadModel", {}, False),
        ("GPT2LMHeadModel", {}, True),
    ],
)
@pytest.mark.parametrize("most", [1e9, 0.0])
def test_where_all_logits_are_kept_loss_and_gradient_are_those_without(architecture, changes, left, most):
    teacher, student = varied(architecture, **changes)
    several = changes.get("problem_type") is not None
    store = kept(14, several=several, most=most)
    inputs = batch_of(9, 5, 7, left=left)
    losses, gradients = [], []
    for one in (Distill(teacher, OUTPUTS), *[Distill(teacher, OUTPUTS, store)] * 2):
        student.zero_grad()
        loss = one.loss(student, student, dict(inputs))
        loss.backward()
        losses.append(loss.item())
        gradients.append([x.grad.clone() for x in student.parameters() if x.grad is not None])
    assert losses[0] > 1e-3
    # Positions are counted from the first place of a batch, padding or not, so that left padding moves them.
    close = 0.2 if left else 1e-4
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=close)
    assert losses[1] == losses[2]
    if not left:
        assert all(torch.allclose(x, y, rtol=1e-3, atol=1e-5) for x, y in zip(*gradients[:2], strict=True))
    assert all(torch.equal(x, y) for x, y in zip(*gradients[1:], strict=True))


def test_what_is_not_kept_counts_as_one_more_class():
    teacher, student = varied("GPT2LMHeadModel")
    inputs = batch_of(6)
    store = kept(3)
    found = Distill(teacher, OUTPUTS, store).loss(student, student, dict(inputs)).item()
    with torch.no_grad():
        p, q = ((model(**inputs).logits[0].double() / 2).softmax(-1) for model in (teacher, student))
    places = p.topk(3).indices
    p3, q3 = p.gather(1, places), q.gather(1, places)
    rest_p, rest_q = 1 - p3.sum(1), 1 - q3.sum(1)
    expected = (p3 * (p3 / q3).log()).sum(1) + rest_p * (rest_p / rest_q).log()
    assert found == pytest.approx(float(expected.mean()) * 4, rel=1e-4)
    assert found < float((p * (p / q).log()).sum(1).mean()) * 4
    note = store.note or ""
    assert note.startswith("The 3 largest of the teacher's logits were kept for 1 inputs (0.0 MB); they hold ")
    assert float(note.split()[-5]) == pytest.approx(100 * float(p3.sum(1).mean()), abs=0.01)


def test_the_teacher_sees_each_input_once_and_the_share_is_reported(sst2, tmp_path):
    options = options_of(sst2, recover=["distill"], steps=40, distill={"hidden": 0.0, "cache": 1}, evaluate_every=40)
    model, teacher = model_of(), model_of(None)
    # Without dropout and with equal weights there would be nothing to learn.
    model.classifier.weight.data.neg_()
    seen: list[bytes] = []
    teacher.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(kwargs["input_ids"].numpy().tobytes()), with_kwargs=True
    )
    done = trained(model, tmp_path / "work", options, teacher=teacher)
    # Four sentences, of which all examples are copies.
    assert len(seen) == len(set(seen)) == 4
    (note,) = (note for note in done.notes if "largest" in note)
    assert "The 1 largest of the teacher's logits were kept for 4 inputs" in note
    assert done.phases[0].curve[-1]["loss"] < done.phases[0].curve[1]["loss"]


@pytest.mark.slow
def test_a_resumed_training_with_kept_logits_ends_with_the_same_weights(sst2, tmp_path):
    options = options_of(sst2, recover=["distill"], steps=30, distill={"hidden": 0.0, "cache": 1}, evaluate_every=10)
    whole = trained(uninterrupted := model_of(), tmp_path / "whole", options)

    interrupt(model_of(), tmp_path / "work", options, 13)
    done = trained(model := model_of(), tmp_path / "work", options, resume=True)
    assert done.after == whole.after
    assert all(torch.equal(x, uninterrupted.state_dict()[name]) for name, x in model.state_dict().items())


def test_a_single_pass_keeps_nothing(sst2):
    for steps, passes in ((9, 1), (10, 2)):
        options = options_of(sst2, recover=["distill"], steps=steps, distill={"hidden": 0.0, "cache": 1})
        (phase,) = prepare_training(model_of(), tiny_tokenizer(), options).phases
        assert isinstance(phase.objective, Distill)
        assert (phase.objective.kept is not None) is (passes > 1)


@pytest.mark.parametrize(
    ("parts", "text", "code", "message"),
    [
        ({"cache": 4}, None, Exit.USAGE, "keeps logits, and hidden states"),
        ({"cache": 4, "hidden": 0.0, "attention": 1.0}, None, Exit.USAGE, "keeps logits, and hidden states"),
        ({"cache": 4, "hidden": 0.0}, "mlm", Exit.USAGE, "mlm, which hides other tokens in each pass"),
    ],
)
def test_refuses_what_cannot_be_kept(parts, text, code, message, sst2, tmp_path):
    options, model = options_of(sst2, recover=["distill"], distill=parts), model_of()
    tokenizer = tiny_tokenizer()
    if text:
        (tmp_path / "text.txt").write_text("the film is good " * 200)
        options = FinetuneStage(
            text=[str(tmp_path / "text.txt")], recover=["distill"], distill=Distillation(**parts), length=16
        )
        model, tokenizer.mask_token = tiny("BertForMaskedLM", vocab_size=14), "[UNK]"
        surgery.convert(model, Plan.of("local", left=1, right=1))
    with pytest.raises(ApproxError, match=message) as caught:
        prepare_training(model, tokenizer, options)
    assert caught.value.exit_code == code


def test_a_decoder_learns_from_kept_logits(tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(["the film is not very good", "bad dull fine long"] * 60))
    options = FinetuneStage(
        text=[str(tmp_path / "text.txt")],
        recover=["distill"],
        distill=Distillation(hidden=0.0, cache=4),
        steps=20,
        batch_size=4,
        length=16,
        learning_rate=1e-2,
    )
    done = trained(tiny_gpt2(64, "local", left=1, right=0), tmp_path / "work", options)
    losses = [point["loss"] for point in done.phases[0].curve if "loss" in point]
    assert losses[-1] < 0.7 * losses[0]
    assert any("The 4 largest of the teacher's logits" in note for note in done.notes)
