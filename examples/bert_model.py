"""Give a BERT encoder a masked language model's head and longer positions.

    python examples/bert_model.py MINILM -o runs/bert --text runs/gpt2/text.txt

The head is new, so it is trained, together with the encoder, on short windows of the text. The position table then
repeats its rows up to `--positions`: inputs of up to 512 tokens give the outputs they gave before, and longer ones have
ambiguous positions until the model is trained on such inputs, by `approx finetune --recover mlm`.
`examples/gpt2_model.py` writes the text.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

import approx
from approx.checkpoints.atomic_folder import atomic_folder, refuse_existing
from approx.planning import positions

STEPS, BATCH, LENGTH, LEARNING = 300, 16, 128, 3e-4


def main() -> None:
    """Train the head and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("encoder", help="a BERT: a folder or a model id of the hub")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--text", type=Path, required=True, help="a text to train on")
    parser.add_argument("--positions", type=int, default=2048, help="tokens of the longest input")
    parser.add_argument("--force", action="store_true", help="replace the folder if it exists")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    refuse_existing(arguments.out, force=arguments.force)
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(arguments.encoder)
    model = AutoModelForMaskedLM.from_pretrained(arguments.encoder)
    started = time.monotonic()

    def progress(what: str, done: int, total: int) -> None:
        print(f"{time.monotonic() - started:6.0f} s  {what}", flush=True)

    with atomic_folder(arguments.out, force=arguments.force) as folder:
        done = approx.finetune(
            model,
            processor=tokenizer,
            recover=["mlm"],
            text=[str(arguments.text)],
            steps=STEPS,
            batch_size=BATCH,
            length=LENGTH,
            learning_rate=LEARNING,
            validation=200,
            bfloat16=True,
            seed=arguments.seed,
            progress=progress,
        )
        print(f"held-out loss of hidden tokens: {done.after:.3f} nats", flush=True)
        positions.resize(model, arguments.positions)
        model.save_pretrained(folder)
        tokenizer.model_max_length = arguments.positions
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
