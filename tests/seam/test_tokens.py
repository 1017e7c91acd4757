"""Global tokens chosen by content: the token ids of a forward reach only the layers of that forward."""

import copy
import pickle

import pytest
import torch
from transformers import BertForSequenceClassification, pipeline

from approx.conversion import convert, surgery
from approx.errors import ApproxError, Exit
from approx.planning.plan import Plan, Rule
from tiny_classifier import WORDS, tiny_model, tiny_tokenizer
from zoo import tiny

READERS = (
    "BertForQuestionAnswering",
    "RobertaForSequenceClassification",
    "XLMRobertaForTokenClassification",
    "DistilBertForQuestionAnswering",
    "ElectraForSequenceClassification",
)
SEPARATOR = 5


def converted(architecture, chosen="separator"):
    model = tiny(architecture)
    surgery.convert(model, Plan.of("longformer", window=4, global_tokens=chosen, separator=SEPARATOR))
    return model


def draw(seed, length=30, batch=2):
    """Token ids with a few separators at different positions in each row."""
    return torch.randint(4, 20, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("architecture", READERS)
def test_layers_read_the_ids_of_their_own_forward_even_when_recomputed(architecture):
    # With two forwards before one backward, recomputation of the first must not read the ids of the second.
    grads = []
    for recompute in (None, False, True):
        model = converted(architecture).train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if recompute is not None:
            model.gradient_checkpointing_enable({"use_reentrant": recompute})
        (model(draw(1))[0].square().sum() + model(input_ids=draw(2))[0].square().sum()).backward()
        grads.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(grads[1], grads[0])
    torch.testing.assert_close(grads[2], grads[0])


def test_batches_of_other_shapes_leave_no_trace():
    model = converted("BertForQuestionAnswering")
    with torch.no_grad():
        before = model(draw(1))[0]
        model(draw(2, length=11, batch=3))
        assert torch.equal(model(draw(1))[0], before)


def test_copies_are_independent():
    model = converted("RobertaForSequenceClassification")
    ids = draw(1)
    with torch.no_grad():
        before = model(ids)[0]
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        for twin in copies:
            assert torch.equal(twin(ids)[0], before)
            surgery.revert(twin)
            assert not any(module._forward_pre_hooks for module in twin.modules())
            torch.testing.assert_close(twin(ids)[0], tiny("RobertaForSequenceClassification")(ids)[0])
        assert torch.equal(model(ids)[0], before)


def test_weights_show_the_rows_and_columns_of_separators():
    ids = draw(3)
    weights = converted("BertForQuestionAnswering")(ids, output_attentions=True).attentions[1]
    place = torch.arange(ids.shape[1])
    marked = ids == SEPARATOR
    seen = ((place[:, None] - place).abs() <= 2) | marked[:, None, :] | marked[:, :, None]
    assert torch.equal(weights > 0, seen[:, None].expand_as(weights))


def test_embeddings_instead_of_ids_are_refused():
    with pytest.raises(ApproxError, match="Pass 'input_ids'"):
        converted("BertForQuestionAnswering")(inputs_embeds=torch.randn(2, 9, 32))


@pytest.mark.parametrize(
    ("architecture", "words"), [("Wav2Vec2ForCTC", "reads no token ids"), ("GPT2LMHeadModel", "this layer is causal")]
)
def test_refuses_an_unsupported_model_and_leaves_it_unchanged(architecture, words):
    model = tiny(architecture)
    content = Rule("longformer", "1", {"global_tokens": "question", "separator": 2})
    with pytest.raises(ApproxError, match=words) as caught:
        surgery.convert(model, Plan((Rule("local", "0"), content)))
    assert caught.value.exit_code == Exit.UNSUPPORTED
    assert not any(hasattr(module, "mechanism") for module in model.modules())


def test_the_separator_of_a_live_model_is_that_of_its_config():
    model = tiny("RobertaForSequenceClassification")
    surgery.convert(model, Plan((Rule("longformer", "0", {"global_tokens": "question"}), Rule("local", "1"))))
    settings = [site["settings"] for site in model.config.approx["sites"].values()]
    assert settings[0]["separator"] == model.config.eos_token_id == 2
    assert "separator" not in settings[1]
    with pytest.raises(ApproxError, match="Give its id as the setting 'separator'"):
        surgery.convert(tiny("BertModel"), Plan.of("longformer", global_tokens="separator"))


def test_a_folder_has_the_separator_of_its_tokenizer_and_works_in_a_pipeline(tmp_path):
    torch.manual_seed(0)
    tiny_model(3).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    plan = Plan.of("longformer", window=2, global_tokens="question")
    receipt = convert.convert(tmp_path / "base", tmp_path / "out", plan)
    assert receipt.swapped[0].settings["separator"] == WORDS.index("[SEP]")
    # The folder's own code reads the ids as well; a fresh process did so in the checks.
    pair = {"text": "is the film dull", "text_pair": "the film is very long not bad not good"}
    scores = []
    for folder in ("base", "out"):
        classify = pipeline("text-classification", model=str(tmp_path / folder), trust_remote_code=True, top_k=None)
        scores.append([prediction["score"] for prediction in classify(pair)])
    assert scores[0] != scores[1]
    live = BertForSequenceClassification.from_pretrained(tmp_path / "base")
    surgery.convert(live, Plan.of("longformer", window=2, global_tokens="question", separator=WORDS.index("[SEP]")))
    with torch.no_grad():
        here = live(**tiny_tokenizer()(pair["text"], pair["text_pair"], return_tensors="pt")).logits.softmax(-1)
    assert sorted(scores[1]) == pytest.approx(sorted(here[0].tolist()), abs=1e-6)
