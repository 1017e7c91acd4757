"""A converted model and its exact base in every runtime, in float32 and int8: quality on the same examples, and time.

    python bench/runtimes.py runs/genres/model runs/genres-run/healed/linear-0 -o runs/runtimes \\
        --task documents --data runs/genres/brown.jsonl --labels press,general,learned,fiction

The models are PyTorch's, and programs of torch.export, ONNX Runtime and OpenVINO that `approx export` makes of them, and stock
checkpoints where there are any. What cannot be exported is named and left out. Programs that are there are not made again,
`--force` makes them again. Writes `programs/`, one record of quality for each length, one of speed, and a report of all.
"""

import argparse
import sys
from pathlib import Path

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

from approx import api
from approx.conversion.export import export
from approx.errors import ApproxError
from approx.evaluation.record import save

# Format and precision.
PROGRAMS = (
    ("torch-export", None),
    ("onnx", None),
    ("onnx", "int8"),
    ("openvino", None),
    ("openvino", "int8"),
    ("stock", None),
)


def programs(model: str, name: str, folder: Path, formats: list[str], *, force: bool) -> list[str]:
    """The folders of a model's programs, those made that are missing; what cannot be made is said on stderr."""
    found = []
    for format, quantize in (each for each in PROGRAMS if each[0] in formats):
        out = folder / "-".join([name, format, *([quantize] if quantize else [])])
        try:
            if force or not out.exists():
                print(f"exporting {out.name}", file=sys.stderr, flush=True)
                export(model, out, format=format, quantize=quantize, force=force)
        except ApproxError as error:
            print(f"left out {out.name}: {error}", file=sys.stderr, flush=True)
        else:
            found.append(str(out))
    return found


def main() -> None:
    """Export, score, time and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exact", help="the checkpoint that was converted")
    parser.add_argument("converted", help="the converted folder, healed or not")
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--task", required=True, help="a task of texts that can be truncated, such as documents")
    parser.add_argument("--data", required=True)
    parser.add_argument("--labels", help="labels of the task, in the order of the model's classes")
    parser.add_argument(
        "--lengths", default="512,2048", help="tokens of each text that are read (default: %(default)s)"
    )
    parser.add_argument(
        "--formats", default="torch-export,onnx,openvino,stock", help="formats of programs (default: %(default)s)"
    )
    parser.add_argument("--limit", type=int, help="examples of each length; all by default")
    parser.add_argument("--rounds", type=int, default=12, help="least rounds of timing (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="least seconds of timing (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="export again what is there")
    asked = parser.parse_args()
    folder = asked.out / "programs"
    folder.mkdir(parents=True, exist_ok=True)
    beside = [
        *programs(asked.exact, "exact", folder, asked.formats.split(","), force=asked.force),
        *programs(asked.converted, "converted", folder, asked.formats.split(","), force=asked.force),
    ]
    settings = {"labels": asked.labels.split(",")} if asked.labels else {}
    lengths = [int(length) for length in asked.lengths.split(",")]
    command = " ".join(["python", *sys.argv])
    named = {"against": asked.exact, "beside": beside, "data": asked.data, "settings": settings, "command": command}
    records = []
    for length in lengths:
        print(f"scoring at {length}", file=sys.stderr, flush=True)
        found = api.evaluate(
            asked.converted, asked.task, **named, max_length=length, truncate=True, batch_size=1, limit=asked.limit
        )
        save(asked.out / f"quality-{length}.json", found)
        records.append(found)
    print("timing", file=sys.stderr, flush=True)
    timed = api.bench(asked.converted, lengths, **named, task=asked.task, rounds=asked.rounds, seconds=asked.seconds)
    save(asked.out / "speed.json", timed)
    api.report([*records, timed], asked.out / "report")
    print(f"Written to {asked.out / 'report'}")


if __name__ == "__main__":
    main()
