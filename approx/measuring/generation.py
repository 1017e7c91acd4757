"""Let several models continue the same prompts, and find where their texts part."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from approx.checkpoints import checkpoint
from approx.errors import ApproxError, Exit
from approx.measuring.decoding import cache_bytes, refuse
from approx.planning import positions
from approx.recipe import BASE
from approx.seam.transformers_internals import cache_keyword


class _Clock(BaseStreamer):
    """Notes the time at which the prompt begins to be read, and that of every new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Note one more token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: the last token was noted."""


def continued(
    opened: Mapping[str, checkpoint.Checkpoint],
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 50,
    sample: bool = False,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Continue every prompt with every model, one after the other.

    Args:
        opened: Label -> checkpoint of a decoder; the first is the base of all others.
        prompts: The texts to continue.
        max_new_tokens: Maximum number of new tokens; a text may end earlier.
        sample: Whether to draw tokens, with the other settings of the checkpoint, instead of taking the likeliest.
        temperature: Temperature of the drawing.
        seed: Seed of the drawing, the same for every model and prompt.

    Returns:
        For every prompt its `tokens`, by label the `continuations`, and by label of all but the base the first
        `differences` from the base, or None. Times are of a single run.

    Raises:
        ApproxError: if a model does not continue a text, tokenizers differ, or a prompt is empty or too long.
    """
    for one in opened.values():
        refuse(one.model)
    ways: dict[str, Any] = {"do_sample": True, "temperature": temperature}
    if not sample:
        # What the checkpoint says about drawing has no meaning here, and transformers would warn about it.
        ways = {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}
    read = [_read(opened, prompt, max_new_tokens) for prompt in prompts]
    results = []
    for prompt, ids in zip(prompts, read, strict=True):
        said = {}
        for label, one in opened.items():
            if not results:
                # The first call compiles and allocates.
                _continue(one, ids, min(2, max_new_tokens), ways, seed)
            said[label] = _continue(one, ids, max_new_tokens, ways, seed)
        tokenizer = checkpoint.processor(opened[BASE].source)
        results.append(
            {
                "prompt": prompt,
                "tokens": ids.shape[1],
                "continuations": said,
                "differences": {
                    label: _difference(tokenizer, said[BASE]["tokens"], entry["tokens"])
                    for label, entry in said.items()
                    if label != BASE
                },
            }
        )
    return results


def _read(opened: Mapping[str, checkpoint.Checkpoint], prompt: str, new: int) -> Tensor:
    """The tokens of a prompt, [1, L], checked against every model."""
    encoded = {label: checkpoint.processor(one.source)(prompt)["input_ids"] for label, one in opened.items()}
    ids = encoded[BASE]
    if not ids:
        raise ApproxError("The prompt is empty, and there is no token to begin with. Give at least one word.")
    for label, one in opened.items():
        if encoded[label] != ids:
            raise ApproxError(
                f"The tokenizers of {label} and {BASE} differ. Compare a converted checkpoint with the base it was made from."
            )
        vocabulary, limit = one.model.config.get_text_config().vocab_size, positions.limit(one.model.config)
        if max(ids) >= vocabulary:
            raise ApproxError(
                f"The prompt has token {max(ids)}, but the vocabulary of {one.source.name} is 0-{vocabulary - 1}: its "
                "tokenizer belongs to another model. Put the model's own tokenizer into its folder.",
                Exit.UNAVAILABLE,
            )
        if limit is not None and len(ids) + new > limit:
            room = limit - len(ids)
            remedy = f"at most {room} new tokens (--max-new-tokens {room})" if room > 0 else "a shorter prompt"
            raise ApproxError(
                f"The prompt has {len(ids)} tokens and {new} more were asked for, but {one.source.name} takes {limit} "
                f"positions. Use {remedy}, or convert with --max-length {len(ids) + new}."
            )
    return torch.tensor([ids])


def _continue(one: checkpoint.Checkpoint, ids: Tensor, new: int, ways: Mapping[str, Any], seed: int) -> dict[str, Any]:
    tokenizer, clock = checkpoint.processor(one.source), _Clock()
    ids = ids.to(one.model.device)
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        done = one.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, streamer=clock, return_dict_in_generate=True,
            pad_token_id=tokenizer.pad_token_id or 0, **ways,
        )  # fmt: skip
    made = done.sequences[0, ids.shape[1] :].tolist()
    begun, first, *later = clock.times
    return {
        "text": tokenizer.decode(made),
        "tokens": made,
        "first_token_ms": (first - begun) * 1e3,
        "tokens_per_second": len(later) / (later[-1] - first) if later else None,
        "cache_mb": cache_bytes(done[cache_keyword()]) / 1e6,
    }


def _difference(tokenizer: Any, base: Sequence[int], other: Sequence[int]) -> dict[str, Any] | None:
    """The first place, counted from 1, where two texts have different tokens; None if they are equal.

    Where one text ended, its token is None.
    """
    if list(base) == list(other):
        return None
    place = next((n for n, pair in enumerate(zip(base, other, strict=False)) if len(set(pair)) > 1), None)
    place = min(len(base), len(other)) if place is None else place
    words = [tokenizer.decode(ids[place : place + 1]) if place < len(ids) else None for ids in (base, other)]
    return {"token": place + 1, "base": words[0], "own": words[1]}
