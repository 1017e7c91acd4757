"""Continued texts: their speed and units, draws by the seed, ends, and prompts and tokenizers that do not fit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from approx.errors import ApproxError, Exit
from approx.evaluation.options import BASE
from approx.measuring import prediction
from approx.measuring.measure import in_memory
from approx.measuring.prediction import Parting, continued
from tiny_classifier import WORDS
from tiny_decoder import tiny_gpt2, words

PROMPT = "the film is"


def opened(*models: Any, tokenizers: Any = None) -> dict[str, Any]:
    labels = [BASE, *(f"model {number}" for number in range(1, len(models)))]
    readers = tokenizers or [words()] * len(models)
    return {label: in_memory(model, reader) for label, model, reader in zip(labels, models, readers, strict=True)}


def test_times_are_of_the_first_token_in_milliseconds_and_of_the_others_by_the_second(monkeypatch):
    # The prompt, its first token after 2 s, and then a token in every quarter of a second.
    clock = iter([100.0, 102.0, 102.25, *([7.0, 9.0, *(9.0 + 0.25 * token for token in range(1, 8))] * 2)])
    monkeypatch.setattr(prediction, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    (one,) = continued(opened(tiny_gpt2()), [PROMPT], max_new_tokens=8)
    entry = one.continuations[BASE]
    assert (entry.first_token_ms, entry.tokens_per_second) == (2000.0, 4.0)
    assert len(entry.tokens) == 8


def test_only_the_first_prompt_warms_up_with_each_model(monkeypatch):
    calls: list[tuple[Any, int]] = []
    original = prediction._continue
    monkeypatch.setattr(
        prediction, "_continue", lambda one, ids, new, *more: calls.append((one, new)) or original(one, ids, new, *more)
    )
    both = opened(tiny_gpt2(), tiny_gpt2(mechanism="linear"))
    continued(both, [PROMPT, PROMPT], max_new_tokens=5)
    base, other = both.values()
    assert calls == [(base, 2), (base, 5), (other, 2), (other, 5), (base, 5), (other, 5)]


def test_without_sampling_the_likeliest_is_taken_whatever_the_checkpoint_says():
    model = tiny_gpt2()
    (plain,) = continued(opened(model), [PROMPT], max_new_tokens=8)
    for said in ({"do_sample": True, "temperature": 50.0, "top_k": 3, "top_p": 0.5}, {"num_beams": 4}):
        other = tiny_gpt2()
        other.generation_config.update(**said)
        (one,) = continued(opened(other), [PROMPT], max_new_tokens=8, temperature=9.0, seed=7)
        assert one.continuations[BASE].tokens == plain.continuations[BASE].tokens


def test_draws_are_those_of_generate_with_the_seed_for_every_model_and_prompt():
    model, state = tiny_gpt2(), torch.random.get_rng_state()
    first, again = continued(
        opened(model, model), [PROMPT, PROMPT], max_new_tokens=8, sample=True, temperature=1.7, seed=11
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    ids = torch.tensor([words()(PROMPT)["input_ids"]])
    torch.manual_seed(11)
    due = model.generate(ids, do_sample=True, temperature=1.7, max_new_tokens=8, pad_token_id=0)[0, 3:].tolist()
    for one in (first, again):
        assert [entry.tokens for entry in one.continuations.values()] == [due, due]
        assert one.differences == {"model 1": None}
    (other,) = continued(opened(model), [PROMPT], max_new_tokens=8, sample=True, temperature=0.2, seed=11)
    assert other.continuations[BASE].tokens != due


def test_a_text_that_ends_earlier_differs_where_it_ended():
    base, ending = tiny_gpt2(), tiny_gpt2()
    (plain,) = continued(opened(base), [PROMPT], max_new_tokens=8)
    tokens = plain.continuations[BASE].tokens
    place = next(number for number in range(2, 8) if tokens[number] not in tokens[:number])
    ending.generation_config.eos_token_id = tokens[place]
    (one,) = continued(opened(base, ending), [PROMPT], max_new_tokens=8)
    assert one.continuations["model 1"].tokens == tokens[: place + 1]
    assert one.differences["model 1"] == Parting(place + 2, WORDS[tokens[place + 1]], None)
    (turned,) = continued(opened(ending, base), [PROMPT], max_new_tokens=8)
    assert turned.differences["model 1"] == Parting(place + 2, None, WORDS[tokens[place + 1]])


@pytest.mark.parametrize(("prompt", "new", "remedy"), [(60, 4, None), (60, 5, "4"), (63, 2, "1"), (64, 1, None)])
def test_a_text_may_fill_the_positions_to_the_last(prompt, new, remedy):
    text = "good " * prompt
    if prompt + new == 64:
        (one,) = continued(opened(tiny_gpt2()), [text], max_new_tokens=new)
        assert len(one.continuations[BASE].tokens) == new
        return
    words_of = f"Use at most {remedy} new tokens" if remedy else "Use a shorter prompt"
    with pytest.raises(
        ApproxError, match=f"has {prompt} tokens and {new} more .* takes 64 positions. {words_of}.*{prompt + new}"
    ) as caught:
        continued(opened(tiny_gpt2()), [text], max_new_tokens=new)
    assert caught.value.exit_code == Exit.USAGE


def test_models_with_other_tokenizers_are_not_compared():
    turned = words()
    turned.add_tokens(["film is"])
    with pytest.raises(ApproxError, match="The tokenizers of model 1 and exact differ"):
        continued(opened(tiny_gpt2(), tiny_gpt2(), tokenizers=[words(), turned]), [PROMPT])


def test_the_last_token_of_the_vocabulary_is_read_and_the_next_is_not():
    tokenizer = words()
    tokenizer.add_tokens(["another"])
    # All prompts are checked before any is continued.
    assert continued(opened(tiny_gpt2()), ["long"], max_new_tokens=1)[0].tokens == 1
    with pytest.raises(ApproxError, match=r"has token 14, but the vocabulary of .* is 0-13") as caught:
        continued(opened(tiny_gpt2(), tokenizers=[tokenizer]), [PROMPT, "another"], max_new_tokens=1)
    assert caught.value.exit_code == Exit.UNAVAILABLE
