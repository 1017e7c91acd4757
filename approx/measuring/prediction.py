"""Let several models read or continue one text, recording or image, and put what they predict side by side."""

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from approx.checkpoints import checkpoint
from approx.errors import ApproxError, Exit
from approx.evaluation.bench import Contender
from approx.evaluation.evaluate import Subject, predict, prepare
from approx.evaluation.options import BASE, CEILING
from approx.planning import positions
from approx.seam.attention_free import attention_free
from approx.seam.dispatch import fastest_exact
from approx.seam.internals import cache_keyword
from approx.tasks import open_task
from approx.tasks.images import Picture
from approx.tasks.recording import Recording
from approx.tasks.task import Example, Split
from approx.tasks.transcription import RATE
from approx.text_file import read_text


class Decoder:
    """Greedy decoding by one model, each time from a copy of the cache that holds the prompt.

    Args:
        model: A decoder of text.
        new_tokens: Tokens to decode.
        within: Context of all calls of the model, such as `attention_free`.
    """

    def __init__(
        self,
        model: Any,
        new_tokens: int,
        within: Callable[[Any], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._model, self._new_tokens, self._within = model, new_tokens, within
        self._inputs: Any = None
        self._read: tuple[Tensor, Any] | None = None
        self._cache: Any = None
        self._bytes = 0

    def begin(self, inputs: dict[str, Tensor]) -> None:
        """Read the prompt `inputs["input_ids"]` [B, L], once for each object, and copy its cache, so that `run` only decodes."""
        if self._read is None or inputs is not self._inputs:
            self._read = None
            cache = DynamicCache(config=self._model.config)
            self._inputs, self._read = inputs, (self._generated(inputs["input_ids"], cache, 1), cache)
        self._cache = copy.deepcopy(self._read[1])

    def run(self, inputs: dict[str, Tensor]) -> Tensor:
        """Decode the new tokens.

        Returns:
            The prompt, the token after it, and the new tokens, [B, L + 1 + new].
        """
        if self._cache is None or inputs is not self._inputs:
            self.begin(inputs)
        assert self._read is not None  # `begin` has read the prompt
        ids = self._generated(self._read[0], self._cache, self._new_tokens)
        self._bytes, self._cache = cache_bytes(self._cache), None
        return ids

    def prompt(self, inputs: dict[str, Tensor]) -> Tensor:
        """Read a prompt into a cache of its own and write the token after it, [B, L + 1]."""
        return self._generated(inputs["input_ids"], DynamicCache(config=self._model.config), 1)

    def cache_mb(self) -> float:
        """Megabytes of the cache after the last token of the last `run`."""
        return self._bytes / 1e6

    def _generated(self, ids: Tensor, cache: Any, count: int) -> Tensor:
        with self._within(self._model):
            # No row ends early, so nothing is padded.
            return self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                num_beams=1,
                pad_token_id=0,
                **{cache_keyword(): cache},
            )


def decoders(models: Mapping[str, Any], new_tokens: int) -> list[Contender]:
    """Contenders that decode; the first model is the base, which also runs without attention.

    Raises:
        ApproxError: if a model does not continue a text.
    """
    for model in models.values():
        refuse(model)

    def contender(name: str, decoder: Decoder, **role: Any) -> Contender:
        ways = {"begin": decoder.begin, "cache_mb": decoder.cache_mb, "prompt": decoder.prompt}
        return Contender(name, decoder.run, **ways, **role)

    base = models[BASE]
    decoder = Decoder(base, new_tokens)

    def fastest(inputs: Any) -> Tensor:
        with fastest_exact(base):
            return decoder.run(inputs)

    def read(inputs: Any) -> Tensor:
        with fastest_exact(base):
            return decoder.prompt(inputs)

    return [
        contender(BASE, decoder, role="base"),
        Contender("fastest way", fastest, "exact", begin=decoder.begin, prompt=read),
        contender(CEILING, Decoder(base, new_tokens, attention_free), role="ceiling"),
        *(contender(label, Decoder(model, new_tokens)) for label, model in models.items() if label != BASE),
    ]


def refuse(model: Any) -> None:
    """Raise if a model does not continue a text.

    Raises:
        ApproxError: naming what it is.
    """
    causal = model.can_generate() and not model.config.is_encoder_decoder and model.main_input_name == "input_ids"
    if not causal:
        raise ApproxError(
            f"A {type(model).__name__} does not continue a text. Only decoders with a language-modelling head do, such "
            "as GPT-2 and Llama; for other models there are `approx predict` and `approx bench` without --mode.",
            Exit.UNSUPPORTED,
        )


def cache_bytes(cache: Any) -> int:
    """Bytes of the tensors in a KV cache of transformers, with the states and notes of converted layers."""
    storages: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, dict):
            for each in value.values():
                visit(each)

    # The cache of an encoder-decoder holds one for each kind of attention.
    parts = [part for name in ("self_attention_cache", "cross_attention_cache") if (part := getattr(cache, name, None))]
    for one in parts or [cache]:
        for layer in one.layers:
            visit(vars(layer))
    return sum(storages.values())


class _Clock(BaseStreamer):
    """Notes the time at which the prompt begins to be read, and that of every new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Note one more token."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing: the last token was noted."""


@dataclass(frozen=True)
class Continuation:
    """What one model writes after a prompt, as text and as token ids, and how fast in a single run."""

    text: str
    tokens: list[int]
    first_token_ms: float
    tokens_per_second: float | None
    cache_mb: float


@dataclass(frozen=True)
class Parting:
    """The first place, counted from 1, where a text differs from the base's; a token is None where a text ended."""

    token: int
    base: str | None
    own: str | None


@dataclass(frozen=True)
class Continued:
    """A prompt of so many tokens, and by label what each model writes after it, and where that differs from the base."""

    prompt: str
    tokens: int
    continuations: dict[str, Continuation]
    differences: dict[str, Parting | None]


def continued(
    opened: Mapping[str, checkpoint.Checkpoint],
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 50,
    sample: bool = False,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[Continued]:
    """Continue every prompt with every model, one after the other.

    Args:
        opened: Label -> checkpoint of a decoder; the first is the base of all others.
        prompts: The texts to continue.
        max_new_tokens: Maximum number of new tokens; a text may end earlier.
        sample: Whether to draw tokens, with the other settings of the checkpoint, instead of taking the likeliest.
        temperature: Temperature of the drawing.
        seed: Seed of the drawing, the same for every model and prompt.

    Raises:
        ApproxError: if a model does not continue a text, tokenizers differ, or a prompt is empty or too long.
    """
    for one in opened.values():
        refuse(one.model)
    ways: dict[str, Any] = {"do_sample": True, "temperature": temperature}
    if not sample:
        # Sampling settings of the checkpoint do not apply here, and transformers would warn about them.
        ways = {"do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None}
    read = [_read(opened, prompt, max_new_tokens) for prompt in prompts]
    results = []
    for prompt, ids in zip(prompts, read, strict=True):
        outputs = {}
        for label, one in opened.items():
            if not results:
                # The first call compiles and allocates.
                _continue(one, ids, min(2, max_new_tokens), ways, seed)
            outputs[label] = _continue(one, ids, max_new_tokens, ways, seed)
        tokenizer = checkpoint.processor(opened[BASE].source)
        results.append(
            Continued(
                prompt,
                ids.shape[1],
                continuations=outputs,
                differences={
                    label: _difference(tokenizer, outputs[BASE].tokens, entry.tokens)
                    for label, entry in outputs.items()
                    if label != BASE
                },
            )
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
                f"The tokenizers of {label} and {BASE} differ. Compare a converted checkpoint with the base it was "
                "made from."
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
                f"The prompt has {len(ids)} tokens and {new} more are to follow, but {one.source.name} takes {limit} "
                f"positions. Use {remedy}, or convert with --max-length {len(ids) + new}."
            )
    return torch.tensor([ids])


def _continue(one: checkpoint.Checkpoint, ids: Tensor, new: int, ways: Mapping[str, Any], seed: int) -> Continuation:
    tokenizer, clock = checkpoint.processor(one.source), _Clock()
    ids = ids.to(one.model.device)
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        done = one.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            streamer=clock,
            return_dict_in_generate=True,
            pad_token_id=tokenizer.pad_token_id or 0,
            **ways,
        )
    made = done.sequences[0, ids.shape[1] :].tolist()
    begun, first, *later = clock.times
    return Continuation(
        text=tokenizer.decode(made),
        tokens=made,
        first_token_ms=(first - begun) * 1e3,
        tokens_per_second=len(later) / (later[-1] - first) if later else None,
        cache_mb=cache_bytes(done[cache_keyword()]) / 1e6,
    )


def _difference(tokenizer: Any, base: Sequence[int], other: Sequence[int]) -> Parting | None:
    """The first place where two texts have different tokens; None if they are equal."""
    if list(base) == list(other):
        return None
    place = next((n for n, pair in enumerate(zip(base, other, strict=False)) if len(set(pair)) > 1), None)
    place = min(len(base), len(other)) if place is None else place
    words = [tokenizer.decode(ids[place : place + 1]) if place < len(ids) else None for ids in (base, other)]
    return Parting(place + 1, *words)


# Main input and ending of the class's name -> what transformers' pipeline for it is called.
_PIPELINES = {
    ("input_ids", "ForSequenceClassification"): "text-classification",
    ("input_ids", "ForTokenClassification"): "token-classification",
    ("input_ids", "ForMaskedLM"): "fill-mask",
    ("input_values", "ForSequenceClassification"): "audio-classification",
    ("input_features", "ForConditionalGeneration"): "automatic-speech-recognition",
    ("pixel_values", "ForImageClassification"): "image-classification",
}
# Heads that the tasks of `evaluate` read: the prediction is the one that would be scored.
_TASKS = {
    ("input_values", "ForCTC"): "librispeech/test-clean",
    ("input_ids", "ForQuestionAnswering"): "squad",
}
# Whisper reads longer recordings in pieces, which it finds by its own time stamps.
_WHISPER_SECONDS = 30


@dataclass(frozen=True)
class Predicted:
    """What every model predicts from one input.

    Attributes:
        input: The text or path.
        question: The question to it.
        kind: What the predictions are.
        predictions: By label: for `labels` the probability of each (of a regression its value); for `tokens` the word,
            label and probability of each; for `masks` the candidates of each mask with their probabilities; for `text`
            a transcript or an answer.
    """

    input: str
    question: str | None
    kind: str
    predictions: dict[str, Any]


def compare(
    opened: Mapping[str, checkpoint.Checkpoint], source: str, *, question: str | None = None, top: int = 5
) -> Predicted:
    """Predict from one input with every model.

    Args:
        opened: Label -> checkpoint; the first is the base of all others.
        source: A text or the path of a .txt file; the path of a FLAC or WAV file for speech, of an image file for
            images.
        question: The question to the text, for question answering and only for it.
        top: Number of candidates for each hidden token of a masked language model.

    Raises:
        ApproxError: if the head predicts nothing, models differ in their head, or the input does not fit the model.
    """
    heads = {label: _head(one) for label, one in opened.items()}
    if len(set(heads.values())) > 1:
        classes = ", ".join(f"{label} is a {type(one.model).__name__}" for label, one in opened.items())
        raise ApproxError(f"The models have different heads: {classes}. Compare models of one task.", Exit.UNSUPPORTED)
    head = heads[BASE]
    if (question is not None) != (head[1] == "ForQuestionAnswering"):
        used = "needs a question about the text: give it with --question" if question is None else "takes no --question"
        raise ApproxError(f"A {type(opened[BASE].model).__name__} {used}.")
    if head in _TASKS:
        kind, predictions = "text", _by_task(opened, _TASKS[head], source, question)
    else:
        kind, predictions = _by_pipeline(opened, _PIPELINES[head], source, top)
    return Predicted(source, question, kind, predictions)


def _head(one: checkpoint.Checkpoint) -> tuple[str, str]:
    """The main input of a model and the ending of its class that names its head."""
    name, reads = one.source.stock_class.__name__, one.model.main_input_name
    for head in (*_PIPELINES, *_TASKS):
        if head[0] == reads and name.endswith(head[1]):
            return head
    remedy = "`approx generate` continues texts" if one.model.can_generate() else "use a checkpoint with a task head"
    endings = ", ".join(dict.fromkeys(ending for _, ending in (*_PIPELINES, *_TASKS)))
    raise ApproxError(f"{name} predicts nothing to compare; heads that do are {endings}: {remedy}.", Exit.UNSUPPORTED)


def _by_task(
    opened: Mapping[str, checkpoint.Checkpoint], name: str, source: str, question: str | None
) -> dict[str, Any]:
    """What the task of an evaluation predicts for the input."""
    limit = positions.limit(opened[BASE].model.config)
    # Windows of a short position table cannot share as much as those of an evaluation.
    shared: dict[str, Any] = {} if question is None or limit is None else {"stride": min(128, limit // 4)}
    task = open_task(name, **shared)
    inputs = {"recording": Recording.of(source, Path(source))} if question is None else {}
    if question is not None:
        inputs = {"question": question, "context": text_of(source)}
    split = Split("input", [Example("the input", inputs, "" if question is None else [])], subset=False)
    subjects = [Subject(label, one.model, checkpoint.processor(one.source)) for label, one in opened.items()]
    for subject in subjects:
        task.check(subject.model)
    prepared = prepare(subjects, task, split, batch_size=1)
    return {
        subject.name: predict(subject, task, prepared, device=subject.model.device)[0].strip() for subject in subjects
    }


def _by_pipeline(
    opened: Mapping[str, checkpoint.Checkpoint], name: str, source: str, top: int
) -> tuple[str, dict[str, Any]]:
    """What transformers' pipeline makes of the input, as plain data."""
    predictions, kind = {}, ""
    for label, one in opened.items():
        reads: Any = text_of(source)
        if name in ("audio-classification", "automatic-speech-recognition"):
            sound = Recording.of(source, Path(source)).decoded(RATE)
            reads = {"raw": sound, "sampling_rate": RATE}
        elif name == "image-classification":
            reads = Picture.of(source, Path(source)).decoded()
        else:
            check_text(one, reads)
        settings: dict[str, Any] = {}
        if name.endswith("classification") and name != "token-classification":
            settings = {"top_k": one.model.config.num_labels}
            if one.model.config.num_labels == 1:
                settings["function_to_apply"] = "none"
        elif name == "fill-mask":
            settings = {"top_k": top}
        elif name == "automatic-speech-recognition":
            settings = {"return_timestamps": len(reads["raw"]) > _WHISPER_SECONDS * RATE}
        with torch.inference_mode():
            kind, predictions[label] = _plain(name, _pipeline(name, one)(reads, **settings))
    return kind, predictions


def _pipeline(name: str, one: checkpoint.Checkpoint) -> Any:
    reader = checkpoint.processor(one.source)
    parts = {
        part: getattr(reader, part)
        for part in ("tokenizer", "feature_extractor", "image_processor")
        if getattr(reader, part, None) is not None
    }
    if not parts:
        keys = {"input_ids": "tokenizer", "pixel_values": "image_processor"}
        parts = {keys.get(one.model.main_input_name, "feature_extractor"): reader}
    return transformers.pipeline(name, model=one.model, device=one.model.device, **parts)  # type: ignore[call-overload]  # the name is one of the table's


def _plain(name: str, outputs: Any) -> tuple[str, Any]:
    """Kind and prediction of what a pipeline returns."""
    if name == "automatic-speech-recognition":
        return "text", outputs["text"].strip()
    if name == "token-classification":
        return "tokens", [
            {"word": one["word"], "label": one["entity"], "probability": float(one["score"])} for one in outputs
        ]
    if name == "fill-mask":
        # A single mask is not in a nested list.
        masks = outputs if isinstance(outputs[0], list) else [outputs]
        return "masks", [{one["token_str"].strip(): float(one["score"]) for one in mask} for mask in masks]
    return "labels", {one["label"]: float(one["score"]) for one in outputs}


def text_of(source: str) -> str:
    """A text, or the content of a .txt file.

    Raises:
        ApproxError: if the file cannot be read.
    """
    if not source.endswith(".txt"):
        return source
    return read_text(Path(source), settable=False)


def check_text(one: checkpoint.Checkpoint, text: str) -> None:
    """Raise if a text does not fit a model, which would fail deep inside.

    Raises:
        ApproxError: if it is empty or has no known word, is longer than the model's positions, or the tokenizer is of another
            model.
    """
    tokenizer = checkpoint.processor(one.source)
    ids, limit = tokenizer(text, verbose=False)["input_ids"], positions.limit(one.model.config)
    if not set(ids) - set(tokenizer.all_special_ids):
        if text.strip():
            raise ApproxError(
                "The tokenizer of this model knows no word of the input. Give a text of words that it knows."
            )
        raise ApproxError("The input has no tokens: its text is empty. Give at least one word.")
    if limit is not None and len(ids) > limit:
        raise ApproxError(
            f"The input has {len(ids)} tokens, the limit is {limit} (the positions of {one.source.name}). Shorten it, "
            f"or convert with --max-length {len(ids)} to extend them."
        )
    if max(ids) >= one.model.config.get_text_config().vocab_size:
        raise ApproxError(
            f"The input has token {max(ids)}, but the vocabulary of {one.source.name} is "
            f"0-{one.model.config.get_text_config().vocab_size - 1}: its tokenizer belongs to another model. Put the "
            "model's own tokenizer into its folder.",
            Exit.UNAVAILABLE,
        )
