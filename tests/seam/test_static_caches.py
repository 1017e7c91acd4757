"""Static caches, with slots for later tokens: converted decoders give the same as with dynamic ones."""

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig, StaticCache

from approx.errors import ApproxError
from approx.planning.positions import example_inputs
from approx.seam.dispatch import in_use, key_mask
from decoders import DECODERS, DECODING, WAYS, assert_same, decoder, generated, prompts, rule


@pytest.mark.parametrize("mechanism", DECODING)
@pytest.mark.parametrize("architecture", DECODERS[:2])
@pytest.mark.sample(6)
def test_a_static_cache_changes_no_token(architecture, mechanism):
    model = decoder(architecture, rule(mechanism, "0-1"))
    inputs = prompts(model)
    for arguments, way in ((inputs, "greedy"), ({"input_ids": inputs["input_ids"]}, "sampling")):
        static = generated(model, arguments, cache_implementation="static", **WAYS[way])
        assert_same(static, generated(model, arguments, **WAYS[way]))


@pytest.mark.parametrize("mechanism", ["exact", "strided", "local"])
def test_a_prompt_read_in_chunks_into_a_static_cache(mechanism):
    model = decoder("LlamaForCausalLM", rule(mechanism))
    tokens, cache = example_inputs(model, 21, batch=2)["input_ids"], StaticCache(config=model.config, max_cache_len=40)
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    with torch.no_grad():
        pieces = zip(tokens.split([9, 1, 7, 1, 3], dim=1), (9, 10, 17, 18, 21), strict=True)
        logits = [model(piece, attention_mask=mask[:, :end], past_key_values=cache).logits for piece, end in pieces]
        whole = model(tokens, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(torch.cat(logits, 1)[mask.bool()], whole[mask.bool()], rtol=1e-4, atol=1e-4)
        with pytest.raises(ApproxError, match="of all tokens at every step, here 22 columns"):
            model(tokens[:, :1], attention_mask=mask, past_key_values=cache)


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", ["exact", "strided", "linear"])
def test_compiled_decoding_over_a_static_cache_changes_no_token(mechanism):
    model = decoder("LlamaForCausalLM", rule(mechanism, "0-1"))
    inputs = prompts(model)
    # Generation compiles this by itself on accelerators.
    how: Any = CompileConfig(backend="eager", dynamic=True)
    how.mode = None
    how._compile_all_devices = True
    torch._dynamo.reset()
    counters.clear()
    few = {"max_new_tokens": 3, "min_new_tokens": 3}
    compiled = generated(model, inputs, cache_implementation="static", compile_config=how, **few)
    assert counters["frames"]["ok"], "nothing was compiled"
    assert_same(compiled, generated(model, inputs, **few))


@pytest.mark.parametrize("mechanism", ["exact", "local"])
def test_attention_weights_have_a_column_for_each_slot(mechanism):
    model = decoder("LlamaForCausalLM", rule(mechanism))
    inputs, attentions = prompts(model), []
    for ways in ({}, {"cache_implementation": "static"}):
        out = model.generate(
            **inputs, max_new_tokens=3, min_new_tokens=3, output_attentions=True, return_dict_in_generate=True, **ways
        )
        attentions.append(out.attentions)
    for dynamic, static in zip(*attentions, strict=True):
        columns = dynamic[0].shape[-1]
        torch.testing.assert_close(static[0][..., :columns], dynamic[0])
        # Nine tokens of the prompt, and two new ones that are read again.
        assert static[0].shape[-1] == 11
        assert not static[0][..., columns:].any()


def test_free_slots_are_cut_off_without_a_copy():
    q, k = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 10, 8)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, :2] = False
    row = key_mask(2, 1, 10, torch.tensor(4), attention_mask=mask, device=q.device)
    assert row is not None
    assert row.shape == (2, 1, 1, 10)
    for _ in range(2):
        key, value, real = in_use(q, k, k, row, True)
        assert key.shape == value.shape == (2, 2, 5, 8)
        assert key.data_ptr() == k.data_ptr()
        assert real is not None
        assert torch.equal(real, mask)
    # A mask changed in place is read again.
    row[:, :, :, 5] = True
    assert in_use(q, k, k, row, True)[0].shape[2] == 6
    # Several tokens get one column per slot in use, and no mask if the cache is full.
    several = key_mask(2, 3, 10, 2, attention_mask=mask, device=q.device)
    assert several is not None
    assert torch.equal(several, mask)
    assert key_mask(2, 3, 10, 7, attention_mask=None, device=q.device) is None
    assert in_use(q, k, k, torch.ones(2, 7, dtype=torch.bool), True)[2] is None
