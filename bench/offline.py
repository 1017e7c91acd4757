"""The compiler's output for every kernel, without a GPU: registers, spills, shared memory, instructions.

    python bench/offline.py -o reports/kernels

Each file of `bench/launches` launches the kernels of one op on CPU tensors. The launches are intercepted, and compiled for
compute capability 8.0 (A100) and 9.0 (H100, H200) with their arguments. Writes `record.json` and, from it, `report.md`;
`--only OP` reads one op, `--first` the first launch of each. Without `-o` the figures are printed as JSON. The record
holds a digest of its sources, so that an outdated table is detected without compiling.
"""

import argparse
import hashlib
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

import torch

CAPABILITIES = (80, 90)
# Shared memory per program, in KiB. Cards of capability 8.6 and 8.9 have at most 99.
SHARED = {80: 99, 90: 227}
TENSOR_CORES = ("HMMA", "IMMA", "HGMMA", "IGMMA", "QGMMA")
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


class Launch(NamedTuple):
    """A function that launches one or more kernels on CPU tensors; its name identifies the figures.

    Launches through `first_that_fits` are compiled in each configuration.
    `tensor_cores` states whether every kernel must use them; products in true float32 cannot.
    """

    name: str
    run: Callable[[], Any]
    tensor_cores: bool = True


class Caught(NamedTuple):
    """A kernel with the arguments of a launch."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


def ops() -> list[str]:
    """The ops with kernels."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent / "launches")]))


def launches(op: str) -> list[Launch]:
    """All launches of an op."""
    return list(importlib.import_module(f"bench.launches.{op}").launches())


def digest(op: str) -> str:
    """A hash of the kernels of an op and their launches, without comments, imports and empty lines."""
    root = Path(__file__).resolve().parent.parent
    kernels = root / "kernels" / "approx_kernels"
    paths = [
        *(kernels / "gpu" / name for name in ("language.py", "launch.py")),
        *sorted((kernels / "ops" / op).glob("triton*.py")),
        root / f"bench/launches/{op}.py",
    ]
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    kept = [line for line in lines if line.strip() and not line.lstrip().startswith(("#", "from ", "import "))]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def figures(op: str, *, first: bool = False) -> Iterator[dict[str, Any]]:
    """The compiler's output for every kernel of an op, one row per launch and capability.

    Args:
        op: One of `ops()`.
        first: Whether to take only the first launch.
    """
    for launch in launches(op)[: 1 if first else None]:
        for caught in catch(launch.run):
            for capability in CAPABILITIES:
                yield {"op": op, "launch": launch.name} | compiled(caught, capability, launch.tensor_cores)


def catch(run: Callable[[], Any]) -> list[Caught]:
    """Intercept the launches of a function without running them."""
    from triton import JITFunction

    from approx_kernels.gpu.launch import configuration

    launches: list[Caught] = []

    def instead(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        if missing := set(kernel.arg_names) - set(values):
            raise ValueError(f"{kernel.__name__} was launched without {', '.join(sorted(missing))}.")
        launches.append(Caught(kernel, values, options))

    real = JITFunction.run
    setattr(JITFunction, "run", instead)  # noqa: B010  # pyright takes a plain assignment for a mistake
    try:
        with configuration(None):
            run()
    finally:
        setattr(JITFunction, "run", real)  # noqa: B010  # as above
    return launches


def compiled(caught: Caught, capability: int, tensor_cores: bool) -> dict[str, Any]:
    """Registers, spills, shared memory and instructions of a kernel on one compute capability."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(caught.kernel.params):
        value = caught.arguments[parameter.name]
        # Triton itself treats these as constants: annotated parameters, None, and the number 1.
        plain = type(value) is int and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (plain and value == 1):
            signature[parameter.name], constants[(place,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif type(value) is int:
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if plain and value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    source = ASTSource(caught.kernel, signature, constants, attributes)
    made = compile(source, target=GPUTarget("cuda", capability, 32), options=caught.options)
    registers, spilled, instructions = disassembled(made.asm["cubin"])
    tiles = {
        name: constants[(caught.kernel.arg_names.index(name),)] for name in caught.kernel.arg_names if _is_tile(name)
    }
    return {
        "kernel": caught.kernel.__name__,
        "tiles": tiles,
        **caught.options,
        "capability": capability,
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": made.metadata.shared,
        "tensor_cores": tensor_cores,
        "instructions": instructions,
    }


def _is_tile(name: str) -> bool:
    return re.fullmatch(r"B[A-Z]|BLOCK_[A-Z]+", name) is not None


def disassembled(cubin: bytes) -> tuple[int, int, list[str]]:
    """Registers per thread, spilled bytes, and the tensor-core instructions in the machine code."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)

        def asked(option: str) -> str:
            return subprocess.run([tool, option, path], check=True, capture_output=True, text=True).stdout

        usage, code = asked("-res-usage"), asked("-sass")
    (registers, stack), *_ = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    return int(registers), int(stack), [name for name in TENSOR_CORES if re.search(rf"\b{name}\b", code)]


def wrong(row: dict[str, Any]) -> list[str]:
    """One sentence per limit that a kernel exceeds."""
    faults = []
    if row["spilled_bytes"]:
        faults.append(f"spills {row['spilled_bytes']} bytes")
    if row["shared_bytes"] > SHARED[row["capability"]] * 1024:
        faults.append(f"needs {row['shared_bytes']} bytes of shared memory of {SHARED[row['capability']]} KiB")
    if row["tensor_cores"] and not row["instructions"]:
        faults.append("uses no tensor cores")
    name = f"{row['op']}, {row['launch']}, {row['kernel']} on {row['capability']}"
    return [f"{name} {sentence}" for sentence in faults]


def report(record: dict[str, Any]) -> str:
    """The record as tables in Markdown."""
    lines = [
        "# Kernels, as compiled",
        "",
        f"Read from the machine code that Triton {record['triton']} makes for compute capability 8.0 (A100) and 9.0 (H100, "
        f"H200); nothing was run. Made by `{record['command']}`.",
    ]
    for op in dict.fromkeys(row["op"] for row in record["kernels"]):
        lines += [
            "",
            f"## {op}",
            "",
            "| launch | kernel | tile | warps, stages | capability | registers | spilled | shared | tensor cores |",
        ]
        lines += ["|---|---|---|---|--:|--:|--:|--:|---|"]
        for row in (row for row in record["kernels"] if row["op"] == op):
            tile = "×".join(str(size) for size in row["tiles"].values()) or "–"
            lines.append(
                f"| {row['launch']} | `{row['kernel']}` | {tile} | {row['num_warps']}, {row['num_stages']} | "
                f"{row['capability'] / 10:.1f} | {row['registers']} | {row['spilled_bytes']} | "
                f"{row['shared_bytes'] / 1024:.0f} KiB | {', '.join(row['instructions']) or '–'} |"
            )
    return "\n".join([*lines, ""])


def write(rows: list[dict[str, Any]], folder: Path, version: str) -> None:
    """Replace the rows of some ops in the record, and write the report again."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "record.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"kernels": [], "digests": {}}
    new = {row["op"] for row in rows}
    kept = [row for row in old["kernels"] if row["op"] in ops() and row["op"] not in new]
    record = {
        "command": "python bench/offline.py -o reports/kernels",
        "triton": version,
        "digests": {op: digest(op) if op in new else old["digests"].get(op) for op in ops()},
        "kernels": sorted(kept + rows, key=lambda row: row["op"]),
    }
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(report(record), encoding="utf-8")


def mixed(folder: Path, version: str) -> str | None:
    """Why the figures of one op cannot join the record of a folder with the others unchanged; None if they can."""
    path = folder / "record.json"
    old = json.loads(path.read_text(encoding="utf-8"))["triton"] if path.is_file() else version
    if old == version:
        return None
    return f"{path} was read off Triton {old}, and this is {version}. Read all ops again, without --only, or take another folder."


def main() -> int:
    """Compile, write and print; exit code 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, help="folder for the record and the report")
    parser.add_argument("--only", metavar="OP", choices=ops(), help="read this op alone")
    parser.add_argument("--first", action="store_true", help="the first launch of each op; not for the record")
    options = parser.parse_args()
    if options.first and options.output:
        parser.error("--first reads too little for the record of -o")
    # Read when Triton is imported: kernels are compiled here, not interpreted.
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    from triton import __version__

    if options.only and options.output and (why := mixed(options.output, __version__)):
        parser.error(why)
    rows = [row for op in ([options.only] if options.only else ops()) for row in figures(op, first=options.first)]
    if options.output:
        write(rows, options.output, __version__)
    else:
        sys.stdout.write(json.dumps(rows) + "\n")
    broken = [sentence for row in rows for sentence in wrong(row)]
    sys.stderr.write("".join(f"{sentence}\n" for sentence in broken))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
