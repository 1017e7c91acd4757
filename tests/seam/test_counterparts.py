"""A converted RoBERTa or BERT equals transformers' Longformer or BigBird with the same weights."""

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    BigBirdConfig,
    BigBirdModel,
    LongformerConfig,
    LongformerModel,
    RobertaConfig,
    RobertaModel,
)
from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention

from approx.conversion import surgery
from approx.planning.plan import Plan
from approx_kernels.ops.patterns.reference import bigbird_lists, draw_blocks

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 101,
    "max_position_embeddings": 260,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    # Large weights make the softmax far from uniform, so that differences in attention show.
    "initializer_range": 0.3,
}


def batch(length, *shorter):
    """Token ids without padding ids, and a mask that pads all rows but the first on the right."""
    ids = torch.randint(4, 101, (1 + len(shorter), length), generator=torch.Generator().manual_seed(length))
    mask = (torch.arange(length) < torch.tensor([[length], *([real] for real in shorter)])).long()
    return ids * mask + (1 - mask), mask


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def assert_same_gradients(theirs, ours, expected, actual, mask):
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)) * mask[..., None]
    for out in (expected, actual):
        (out * direction).sum().backward()
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for name, parameter in ours.named_parameters():
        module, _, kind = name.rpartition(".")
        # The gradient of copied projections is that of the single projection here.
        whole = sum(grads[key] for key in (name, f"{module}_global.{kind}") if key in grads)
        error = float((parameter.grad - whole).abs().max()) / largest
        assert error < 1e-5, f"{name}: {error:.1e}"


def longformer(window):
    """A Longformer whose global projections are copies of the others, and a RoBERTa with the same weights."""
    torch.manual_seed(0)
    theirs = LongformerModel(
        LongformerConfig(**SIZES, attention_window=window, type_vocab_size=1, layer_norm_eps=1e-5),
        add_pooling_layer=False,
    )
    weights = theirs.state_dict()
    for name in weights:
        if "_global" in name:
            weights[name].copy_(weights[name.replace("_global", "")])
    ours = RobertaModel(RobertaConfig(**SIZES, type_vocab_size=1, layer_norm_eps=1e-5), add_pooling_layer=False)
    ours.load_state_dict({name: tensor for name, tensor in weights.items() if "_global" not in name})
    return theirs, ours


@pytest.mark.parametrize(("window", "length"), [(4, 75), (8, 160)])
@pytest.mark.parametrize("chosen", ["first", [0, 3, 40, 71], "separator"], ids=["first", "several", "separators"])
def test_roberta_becomes_a_longformer(window, length, chosen):
    theirs, ours = longformer(window)
    surgery.convert(ours, Plan.of("longformer", window=window, global_tokens=chosen))
    ids, mask = batch(length, length - 2, length - window - 1, 30)
    seeing = torch.zeros_like(ids)
    if chosen == "separator":
        ids[[0, 0, 0, 1, 2], [9, 11, length - 1, 60, 5]] = 2
        seeing[ids == 2] = 1
    else:
        seeing[:, [0] if chosen == "first" else chosen] = 1
    seeing *= mask
    expected = theirs(ids, attention_mask=mask, global_attention_mask=seeing).last_hidden_state
    actual = ours(ids, attention_mask=mask).last_hidden_state
    real = mask.bool()
    assert_close(actual[real], expected[real])
    assert_same_gradients(theirs, ours, expected, actual, mask)


def bigbird(blocks):
    """A block-sparse BigBird in evaluation mode, and a BERT with the same weights."""
    torch.manual_seed(0)
    shared = {**SIZES, "hidden_act": "gelu_new"}
    theirs = BigBirdModel(
        BigBirdConfig(**shared, attention_type="block_sparse", block_size=blocks, num_random_blocks=2),
        add_pooling_layer=False,
    ).eval()
    ours = BertModel(BertConfig(**shared), add_pooling_layer=False).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize(("block", "length"), [(8, 88), (4, 87)], ids=["whole blocks", "a partial block"])
def test_bert_becomes_a_bigbird_in_evaluation_mode(block, length):
    theirs, ours = bigbird(block)
    surgery.convert(ours, Plan.of("bigbird", block=block, random=2, compatible=True))
    # All rows end in the last block, since transformers' last block is that of the longest row.
    ids, mask = batch(length, length - 1, length - 2)
    expected = theirs(ids, attention_mask=mask).last_hidden_state
    assert theirs.attention_type == "block_sparse"
    actual = ours(ids, attention_mask=mask).last_hidden_state
    assert_close(actual[mask.bool()], expected[mask.bool()])
    assert_same_gradients(theirs, ours, expected, actual, mask)


def test_bert_becomes_a_bigbird_in_training_that_drew_the_same_random_blocks(monkeypatch):
    theirs, ours = bigbird(4)
    surgery.convert(ours, Plan.of("bigbird", block=4, random=2, seed=3))
    lists = bigbird_lists(22, draw_blocks(2, 3), False)
    known = [{0, block - 1, block, block + 1, 21} for block in range(22)]
    drawn = np.array([sorted(set(lists[block]) - known[block]) for block in range(1, 21)])

    def same_for_all_heads(self, num_heads, **plan):
        return [drawn] * num_heads

    monkeypatch.setattr(BigBirdBlockSparseAttention, "_bigbird_block_rand_mask_with_head", same_for_all_heads)
    ids, mask = batch(88, 87)
    expected = theirs.train()(ids, attention_mask=mask).last_hidden_state
    actual = ours.train()(ids, attention_mask=mask).last_hidden_state
    assert_close(actual[mask.bool()], expected[mask.bool()])
    assert_same_gradients(theirs, ours, expected, actual, mask)


def test_what_is_exact_there_because_it_is_short_is_exact_here_and_leaves_no_trace():
    theirs, ours = bigbird(4)
    plain = BertModel(ours.config, add_pooling_layer=False).eval()
    plain.load_state_dict(ours.state_dict())
    surgery.convert(ours, Plan.of("bigbird", block=4, random=2, compatible=True, exact_below=4 * 9 + 1))
    long, short = batch(88)[0], batch(36)[0]
    before = ours(long).last_hidden_state
    assert_close(ours(short).last_hidden_state, plain(short).last_hidden_state)
    assert_close(theirs(long).last_hidden_state, before)
    assert_close(theirs(short).last_hidden_state, ours(short).last_hidden_state)
    assert torch.equal(ours(long).last_hidden_state, before)
