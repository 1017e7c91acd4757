"""Train the embedded default: a two-layer BERT that finds a needle in a document of 2,048 tokens.

    python examples/quickstart_model.py -o approx/quickstart --force

It takes two minutes on one core and ends at accuracy 1.000 on 200 held-out documents of 256, 1,024 and 2,048 tokens.
Small in everything but attention (64 numbers per token, 2,048 tokens), so that attention takes nearly all of the time
of a forward pass. Documents grow during training; short ones are placed anywhere in the position table, which trains
all positions at the cost of a few. The answer at [CLS] alone is a sparse signal, so every word is trained too;
a conversion then shows what it shows on large models: many queries that ask nearly the same question.
"""

import argparse
import math
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from approx.checkpoints.atomic_folder import atomic_folder, refuse_existing
from approx.tasks.needle import KEYS, NEEDLES, VALUES, WORDS, Needle

POSITIONS = 2048
HIDDEN = 64
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
FIRST_KEY = len(SPECIAL) + WORDS.index(KEYS[0])
FIRST_NEEDLE = len(SPECIAL) + WORDS.index(NEEDLES[0])
# [CLS], "find" and the key keep their positions; the document after them may be anywhere.
DOCUMENT = 3

CARD = """\
# A BERT that finds needles

The embedded default: a demonstration model for the generated task `needle`, made by
`python examples/quickstart_model.py -o approx/quickstart --force`.
"""


class Phase(NamedTuple):
    """This many steps on batches of documents of one length."""

    length: int
    steps: int
    batch: int
    rate: float


PHASES = (Phase(64, 1000, 64, 3e-3), Phase(256, 150, 32, 3e-3), Phase(1024, 40, 8, 1e-3))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, with BERT's special tokens around the text."""
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    words.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "attention_mask"],
        **dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=True)),
    )


def make_model() -> BertForSequenceClassification:
    """The untrained classifier, with a sinusoidal initial position table."""
    config = BertConfig(
        vocab_size=len(SPECIAL + WORDS),
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.1,
        # Near 1/sqrt(HIDDEN): with 0.02, meant for 768 dimensions, attention would start out uniform.
        initializer_range=0.1,
        id2label=dict(enumerate(VALUES)),
        label2id={value: index for index, value in enumerate(VALUES)},
    )
    model = BertForSequenceClassification(config)
    angles = torch.arange(POSITIONS)[:, None] * torch.exp(-math.log(10000.0) / HIDDEN * torch.arange(0, HIDDEN, 2))
    embeddings = model.bert.embeddings
    with torch.no_grad():
        embeddings.position_embeddings.weight.copy_(0.5 * torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        # Word embeddings at the scale of the positions.
        embeddings.word_embeddings.weight.mul_(5.0)
    return model


def loss(
    model: BertForSequenceClassification, name_key: nn.Module, ids: Tensor, labels: Tensor, offset: Tensor
) -> Tensor:
    """The loss of the task, plus losses for every word's state in the first and the last layer.

    The first layer should know the key and the last the value: a needle its own, any other word those of the question.

    Args:
        model: The model to train.
        name_key: Reads a key from a state of the first layer; discarded after training.
        ids: [B, L].
        labels: [B].
        offset: Position of each document in the table, [B].
    """
    positions = torch.arange(ids.shape[1]).repeat(len(ids), 1)
    positions[:, DOCUMENT:] += offset[:, None]
    outputs = model.bert(input_ids=ids, position_ids=positions, output_hidden_states=True)
    first, last = outputs.hidden_states[1], outputs.last_hidden_state
    pooler = model.get_submodule("bert.pooler.dense")

    def value(state: Tensor) -> Tensor:
        return model.classifier(torch.tanh(pooler(state)))

    is_needle = (ids >= FIRST_NEEDLE) & (ids < FIRST_NEEDLE + len(NEEDLES))
    needles = ids[is_needle] - FIRST_NEEDLE
    total = cross_entropy(value(last[:, 0]), labels)
    for state, read, own, asked in (
        (first, name_key, needles // len(VALUES), ids[:, DOCUMENT - 1] - FIRST_KEY),
        (last, value, needles % len(VALUES), labels),
    ):
        total = total + cross_entropy(read(state[is_needle]), own)
        total = total + cross_entropy(read(state[~is_needle]), asked[:, None].expand_as(ids)[~is_needle])
    return total


def train(model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Train through the phases, in place."""
    random = np.random.default_rng(seed)
    name_key = nn.Linear(HIDDEN, len(KEYS))
    parameters = [*model.parameters(), *name_key.parameters()]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.perf_counter()
    model.train()
    for length, steps, batch, rate in PHASES:
        examples = Needle(length, steps * batch, seed=seed).examples(split="train")
        for step in range(steps):
            rows = examples[step * batch : (step + 1) * batch]
            ids = torch.tensor(tokenizer([row.inputs["text"] for row in rows])["input_ids"])
            labels = torch.tensor([row.label for row in rows])
            offset = torch.from_numpy(random.integers(POSITIONS - length + 1, size=batch))
            optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 50, 3 * (1 - step / steps))
            batch_loss = loss(model, name_key, ids, labels, offset)
            optimizer.zero_grad()
            batch_loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            if (step + 1) % (steps // 5) == 0:
                seconds = time.perf_counter() - started
                print(
                    f"{length:5d} tokens  step {step + 1:4d}  loss {batch_loss.item():.3f}  {seconds:.0f} s", flush=True
                )


@torch.no_grad()
def accuracy(model: BertForSequenceClassification, tokenizer: PreTrainedTokenizerFast, task: Needle) -> float:
    """Share of right answers on held-out documents."""
    model.eval()
    right = 0
    for example in task.examples():
        logits = model(**tokenizer(example.inputs["text"], return_tensors="pt")).logits
        right += int(logits.argmax().item() == example.label)
    return right / task.size


def main() -> None:
    """Train, measure, and write the folder only if the model solves its task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--force", action="store_true", help="replace the folder if it exists")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    refuse_existing(arguments.out, force=arguments.force)
    # One thread adds in a fixed order: the same seed gives the same model on the same machine.
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    tokenizer, model = make_tokenizer(), make_model()
    train(model, tokenizer, arguments.seed)
    for length in (256, 1024, POSITIONS):
        score = accuracy(model, tokenizer, Needle(length, 200, seed=arguments.seed))
        print(f"{length:5d} tokens  accuracy {score:.3f} on 200 held-out documents", flush=True)
        if score < 0.95:
            raise SystemExit("That is below 0.95: nothing was written. Try another seed.")
    with atomic_folder(arguments.out, force=arguments.force) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(CARD, encoding="utf-8")


if __name__ == "__main__":
    main()
