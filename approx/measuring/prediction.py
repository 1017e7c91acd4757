"""Let several models read one text, recording or image, and put what they predict side by side."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from approx.checkpoints import checkpoint
from approx.errors import ApproxError, Exit
from approx.evaluation.evaluate import Subject, predict, prepare
from approx.planning import positions
from approx.recipe import BASE
from approx.tasks import open_task
from approx.tasks.images import Picture
from approx.tasks.recording import Recording
from approx.tasks.task import Example, Split
from approx.tasks.transcription import RATE
from approx.text_file import read_text

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


def compare(
    opened: Mapping[str, checkpoint.Checkpoint], given: str, *, question: str | None = None, top: int = 5
) -> dict[str, Any]:
    """Predict from one input with every model.

    Args:
        opened: Label -> checkpoint; the first is the base of all others.
        given: A text or the path of a .txt file; the path of a FLAC or WAV file for speech, of an image file for images.
        question: The question to the text, for question answering and only for it.
        top: Number of candidates for each hidden token of a masked language model.

    Returns:
        `kind`, and by label the `predictions`: for `labels` the probability of each (of a regression its value); for
        `tokens` the word, label and probability of each; for `masks` the candidates of each mask with their
        probabilities; for `text` a transcript or an answer.

    Raises:
        ApproxError: if the head predicts nothing, models differ in their head, or the input does not fit the model.
    """
    heads = {label: _head(one) for label, one in opened.items()}
    if len(set(heads.values())) > 1:
        said = ", ".join(f"{label} is a {type(one.model).__name__}" for label, one in opened.items())
        raise ApproxError(f"The models have different heads: {said}. Compare models of one task.", Exit.UNSUPPORTED)
    head = heads[BASE]
    if (question is not None) != (head[1] == "ForQuestionAnswering"):
        used = "needs a question about the text: give it with --question" if question is None else "takes no --question"
        raise ApproxError(f"A {type(opened[BASE].model).__name__} {used}.")
    if head in _TASKS:
        kind, said = "text", _by_task(opened, _TASKS[head], given, question)
    else:
        kind, said = _by_pipeline(opened, _PIPELINES[head], given, top)
    return {"input": given, "question": question, "kind": kind, "predictions": said}


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
    opened: Mapping[str, checkpoint.Checkpoint], name: str, given: str, question: str | None
) -> dict[str, Any]:
    """What the task of an evaluation predicts for the input."""
    limit = positions.limit(opened[BASE].model.config)
    # Windows of a short position table cannot share as much as those of an evaluation.
    shared: dict[str, Any] = {} if question is None or limit is None else {"stride": min(128, limit // 4)}
    task = open_task(name, **shared)
    inputs = {"recording": Recording.of(given, Path(given))} if question is None else {}
    if question is not None:
        inputs = {"question": question, "context": _text(given)}
    split = Split("input", [Example("the input", inputs, "" if question is None else [])], subset=False)
    subjects = [Subject(label, one.model, checkpoint.processor(one.source)) for label, one in opened.items()]
    for subject in subjects:
        task.check(subject.model)
    prepared = prepare(subjects, task, split, batch_size=1)
    return {
        subject.name: predict(subject, task, prepared, device=subject.model.device)[0].strip() for subject in subjects
    }


def _by_pipeline(
    opened: Mapping[str, checkpoint.Checkpoint], name: str, given: str, top: int
) -> tuple[str, dict[str, Any]]:
    """What transformers' pipeline makes of the input, as plain data."""
    said, kind = {}, ""
    for label, one in opened.items():
        reads: Any = _text(given)
        if name in ("audio-classification", "automatic-speech-recognition"):
            sound = Recording.of(given, Path(given)).decoded(RATE)
            reads = {"raw": sound, "sampling_rate": RATE}
        elif name == "image-classification":
            reads = Picture.of(given, Path(given)).decoded()
        else:
            _check_text(one, reads)
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
            kind, said[label] = _plain(name, _pipeline(name, one)(reads, **settings))
    return kind, said


def _pipeline(name: str, one: checkpoint.Checkpoint) -> Any:
    reader = checkpoint.processor(one.source)
    parts = {
        part: getattr(reader, part)
        for part in ("tokenizer", "feature_extractor", "image_processor")
        if getattr(reader, part, None) is not None
    }
    if not parts:
        own = {"input_ids": "tokenizer", "pixel_values": "image_processor"}
        parts = {own.get(one.model.main_input_name, "feature_extractor"): reader}
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
        # A single mask is not in a list of its own.
        masks = outputs if isinstance(outputs[0], list) else [outputs]
        return "masks", [{one["token_str"].strip(): float(one["score"]) for one in mask} for mask in masks]
    return "labels", {one["label"]: float(one["score"]) for one in outputs}


def _text(given: str) -> str:
    """A text, or the content of a .txt file."""
    if not given.endswith(".txt"):
        return given
    return read_text(Path(given), settable=False)


def _check_text(one: checkpoint.Checkpoint, text: str) -> None:
    """Raise if a text does not fit a model, which would fail deep inside."""
    tokenizer = checkpoint.processor(one.source)
    ids, limit = tokenizer(text, verbose=False)["input_ids"], positions.limit(one.model.config)
    if not set(ids) - set(tokenizer.all_special_ids):
        raise ApproxError("The input has no tokens: its text is empty. Give at least one word.")
    if limit is not None and len(ids) > limit:
        raise ApproxError(
            f"The input has {len(ids)} tokens, the limit is {limit} (the positions of {one.source.name}). Shorten it, or convert "
            f"with --max-length {len(ids)} to extend them."
        )
    if max(ids) >= one.model.config.get_text_config().vocab_size:
        raise ApproxError(
            f"The input has token {max(ids)}, but the vocabulary of {one.source.name} is 0-{one.model.config.get_text_config().vocab_size - 1}: its "
            "tokenizer belongs to another model. Put the model's own tokenizer into its folder.",
            Exit.UNAVAILABLE,
        )
