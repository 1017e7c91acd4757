"""The compiler's output for every kernel, without a GPU: registers, spills, shared memory, instructions.

    python bench/offline.py -o reports/kernels

Each file of `bench/launches` launches the kernels of one op on CPU tensors. The launches are intercepted, and compiled
for compute capability 8.0 (A100), 9.0 (H100, H200) and 10.0 (B200) with their arguments. Writes `record.json` and, from
it, `report.md`; `--only OP` reads one op, `--first` the first launch of each. Without `-o` the figures are printed as
JSON. The record holds a digest of its sources, so that an outdated table is detected without compiling.

A GPU runs what its own Triton and assembler make, so the record has the figures of each compiler that was run, by the
versions of Triton and of the ptxas that it runs for Hopper. Run it again with another Triton, and its figures join.
`--ptxas PATH` has the same PTX assembled by another program too:

    pip install --target OLD --no-deps triton==3.6.0
    PYTHONPATH=OLD python bench/offline.py --capability 90 --ptxas …/bin/ptxas -o reports/kernels
"""

import argparse
import ast
import hashlib
import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

import torch

from bench.pages import RECORD, opened, table, write_page, write_record

CAPABILITIES = (80, 90, 100)
# Shared memory per program, in KiB. Cards of capability 8.6 and 8.9 have at most 99.
SHARED = {80: 99, 90: 227, 100: 227}
TENSOR_CORES = ("HMMA", "IMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA")
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
    """A hash of the syntax trees of an op's kernels and their launches, without imports and docstrings."""
    # Imports Triton, which reads the environment that `main` sets.
    from approx_kernels.dispatch.checked import written

    root = Path(__file__).resolve().parent.parent
    kernels = root / "kernels" / "approx_kernels"
    paths = [
        kernels / "gpu" / "launch.py",
        *sorted((kernels / "ops" / op).glob("triton*.py")),
        root / f"bench/launches/{op}.py",
    ]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    statements = [node for tree in trees for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return hashlib.sha256(written(statements).encode()).hexdigest()


def figures(
    op: str, capabilities: Sequence[int] = CAPABILITIES, ptxas: Path | None = None, *, first: bool = False
) -> Iterator[tuple[dict[str, Any], dict[str, Any] | None]]:
    """The compiler's output for every kernel of an op, and that of another assembler, one pair per launch and capability.

    Args:
        op: One of `ops()`.
        capabilities: What to compile for.
        ptxas: Another assembler of the same PTX, or None.
        first: Whether to take only the first launch.
    """
    for launch in launches(op)[: 1 if first else None]:
        for caught in catch(launch.run):
            for capability in capabilities:
                mine, other = compiled(caught, capability, launch.tensor_cores, ptxas)
                name = {"op": op, "launch": launch.name}
                yield name | mine, None if other is None else name | other


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


def compiled(
    caught: Caught, capability: int, tensor_cores: bool, ptxas: Path | None = None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Registers, spills, shared memory and instructions of a kernel on one compute capability; and by another assembler."""
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
    tiles = {
        name: constants[(caught.kernel.arg_names.index(name),)] for name in caught.kernel.arg_names if _is_tile(name)
    }
    same = {
        "kernel": caught.kernel.__name__,
        "tiles": tiles,
        **caught.options,
        "capability": capability,
        "shared_bytes": made.metadata.shared,
        "tensor_cores": tensor_cores,
    }
    mine = same | disassembled(made.asm["cubin"])
    return mine, None if ptxas is None else same | disassembled(_assembled(made.asm["ptx"], ptxas))


def _assembled(ptx: str, ptxas: Path) -> bytes:
    """The machine code that an assembler makes, with the options that Triton gives its own."""
    target = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert target, "PTX names its target"
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx, encoding="utf-8")
        command = [ptxas, "-lineinfo", "-v", f"--gpu-name={target[1]}", source, "-o", made]
        subprocess.run(command, check=True, capture_output=True)
        return made.read_bytes()


def _is_tile(name: str) -> bool:
    return re.fullmatch(r"B[A-Z]|BLOCK_[A-Z]+", name) is not None


def disassembled(cubin: bytes) -> dict[str, Any]:
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
    used = [name for name in TENSOR_CORES if re.search(rf"\b{name}\b", code)]
    return {"registers": int(registers), "spilled_bytes": int(stack), "instructions": used}


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


def report(record: dict[str, Any], _: Path) -> str:
    """The page of a record, in Markdown."""
    compilers, counts = record["compilers"], []
    for one in compilers:
        rows = one["kernels"]
        spilled = sum(bool(row["spilled_bytes"]) for row in rows)
        without = sum(row["tensor_cores"] and not row["instructions"] for row in rows)
        counts.append([f"Triton {one['triton']}", one["ptxas"], f"{len(rows)}", f"{spilled}", f"{without}"])
    parts = [
        "# Kernels, as compiled",
        "Read from the machine code for compute capability 8.0 (A100), 9.0 (H100, H200) and 10.0 (B200); nothing was run. Made by "
        f"`{record['command']}`, once with each compiler. The figures of a compiler are *registers per thread · KiB of shared memory · "
        "tensor-core instructions*; spilled bytes are named where there are any.",
        table(["compiler", "ptxas for Hopper", "kernels", "that spill", "without tensor cores"], counts, words=2),
    ]
    known = [{_key(row): row for row in one["kernels"]} for one in compilers]
    every = {key: row for rows in reversed(known) for key, row in rows.items()}
    head = ["launch", "kernel", "tile", "warps, stages", "capability"]
    for op in sorted({row["op"] for row in every.values()}):
        lines = []
        for key, row in every.items():
            if row["op"] == op:
                tile = "×".join(str(size) for size in row["tiles"].values()) or "–"
                options = f"{row['num_warps']}, {row['num_stages']}"
                made = [row["launch"], f"`{row['kernel']}`", tile, options, f"{row['capability'] / 10:.1f}"]
                lines.append([*made, *(_figures(rows.get(key)) for rows in known)])
        heads = [f"{one['triton']}, {one['ptxas']}" for one in compilers]
        parts += [f"## {op}", table([*head, *heads], lines, words=4, remarks=len(heads))]
    return "\n\n".join(parts) + "\n"


def _key(row: dict[str, Any]) -> str:
    """What was compiled, whatever the compiler made of it."""
    names = ("op", "launch", "kernel", "tiles", "num_warps", "num_stages", "capability")
    return json.dumps([row[name] for name in names])


def _figures(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    spills = f" · spills {row['spilled_bytes']}" if row["spilled_bytes"] else ""
    shared, used = f"{row['shared_bytes'] / 1024:.0f}", ", ".join(row["instructions"]) or "–"
    return f"{row['registers']} · {shared} · {used}{spills}"


def write(rows: list[dict[str, Any]], folder: Path, compiler: tuple[str, str]) -> None:
    """Replace the rows of some ops and one compiler in the record, and write the report again.

    Args:
        rows: The figures.
        folder: Where `record.json` and `report.md` are.
        compiler: The versions of Triton and of its ptxas for Hopper.
    """
    old = opened(folder)["compilers"] if (folder / RECORD).is_file() else []
    by_version = {(one["triton"], one["ptxas"]): one for one in old}
    before = by_version.get(compiler, {"kernels": [], "digests": {}})
    new = {(row["op"], row["capability"]) for row in rows}
    others = [row for row in before["kernels"] if row["op"] in ops() and (row["op"], row["capability"]) not in new]
    digests = {f"{op}, {capability}": digest(op) for op, capability in new}
    by_version[compiler] = {
        "triton": compiler[0],
        "ptxas": compiler[1],
        "digests": dict(sorted({**before["digests"], **digests}.items())),
        "kernels": sorted(others + rows, key=lambda row: (row["op"], row["launch"])),
    }
    newest_first = sorted(by_version.items(), key=lambda pair: [_numbers(part) for part in pair[0]], reverse=True)
    record = {
        "command": "python bench/offline.py -o reports/kernels",
        "compilers": [one for _, one in newest_first],
    }
    write_record(folder / RECORD, record)
    write_page(report, folder, folder)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def main() -> int:
    """Compile, write and print; exit code 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, help="folder for the record and the report")
    parser.add_argument("--only", metavar="OP", choices=ops(), help="read this op alone")
    parser.add_argument("--capability", type=int, choices=CAPABILITIES, help="compile for this alone")
    parser.add_argument("--ptxas", type=Path, help="assemble with this too; needs -o")
    parser.add_argument("--first", action="store_true", help="the first launch of each op; not for the record")
    options = parser.parse_args()
    if options.first and options.output:
        parser.error("--first reads too little for the record of -o")
    # Read when Triton is imported: kernels are compiled here, not interpreted.
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    from triton import __version__

    from approx_kernels.gpu.language import HOPPER, assembler, version_of

    rows, used = list[dict[str, Any]](), assembler(HOPPER)
    capabilities = [options.capability] if options.capability else CAPABILITIES
    for op in [options.only] if options.only else ops():
        pairs = list(figures(op, capabilities, options.ptxas, first=options.first))
        mine, others = [one for one, _ in pairs], [other for _, other in pairs if other is not None]
        rows += mine
        if options.output:
            write(mine, options.output, (__version__, used.version if used else "unknown"))
            if options.ptxas:
                write(others, options.output, (__version__, version_of(str(options.ptxas)) or "unknown"))
            sys.stderr.write(f"{op}: {len(pairs)} kernels\n")
    if not options.output:
        sys.stdout.write(json.dumps(rows) + "\n")
    broken = [sentence for row in rows for sentence in wrong(row)]
    sys.stderr.write("".join(f"{sentence}\n" for sentence in broken))
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
