"""Write the golden slim folder, which must load for ever: python tests/checkpoints/golden.py, after a change of format alone."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import BertConfig, BertModel

from approx.conversion import surgery
from approx.planning.plan import Plan
from approx_kernels.dispatch.implementation import implementation

GOLDEN = Path(__file__).parent / "golden-slim"


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=29,
        max_position_embeddings=64,
    )  # fmt: skip
    model = BertModel(config).eval()
    surgery.convert(model, Plan.of("improved-clustered", clusters=4, topk=5, bits=16))
    shutil.rmtree(GOLDEN, ignore_errors=True)
    model.save_pretrained(GOLDEN / "model")
    inputs = {"input_ids": torch.randint(29, (2, 40)), "attention_mask": torch.ones(2, 40, dtype=torch.int64)}
    inputs["attention_mask"][1, 30:] = 0
    with implementation("plain"), torch.inference_mode():
        out = model(**inputs)[0]
    save_file({**inputs, "last_hidden_state": out}, GOLDEN / "outputs.safetensors")


if __name__ == "__main__":
    main()
