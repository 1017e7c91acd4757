"""A text read in order: windows, memories and states give the outputs of plain loops, in memory that stays the same."""

import json
import math

import pytest
import torch
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
)

from approx.conversion import surgery
from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import Subject, evaluate
from approx.finetuning.finetune import finetune
from approx.finetuning.options import FinetuneStage
from approx.finetuning.trainer import Segments
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from approx.tasks import open_task
from approx.tasks.carrying import Carried
from tiny_classifier import WORDS, tiny_tokenizer

TEXT = " ".join(WORDS[4 + (index * index) % 10] for index in range(150))
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TOKENS = {"vocab_size": len(WORDS), "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def gpt2(positions=64):
    return _seeded(
        GPT2LMHeadModel,
        GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=positions, initializer_range=0.5, **TOKENS),
    )


def llama(positions=64):
    return _seeded(
        LlamaForCausalLM,
        LlamaConfig(**SIZE, **TOKENS, num_key_value_heads=1, max_position_embeddings=positions, initializer_range=0.3),
    )


def _seeded(kind, config):
    torch.manual_seed(1)
    return kind(config).eval()


def ids(count=150):
    return tiny_tokenizer()(TEXT, add_special_tokens=False, return_tensors="pt")["input_ids"][:, :count]


def read_all(model, tokens, carry, window, stride, sinks=None):
    carried = Carried(model, carry, window, stride, sinks)
    with torch.inference_mode():
        return torch.cat([carried.read(some) for some in tokens.split([*carried.steps(tokens.shape[1])], 1)], 1)


def entry(model, tmp_path, **settings):
    (tmp_path / "test.txt").write_text(TEXT)
    return evaluate({"exact": Subject("exact", model, tiny_tokenizer())}, open_task("lm", **settings), data=tmp_path)


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("stretch", [60, 10_000])
@pytest.mark.parametrize(("window", "stride"), [(16, 5), (32, 31), (64, 32)])
def test_recompute_is_the_strided_perplexity_of_transformers(tmp_path, make, stretch, window, stride):
    model, tokens = make(), ids()
    loss, count, before = 0.0, 0, 0
    # https://huggingface.co/docs/transformers/perplexity
    for begin in range(0, tokens.shape[1], stride):
        end = min(begin + window, tokens.shape[1])
        labels = tokens[:, begin:end].clone()
        labels[:, : before - end] = -100
        scored = int((labels[:, 1:] != -100).sum())
        if scored:
            with torch.no_grad():
                loss += model(input_ids=tokens[:, begin:end], labels=labels).loss.item() * scored
        count, before = count + scored, end
        if end == tokens.shape[1]:
            break
    made = entry(model, tmp_path, carry="recompute", window=window, stride=stride, stretch=stretch)
    assert made.base.scores["perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-6)
    assert count == tokens.shape[1] - 1


@pytest.mark.parametrize("make", [gpt2, llama])
def test_flush_reads_windows_that_know_nothing_of_one_another(make):
    model, tokens = make(), ids()
    with torch.inference_mode():
        apart = torch.cat([model(some).logits for some in tokens.split(24, 1)], 1)
    torch.testing.assert_close(read_all(model, tokens, "flush", 24, 12), apart)


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize(("carry", "window", "stride"), [("segments", 64, 63), ("flush", 64, 1)])
def test_a_text_within_one_segment_is_one_forward_pass(make, carry, window, stride):
    model, tokens = make(), ids(63)
    with torch.inference_mode():
        torch.testing.assert_close(read_all(model, tokens, carry, window, stride), model(tokens).logits)


@pytest.mark.parametrize("sinks", [0, None, 15])
@pytest.mark.parametrize("make", [gpt2, llama])
def test_segments_see_the_first_and_the_last_keys_and_no_others(make, sinks):
    """The memory is what a mask of the same shape lets through, layer by layer, of a model with as many positions."""
    model, tokens = make(256), ids()
    window, stride = 24, 8
    rows = torch.arange(150)
    segment = rows[:, None] // stride
    first = 4 if sinks is None else sinks
    seen = (rows <= rows[:, None]) & ((rows >= segment * stride - (window - stride - first)) | (rows < first))
    mask = torch.zeros(150, 150).masked_fill(~seen, torch.finfo(torch.float32).min)[None, None]
    with torch.inference_mode():
        expected = model(tokens, attention_mask=mask).logits
    got = read_all(model, tokens, "segments", window, stride, sinks)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_positions_within_the_window_change_no_distance():
    """Kept keys are rotated back when positions end; a model with more positions never has to."""
    short, long = llama(24), llama(4096)
    long.load_state_dict(short.state_dict())
    near, far = (read_all(model, ids(), "segments", 24, 8, sinks=0) for model in (short, long))
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)


def test_first_tokens_stay_where_they_are_when_others_are_rotated_back():
    """Positions after the turn are those of a text without the tokens in between."""
    # In one layer, kept keys depend on their own token alone.
    model, tokens = llama(24), ids(32)
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    carried = Carried(model, "segments", 24, 8, sinks=3)
    with torch.inference_mode():
        *_, got = [carried.read(some) for some in tokens.split(8, 1)]
        expected = model(torch.cat([tokens[:, :3], tokens[:, 11:]], 1), use_cache=False).logits[:, -8:]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_part_of_a_head_may_be_rotated():
    sizes = {**SIZE, "vocab_size": len(WORDS), "rotary_pct": 0.5, "initializer_range": 0.3}
    short, long = (
        _seeded(GPTNeoXForCausalLM, GPTNeoXConfig(**sizes, max_position_embeddings=count)) for count in (24, 4096)
    )
    near, far = (read_all(model, ids(), "segments", 24, 8, sinks=0) for model in (short, long))
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("mechanism", "settings"),
    [("linear", {}), ("performer", {}), ("sinks", {"sinks": 2, "window": 6}), ("local", {"left": 6})],
)
@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_state_read_in_chunks_is_one_forward_pass(make, mechanism, settings):
    model, tokens = make(256), ids()
    model = converted(model, mechanism, settings)
    with torch.inference_mode():
        expected = model(tokens).logits
    torch.testing.assert_close(read_all(model, tokens, "state", 2, 16), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("carry", "mechanism"),
    [("segments", None), ("recompute", None), ("flush", None)]
    + [("state", name) for name in ("linear", "sinks", "local")],
)
@pytest.mark.parametrize("make", [gpt2, llama])
def test_memory_stays_the_same(make, carry, mechanism):
    model = make(32)
    if mechanism is not None:
        model = converted(model, mechanism, {"local": {"left": 6}, "sinks": {"window": 6}}.get(mechanism, {}))
    carried = Carried(model, carry, 24, 8)
    sizes = []
    with torch.inference_mode():
        for some in ids().repeat(1, 8).split([*carried.steps(1200)], 1):
            carried.read(some)
            sizes.append(carried.state_bytes)
    # Windows fill first; the text may end with a shorter segment.
    assert len(set(sizes[30:-1])) == 1
    if carry == "segments":
        config = model.config
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        assert sizes[5] == 2 * 2 * heads * 16 * (32 // config.num_attention_heads) * 4
    assert not carried.grows


@pytest.mark.parametrize("carry", ["recompute", "flush", "segments"])
def test_reading_token_by_token_sees_no_more_than_the_window(carry):
    model, tokens = llama(), ids()
    carried = Carried(model, carry, 16, 8)
    with torch.inference_mode():
        for token in tokens.split(1, 1):
            logits = carried.read(token)
            assert logits.isfinite().all()
            assert carried.state_bytes <= 2 * 2 * 16 * 16 * 4


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("carry", ["recompute", "flush", "segments"])
def test_writes_beyond_the_positions(make, carry):
    model = make(32)
    written = Carried(model, carry, 32, 16).write(ids(50), 40)
    assert written.shape == (1, 90)
    torch.testing.assert_close(written[:, :50], ids(50))
    # Within the window it is greedy decoding.
    expected = model.generate(ids(5), max_new_tokens=10, do_sample=False, attention_mask=torch.ones(1, 5))
    torch.testing.assert_close(Carried(model, carry, 32, 16).write(ids(5), 10), expected)


def test_refuses_what_a_model_cannot_carry(tmp_path):
    def refusal(model, exit_code=Exit.UNSUPPORTED, **settings):
        with pytest.raises(ApproxError) as raised:
            entry(model, tmp_path, **settings)
        assert raised.value.exit_code == exit_code
        assert "\n" not in str(raised.value)
        return str(raised.value)

    without = _seeded(OpenAIGPTLMHeadModel, OpenAIGPTConfig(n_embd=32, n_layer=1, n_head=2, n_positions=64, **TOKENS))
    assert "OpenAIGPTLMHeadModel keeps none" in refusal(without, carry="segments")
    entry(without, tmp_path, carry="recompute", window=16)
    sliding = _seeded(MistralForCausalLM, MistralConfig(**SIZE, **TOKENS, num_key_value_heads=1, sliding_window=8))
    assert "have a DynamicSlidingWindowLayer" in refusal(sliding, carry="segments")
    entry(sliding, tmp_path, carry="state")
    state = converted(gpt2(), "linear", {})
    assert "have a StateLayer" in refusal(state, carry="segments")
    assert "keeps all keys of GPT2LMHeadModel, which has 64 positions" in refusal(gpt2(), carry="state")
    assert "'window' of the task 'lm' is 65, but the limit is 64" in refusal(
        gpt2(), Exit.USAGE, carry="segments", window=65
    )
    assert "allowed is one of recompute, flush, segments, state" in refusal(gpt2(), Exit.USAGE, carry="all")
    assert "none with carry=flush" in refusal(gpt2(), Exit.USAGE, carry="flush", stride=3)
    assert "none without carry=segments" in refusal(gpt2(), Exit.USAGE, carry="flush", sinks=3)
    assert "allowed is a whole number from 0 to 15" in refusal(
        gpt2(), Exit.USAGE, carry="segments", window=24, stride=8, sinks=16
    )
    assert "none with carry=state" in refusal(gpt2(), Exit.USAGE, carry="state", window=3)
    encoder = _seeded(
        BertLMHeadModel, BertConfig.from_dict({**SIZE, "vocab_size": len(WORDS), "max_position_embeddings": 64})
    )
    assert "needs a causal model" in refusal(encoder, carry="segments")


def test_a_record_has_state_and_time_and_slices_by_the_place_in_the_text(tmp_path):
    model = converted(llama(256), "sinks", {"sinks": 2, "window": 6})
    (tmp_path / "test.txt").write_text(TEXT)
    subjects = {name: Subject(name, one, tiny_tokenizer()) for name, one in (("exact", llama(256)), ("sinks", model))}
    made = evaluate(subjects, open_task("lm", carry="state", stride=16, stretch=100), data=tmp_path)
    base, sinks = made.base.carried, made.variants[0].carried
    assert base is not None
    assert sinks is not None
    # All keys of the exact model, and of the converted one those of two first tokens and some last ones.
    assert (base.tokens, sinks.tokens) == (149, 149)
    assert base.state_bytes == 2 * 2 * 149 * 16 * 4
    assert base.reached == 149
    # Rings have some room.
    assert sinks.state_bytes < base.state_bytes / 2
    assert sinks.reached < 60
    assert base.seconds > 0
    assert [part.to for part in made.variants[0].slices] == [16, 32, 64, 128, 256]


@pytest.mark.parametrize("make", [gpt2, llama])
def test_trains_on_segments_without_a_gradient_to_the_memory(make):
    model, tokens = make(256), ids(40)
    objective = Segments(Carried(model, "segments", 24, 8))
    loss = objective.loss(model, model, {"input_ids": tokens, "labels": tokens.clone()})
    with torch.inference_mode():
        logits = read_all(model.eval(), tokens[:, :-1], "segments", 24, 8)
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(logits[0], tokens[0, 1:]).item(), rel=1e-5)
    # The loss of one segment alone reaches no embedding of the tokens before it.
    carried = Carried(model, "segments", 24, 8)
    table = model.get_input_embeddings()
    seen = []

    def keep(module, args, out):
        out.retain_grad()
        seen.append(out)

    table.register_forward_hook(keep)
    carried.read(tokens[:, :8])
    carried.read(tokens[:, 8:16]).sum().backward()
    assert seen[0].grad is None
    assert seen[1].grad.abs().sum() > 0


def test_finetune_carries_segments(tmp_path):
    texts = [" ".join(WORDS[4 + (row * index + index // 3) % 10] for index in range(48)) for row in range(60)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    def trained(carry, **settings):
        options = FinetuneStage(
            recover=["task"],
            task="lm",
            data=str(tmp_path / "train.jsonl"),
            settings={"carry": carry, **settings},
            length=64,
            steps=3,
            batch_size=8,
            validation=5,
            evaluate_every=3,
        )
        return finetune(llama(128), tiny_tokenizer(), options, folder=tmp_path / carry)

    made = trained("segments", window=16, stride=8)
    assert made.steps == 3
    for wrong, words in (({"carry": "state"}, "a way to evaluate"), ({"carry": "recompute"}, "a way to evaluate")):
        with pytest.raises(ApproxError, match=words):
            trained(**wrong)


def converted(model, mechanism, settings):
    surgery.convert(model, Plan((Rule(mechanism, "all", settings),)), calibration=example_inputs(model, 24))
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize(("carry", "mechanism"), [("segments", None), ("state", "sinks"), ("state", "linear")])
def test_a_million_tokens_need_no_more_memory_than_the_first_thousands(carry, mechanism):
    model = llama(4096)
    if mechanism is not None:
        model = converted(model, mechanism, {})
    carried = Carried(model, carry, 2048, 1024)
    sizes = []
    with torch.inference_mode():
        for _ in range(1_000_000 // 1024 + 1):
            assert carried.read(torch.randint(len(WORDS), (1, 1024))).isfinite().all()
            sizes.append(carried.state_bytes)
    assert len(set(sizes[4:])) == 1
