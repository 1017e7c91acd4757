"""Tiny models of seven families with their tokenizers and processors, converted; and what they compute."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import ViTImageProcessorPil, WhisperFeatureExtractor, WhisperTokenizer

from approx.conversion import convert, surgery
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from approx_kernels.dispatch.implementation import implementation
from converted import auto_class
from tiny_classifier import WORDS, tiny_tokenizer
from tiny_decoder import words
from tiny_speech import recogniser, sound, speech_processor
from zoo import tiny

# Family -> head -> the pipeline that runs it. The first is converted as `approx convert` does it, the others in memory.
HEADS: dict[str, dict[str, str | None]] = {
    "bert": {
        "BertForSequenceClassification": "text-classification",
        "BertForTokenClassification": "token-classification",
        "BertForQuestionAnswering": "question-answering",
        "BertForMaskedLM": "fill-mask",
        "BertModel": "feature-extraction",
    },
    "roberta": {
        "RobertaForMaskedLM": "fill-mask",
        "RobertaForSequenceClassification": "text-classification",
        "RobertaForQuestionAnswering": "question-answering",
        "RobertaModel": "feature-extraction",
    },
    "gpt2": {
        "GPT2LMHeadModel": "text-generation",
        "GPT2ForSequenceClassification": "text-classification",
        "GPT2Model": "feature-extraction",
    },
    "llama": {
        "LlamaForCausalLM": "text-generation",
        "LlamaForSequenceClassification": "text-classification",
        "LlamaModel": "feature-extraction",
    },
    "wav2vec2": {
        "Wav2Vec2ForCTC": "automatic-speech-recognition",
        "Wav2Vec2ForSequenceClassification": "audio-classification",
        "Wav2Vec2Model": None,
    },
    "vit": {"ViTForImageClassification": "image-classification", "ViTModel": "image-feature-extraction"},
    "whisper": {"WhisperForConditionalGeneration": "automatic-speech-recognition"},
}
# A window and a recurrent state, neither of them drawn at random.
PLAN = Plan((Rule("local", "all", {"left": 2, "right": 2}), Rule("linear", "1")))
CAUSAL = Plan((Rule("local", "all", {"left": 2}), Rule("linear", "1")))


def write(family: str, folder: Path) -> list[str]:
    """Write a folder for each head of a family, and beside it `<head>.json`, its inputs and what it computes of them.

    Returns:
        The names of the heads.
    """
    plan = CAUSAL if family in ("gpt2", "llama", "whisper") else PLAN
    for place, (head, task) in enumerate(HEADS[family].items()):
        model, base, out = _model(head), folder / f"{head}.base", folder / head
        if place == 0:
            _save_reader(family, base)
            model.save_pretrained(base)
            convert.convert(base, out, plan)
        surgery.convert(model, plan)
        if place > 0:
            model.save_pretrained(out)
            _save_reader(family, out)
        inputs = example_inputs(model, 16, batch=2)
        # In a folder without the package there is plain PyTorch alone.
        with torch.no_grad(), implementation("plain"):
            expected = model(**inputs)[0].contiguous()
        save_file({**inputs, "expected": expected}, folder / f"{head}.safetensors")
        (folder / f"{head}.json").write_text(json.dumps({"auto": auto_class(head), "pipeline": task}))
    np.save(folder / "sound.npy", sound(0.7))
    pixels = np.random.default_rng(0).integers(0, 255, (30, 40, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    return list(HEADS[family])


def _model(head: str) -> Any:
    more: dict[str, Any] = {"vocab_size": len(WORDS) + 1}
    if head == "Wav2Vec2ForCTC":
        return recogniser()
    if head.startswith("Whisper"):
        more = {"vocab_size": len(_whisper_tokenizer()), "max_source_positions": 50, "max_length": 12}
    return tiny(head, **({} if head.startswith(("Wav2Vec2", "ViT")) else more))


def _save_reader(family: str, folder: Path) -> None:
    """Write what turns texts, recordings or images into inputs."""
    if family == "wav2vec2":
        speech_processor(folder).save_pretrained(folder)
    elif family == "vit":
        ViTImageProcessorPil(size={"height": 24, "width": 24}).save_pretrained(folder)
    elif family == "whisper":
        _whisper_tokenizer().save_pretrained(folder)
        WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(folder)
    else:
        tokenizer = words() if family in ("gpt2", "llama") else tiny_tokenizer()
        tokenizer.add_special_tokens({"mask_token": "[MASK]"})
        tokenizer.model_max_length = 32
        if family != "bert":
            tokenizer.model_input_names = ["input_ids", "attention_mask"]
        tokenizer.save_pretrained(folder)


def _whisper_tokenizer() -> WhisperTokenizer:
    """A token for each byte, and those that the pipeline asks for."""
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = WhisperTokenizer(vocab=letters, merges=[])
    special = ["<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer
