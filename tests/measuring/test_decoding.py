"""Decoding that is timed: the same tokens as `generate`, from a copy of the prompt's cache, in counted memory."""

import time
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache

from approx import api
from approx.errors import ApproxError, Exit
from approx.evaluation import timing
from approx.evaluation.bench import Contender, bench
from approx.evaluation.options import BASE, CEILING, BenchStage
from approx.evaluation.timing import Runner
from approx.measuring.prediction import Decoder, cache_bytes, decoders, refuse
from approx.seam.attention_free import attention_free
from approx.seam.dispatch import fastest_exact
from tiny_classifier import tiny_model
from tiny_decoder import save, tiny_gpt2
from typed import known
from zoo import tiny


def prompt(length: int = 9) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(4, 14, (2, length), generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("mechanism", [None, "linear", "local"])
def test_decodes_like_generate_every_time(mechanism):
    settings = {"left": 4} if mechanism == "local" else {}
    model, inputs = tiny_gpt2(mechanism=mechanism, **settings), prompt()
    ids = inputs["input_ids"]
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
    )
    decoder = Decoder(model, 5)
    for _ in range(2):
        decoder.begin(inputs)
        assert torch.equal(decoder.run(inputs), whole)
    # Without the preparation it reads the prompt itself.
    assert torch.equal(decoder.run(inputs), whole)
    decoder.begin(inputs)
    assert decoder.run(prompt(4)).shape == (2, 4 + 1 + 5)


def test_decoding_is_greedy_and_never_ends_early_whatever_the_checkpoint_says():
    model, inputs = tiny_gpt2(), prompt()

    def decoded() -> torch.Tensor:
        return Decoder(model, 6).run(inputs)

    expected = decoded()
    for said in ({"do_sample": True, "temperature": 50.0}, {"num_beams": 4}, {"max_new_tokens": 2}):
        before = {name: getattr(model.generation_config, name) for name in said}
        model.generation_config.update(**said)
        assert torch.equal(decoded(), expected), said
        model.generation_config.update(**before)
    # Every row is decoded to its last token, without the one that would end it.
    ends = int(expected[0, 11])
    model.generation_config.update(eos_token_id=ends)
    assert decoded().shape == expected.shape
    assert ends not in decoded()[:, 9:]


def test_contenders_are_the_base_in_its_ways_and_the_variants(monkeypatch):
    base, converted, inputs = tiny_gpt2(), tiny_gpt2(mechanism="linear"), prompt()
    inside = []

    @contextmanager
    def noted(model):
        inside.append(model)
        with fastest_exact(model):
            yield

    monkeypatch.setattr("approx.measuring.prediction.fastest_exact", noted)
    made = decoders({BASE: base, "own": converted}, 4)
    assert [(one.name, one.role) for one in made] == [
        (BASE, "base"),
        ("fastest way", "exact"),
        (CEILING, "ceiling"),
        ("own", "variant"),
    ]
    for one, expected in zip(
        made, (Decoder(base, 4), Decoder(base, 4), Decoder(base, 4, attention_free), Decoder(converted, 4)), strict=True
    ):
        assert one.begin is not None
        one.begin(inputs)
        assert torch.equal(known(cast(Any, one.run(inputs))), expected.run(inputs)), one.name
        assert inside == ([base] if one.name != BASE else [])
        assert (one.cache_mb is None) == (one.name == "fastest way")
        assert one.cache_mb is None or one.cache_mb() == expected.cache_mb() > 0


def test_the_cache_of_both_kinds_of_attention_is_counted_and_shared_memory_once():
    def filled(tokens: int) -> DynamicCache:
        cache = DynamicCache()
        for layer in range(2):
            cache.update(torch.zeros(1, 2, tokens, 4), torch.zeros(1, 2, tokens, 4), layer)
        return cache

    assert cache_bytes(filled(3)) == 2 * 2 * 2 * 3 * 4 * 4
    assert cache_bytes(EncoderDecoderCache(filled(3), filled(5))) == 2 * 2 * 2 * (3 + 5) * 4 * 4
    state, half = torch.zeros(10), torch.zeros(7, dtype=torch.bfloat16)
    layer = SimpleNamespace(keys=state, values=state[:5], notes={"of": {"one": half}, "length": 3}, other=None)
    assert cache_bytes(SimpleNamespace(layers=[layer])) == 40 + 14


@pytest.mark.parametrize(
    "architecture", ["BartForConditionalGeneration", "WhisperForConditionalGeneration", "ViTForImageClassification"]
)
def test_refuses_encoder_decoders_and_models_without_text(architecture):
    with pytest.raises(ApproxError, match=f"A {architecture} does not continue a text"):
        refuse(tiny(architecture))


def test_the_cache_of_exact_attention_holds_every_token_and_that_of_a_state_does_not_grow():
    sizes = {}
    for mechanism in (None, "linear"):
        for length in (9, 30):
            decoder, inputs = Decoder(tiny_gpt2(mechanism=mechanism), 5), prompt(length)
            decoder.run(inputs)
            sizes[mechanism, length] = decoder.cache_mb() * 1e6
    # 3 layers, keys and values, 2 rows, 32 numbers of 4 bytes.
    assert {length: sizes[None, length] for length in (9, 30)} == {
        length: 3 * 2 * 2 * (length + 5) * 32 * 4 for length in (9, 30)
    }
    assert sizes["linear", 9] == sizes["linear", 30] > 0


def test_without_attention_tokens_differ():
    model, inputs = tiny_gpt2(), prompt()
    assert not torch.equal(Decoder(model, 5).run(inputs), Decoder(model, 5, attention_free).run(inputs))


def test_accepts_only_models_that_continue_a_text():
    with pytest.raises(ApproxError, match="BertForSequenceClassification does not continue a text") as caught:
        decoders({BASE: tiny_model(2)}, 4)
    assert caught.value.exit_code == Exit.UNSUPPORTED


def test_a_record_of_decoding_has_its_rate_and_its_cache(tmp_path):
    folder = save(tiny_gpt2(mechanism="linear"), tmp_path / "linear")
    asked = {"mode": "generate", "new_tokens": 4, "rounds": 3, "seconds": 0.0, "device": "cpu"}
    made = api.bench(str(folder), [8, 40], **asked)
    assert [(row.mode, row.length, row.new_tokens) for row in made.speed] == [
        ("generate", 8, 4),
        ("generate", 40, 4),
    ]
    short, long = made.speed
    assert all((entry.tokens_per_second or 0) > 0 for row in made.speed for entry in (row.base, *row.variants))
    assert (long.base.cache_mb or 0) * 12 == pytest.approx((short.base.cache_mb or 0) * 44)
    assert long.variants[0].cache_mb == short.variants[0].cache_mb
    assert all((entry.prompt_ms or 0) > 0 for row in made.speed for entry in (row.base, *row.variants))
    assert {entry.mode for entry in made.crossover} == {"generate"}
    with pytest.raises(ApproxError, match=r"Length 61, with 4 new tokens, is too long: .* takes 64.*--max-length 65"):
        api.bench(str(folder), [61], **asked)


def test_prepares_each_repetition_outside_the_timing(monkeypatch):
    timed_calls, order = [], []
    of = timing.timed

    def note(call, repeats, device):
        timed_calls.append(repeats)
        return of(call, repeats, device)

    monkeypatch.setattr("approx.evaluation.timing.timed", note)

    def contender(name: str, **role) -> Contender:
        return Contender(name, lambda q: order.append(name), begin=lambda q: order.append(f"to {name}"), **role)

    contenders = [contender("exact", role="base"), contender("other", cache_mb=lambda: 1.5)]
    how = {"make_inputs": lambda batch, length: None, "device": "cpu", "dtype": "float32", "warm_up_seconds": 0.0}
    sizes = {"lengths": [16], "batches": [2], "rounds": 3, "seconds": 0.0}
    (made,) = bench(contenders, BenchStage(mode="generate", new_tokens=4, **sizes), **how)
    assert [order[at] for at in range(0, len(order), 2)] == [f"to {name}" for name in order[1::2]]
    # The state that a call used up cannot serve another.
    assert set(timed_calls) == {1}
    assert (made.mode, made.new_tokens) == ("generate", 4)
    (variant,) = made.variants
    # A batch of two.
    assert variant.tokens_per_second == pytest.approx(2 * 4 * 1e3 / known(variant.median_ms))
    assert (variant.cache_mb, made.base.cache_mb) == (1.5, None)
    (forward,) = bench(contenders, BenchStage(**sizes), **how)
    assert (forward.new_tokens, forward.base.tokens_per_second) == (None, None)


def test_prompts_are_read_in_turns_and_the_faster_exact_attention_counts():
    order: list[str] = []

    def reading(name: str, seconds: float):
        def read() -> None:
            order.append(name)
            time.sleep(seconds)

        return read

    def runner(*prompts: Callable[[], object], **more: Any) -> Runner:
        return Runner(lambda: None, prompts=list(prompts), **more)

    base = runner(reading("sdpa", 0.2), reading("other", 0.001))
    other, none = runner(reading("variant", 0.001)), runner()
    lost = runner(reading("lost", 0.0), status=timing.OUT_OF_MEMORY)
    steps: list[tuple[int, int]] = []
    timing.read_prompts([base, other, none, lost], torch.device("cpu"), lambda *step: steps.append(step))
    assert steps == [(done, 9) for done in range(9)]
    assert order == ["sdpa", "other", "variant"] * 3
    assert known(base.prompt_ms) < 200
    assert known(other.prompt_ms) > 0.9
    assert (none.prompt_ms, lost.prompt_ms) == (None, None)
