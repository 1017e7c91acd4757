"""Are kernels that failed on Hopper right with another assembler? The same cases with the bundled ptxas and a newer one, side by side.

    python bench/assemblers.py --ptxas PATH/ptxas -o reports/gpu      # at most 200 seconds, on a GPU of capability 9.0

Each case runs in a process of its own, with an own cache of compiled kernels, in each form: the assembler that Triton
brings, or that of `--ptxas`, with k-means padded to 32 clusters, where its kernel mixes two kinds of products, or to
64, as it is shipped. If a case also fails with the newer assembler, NVIDIA's compute-sanitizer runs it once more, where
it is installed. Writes `assemblers.json` and `assemblers.md`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

import torch

from approx.errors import ApproxError, Exit
from approx_kernels.dispatch.checked import unchecked
from approx_kernels.gpu import language
from approx_kernels.gpu.language import HOPPER, assembler
from approx_kernels.ops.clustering import triton as clustering
from bench import gpu_jobs
from bench.gpu_cases import Part
from bench.gpu_verify import verify
from bench.gpu_workers import in_one_line
from bench.pages import table

ROOT = Path(__file__).resolve().parent.parent
SECONDS, LANES = 200.0, 8
# Seconds kept for the sanitizer.
SANITIZING = 40.0


class Form(NamedTuple):
    """How kernels are compiled: by which assembler, and the clusters that k-means is padded to."""

    newer: bool
    clusters: int

    @property
    def name(self) -> str:
        """What the page calls it."""
        return f"{'newer' if self.newer else 'bundled'} assembler, {self.clusters} clusters"


FORMS = tuple(Form(newer, clusters) for newer in (False, True) for clusters in (32, 64))


def _test(name: str) -> Callable[[], str]:
    def run() -> str:
        import pytest

        code = pytest.main(["-q", "-m", "", "-p", "no:cacheprovider", str(ROOT / "tests" / "kernels" / name)])
        return "ok" if code == 0 else f"pytest ended with {int(code)}"

    return run


def _layer(name: str, suite: str = "attention", length: int = 512, batch: int = 32) -> Callable[[], str]:
    def run() -> str:
        return str(verify(suite, name, torch.bfloat16, torch.device("cuda"), [(batch, length, 12)])["status"])

    return run


def _model() -> str:
    part = Part("roberta", "forward", "bfloat16", 2048, 8, "graph")
    names = ("clustered iterations=3", "improved-clustered iterations=3")
    # Otherwise `auto` would take PyTorch, which cannot be captured and shows nothing.
    with unchecked():
        found = {name: gpu_jobs.runs(part, name, torch.device("cuda")) for name in names}
    return next((f"{name}: {status}" for name, status in found.items() if status != "ok"), "ok")


# The cases that failed on an H200 with ptxas 12.8.93.
CASES: dict[str, Callable[[], str]] = {
    "clustered, 600 tokens, bfloat16 (test)": _test("test_clustered_triton.py::test_bfloat16"),
    **{
        f"{kind} iterations={iterations}, 512 × 32": _layer(f"{kind} iterations={iterations}")
        for kind in ("clustered", "improved-clustered")
        for iterations in (3, 10)
    },
    "RoBERTa, 2,048 × 8, clustered": _model,
    "causal performer, bfloat16": _layer("performer estimator=positive", "attention-causal", 150, 3),
    "lsh without duplicates, bfloat16 (test)": _test("test_lsh_triton.py::test_bfloat16"),
}


def run_case(name: str, form: Form) -> dict[str, Any]:
    """Run one case in this process, whatever is known about its assembler."""
    language.assembler_obstacle = lambda major, minor: None
    clustering.LEAST_CLUSTERS = form.clusters
    begun = time.monotonic()
    try:
        status = CASES[name]()
        torch.cuda.synchronize()
    except Exception as error:  # it is the result
        status = in_one_line(error)
    used = assembler(HOPPER)
    return {"status": status, "seconds": time.monotonic() - begun, "ptxas": used.version if used else None}


def compare(ptxas: Path, output: Path, seconds: float) -> list[dict[str, Any]]:
    """Run every case in every form, and write the record after each result."""
    end = time.monotonic() + seconds - SANITIZING
    waiting = [(name, form) for form in FORMS for name in CASES]
    running: dict[subprocess.Popen[bytes], tuple[str, Form, Path]] = {}
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as caches:
        while waiting or running:
            while waiting and len(running) < LANES and time.monotonic() < end:
                name, form = waiting.pop(0)
                made = Path(caches) / f"{len(waiting)}.json"
                running[_start(name, form, ptxas, Path(caches), made)] = (name, form, made)
            if time.monotonic() >= end:
                waiting.clear()
            time.sleep(0.2)
            for process in list(running):
                late = time.monotonic() >= end
                if process.poll() is None and not late:
                    continue
                name, form, made = running.pop(process)
                process.kill()
                code = process.wait()
                lost = "not finished in time" if late else f"its process ended with exit code {code}"
                found = json.loads(made.read_text("utf-8")) if made.is_file() else {"status": lost}
                results.append({"case": name, "form": form.name, "newer": form.newer, **found})
                _write(results, output)
                sys.stderr.write(f"{form.name}: {name}: {found['status']}\n")
        failed = next((one for one in results if one["newer"] and one["status"] != "ok"), None)
        if failed and (tool := shutil.which("compute-sanitizer")):
            form = next(form for form in FORMS if form.name == failed["form"])
            process = _start(failed["case"], form, ptxas, Path(caches), Path(caches) / "again.json", tool)
            try:
                process.wait(timeout=max(SANITIZING, end + SANITIZING - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            log = Path(caches) / "sanitizer.log"
            failed["sanitizer"] = (
                log.read_text("utf-8", errors="replace")[-4000:] if log.is_file() else "it wrote nothing"
            )
            _write(results, output)
    return results


def _start(
    name: str, form: Form, ptxas: Path, caches: Path, made: Path, sanitizer: str | None = None
) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--case", name, "--form", str(FORMS.index(form)), "-o", str(made)]
    if sanitizer:
        command = [sanitizer, "--log-file", str(caches / "sanitizer.log"), *command]
    environment = os.environ | {"TRITON_CACHE_DIR": str(caches / f"{made.stem}-cache")}
    if form.newer:
        environment |= {"TRITON_PTXAS_PATH": str(ptxas), "TRITON_PTXAS_BLACKWELL_PATH": str(ptxas)}
    with (caches / f"{made.stem}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT)


def _write(results: list[dict[str, Any]], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    (output / "assemblers.json").write_text(json.dumps({"results": results}, indent=1) + "\n", encoding="utf-8")
    (output / "assemblers.md").write_text(page(results), encoding="utf-8")


def page(results: list[dict[str, Any]]) -> str:
    """The results as a table, one column per form with the version of its assembler."""
    by_place = {(one["case"], one["form"]): one for one in results}
    heads = []
    for form in FORMS:
        versions = {one.get("ptxas") for one in results if one["form"] == form.name} - {None}
        heads.append(f"{form.name} ({', '.join(sorted(map(str, versions))) or 'unknown'})")
    rows = []
    for case in CASES:
        found = [by_place.get((case, form.name), {"status": "not run"})["status"] for form in FORMS]
        rows.append([case, *(status.replace("|", "/") for status in found)])
    text = ["# The same kernels by two assemblers", table(["case", *heads], rows, words=len(FORMS) + 1)]
    reports = [one for one in results if "sanitizer" in one]
    text += [
        f"compute-sanitizer on {one['case']}, {one['form']}:\n\n```text\n{one['sanitizer']}\n```" for one in reports
    ]
    return "\n\n".join(text) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Compare, write and print; exit code 6 if a case fails with the newer assembler and the shipped padding."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder for the record and the page")
    parser.add_argument("--ptxas", type=Path, help="a ptxas of 13.1 or later: pip install 'nvidia-cuda-nvcc>=13.1'")
    parser.add_argument("--budget", type=float, default=SECONDS, metavar="SECONDS", help=f"time for all ({SECONDS:g})")
    parser.add_argument("--case", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--form", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case is not None:
        found = run_case(options.case, FORMS[options.form])
        options.output.write_text(json.dumps(found), encoding="utf-8")
        # A spoiled device would hang at exit.
        os._exit(0)
    try:
        _check(options.ptxas)
    except ApproxError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    results = compare(options.ptxas, options.output, options.budget)
    sys.stdout.write(page(results))
    shipped = [one for one in results if one["form"] == FORMS[-1].name]
    return Exit.OK if shipped and all(one["status"] == "ok" for one in shipped) else Exit.VERIFICATION


def _check(ptxas: Path | None) -> None:
    """Check that there is something to compare.

    Raises:
        ApproxError: if there is no other assembler, or no GPU.
    """
    if ptxas is None or not os.access(ptxas, os.X_OK):
        raise ApproxError(
            f"--ptxas is {ptxas}, which is not a program. Install one with pip install 'nvidia-cuda-nvcc>=13.1', and name its bin/ptxas.",
            Exit.USAGE,
        )
    if not torch.cuda.is_available():
        raise ApproxError(
            f"bench/assemblers.py runs kernels on an NVIDIA GPU, and torch {torch.__version__} finds none. Run it where there is one.",
            Exit.MISSING,
        )


if __name__ == "__main__":
    sys.exit(main())
