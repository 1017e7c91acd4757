"""Train a small Wav2Vec2 with a CTC task head on a few utterances, as a speech model to convert without a real checkpoint.

    python bench/speech_model.py -o runs/speech-model --utterances ../shared/data/librispeech/test-other

It starts from random weights and trains for some ten minutes on one thread. It is evaluated on its training data, so it shows how
a conversion changes a model that has memorised its inputs, and nothing about speech recognition.
"""

import argparse
import json
import string
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    Wav2Vec2Processor,
)

from approx.checkpoints.atomic_folder import atomic_folder, refuse_existing
from approx.tasks.librispeech import LibriSpeech
from approx.tasks.task import Example
from approx.tasks.transcription import RATE

STEPS, BATCH, LEARNING, WARM_UP = 500, 10, 1e-3, 50
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "|")


def make_processor() -> Wav2Vec2Processor:
    """Letters, the apostrophe and the word boundary; normalised audio, with an attention mask."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "vocab.json"
        vocabulary = (*SPECIAL, *string.ascii_uppercase, "'")
        path.write_text(json.dumps({character: index for index, character in enumerate(vocabulary)}))
        tokenizer = Wav2Vec2CTCTokenizer(str(path))
    return Wav2Vec2Processor(Wav2Vec2FeatureExtractor(return_attention_mask=True, do_normalize=True), tokenizer)


def make_model(processor: Any) -> Wav2Vec2ForCTC:
    """The untrained model: frames of 20 ms like its larger relatives, four layers of four heads."""
    config = Wav2Vec2Config(
        vocab_size=len(processor.tokenizer),
        pad_token_id=processor.tokenizer.pad_token_id,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        conv_dim=(32, 64, 128),
        conv_kernel=(10, 8, 4),
        conv_stride=(10, 8, 4),
        feat_extract_norm="layer",
        do_stable_layer_norm=True,
        num_conv_pos_embeddings=32,
        num_conv_pos_embedding_groups=8,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        final_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        ctc_loss_reduction="mean",
        ctc_zero_infinity=True,
    )
    return Wav2Vec2ForCTC(config)


def train(model: Wav2Vec2ForCTC, processor: Any, examples: list[Example], steps: int, seed: int) -> None:
    """Train in place, on batches of utterances of similar length."""
    random = np.random.default_rng(seed)
    sounds = [example.inputs["recording"].decoded(RATE) for example in examples]
    order = sorted(range(len(sounds)), key=lambda row: len(sounds[row]))
    batches = [order[start : start + BATCH] for start in range(0, len(order), BATCH)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING, betas=(0.9, 0.98), weight_decay=0.01)
    turns = [batch for _ in range(-(-steps // len(batches))) for batch in random.permutation(len(batches))]
    started = time.process_time()
    model.train()
    for step, turn in enumerate(turns[:steps], start=1):
        rows = batches[turn]
        inputs = processor.feature_extractor(
            [sounds[row] for row in rows], sampling_rate=RATE, padding=True, return_tensors="pt"
        )
        spelled = processor.tokenizer([examples[row].label for row in rows], padding=True, return_tensors="pt")
        labels = spelled["input_ids"].masked_fill(spelled["attention_mask"] == 0, -100)
        optimizer.param_groups[0]["lr"] = LEARNING * min(step / WARM_UP, 2 * (steps - step + 1) / steps, 1.0)
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0:
            seconds = time.process_time() - started
            print(f"step {step:4d} of {steps}  loss {loss.item():.3f}  {seconds:.0f} s", flush=True)
    model.eval()


def main() -> None:
    """Train and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--utterances", type=Path, required=True, help="a folder in LibriSpeech's layout: test-other")
    parser.add_argument("--force", action="store_true", help="replace the folder if it exists")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    refuse_existing(arguments.out, force=arguments.force)
    # One thread adds in a fixed order: the same seed gives the same model on the same machine.
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    processor = make_processor()
    model = make_model(processor)
    examples = LibriSpeech("test-other").load(arguments.utterances).examples
    train(model, processor, examples, STEPS, arguments.seed)
    with atomic_folder(arguments.out, force=arguments.force) as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)


if __name__ == "__main__":
    main()
