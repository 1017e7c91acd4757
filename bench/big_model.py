"""Convert and revert a random Llama of about a billion parameters, and record time and memory: bench/big_model.py -o RECORD.

Its weights are random, since only their size counts here. Memory is read from /proc (Linux), of the command and of its
children together, so that pages they share count once.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

GIGABYTE = 1e9


def make(folder: Path, layers: int) -> int:
    """Save a random Llama in bfloat16, and return the bytes of its weights. 17 layers have 1.05 billion parameters."""
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=2048,
        pad_token_id=0,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def watched(command: list[str]) -> dict[str, float]:
    """Run a command; seconds, and the largest memory of it and its children in GB: all, and what is not a file's."""
    began = time.monotonic()
    process = subprocess.Popen(command)
    most = {"memory_gb": 0.0, "without_files_gb": 0.0}
    while process.poll() is None:
        resident, anonymous = 0, 0
        for each in _tree(process.pid):
            sizes = _sizes(each.pid)
            resident += sizes.get("Pss", 0)
            anonymous += sizes.get("Pss_Anon", 0) + sizes.get("Pss_Shmem", 0)
        most = {
            "memory_gb": max(most["memory_gb"], resident / GIGABYTE),
            "without_files_gb": max(most["without_files_gb"], anonymous / GIGABYTE),
        }
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}.")
    return {"seconds": round(time.monotonic() - began, 1), **{name: round(size, 2) for name, size in most.items()}}


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _sizes(pid: int) -> dict[str, int]:
    """Bytes of each kind of memory of a process; nothing once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {}
    return {name: int(size.split()[0]) * 1024 for name, _, size in (line.partition(":") for line in lines)}


def main() -> None:
    """Make the model, convert it, revert it, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="the record, a JSON file")
    parser.add_argument("--layers", type=int, default=17, help="layers of the model (17: a billion parameters)")
    parser.add_argument("--mechanism", default="local")
    chosen = parser.parse_args()
    approx = [sys.executable, str(Path(__file__).parents[1] / "cli.py")]
    with tempfile.TemporaryDirectory() as room:
        base, converted, reverted = (Path(room) / name for name in ("base", "converted", "reverted"))
        size = make(base, chosen.layers)
        record = {
            "checkpoint_gb": round(size / GIGABYTE, 2),
            "mechanism": chosen.mechanism,
            "convert": watched([*approx, "convert", str(base), "-o", str(converted), "-m", chosen.mechanism]),
            "revert": watched([*approx, "revert", str(converted), "-o", str(reverted)]),
        }
    chosen.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
