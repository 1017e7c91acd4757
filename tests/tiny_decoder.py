"""A GPT-2 of a few kilobytes with its tokenizer."""

from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing

from approx.conversion import surgery
from approx.mechanisms import MECHANISMS
from approx.planning.plan import Plan
from tiny_classifier import WORDS, tiny_tokenizer
from zoo import tiny


def tiny_gpt2(positions: int = 64, mechanism: str | None = None, **settings: Any) -> Any:
    """Random weights, large enough for varied texts; no word ends a text."""
    model = tiny(
        "GPT2LMHeadModel",
        3,
        vocab_size=len(WORDS),
        n_positions=positions,
        initializer_range=0.6,
        eos_token_id=None,
        bos_token_id=None,
    )
    if mechanism:
        surgery.convert(model, Plan.of(mechanism, **{**MECHANISMS[mechanism].published, **settings}))
    return model


def save(model: Any, folder: Path) -> Path:
    """Write a model with the tokenizer, which adds no special tokens."""
    model.save_pretrained(folder)
    words().save_pretrained(folder)
    return folder


def words() -> Any:
    """A tokenizer without special tokens around a text."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    return tokenizer
