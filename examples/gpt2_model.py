"""Train a small GPT-2 on English texts, and compare its perplexity with those of n-gram models.

    python examples/gpt2_model.py -o runs/gpt2 --encoder MINILM --tokenizer ../shared/data/tokenizers/gpt2 \\
        --data ../shared/data

`--data` holds the texts: `longdocs`, `imdb` and `squad`, written as WikiText writes: with spaces around punctuation.
The perplexities are those of the validation split of WikiText-2, `lm/wikitext-2`, which none of them is part of.

The model starts from random weights, except for its embeddings: those of the words in a real BERT, MiniLM, reduced to
its size. A model of this size that has read a few million tokens is a weak one. It shows what a conversion changes in a
working GPT-2, and no more. `model/` is the checkpoint, `text.txt` the texts, `figures.json` the perplexities.
"""

import argparse
import gzip
import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2 import GPT2Tokenizer

import approx
from approx.checkpoints.atomic_folder import atomic_folder, refuse_existing

LAYERS, HEADS, HIDDEN, POSITIONS = 6, 4, 256, 512
STEPS, BATCH, LENGTH, LEARNING = 1000, 4, POSITIONS, 1e-3
# Of the reviews, this many characters are enough.
REVIEWS = 6_000_000
# Absolute discount of the n-gram models.
DISCOUNT = 0.75
ORDERS = (1, 2, 3)


def texts(data: Path) -> Iterator[str]:
    """Documents, speeches, the articles of SQuAD, and reviews."""
    for name in ("longdocs/brown/train.jsonl.gz", "longdocs/state_union/docs_a.jsonl.gz"):
        yield from (json.loads(line)["text"] for line in _lines(data / name))
    for article in json.loads((data / "squad" / "dev-v2.0.a.json").read_text(encoding="utf-8"))["data"]:
        yield from (paragraph["context"] for paragraph in article["paragraphs"])
    read = 0
    for line in _lines(data / "imdb" / "train.jsonl.gz"):
        read += len(text := json.loads(line)["text"])
        yield text
        if read > REVIEWS:
            return


def _lines(file: Path) -> Iterator[str]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        yield from lines


def spaced(text: str) -> str:
    """A text as WikiText writes it: words and punctuation apart, one paragraph."""
    text = re.sub(r"<br ?/?>", " ", re.sub(r"``|''", '"', text))
    text = re.sub(r"(?<=\w)-(?=\w)", " @-@ ", text)
    return " ".join(re.sub(r"([.,;:!?()\"])(?!\d)", r" \1 ", text).split())


def shuffled(data: Path, seed: int) -> str:
    """All texts, in an order fixed by the seed, a line each."""
    lines = [spaced(text) for text in texts(data)]
    return "\n".join(lines[place] for place in np.random.default_rng(seed).permutation(len(lines))) + "\n"


def embeddings(tokenizer: Any, encoder: str) -> Tensor:
    """Embeddings of BERT for the tokens of GPT-2, reduced to `HIDDEN` numbers by principal components, [V, HIDDEN].

    Source: Minixhofer et al. 2022, "WECHSEL", arXiv 2112.06598, moves a model to other tokens; departs from it: a token
    gets the mean of the pieces that BERT cuts it into.
    """
    bert = AutoTokenizer.from_pretrained(encoder)
    table = AutoModel.from_pretrained(encoder).get_input_embeddings().weight.detach()
    rows = torch.zeros(len(tokenizer), table.shape[1])
    for token in range(len(tokenizer)):
        pieces = bert(tokenizer.decode([token]).strip(), add_special_tokens=False)["input_ids"]
        rows[token] = table[pieces or [bert.unk_token_id]].mean(0)
    rows -= rows.mean(0)
    _, _, directions = torch.linalg.svd(rows, full_matrices=False)
    reduced = rows @ directions[:HIDDEN].T
    # The deviation of GPT-2's own random embeddings.
    return reduced / reduced.std() * 0.02


def make_model(tokenizer: Any, encoder: str) -> GPT2LMHeadModel:
    """The untrained model."""
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=POSITIONS,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(embeddings(tokenizer, encoder))
    return model


def ngram_perplexities(trained: Sequence[int], measured: Sequence[int], vocabulary: int) -> dict[str, float]:
    """Perplexity of interpolated n-gram models of tokens with absolute discounting, by order.

    Source: Ney, Essen and Kneser, 1994, "On structuring probabilistic dependences in stochastic language modelling".
    """
    likely: NDArray[Any] = np.full(len(measured), 1 / vocabulary)
    found = {}
    for order in ORDERS:
        grams, counts = np.unique(_grams(trained, order), axis=0, return_counts=True)
        begun, starts = np.unique(grams[:, :-1], axis=0, return_index=True)
        totals = np.add.reduceat(counts, starts)
        kinds = np.diff([*starts, len(grams)])
        count = dict(zip(map(bytes, grams), counts, strict=True))
        context = dict(zip(map(bytes, begun), zip(totals, kinds, strict=True), strict=True))
        # The first tokens have no whole context.
        for place, gram in enumerate(_grams(measured, order), start=order - 1):
            if known := context.get(bytes(np.ascontiguousarray(gram[:-1]))):
                total, follow = known
                seen = max(count.get(bytes(gram), 0) - DISCOUNT, 0) / total
                likely[place] = seen + DISCOUNT * follow / total * likely[place]
        found[f"{order}-gram"] = float(np.exp(-np.log(likely).mean()))
    return found


def _grams(tokens: Sequence[int], order: int) -> NDArray[np.int32]:
    return np.ascontiguousarray(np.lib.stride_tricks.sliding_window_view(np.asarray(tokens, np.int32), order))


def main() -> None:
    """Train, measure and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--encoder", required=True, help="MiniLM: a folder or a model id of the hub")
    parser.add_argument("--tokenizer", required=True, help="GPT-2's tokenizer: a folder or a model id of the hub")
    parser.add_argument("--data", type=Path, required=True, help="the folder with the texts")
    parser.add_argument("--force", action="store_true", help="replace the folder if it exists")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    refuse_existing(arguments.out, force=arguments.force)
    torch.manual_seed(arguments.seed)
    tokenizer = GPT2Tokenizer.from_pretrained(arguments.tokenizer)
    model = make_model(tokenizer, arguments.encoder)
    started = time.monotonic()

    def progress(what: str, done: int, total: int) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {what}", flush=True)

    with atomic_folder(arguments.out, force=arguments.force) as folder:
        text = folder / "text.txt"
        text.write_text(shuffled(arguments.data, arguments.seed), encoding="utf-8")
        wikitext = arguments.data / "lm" / "wikitext-2" / "valid.raw.txt"
        trained, measured = (tokenizer(file.read_text(encoding="utf-8"))["input_ids"] for file in (text, wikitext))
        print(f"{len(trained):,} tokens of text", flush=True)
        figures = ngram_perplexities(trained, measured, len(tokenizer))
        print(figures, flush=True)
        approx.finetune(
            model,
            processor=tokenizer,
            recover=["clm"],
            text=[str(text)],
            steps=STEPS,
            batch_size=BATCH,
            length=LENGTH,
            learning_rate=LEARNING,
            validation=100,
            bfloat16=True,
            seed=arguments.seed,
            progress=progress,
        )
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        made = approx.evaluate(str(folder / "model"), "lm", data=str(wikitext), fresh=True)
        figures["model"] = made.quality[0].base.scores["perplexity"]
        (folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
