"""Observed attention calls: complete, in order, with gradients, and without side effects."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from approx.conversion import surgery
from approx.errors import ApproxError, Exit
from approx.mechanisms.mechanism import HeadGroups, Mechanism
from approx.planning.anatomy import anatomy
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from approx.seam.decode_cache import StateLayer
from approx.seam.observe import observe
from zoo import difference, outputs, tiny

SIZE: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
# End of the name of an attention module -> that of the projection that receives its output.
RECEIVERS = {
    "BertModel": ("attention.self", "attention.output.dense"),
    "GPT2LMHeadModel": ("attn", "attn.c_proj"),
    "LlamaForCausalLM": ("self_attn", "self_attn.o_proj"),
    "Wav2Vec2Model": ("attention", "attention.out_proj"),
    "WhisperForConditionalGeneration": ("_attn", "_attn.out_proj"),
}


def converted(architecture, *rules):
    model = tiny(architecture)
    surgery.convert(model, Plan(rules))
    return model


def received(model, architecture):
    """Attention modules by path with the inputs of their output projections, in the order of later calls."""
    attention, projection = RECEIVERS[architecture]
    seen = []
    for name, module in model.base_model.named_modules():
        if name.endswith(projection):
            path = name.removesuffix(projection) + attention
            module.register_forward_pre_hook(lambda _, args, path=path: seen.append((path, args[0])))
    return seen


@pytest.mark.parametrize("mechanism", [None, "local"], ids=["stock", "converted"])
@pytest.mark.parametrize("architecture", RECEIVERS)
def test_every_call_is_observed_once_and_in_order_with_the_output_that_the_model_uses(architecture, mechanism):
    model = tiny(architecture)
    sites = anatomy(model.config, type(model)).sites
    if mechanism:
        surgery.convert(model, Plan.of(mechanism))
    inputs = example_inputs(model, 20, batch=2)
    before = outputs(model, inputs)
    seen = received(model, architecture)
    with torch.no_grad(), observe(model, layers={site.path: site.layer for site in sites}) as calls:
        after = model(**inputs).to_tuple()
    assert [call.path for call in calls] == [path for path, _ in seen]
    for call, (_, arguments) in zip(calls, seen, strict=True):
        assert torch.equal(call.output.transpose(1, 2).flatten(2), arguments)
    assert [(call.path, call.layer) for call in calls if call.layer is not None] == [
        (site.path, site.layer) for site in sites
    ]
    crossing = [call for call in calls if call.layer is None]
    assert len(crossing) == (2 if "Whisper" in architecture else 0)
    assert all(call.mechanism is None and call.exact and call.k.shape[2] == 24 for call in crossing)
    for site, call in zip(sites, (call for call in calls if call.layer is not None), strict=True):
        module = model.base_model.get_submodule(site.path)
        assert call.mechanism is getattr(module, "mechanism", None)
        assert call.exact is (mechanism is None)
        assert (call.q.shape[1], call.k.shape[1], call.v.shape[1]) == (site.heads, site.key_heads, site.key_heads)
    assert difference([x for x in after if torch.is_tensor(x) and x.is_floating_point()], before) < 1e-5


def test_converted_layers_have_the_numbers_of_their_config():
    model = converted("LlamaForCausalLM", Rule("local", "1", {"left": 3}))
    with torch.no_grad(), observe(model) as calls:
        model(**example_inputs(model, 12))
    assert [call.layer for call in calls] == [None, 1, None]
    assert calls[1].k.shape == (1, 2, 12, 8)


@pytest.mark.parametrize("mechanism", [None, "local", "linear"])
def test_steps_of_decoding_show_the_keys_of_all_tokens(mechanism):
    model = tiny("GPT2LMHeadModel")
    if mechanism:
        surgery.convert(model, Plan.of(mechanism))
    ids = torch.randint(5, 100, (1, 9))
    how = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    alone = model.generate(ids, **how)
    with observe(model) as calls:
        watched = model.generate(ids, **how)
    assert torch.equal(watched, alone)
    assert [call.q.shape[2] for call in calls] == [9] * 3 + [1] * 9
    assert [call.k.shape[2] for call in calls] == [9] * 3 + [10] * 3 + [11] * 3 + [12] * 3
    # Afterwards the layers use their bounded states again.
    after = model.generate(ids, return_dict_in_generate=True, **how)
    layers = (after.get("cache") or after.past_key_values).layers
    assert all(isinstance(layer, StateLayer) is (mechanism is not None) for layer in layers)


def test_free_slots_of_a_static_cache_are_not_shown():
    model = converted("LlamaForCausalLM", Rule("local", "all", {"left": 3}))
    ids = torch.randint(5, 100, (2, 9))
    with observe(model) as calls:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, min_new_tokens=3, cache_implementation="static"
        )
    assert [call.k.shape[2] for call in calls] == [9] * 3 + [10] * 3 + [11] * 3
    assert all(call.mask is None for call in calls)


def test_a_layer_of_several_mechanisms_is_one_call_with_a_part_for_each_group():
    near = {"left": 2, "right": 2}
    model = converted(
        "BertModel", Rule("linear", heads="1,3"), Rule("local", settings=near, heads="0,2", exact_below=30)
    )
    with torch.no_grad(), observe(model) as calls:
        model(**example_inputs(model, 20, batch=2, padded=6))
    assert [call.layer for call in calls] == [0, 1, 2]
    for call in calls:
        assert isinstance(call.mechanism, HeadGroups)
        assert not call.exact
        parts = call.members()
        assert {type(part.mechanism).__name__: part.exact for part in parts} == {
            "LinearAttention": False,
            "LocalAttention": True,
        }
        for part in parts:
            assert part.output.shape == part.q.shape == part.k.shape == (2, 2, 20, 8)
            assert part.mechanism is not None
            if not part.exact:
                torch.testing.assert_close(part.mechanism(part.q, part.k, part.v, part.mask), part.output)


def test_a_layer_below_its_limit_is_observed_as_exact():
    model = converted("BertModel", Rule("local", "all", {"left": 1, "right": 1}, exact_below=16))
    asked = []
    for module in model.modules():
        if isinstance(module, Mechanism):
            module.register_forward_hook(lambda *_: asked.append(1))
    with torch.no_grad(), observe(model) as calls:
        model(**example_inputs(model, 15))
        assert not asked
        model(**example_inputs(model, 16))
    assert [(call.exact, call.q.shape[2]) for call in calls] == [(True, 15)] * 3 + [(False, 16)] * 3
    short = calls[0]
    assert short.mechanism is not None
    expected = F.scaled_dot_product_attention(short.q, short.k, short.v, scale=short.mechanism.scale)
    torch.testing.assert_close(short.output, expected)


@pytest.mark.parametrize("mechanism", [None, "adaptive-span"], ids=["stock", "converted"])
def test_gradients_reach_projections_and_mechanisms(mechanism):
    model = tiny("BertModel")
    if mechanism:
        surgery.convert(model, Plan.of(mechanism, max_span=10, ramp=4))
    with observe(model) as calls:
        model(**example_inputs(model, 20, batch=2, padded=5))
    calls[-1].output.square().sum().backward(retain_graph=True)
    for layer in model.encoder.layer:
        attention = layer.attention.self
        learned = [attention.query.weight, attention.key.weight, attention.value.weight]
        learned += [*attention.mechanism.parameters()] if mechanism else []
        assert len(learned) == (4 if mechanism else 3)
        assert all(each.grad is not None and bool(each.grad.any()) for each in learned)
    model.zero_grad()
    (calls[1].q.sum() + calls[1].k.sum() + calls[1].v.sum()).backward()
    assert model.encoder.layer[1].attention.self.value.weight.grad.any()
    assert model.encoder.layer[2].attention.self.value.weight.grad is None


@pytest.mark.parametrize("convert", [False, True], ids=["stock", "converted"])
@pytest.mark.parametrize("architecture", ["BertModel", "GPT2LMHeadModel", "LlamaForCausalLM", "Wav2Vec2Model"])
def test_masks_mark_real_keys_and_are_none_if_all_are(architecture, convert):
    model = tiny(architecture)
    if convert:
        surgery.convert(model, Plan.of("local"))
    with torch.no_grad(), observe(model) as calls:
        model(**example_inputs(model, 20, batch=2, padded=6))
        model(**example_inputs(model, 20, batch=2))
    real = torch.ones(2, 20, dtype=torch.bool)
    real[1, 14:] = False
    assert all(call.mask is not None and torch.equal(call.mask, real) for call in calls[:3])
    assert [call.mask for call in calls[3:]] == [None] * 3


def test_shows_the_tokens_that_the_mechanism_reads():
    marked = {"window": 4, "global_tokens": "separator", "separator": 5}
    model = converted(
        "BertModel", Rule("linear", "1-2"), Rule("longformer", "0", marked), Rule("longformer", "1", marked, heads="0")
    )
    ids = torch.randint(4, 8, (2, 20))
    with torch.no_grad(), observe(model) as calls:
        model(ids)
    assert all(call.tokens is not None and torch.equal(call.tokens, ids) for call in calls[:2])
    assert calls[2].tokens is None
    assert [part.tokens is not None for part in calls[1].members()] == [True, False]


def test_changes_before_a_layer_attends_reach_its_output_and_the_next_layer():
    model = converted("BertModel", Rule("adaptive-span", "all", {"max_span": 10, "ramp": 4}))
    inputs = example_inputs(model, 20)
    messages = []

    def widen(call):
        messages.append(("before", call.layer, hasattr(call, "output")))
        call.mechanism.fraction.fill_(0.0)

    with torch.no_grad():
        with observe(model, lambda call: messages.append(("after", call.layer, call.output)), before=widen) as calls:
            changed = model(**inputs)[0]
        assert torch.equal(model(**inputs)[0], changed)
    assert calls == []
    assert [entry[:2] for entry in messages] == [(when, layer) for layer in range(3) for when in ("before", "after")]
    assert [entry[2] for entry in messages[::2]] == [False] * 3


def test_does_not_store_calls_passed_to_a_function():
    model, alive = tiny("BertModel"), []

    def on_call(call):
        gc.collect()
        assert not any(each() for each in alive)
        alive.append(weakref.ref(call))

    with torch.no_grad(), observe(model, on_call):
        model(**example_inputs(model, 20))
    assert len(alive) == 3


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
@pytest.mark.parametrize("convert", [False, True], ids=["stock", "converted"])
def test_leaves_the_model_unchanged(convert, fails):
    text = transformers.LlamaConfig(**SIZE, vocab_size=101, max_position_embeddings=64)
    seen = transformers.CLIPVisionConfig(**SIZE, image_size=24, patch_size=8)
    # Its parts have separate configs, with different implementations.
    model: Any = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=seen)
    )
    model.eval().set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    if convert:
        surgery.convert(model, Plan.of("local"))

    def state():
        configs = model.config, model.config.text_config, model.config.vision_config
        hooks = [{**module._forward_hooks, **module._forward_pre_hooks} for module in model.modules()]
        registered = [set(each().valid_keys()) for each in (AttentionInterface, AttentionMaskInterface)]
        attributes = [sorted(vars(module)) for module in model.modules()]
        return [each._attn_implementation for each in configs], hooks, registered, attributes

    def fail(call):
        if fails:
            raise KeyError("stop")

    inputs = {"input_ids": torch.randint(5, 90, (1, 20))}
    expected, before = outputs(model, inputs), state()
    for on_call, before_it in ((fail, None), (None, fail)):
        with (
            pytest.raises(KeyError, match="stop") if fails else nullcontext(),
            observe(model, on_call, before=before_it),
        ):
            outputs(model, inputs)
        assert state() == before
    assert difference(outputs(model, inputs), expected) == 0


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("architecture", ["BertModel", "GPT2LMHeadModel"])
def test_calls_are_observed_without_gradients_too(architecture, mode):
    model = converted(architecture, Rule("linear"))
    with mode(), observe(model) as calls:
        model(**example_inputs(model, 20))
    assert len(calls) == 3
    assert not any(call.output.requires_grad for call in calls)
    assert all(call.output.is_inference() is (mode is torch.inference_mode) for call in calls)


def test_a_model_that_does_not_dispatch_its_attention_is_refused():
    model = transformers.DebertaV2Model(transformers.DebertaV2Config(**SIZE, vocab_size=101)).eval()
    before = model.config._attn_implementation
    with pytest.raises(ApproxError, match="instead of dispatching it") as caught, observe(model):
        pytest.fail("it was observed")
    assert caught.value.exit_code == Exit.UNSUPPORTED
    assert model.config._attn_implementation == before
