"""Write an archive of a folder that every later version must load: python tests/checkpoints/golden.py NAME."""

import gzip
import io
import os
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertForSequenceClassification

from approx.checkpoints import checkpoint
from approx.conversion import convert
from approx.planning.plan import Plan
from approx_kernels.dispatch.implementation import implementation

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "checkpoints" / "golden"


def main(name: str) -> None:
    sys.path.insert(0, str(TESTS))
    from tiny_classifier import tiny_tokenizer

    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 64
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    config.vocab_size, config.max_position_embeddings = len(tokenizer), 64
    with tempfile.TemporaryDirectory() as scratch:
        # The folder names its base, which must be no place of this machine.
        os.chdir(scratch)
        BertForSequenceClassification(config).eval().save_pretrained("tiny-bert")
        tokenizer.save_pretrained("tiny-bert")
        folder = Path("folder")
        convert.convert("tiny-bert", folder, Plan.of("local", left=3, right=3))
        model = checkpoint.load(folder, offline=True).model
        inputs = {"input_ids": torch.randint(5, len(tokenizer), (2, 40)), "attention_mask": torch.ones(2, 40).long()}
        inputs["attention_mask"][1, 30:] = 0
        with implementation("plain"), torch.inference_mode():
            out = model(**inputs)[0]
        save_file({**inputs, "output": out}, "expected.safetensors")
        archive([Path("expected.safetensors"), *sorted(folder.iterdir())], GOLDEN / f"{name}.tar.gz")
        os.chdir(GOLDEN)


def archive(files: list[Path], target: Path) -> None:
    """Pack files so that equal files give equal bytes."""
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w", format=tarfile.PAX_FORMAT) as writer:
        for file in files:
            entry = tarfile.TarInfo(file.as_posix())
            entry.size = file.stat().st_size
            writer.addfile(entry, io.BytesIO(file.read_bytes()))
    target.write_bytes(gzip.compress(tar.getvalue(), mtime=0))


if __name__ == "__main__":
    main(sys.argv[1])
