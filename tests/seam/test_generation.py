"""generate() on converted decoders gives the same tokens and logits with and without a cache, in bounded memory."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from approx.conversion import surgery
from approx.errors import ApproxError
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from approx.seam.decode_cache import NotedLayer, StateLayer
from decoders import BOUNDED, DECODERS, DECODING, WAYS, assert_same, decoder, generated, prompts, rule
from forms import KINDS, SMALL
from zoo import tiny


@pytest.mark.parametrize("mechanism", DECODING)
@pytest.mark.parametrize(
    ("architecture", "way"),
    [*((name, way) for name in DECODERS[:2] for way in WAYS), (DECODERS[2], "greedy"), ("MixtralForCausalLM", "beams")],
)
@pytest.mark.sample(6)
def test_the_cache_changes_no_token(architecture, way, mechanism):
    model = decoder(architecture, rule(mechanism, "2-3" if architecture.startswith("Whisper") else "1-2"))
    inputs = prompts(model)
    with_cache = generated(model, inputs, use_cache=True, **WAYS[way])
    assert_same(with_cache, generated(model, inputs, use_cache=False, **WAYS[way]))


@pytest.mark.parametrize("mechanism", ["full", "sdpa"])
@pytest.mark.parametrize("architecture", DECODERS)
def test_exact_mechanisms_generate_what_the_base_generates(architecture, mechanism):
    model = decoder(architecture)
    inputs = prompts(model)
    before = generated(model, inputs)
    surgery.convert(model, Plan.of(mechanism))
    assert_same(generated(model, inputs), before)


@pytest.mark.parametrize("mechanism", BOUNDED)
@pytest.mark.parametrize("architecture", DECODERS[:2])
@pytest.mark.sample(5)
def test_left_padding_changes_no_token(architecture, mechanism):
    model = decoder(architecture, rule(mechanism))
    inputs = prompts(model)
    together, _ = generated(model, inputs)
    alone, _ = generated(model, {key: tensor[1:2, 4:] for key, tensor in inputs.items()})
    assert torch.equal(together[1, 4:], alone[0])


@pytest.mark.parametrize("first", ["full", *BOUNDED])
def test_layers_may_differ(first):
    """Transformers asks one layer for the sizes of the mask, which stock layers get too."""
    model = decoder("GPT2LMHeadModel", rule(first, "0"), rule("linear", "2"))
    inputs = prompts(model)
    cache = DynamicCache()
    cached = generated(model, inputs, past_key_values=cache, num_beams=3)
    assert_same(cached, generated(model, inputs, use_cache=False, num_beams=3))
    assert [isinstance(layer, StateLayer) for layer in cache.layers] == [first != "full", False, True]


@pytest.mark.parametrize("other", ["linear", "strided"])
def test_groups_of_heads_decode_from_all_their_states(other):
    groups = [Rule("local", heads="0,2", settings=SMALL["local"]), Rule(other, heads="1,3")]
    model = decoder("LlamaForCausalLM", *groups)
    inputs, cache = prompts(model), DynamicCache()
    cached = generated(model, inputs, past_key_values=cache, num_beams=3)
    assert_same(cached, generated(model, inputs, use_cache=False, num_beams=3))
    assert isinstance(cache.layers[0], StateLayer) == (other == "linear")


@pytest.mark.parametrize("mechanism", DECODING)
@pytest.mark.sample(6)
def test_a_prompt_read_in_chunks_gives_the_same_logits(mechanism):
    model = decoder("LlamaForCausalLM", rule(mechanism))
    inputs = prompts(model)
    whole = generated(model, inputs, use_cache=False)
    assert_same(generated(model, inputs, prefill_chunk_size=4), whole)
    tokens, cache, logits = example_inputs(model, 21, batch=2)["input_ids"], None, []
    with torch.no_grad():
        for piece in tokens.split([9, 1, 7, 1, 3], dim=1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logits.append(out.logits)
        torch.testing.assert_close(torch.cat(logits, 1), model(tokens, use_cache=False).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mechanism", BOUNDED)
def test_rows_of_a_cache_follow_their_beams(mechanism):
    model = decoder("GPT2LMHeadModel", rule(mechanism))
    tokens = example_inputs(model, 14, batch=3)["input_ids"]
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(tokens[:, :10], attention_mask=mask[:, :10], past_key_values=cache)
        cache.reorder_cache(torch.LongTensor([1, 0, 2]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3, 5]))
        rows = torch.tensor([1, 0, 2])
        logits = model(tokens[rows, 10:], attention_mask=mask[rows], past_key_values=cache).logits
        whole = model(tokens[rows], attention_mask=mask[rows], use_cache=False).logits[:, 10:]
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
        cache.reset()
        assert cache.get_seq_length() == 0
        fresh = model(tokens, attention_mask=mask, past_key_values=cache).logits[mask.bool()]
        torch.testing.assert_close(fresh, model(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()])


def state_sizes(cache):
    layers = [layer for layer in cache.layers if isinstance(layer, StateLayer)]
    assert layers
    return [[x.untyped_storage().nbytes() for x in (layer.state or {}).values()] for layer in layers]


@pytest.mark.parametrize("mechanism", BOUNDED)
@pytest.mark.parametrize("architecture", DECODERS[:2])
@pytest.mark.sample(5)
def test_the_cache_does_not_grow(architecture, mechanism):
    model = decoder(architecture, rule(mechanism))
    sizes = []
    for length in (10, 60):
        cache = DynamicCache()
        inputs = {"input_ids": example_inputs(model, 7, batch=1)["input_ids"]}
        generated(model, inputs, past_key_values=cache, max_new_tokens=length - 6, min_new_tokens=length - 6)
        assert cache.get_seq_length() == length
        sizes.append(state_sizes(cache))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("mechanism", BOUNDED)
@pytest.mark.parametrize("kind", ["right", "arbitrary"])
@pytest.mark.sample(5)
def test_holes_in_the_mask_are_padding_while_decoding_too(mechanism, kind):
    model = decoder("GPT2LMHeadModel", rule(mechanism))
    tokens = example_inputs(model, 24, batch=3)["input_ids"]
    mask = torch.ones_like(tokens)
    if kind == "right":
        mask[1, 4:9] = mask[2, 1:9] = 0
    else:
        mask = (torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < 0.6).long()
    cache, logits = DynamicCache(), []
    with torch.no_grad():
        for begin, end in ((0, 9), *((i, i + 1) for i in range(9, 20)), (20, 24)):
            piece = tokens[:, begin:end]
            logits.append(model(piece, attention_mask=mask[:, :end], past_key_values=cache).logits)
        whole = model(tokens, attention_mask=mask, use_cache=False).logits
    real = mask.bool()
    torch.testing.assert_close(torch.cat(logits, 1)[real], whole[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mechanism", ["local", "linear"])
def test_refuses_a_mask_that_changes_for_earlier_tokens(mechanism):
    model = decoder("GPT2LMHeadModel", rule(mechanism))
    tokens = example_inputs(model, 9, batch=2)["input_ids"]
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    for later in (None, torch.ones_like(tokens), mask[:, 8:], mask.roll(1, 1)):
        cache = DynamicCache()
        model(tokens[:, :8], attention_mask=mask[:, :8], past_key_values=cache)
        with pytest.raises(ApproxError, match="mask of all tokens at every step"):
            model(tokens[:, 8:], attention_mask=later, past_key_values=cache)


def test_features_that_need_single_keys_get_an_ordinary_layer():
    model = decoder("GPT2LMHeadModel", rule("linear"))
    inputs = {"input_ids": example_inputs(model, 9, batch=1)["input_ids"]}
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=3, output_attentions=True, return_dict_in_generate=True)
        assert output.attentions[-1][0].shape[-1] == 11
        cache = DynamicCache()
        model(**inputs, past_key_values=cache)
        with pytest.raises(ApproxError, match="in the middle of a generation"):
            model(**inputs, past_key_values=cache, output_attentions=True)
        seen = []
        hook = model.transformer.h[0].attn.mechanism.register_forward_hook(lambda *call: seen.append(call))
        model(**inputs)
        assert len(seen) == 1
        hook.remove()
    model.train()
    assert not isinstance(model(**inputs).past_key_values.layers[0], StateLayer)
    model.eval()
    surgery.revert(model)
    assert not isinstance(model(**inputs).past_key_values.layers[0], StateLayer)


def test_an_interrupted_step_does_not_affect_the_next_call():
    model = decoder("GPT2LMHeadModel", rule("linear"))
    tokens = example_inputs(model, 9, batch=1)["input_ids"]

    def interrupt(*call):
        raise KeyboardInterrupt

    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        cache = DynamicCache()
        model(tokens, past_key_values=cache)
        hook = model.transformer.h[0].attn.c_attn.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(tokens, past_key_values=cache)
        hook.remove()
        assert torch.equal(model(tokens, use_cache=False).logits, expected)


def test_notes_follow_the_samples_of_a_cache():
    model = decoder("GPT2LMHeadModel", rule("lsh"))
    tokens = example_inputs(model, 14, batch=3)["input_ids"]

    def then(change, chosen):
        cache = DynamicCache()
        model(tokens[:, :12], past_key_values=cache)
        layers: list[Any] = cache.layers
        assert all(type(layer) is NotedLayer and layer.notes for layer in layers)
        change(cache)
        assert [bool(layer.notes) for layer in layers] == [change is not back] * len(layers)
        earlier = tokens[chosen][:, : cache.get_seq_length()]
        after = tokens[chosen].roll(1, 0)[:, 12:]
        whole = model(torch.cat([earlier, after], 1), use_cache=False).logits[:, -2:]
        torch.testing.assert_close(model(after, past_key_values=cache).logits, whole, rtol=1e-4, atol=1e-4)

    def back(cache):
        cache.crop(-2)

    with torch.no_grad():
        then(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0])
        then(lambda cache: cache.batch_select_indices(torch.tensor([1, 2])), [1, 2])
        then(lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2])
        then(back, [0, 1, 2])


@pytest.mark.parametrize("mechanism", ["sdpa", "strided", "lsh", "local", "linear"])
def test_assisted_decoding_is_right_or_refused(mechanism):
    model = decoder("GPT2LMHeadModel", rule(mechanism))
    inputs = {"input_ids": example_inputs(model, 9, batch=1)["input_ids"]}
    expected, _ = generated(model, inputs)
    for assistance in ({"assistant_model": tiny("GPT2LMHeadModel")}, {"prompt_lookup_num_tokens": 2}):
        if KINDS[mechanism].decode_state == "cache":
            assert torch.equal(generated(model, inputs, **assistance)[0], expected)
            continue
        # From 5.24 on transformers asks the cache first and raises its own error.
        with pytest.raises(ValueError, match=r"Generate without assistance|requires a cache that can be cropped"):
            generated(model, inputs, **assistance)


def test_other_caches_store_keys_unchanged():
    """Whisper's generation reads the keys, and an explicitly requested cache stays what it is."""
    model = decoder("WhisperForConditionalGeneration", rule("local", "2-3"))
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    generated(model, prompts(model), past_key_values=cache)
    assert not any(isinstance(layer, StateLayer) for layer in cache.self_attention_cache.layers)
    model = decoder("GPT2LMHeadModel", rule("local"))
    cache = StaticCache(config=model.config, max_cache_len=9)
    tokens = example_inputs(model, 9, batch=1)["input_ids"]
    with torch.no_grad():
        assert torch.equal(model(tokens, past_key_values=cache).logits, model(tokens, use_cache=False).logits)
