"""Export a converted checkpoint as a program of torch.export or ONNX, and run it to check it."""

import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from approx.checkpoints import checkpoint, families, foreign
from approx.checkpoints.atomic_folder import atomic_folder, refuse_existing, refuse_overlap, refuse_unwritable
from approx.conversion.calibration import evaluating, mechanisms
from approx.conversion.convert import copy_companions, forget_code
from approx.conversion.verify import difference
from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS
from approx.planning import positions
from approx.planning.positions import example_inputs
from approx.version import __version__

FILES = {"torch-export": "model.pt2", "onnx": "model.onnx"}
CHECK = "approx_export.json"
# Batch sizes and lengths of the checks; the last inputs are padded.
_BATCHES, _LENGTHS = (1, 3, 2), (12, 40, 120)
_TRACED = (2, 100)
# Largest difference relative to the largest output. ONNX Runtime has other kernels.
_TOLERANCE = {"torch-export": 1e-4, "onnx": 1e-3}
# A file of protobuf has at most 2 GB; larger weights get a separate file.
_MOST_IN_ONE_FILE = 1_500_000_000


@dataclass(frozen=True)
class Exported:
    """An exported program, and how it compares with its model.

    Attributes:
        output: The folder.
        file: Name of the program in it.
        format: `torch-export`, `onnx` or `stock`.
        inputs: Names of its inputs.
        largest_relative_difference: Batch x length -> the largest relative difference from the model's outputs.
        versions: Package -> the version that exported it.
        notes: What a user should know.
    """

    output: str
    file: str
    format: str
    inputs: list[str]
    largest_relative_difference: dict[str, float]
    versions: dict[str, str]
    notes: list[str]


def export(
    name: str | Path,
    out: Path,
    *,
    format: str = "torch-export",  # the name of the option
    lengths: Sequence[int] | None = None,
    force: bool = False,
    revision: str | None = None,
    offline: bool = False,
    merge_adapter: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> Exported:
    """Export a checkpoint for inputs of any batch size and length, and compare the program with the model.

    Args:
        name: A folder, converted or not, or a model id of the hub.
        out: The folder to create: the program, config and tokenizer, and the figures of the check.
        format: `torch-export` for `torch.export.load`, `onnx` for ONNX Runtime, `stock` for an ordinary checkpoint of
            transformers, see `stock.py`.
        lengths: Three lengths of the check, in tokens, or in frames of speech.
        force: Whether an existing `out` is replaced.
        revision: Commit on the hub.
        offline: Whether to use only local files and the hub's cache.
        merge_adapter: Whether a PEFT adapter next to the weights, or one named by its folder, is merged into them.
        progress: Called with the name of each step.

    Raises:
        ApproxError: if a mechanism cannot be exported, a package is missing, or the program computes something else.
    """
    out = Path(out)
    if format == "stock":
        from approx.conversion import stock

        return stock.export(
            name,
            out,
            lengths=lengths,
            force=force,
            revision=revision,
            offline=offline,
            merge_adapter=merge_adapter,
            progress=progress,
        )
    if format not in FILES:
        raise ApproxError(f"There is no format '{format}'. Choose {', '.join(FILES)} or stock.")
    refuse_existing(out, force=force)
    refuse_unwritable(out)
    if format == "onnx":
        _refuse_missing()
    progress("loading the weights")
    opened = checkpoint.load(name, revision=revision, offline=offline, merge_adapter=merge_adapter)
    refuse_overlap(opened.source.folder, out)
    model = opened.model.float()
    refuse_unexportable(model)
    # A program has no cache.
    model.config.use_cache = False
    sizes = list(zip(_BATCHES, check_lengths(model, lengths), strict=True))
    with (
        evaluating(model),
        torch.inference_mode(False),
        torch.no_grad(),
        _quiet(),
        atomic_folder(out, force=force) as folder,
    ):
        progress("tracing")
        program = _program(model)
        notes = copy_companions(opened.source, folder, foreign.carried(opened.source.config))
        shutil.copyfile(opened.source.folder / "config.json", folder / "config.json")
        # The program needs no code; a custom tokenizer may.
        forget_code(folder)
        path = folder / FILES[format]
        if format == "onnx":
            progress("translating to ONNX")
            _save_onnx(program, model, path)
        else:
            torch.export.save(program, path)
        progress("comparing with the model")
        run = _onnx_runner(path) if format == "onnx" else _torch_runner(path)
        found = {f"{batch} x {length}": _error(model, run, batch, length) for batch, length in sizes}
        report = {
            "file": path.name,
            "format": format,
            "inputs": list(_inputs(model, *_TRACED)),
            "largest_relative_difference": found,
            "versions": {"approx": __version__, "torch": torch.__version__},
        }
        (folder / CHECK).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if wrong := [f"{size}: {error:.1e}" for size, error in found.items() if not error <= _TOLERANCE[format]]:
            raise ApproxError(
                f"The exported program differs from {name} at {', '.join(wrong)} (batch x length; "
                f"{_TOLERANCE[format]:.0e} is allowed). Nothing was written.",
                Exit.VERIFICATION,
            )
    return Exported(str(out), **report, notes=[*opened.notes, *notes])


def refuse_unexportable(model: Any) -> None:
    """Check that one program can compute a model at every length.

    Raises:
        ApproxError: naming the mechanisms that cannot be exported, and why.
    """
    reasons = {}
    for part in mechanisms(model) if families.is_converted(model) else ():
        named = next((name for name, kind in MECHANISMS.items() if type(part) is kind), None)
        if named is not None and part.compiles != "whole":
            reasons[named] = part.compiles.rstrip(".")
        elif named is not None and part.exact_below:
            reasons[named] = (
                f"inputs below {part.exact_below} tokens keep exact attention, so their length decides what is computed"
            )
    if reasons:
        able = ", ".join(name for name, kind in MECHANISMS.items() if kind.compiles == "whole")
        raise ApproxError(
            f"{'; '.join(f'{named} cannot be exported: {reason}' for named, reason in reasons.items())}. Convert with "
            f"one of {able} instead, without --exact-below.",
            Exit.UNSUPPORTED,
        )


def _refuse_missing() -> None:
    try:
        import onnxruntime  # type: ignore[import-not-found]  # optional
        import onnxscript  # type: ignore[import-not-found]  # optional
    except ImportError as error:
        raise ApproxError(
            f"The format 'onnx' needs the packages onnx, onnxscript and onnxruntime ({error}). Install them: pip "
            "install 'approx-attention[onnx]'.",
            Exit.MISSING,
        ) from None
    del onnxruntime, onnxscript


def check_lengths(model: Any, lengths: Sequence[int] | None) -> list[int]:
    """The lengths of the check, if the model takes them; by default three short ones.

    Raises:
        ApproxError: if there are not three, or the model does not take one.
    """
    most = positions.limit(model.config)
    if lengths is None:
        return [min(length, most or length) for length in _LENGTHS]
    if len(lengths) != len(_LENGTHS) or min(lengths) < 2 or (most is not None and max(lengths) > most):
        limit = "" if most is None else f", {most:,} at most"
        raise ApproxError(
            f"The check runs at three lengths of 2 or more tokens{limit}; --lengths gave "
            f"{', '.join(map(str, lengths))}."
        )
    return list(lengths)


def _inputs(model: Any, batch: int, length: int) -> dict[str, Tensor]:
    padded = length // 4 if batch > 1 else 0
    inputs = example_inputs(model, length, batch=batch, padded=padded)
    main = model.main_input_name
    if main == "input_ids":
        inputs.setdefault("attention_mask", torch.ones_like(inputs[main]))
    return inputs


def _program(model: Any) -> ExportedProgram:
    batch, length = _TRACED
    inputs = _inputs(model, batch, min(length, positions.limit(model.config) or length))
    free = {
        # Images and spectrograms have one size.
        name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} if x.dim() == 2 else {0: Dim.DYNAMIC}
        for name, x in inputs.items()
    }
    try:
        return torch.export.export(model, (), inputs, dynamic_shapes=free)
    except Exception as error:
        # PyTorch raises many kinds here, with reports of many lines.
        raise ApproxError(
            f"A {type(model).__name__} with these mechanisms has no program for every batch size and length: "
            f"{_first_line(error)}",
            Exit.UNSUPPORTED,
        ) from error


def _save_onnx(program: ExportedProgram, model: Any, path: Path) -> None:
    names = list(model(**_inputs(model, *_TRACED)))
    made = torch.onnx.export(program, dynamo=True, output_names=names, verbose=False)
    assert made is not None
    size = sum(x.numel() * x.element_size() for x in model.state_dict().values())
    made.save(path, external_data=size > _MOST_IN_ONE_FILE)


def _torch_runner(path: Path) -> Callable[[dict[str, Tensor]], Tensor]:
    program = torch.export.load(path).module()
    return lambda inputs: program(**inputs)[0]


def _onnx_runner(path: Path) -> Callable[[dict[str, Tensor]], Tensor]:
    import onnxruntime  # type: ignore[import-not-found]  # optional

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    taken = {each.name for each in session.get_inputs()}
    return lambda inputs: torch.from_numpy(
        session.run(None, {name: x.numpy() for name, x in inputs.items() if name in taken})[0]
    )


def _error(model: Any, run: Callable[[dict[str, Tensor]], Tensor], batch: int, length: int) -> float:
    inputs = _inputs(model, batch, length)
    expected = model(**inputs)[0]
    try:
        actual = run(inputs)
    except Exception as error:
        # PyTorch and ONNX Runtime raise many kinds here.
        raise ApproxError(
            f"The exported program does not take {batch} inputs of {length} tokens: {_first_line(error)}. Nothing was "
            "written.",
            Exit.VERIFICATION,
        ) from error
    mask = inputs.get("attention_mask")
    if mask is not None and expected.shape[:2] == mask.shape:
        # Outputs of padding are undefined.
        expected, actual = expected[mask.bool()], actual[mask.bool()]
    return difference(actual, expected)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings of PyTorch's exporters about deprecated parts of PyTorch."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
