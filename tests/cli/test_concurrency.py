"""Two processes with one output: one of them writes it, the other is refused; caches stay whole under eight."""

import json
import signal
import time
from pathlib import Path

import pytest

import killable
from approx.checkpoints.atomic_folder import locked_output
from approx.conversion.verify import verify
from approx.errors import ApproxError, Exit
from approx.evaluation import record
from approx.pipeline.store import Local
from tiny_study import tiny_recipe

from .conftest import call

GRID = """title: Two
checkpoint: {base}
variants: {{local: {{mechanism: local, grid: {{left: [1, 2], right: [2]}}}}}}
evaluate: {{task: glue/sst2, data: {data}, margin: 0.5}}
device: cpu
"""
SOURCE = "int eight(int x) { return x + 8; }"


def words(name: str, base: Path, converted: Path, data: Path, place: Path) -> tuple:
    """A command that writes `out`."""
    task = ("--task", "glue/sst2", "--data", data)
    if name == "run":
        return ("run", tiny_recipe(place / "recipe.yaml", base, data), "-o", "out", "--resume")
    if name == "sweep":
        (place / "grid.yaml").write_text(GRID.format(base=base, data=data), encoding="utf-8")
        return ("sweep", "grid.yaml", "-o", "out")
    if name == "finetune":
        lines = (data / "dev.tsv").read_text("utf-8").splitlines()
        (place / "train.tsv").write_text("\n".join([lines[0], *lines[1:] * 4]) + "\n", encoding="utf-8")
        settings = ("--task", "glue/sst2", "--data", "train.tsv", "--recover", "task", "--steps", "20")
        return ("finetune", converted, "-o", "out", *settings)
    return {
        "convert": ("convert", base, "-o", "out", "-m", "linear"),
        "evaluate": ("evaluate", converted, "-o", "out.json", "--fresh", *task),
    }[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convert", "evaluate", "run", "sweep", "finetune"])
def test_refuses_the_second_of_two_processes_with_one_output(name, base, converted, data, tmp_path):
    typed = words(name, base, converted, data, tmp_path)
    processes = [killable.start(*typed, errors=tmp_path / f"errors{n}") for n in range(2)]
    for process in processes:
        process.join(300)
    reported = [(tmp_path / f"errors{n}").read_text("utf-8") for n in range(2)]
    codes = sorted(process.exitcode or 0 for process in processes)
    if name in ("run", "sweep"):
        # The later one continues, if it began when the earlier one was done.
        assert codes in ([0, Exit.REFUSED], [0, 0]), reported
    else:
        assert codes == [0, Exit.REFUSED], reported
    for process, text in zip(processes, reported, strict=True):
        if process.exitcode:
            (line,) = [line for line in text.splitlines() if not line.startswith(("[", "Compiling C"))]
            assert line.startswith("error: "), text
    if name in ("convert", "finetune"):
        assert all(check.passed is not False for check in verify(tmp_path / "out").checks)
    if name in ("evaluate", "run"):
        record.load(tmp_path / ("out.json" if name == "evaluate" else "out/record.json"))
    if name == "sweep":
        assert len(json.loads((tmp_path / "out" / "sweep.json").read_text("utf-8"))["grid"]["text"]) > 10
    assert not [
        path for path in tmp_path.rglob("*") if path.name.endswith((".lock", ".training")) or ".tmp" in path.name
    ]


@pytest.mark.parametrize("name", ["evaluate", "run", "sweep", "finetune"])
@pytest.mark.sample(3)
def test_refuses_an_output_that_another_process_writes(name, base, converted, data, tmp_path):
    typed = words(name, base, converted, data, tmp_path)
    place = {"evaluate": "out.json", "finetune": "out.training"}.get(name, "out")
    before = {path.name for path in tmp_path.iterdir()}
    with locked_output(tmp_path / place):
        answer = call(*typed)
    assert (answer.code, "Another process is writing" in answer.err) == (Exit.REFUSED, True), answer
    assert {path.name for path in tmp_path.iterdir()} == before


def test_releases_locks_after_the_context_and_after_a_kill(tmp_path):
    with locked_output(tmp_path / "new" / "out"):
        with (
            pytest.raises(ApproxError, match="Another process is writing") as caught,
            locked_output(tmp_path / "new" / "out"),
        ):
            pass
        assert caught.value.exit_code == Exit.REFUSED
        with locked_output(tmp_path / "new" / "other"):
            pass
    assert list(tmp_path.iterdir()) == []
    # A killed process leaves its lock.
    (tmp_path / ".out.lock").write_text("lock of approx\n")
    with locked_output(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


def compiled(item: int, threads: int | None) -> int:
    """Compile and call the same C as other processes."""
    from approx_kernels.cpu.compile import load

    library = load(SOURCE)
    assert not isinstance(library, str), library
    return library.eight(item)


def found(item: int, threads: int | None) -> None:
    """Keep findings beside those of other processes."""
    from approx_kernels.dispatch import findings

    for number in range(10):
        findings.keep("cpu", f"{item} {number}", {"number": number})


def stored(item: int, threads: int | None) -> None:
    """Store the same batches as other processes, and others."""
    from approx.evaluation.evaluate import Ledger, default_folder

    ledger = Ledger(default_folder(), "abcd")
    for batch in (*range(20), 100 + item):
        assert ledger.write(batch, [batch] * 3000) == [batch] * 3000


@pytest.mark.slow
def test_caches_stay_whole_under_eight_processes(own_cache):
    from approx.evaluation.evaluate import Ledger, default_folder
    from approx_kernels.dispatch import findings

    (own_cache / "compiled").unlink()
    for work in (compiled, found, stored):
        answers = dict(Local(8).map(work, range(8)))
        assert [answers[item] for item in range(8)] == [item + 8 if work is compiled else None for item in range(8)]
    assert len(list((own_cache / "compiled").glob("*.so"))) == 2
    stored_findings = json.loads(findings.file().read_text("utf-8"))
    assert {name for one in stored_findings.values() for name in one} == {
        f"{x} {y}" for x in range(8) for y in range(10)
    }
    assert Ledger(default_folder(), "abcd").read() == {n: [n] * 3000 for n in (*range(20), *range(100, 108))}
    assert not [path for path in own_cache.rglob("*") if path.suffix in (".lock", ".tmp")]


@pytest.mark.slow
def test_sigterm_ends_a_command_as_ctrl_c_does(base, data, tmp_path):
    errors = tmp_path / "errors"
    process = killable.start("run", tiny_recipe(tmp_path / "r.yaml", base, data), "-o", "out", errors=errors)
    while "convert to" not in (errors.read_text("utf-8") if errors.exists() else ""):
        assert process.is_alive()
        time.sleep(0.01)
    assert killable.ended(process, signal.SIGTERM) == Exit.INTERRUPTED
    said = [line for line in errors.read_text("utf-8").splitlines() if not line.startswith("[")]
    assert said == ["error: Interrupted. Finished stages are kept; run the same command with --resume to continue."]
