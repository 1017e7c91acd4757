"""Train a classifier of texts of up to 2,048 tokens, and write the texts to measure it on.

    python examples/long_documents_model.py reviews -o runs/long-documents \\
        --start ../shared/checkpoints/minilm-sst2 --reviews ../shared/data/longdocs/movie_reviews/train.jsonl.gz \\
        --imdb ../shared/data/imdb
    python examples/long_documents_model.py genres -o runs/genres \\
        --start ../shared/checkpoints/minilm-sst2 --brown ../shared/data/longdocs/brown/train.jsonl.gz

It starts from a BERT fine-tuned on SST-2, extends its positions like `--max-length`, and trains the upper half of the
layers with exact attention, on one thread, for a few minutes. Batches hold a similar number of tokens at every length,
so most of the texts are truncated to fit a small budget. Settings were not tuned, except for the genres: fifteen of
them were learned badly (28 % right of 193 at 512 tokens), so they are merged into four, as the corpus groups them.
`model/` is the checkpoint; the .jsonl files beside it hold held-out texts: movie reviews and IMDb, or half of the Brown
corpus, whose other half is trained on, whole and from later words on. None of them belongs in a repository.
"""

import argparse
import gzip
import hashlib
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from approx.checkpoints.atomic_folder import atomic_folder, refuse_existing
from approx.planning import positions

POSITIONS = 2048
# Reviews of IMDb that are certainly longer than 512 tokens.
IMDB_WORDS = 700


class Course(NamedTuple):
    """Training rows, and test rows by file; `labels` are the classes, None for those of the initial checkpoint."""

    labels: list[str] | None
    learnt: list[dict[str, Any]]
    tests: dict[str, list[dict[str, Any]]]


class Phase(NamedTuple):
    """This many steps on batches of texts truncated to one length."""

    length: int
    steps: int
    batch: int


PHASES = {
    "reviews": (Phase(256, 24, 16), Phase(512, 24, 8), Phase(1024, 16, 4), Phase(2048, 8, 2)),
    # Four classes instead of two, none of them known to the initial checkpoint.
    "genres": (Phase(256, 48, 16), Phase(512, 36, 8), Phase(1024, 16, 4), Phase(2048, 8, 2)),
}
# Francis and Kučera, 1979, Brown Corpus Manual: genres A to C, D to H, J, and K to R.
GENRES = {
    "press": ("news", "editorial", "reviews"),
    "general": ("religion", "hobbies", "lore", "belles_lettres", "government"),
    "learned": ("learned",),
    "fiction": ("fiction", "mystery", "science_fiction", "adventure", "romance", "humor"),
}
# One in this many is held out: of the reviews, and of the few documents of Brown.
HELD_OUT = {"reviews": 8, "genres": 2}
# Training also uses documents from later words on: a new text starts every so many words, and none is shorter.
STRIDE = 250
RATE, WARM_UP = 1e-4, 0.1


def digest(name: str) -> bytes:
    """A reproducible random number for a text."""
    return hashlib.sha256(name.encode()).digest()


def held_out(name: str, course: str) -> bool:
    """Whether a text is held out."""
    return digest(name)[0] % HELD_OUT[course] == 0


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl.gz: `id`, `text` and `label`, or `genre`."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def open_start(folder: Path, labels: list[str] | None) -> tuple[Any, Any]:
    """Tokenizer and model, with longer positions and only the upper layers trainable; with a new task head for new labels."""
    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=POSITIONS)
    head: dict[str, Any] = {}
    if labels is not None:
        head = {"id2label": dict(enumerate(labels)), "label2id": {name: number for number, name in enumerate(labels)}}
        head["ignore_mismatched_sizes"] = True
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, **head)
    positions.resize(model, POSITIONS)
    layers = model.base_model.encoder.layer
    for part in (model.base_model.embeddings, *layers[: len(layers) // 2]):
        part.requires_grad_(False)
    return tokenizer, model


def train(model: Any, tokenizer: Any, rows: list[dict[str, Any]], phases: tuple[Phase, ...], seed: int) -> None:
    """Train in place; lengths alternate in an order drawn once, and every text is seen before any is repeated."""
    random = np.random.default_rng(seed)
    order = random.permutation([number for number, phase in enumerate(phases) for _ in range(phase.steps)])
    waiting: list[int] = []
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.01)
    started, total = time.process_time(), len(order)
    model.train()
    for step, number in enumerate(order, start=1):
        phase = phases[number]
        if len(waiting) < phase.batch:
            waiting += random.permutation(len(rows)).tolist()
        chosen, waiting = waiting[: phase.batch], waiting[phase.batch :]
        texts = [rows[row]["text"] for row in chosen]
        inputs = tokenizer(texts, truncation=True, max_length=phase.length, padding=True, return_tensors="pt")
        labels = torch.tensor([rows[row]["label"] for row in chosen])
        optimizer.param_groups[0]["lr"] = RATE * min(
            step / (WARM_UP * total), (total - step + 1) / (total * (1 - WARM_UP))
        )
        loss = model(**inputs, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 4 == 0:
            seconds = time.process_time() - started
            print(
                f"step {step:3d} of {total}  {phase.length:5d} tokens  loss {loss.item():.3f}  {seconds:.0f} s",
                flush=True,
            )
    model.eval().requires_grad_(True)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows for the task `documents`, in an order independent of their labels, since `limit` takes the first."""
    rows = sorted(rows, key=lambda row: digest(row["id"]))
    lines = (json.dumps({key: row[key] for key in ("id", "text", "label")}, ensure_ascii=False) for row in rows)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def of_reviews(arguments: argparse.Namespace) -> Course:
    """Movie reviews, some of them held out, and the long reviews of IMDb in its own splits."""
    reviews = read(arguments.reviews)
    long = {
        split: [
            row
            for path in sorted(arguments.imdb.glob(f"{split}*.jsonl.gz"))
            for row in read(path)
            if len(row["text"].split()) > IMDB_WORDS
        ]
        for split in ("train", "test")
    }
    tests = [row for row in reviews if held_out(row["id"], "reviews")]
    # The same film may be reviewed in both, but not with the same text.
    learnt = [row for row in reviews if not held_out(row["id"], "reviews")] + long["train"]
    return Course(None, learnt, {"movie-reviews": tests, "imdb": long["test"]})


def of_genres(arguments: argparse.Namespace) -> Course:
    """The documents of Brown by groups of genres, half of them held out; the others also from later words on."""
    labels = list(GENRES)
    group = {genre: number for number, genres in enumerate(GENRES.values()) for genre in genres}
    rows = [{"id": row["id"], "text": row["text"], "label": group[row["genre"]]} for row in read(arguments.brown)]
    learnt = [
        {**row, "text": " ".join(words[start:])}
        for row in rows
        if not held_out(row["id"], "genres")
        for words in [row["text"].split()]
        for start in range(0, max(1, len(words) - STRIDE + 1), STRIDE)
    ]
    return Course(labels, learnt, {"brown": [row for row in rows if held_out(row["id"], "genres")]})


def main() -> None:
    """Train, and write the checkpoint and the texts to measure it on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-o", "--out", type=Path, required=True, help="the folder to write")
    common.add_argument("--start", type=Path, required=True, help="a BERT with two classes, negative and positive")
    common.add_argument("--force", action="store_true", help="replace the folder if it exists")
    common.add_argument("--seed", type=int, default=0)
    courses = parser.add_subparsers(dest="course", required=True)
    reviews = courses.add_parser("reviews", parents=[common], help="whether a review is positive")
    reviews.add_argument("--reviews", type=Path, required=True, help="the movie reviews of Pang and Lee, .jsonl.gz")
    reviews.add_argument("--imdb", type=Path, required=True, help="IMDb: train.jsonl.gz and test….jsonl.gz")
    genres = courses.add_parser("genres", parents=[common], help="which group of genres a text of Brown is of")
    genres.add_argument(
        "--brown", type=Path, required=True, help="documents of Brown with `id`, `genre` and `text`, .jsonl.gz"
    )
    arguments = parser.parse_args()
    refuse_existing(arguments.out, force=arguments.force)
    # One thread adds in a fixed order: the same seed gives the same model on the same machine.
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    course = of_reviews(arguments) if arguments.course == "reviews" else of_genres(arguments)
    tokenizer, model = open_start(arguments.start, course.labels)
    train(model, tokenizer, course.learnt, PHASES[arguments.course], arguments.seed)
    with atomic_folder(arguments.out, force=arguments.force) as folder:
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        for name, rows in course.tests.items():
            write(folder / f"{name}.jsonl", rows)


if __name__ == "__main__":
    main()
