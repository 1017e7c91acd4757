"""Export a checkpoint as a program of torch.export, ONNX or OpenVINO, and run it to check it."""

import io
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from approx.checkpoints import checkpoint, exported, families, foreign
from approx.checkpoints.atomic_folder import atomic_folder, refuse_existing, refuse_overlap, refuse_unwritable
from approx.checkpoints.checkpoint import EXPORTED
from approx.checkpoints.exported import FILES, RUNTIMES, first_line, quiet, refuse_missing
from approx.conversion import decoding
from approx.conversion.calibration import evaluating
from approx.conversion.convert import copy_companions, forget_code
from approx.conversion.verify import difference
from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS
from approx.planning import positions
from approx.planning.anatomy import ranges
from approx.planning.positions import example_inputs
from approx.version import __version__

PRECISIONS = ("int8",)
_QUANTISED = ("onnx", "openvino")
# Batch sizes and lengths of the checks; the last inputs are padded. The effect of rounding takes more inputs to see.
_BATCHES, _LENGTHS = (1, 3, 2), (12, 40, 120)
_INT8_BATCHES = (1, 8, 16)
_TRACED = (2, 100)
# Largest difference relative to the largest output. The runtimes have other kernels.
_TOLERANCE = {"torch-export": 1e-4, "onnx": 1e-3, "openvino": 1e-3}
# Of int8 the differences of all checks together, relative to the outputs, both as root mean squares: the largest ones say little,
# since random tokens leave a classifier undecided. Rounding costs up to a fifth there; a program that mixes up scales, or whose
# activations do not fit int8, is wrong by about the outputs themselves.
_INT8_TOLERANCE = 0.3
# The first version of ONNX whose operators include `Attention`, which runtimes fuse.
_OPSET = 23
# A file of protobuf has at most 2 GB; larger weights get a separate file.
_MOST_IN_ONE_FILE = 1_500_000_000


@dataclass(frozen=True)
class Exported:
    """An exported program, and how it compares with its model.

    Attributes:
        output: The folder.
        file: Name of the program in it.
        format: `torch-export`, `onnx`, `openvino` or `stock`.
        quantize: `int8`, or None for float32.
        inputs: Names of its inputs.
        largest_relative_difference: Batch x length -> the largest relative difference from the outputs of the float32 model.
        equal_predictions: Share of the checked inputs, or of their tokens, for which the largest output is the same; None if the
            model does not choose among classes.
        versions: Package -> the version that exported it.
        notes: What a user should know.
        state: Of a program that decodes, input name -> sizes of the state of one text, those that grow with it as 0; else None.
        state_bytes: Bytes of that state, without what grows; None for other programs.
        relative_rms: Of int8, the root mean square of all differences relative to that of the outputs; None for float32.
    """

    output: str
    file: str
    format: str
    quantize: str | None
    inputs: list[str]
    largest_relative_difference: dict[str, float]
    equal_predictions: float | None
    versions: dict[str, str]
    notes: list[str]
    state: dict[str, list[int]] | None = None
    state_bytes: int | None = None
    relative_rms: float | None = None


def export(
    name: str | Path,
    out: Path,
    *,
    format: str = "torch-export",  # the name of the option
    quantize: str | None = None,
    decode: bool = False,
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
        format: `torch-export` for `torch.export.load`, `onnx` for ONNX Runtime and others, `openvino` for OpenVINO, `stock`
            for an ordinary checkpoint of transformers, see `stock.py`.
        quantize: `int8` for weights in 8 bits, in `onnx` and `openvino`; None for float32.
        decode: Whether the program, in `onnx`, reads tokens and a state and returns logits and the next state, to write text.
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
    _refuse_precision(format, quantize)
    if decode and (format != "onnx" or quantize):
        raise ApproxError("--decode is for programs in float32 of the format 'onnx'. Use it with --format onnx alone.")
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
    _refuse_missing(format, quantize)
    progress("loading the weights")
    _refuse_quantised(checkpoint.locate(name, revision=revision, offline=offline, merge_adapter=merge_adapter))
    opened = checkpoint.load(name, revision=revision, offline=offline, merge_adapter=merge_adapter)
    refuse_overlap(opened.source.folder, out)
    model = opened.model.float()
    if decode:
        decoding.refuse_undecodable(model)
    refuse_unexportable(model, format, decode=decode)
    # Other programs have no cache.
    model.config.use_cache = False
    checked = check_lengths(model, lengths)
    with (
        evaluating(model),
        torch.inference_mode(False),
        torch.no_grad(),
        quiet(),
        atomic_folder(out, force=force) as folder,
    ):
        progress("tracing")
        first, inputs, outputs = None, list(_traced(model)), None
        if decode:
            first = decoding.first_state(model)
            program, inputs, outputs = decoding.program(model, first)
            checked = checked if lengths else decoding.lengths(model, first, _LENGTHS)
        else:
            program = _program(model)
        notes = copy_companions(opened.source, folder, foreign.carried(opened.source.config))
        shutil.copyfile(opened.source.folder / "config.json", folder / "config.json")
        # The program needs no code; a custom tokenizer may.
        forget_code(folder)
        path = folder / FILES[format]
        if first is None:
            _save(program, model, path, format, quantize, progress)
        else:
            progress("translating to ONNX")
            _save_onnx(program, model, path, inputs, outputs)
            arrays: dict[str, Any] = {name: x.numpy() for name, x in first.tensors.items()}
            np.savez(folder / decoding.FIRST_STATE, **arrays)
        del program
        progress("comparing with the model")
        run, runtime = _runner(path, format)
        sizes = list(zip(_INT8_BATCHES if quantize else _BATCHES, checked, strict=True))
        checks = {f"{batch} x {length}": _compare(model, run, batch, length, first) for batch, length in sizes}
        alike = [same for one in checks.values() for same in one.alike]
        found = {size: one.error for size, one in checks.items()}
        report = {
            "file": path.name,
            "format": format,
            "quantize": quantize,
            "inputs": inputs,
            "largest_relative_difference": found,
            "equal_predictions": sum(alike) / len(alike) if alike else None,
            "state": None if first is None else {name: list(x.shape) for name, x in first.tensors.items()},
            "state_bytes": None if first is None else first.bytes,
            "relative_rms": _relative_rms([*checks.values()]) if quantize else None,
            "versions": {"approx": __version__, "torch": torch.__version__, **runtime},
        }
        (folder / EXPORTED).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if (rms := report["relative_rms"]) is not None and not rms <= _INT8_TOLERANCE:
            raise ApproxError(
                f"Rounded to {quantize}, {name} computes something else: its differences are {rms:.2f} of the outputs, as root mean "
                f"squares; {_INT8_TOLERANCE} is allowed. Leave out --quantize, or quantise in the other format. Nothing was written.",
                Exit.VERIFICATION,
            )
        allowed = torch.inf if quantize else decoding.TOLERANCE if decode else _TOLERANCE[format]
        if wrong := [f"{size}: {error:.1e}" for size, error in found.items() if not error <= allowed]:
            raise ApproxError(
                f"The exported program differs from {name} at {', '.join(wrong)} (batch x length; "
                f"{allowed:.0e} is allowed). Nothing was written.",
                Exit.VERIFICATION,
            )
    return Exported(str(out), **report, notes=[*opened.notes, *notes, *_costs(model), *_growth(first)])


def refuse_unexportable(model: Any, format: str = "torch-export", *, decode: bool = False) -> None:
    """Check that one program of a format can compute a model at every length, or with `decode` continue from a state.

    Raises:
        ApproxError: naming the mechanisms that cannot be exported with their layers, and why.
    """
    reasons: dict[str, list[int]] = {}
    for layer, name, part in _parts(model):
        why = None
        traced = decode and part.decode_state != "cache"
        if part.compiles != "whole" and not part.always_exact and not traced:
            why = part.compiles.rstrip(".")
        elif part.exact_below:
            why = (
                f"inputs below {part.exact_below} tokens keep exact attention, so their length decides what is computed"
            )
        elif format != "torch-export" and getattr(part, "update", None) == "delta":
            why = "ONNX has no operator that solves the triangular systems of the delta rule"
        if why:
            reasons.setdefault(f"{name} cannot be exported: {why}", []).append(layer)
    if reasons:
        able = ", ".join(
            name
            for name, kind in MECHANISMS.items()
            if kind.compiles == "whole" or kind.always_exact or (decode and kind.decode_state != "cache")
        )
        listed = "; ".join(f"{why} (layer{'s' * (len(on) > 1)} {ranges(on)})" for why, on in reasons.items())
        raise ApproxError(f"{listed}. Convert with one of {able} instead, without --exact-below.", Exit.UNSUPPORTED)


def _parts(model: Any) -> Iterator[tuple[int, str, Any]]:
    """The layer, name and mechanism of each group of heads of a converted model, of those mechanisms that a plan can name."""
    for path, site in model.config.approx["sites"].items() if families.is_converted(model) else ():
        for part in model.base_model.get_submodule(path).mechanism.modules():
            name = next((name for name, kind in MECHANISMS.items() if type(part) is kind), None)
            if name is not None:
                yield site["layer"], name, part


def _costs(model: Any) -> list[str]:
    """Notes on layers whose program does more work than PyTorch does."""
    layers = [layer for layer, _, part in _parts(model) if part.reads_tokens]
    return [
        f"Layers {ranges(layers)} choose global tokens by content: a program attends as if each token could be one, which costs "
        "as much as exact attention. Convert with global_tokens none, first or positions."
    ] * bool(layers)


def _growth(first: decoding.FirstState | None) -> list[str]:
    """A note on layers whose part of a state grows."""
    if first is None or not first.growing:
        return []
    return [
        f"Layers {ranges(first.growing)} keep the keys and values of all tokens, so the state grows with the text. Convert them "
        "with linear, performer, local or sinks for a state of constant size."
    ]


def _refuse_precision(format: str, quantize: str | None) -> None:
    if quantize is None:
        return
    if quantize not in PRECISIONS:
        raise ApproxError(f"The precision '{quantize}' is unknown; --quantize takes {', '.join(PRECISIONS)}.")
    if format not in _QUANTISED:
        raise ApproxError(f"The format '{format}' takes no --quantize. Use it with --format {' or '.join(_QUANTISED)}.")


def _refuse_quantised(source: checkpoint.Source) -> None:
    if source.raw.get("quantization_config"):
        raise ApproxError(
            f"{source.name} is quantised, and programs are made from float weights. Export the checkpoint from which it was "
            "quantised, with --quantize int8 for weights in 8 bits.",
            Exit.UNSUPPORTED,
        )


def _refuse_missing(format: str, quantize: str | None) -> None:
    if format == "torch-export":
        return
    packages = ["onnx", "onnxscript", "onnxruntime"]
    if format == "openvino":
        packages = ["onnx", "onnxscript", "openvino", *(["nncf"] if quantize else [])]
    refuse_missing(*packages, what=f"The format '{format}'", extra=format)


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
        if (getattr(model.config, "type_vocab_size", None) or 0) > 1 and "token_type_ids" in signature(
            model.forward
        ).parameters:
            # As of a pair of texts.
            second = torch.arange(inputs[main].shape[1]) >= inputs[main].shape[1] // 2
            inputs["token_type_ids"] = second.long().expand_as(inputs[main]).contiguous()
    return inputs


def _traced(model: Any) -> dict[str, Tensor]:
    batch, length = _TRACED
    return _inputs(model, batch, min(length, positions.limit(model.config) or length))


def _program(model: Any) -> ExportedProgram:
    inputs = _traced(model)
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
            f"{first_line(error)}",
            Exit.UNSUPPORTED,
        ) from error


def _save(
    program: ExportedProgram,
    model: Any,
    path: Path,
    format: str,
    quantize: str | None,
    progress: Callable[[str], None],
) -> None:
    """Write a program in its format."""
    if format == "torch-export":
        torch.export.save(program, path)
        return
    progress("translating to ONNX")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        onnx = Path(folder) / FILES["onnx"]
        straight = format == "onnx" and not quantize
        _save_onnx(program, model, path if straight else onnx)
        if straight:
            return
        try:
            if format == "onnx":
                _quantize_onnx(onnx, path, large=_bytes(model) > _MOST_IN_ONE_FILE)
            else:
                _save_openvino(onnx, path, quantize)
        except Exception as error:
            # The tools raise many kinds here.
            raise ApproxError(
                f"The {type(model).__name__} could not be written as {quantize or ''} {format}: {first_line(error)}",
                Exit.UNSUPPORTED,
            ) from error


def _bytes(model: Any) -> int:
    return sum(x.numel() * x.element_size() for x in model.state_dict().values())


def _save_onnx(
    program: ExportedProgram, model: Any, path: Path, inputs: list[str] | None = None, outputs: list[str] | None = None
) -> None:
    made = torch.onnx.export(
        program,
        dynamo=True,
        opset_version=_OPSET,
        input_names=inputs,
        output_names=outputs or list(model(**_traced(model))),
        custom_translation_table={torch.ops.aten.sort.stable: _stable_sort},
        verbose=False,
    )
    assert made is not None
    made.save(path, external_data=_bytes(model) > _MOST_IN_ONE_FILE)


def _stable_sort(x: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
    """`torch.sort` in ONNX, where equal numbers keep their order in `TopK`."""
    from onnxscript import opset23  # type: ignore[import-not-found]  # optional

    # Its types are those of Python values, but a program is traced.
    op: Any = opset23
    # It takes no small integers.
    count = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
    values, places = op.TopK(op.Cast(x, to=6), count, axis=dim, largest=int(descending), sorted=1)
    return op.CastLike(values, x), places


def _quantize_onnx(path: Path, out: Path, *, large: bool) -> None:
    """Round the weights of matrix products to int8, with a scale for each column; activations are rounded as they arise."""
    import onnx  # type: ignore[import-not-found]  # optional
    from onnxruntime.quantization import QuantType, quantize_dynamic  # type: ignore[import-not-found]  # optional

    graph = onnx.load(path, load_external_data=False).graph
    # ONNX Runtime cannot run rounded weights of more than two dimensions, such as the maps of each head in `linear`.
    deep = {each.name for each in graph.initializer if len(each.dims) > 2}
    # ONNX Runtime has another `Attention` of its own, so the kinds of operators are named.
    quantize_dynamic(
        path,
        out,
        op_types_to_quantize=["MatMul", "Gemm"],
        nodes_to_exclude=[node.name for node in graph.node if deep & {*node.input}],
        per_channel=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=large,
    )


def _save_openvino(path: Path, out: Path, quantize: str | None) -> None:
    import openvino  # type: ignore[import-not-found]  # optional

    made = openvino.convert_model(str(path))
    if quantize:
        import nncf  # type: ignore[import-not-found]  # optional

        nncf.set_log_level(logging.ERROR)
        # It draws its progress on stdout.
        with redirect_stdout(io.StringIO()):
            made = nncf.compress_weights(made, mode=nncf.CompressWeightsMode.INT8_ASYM)
    openvino.save_model(made, str(out), compress_to_fp16=False)


# Inputs by name -> the outputs in order.
Run = Callable[[dict[str, Tensor]], Sequence[Tensor]]


def _runner(path: Path, format: str) -> tuple[Run, dict[str, str]]:
    """What runs a program, and the name and version of its runtime."""
    opened = exported.session(path, RUNTIMES[format][0])
    name, version = opened.runtime.split()
    return lambda inputs: list(opened.run(inputs).values()), {name: version}


@dataclass(frozen=True)
class _Comparison:
    """The largest relative difference of any output, and of each prediction whether it is the same.

    Attributes:
        squares: Output -> sum of the squared differences, and of its own squares.
    """

    error: float
    alike: list[bool]
    squares: dict[str, tuple[float, float]]


def _relative_rms(checks: Sequence[_Comparison]) -> float:
    """The largest of any output, over all checks together; infinite if a difference is not finite."""
    ratios = []
    for name in checks[0].squares:
        apart, size = (sum(check.squares[name][part] for check in checks) for part in (0, 1))
        ratios.append((apart / max(size, 1e-12)) ** 0.5)
    return max(ratios) if all(ratio < torch.inf for ratio in ratios) else torch.inf


def _compare(model: Any, run: Run, batch: int, length: int, first: decoding.FirstState | None = None) -> _Comparison:
    if first is not None:
        found, right = decoding.compared(model, run, first, batch, length)
        return _Comparison(difference(found, right), (found.argmax(-1) == right.argmax(-1)).tolist(), {})
    inputs = _inputs(model, batch, length)
    expected = model(**inputs)
    try:
        actual = run(inputs)
    except Exception as error:
        # PyTorch and the runtimes raise many kinds here.
        raise ApproxError(
            f"The exported program does not take {batch} inputs of {length} tokens: {first_line(error)}. Nothing was "
            "written.",
            Exit.VERIFICATION,
        ) from error
    mask = inputs.get("attention_mask")
    errors, alike, squares = [], [], {}
    for (name, right), found in zip(expected.items(), actual, strict=True):
        if mask is not None and right.shape[:2] == mask.shape:
            # Outputs of padding are undefined.
            right, found = right[mask.bool()], found[mask.bool()]
        errors.append(difference(found, right))
        squares[name] = float((found.double() - right.double()).square().sum()), float(right.double().square().sum())
        if name == "logits" and right.shape[-1] > 1:
            alike = (found.argmax(-1) == right.argmax(-1)).flatten().tolist()
    return _Comparison(max(errors), alike, squares)
