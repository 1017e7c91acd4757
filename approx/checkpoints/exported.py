"""Programs that `approx export` wrote, opened as models: they run in their own runtime and are measured like any other."""

import copy
import functools
import hashlib
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from approx.checkpoints import families
from approx.checkpoints.checkpoint import EXPORTED, Checkpoint, Source, locate, settings
from approx.checkpoints.manifest import sha256
from approx.errors import ApproxError, Exit
from approx.planning import positions
from approx.version import install

FILES = {"torch-export": "model.pt2", "onnx": "model.onnx", "openvino": "model.xml"}
"""Format -> file of the program."""
RUNTIMES = {"torch-export": ("torch",), "onnx": ("onnxruntime", "openvino"), "openvino": ("openvino",)}
"""Format -> the runtimes that programs of it are measured in, the default first."""
# Files in which formats keep large weights.
_DATA = ("model.onnx.data", "model.bin")


@dataclass(frozen=True)
class Session:
    """A program in its runtime.

    Attributes:
        runtime: Name and version, such as `onnxruntime 1.32.0`.
        inputs: Names of its inputs.
        run: Inputs by name -> outputs by name, in order.
    """

    runtime: str
    inputs: list[str]
    run: Callable[[dict[str, Tensor]], dict[str, Tensor]]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what exporters and quantisers say of parts that are deprecated, and of steps that could come before theirs."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def refuse_missing(*packages: str, what: str, extra: str) -> None:
    """Check that packages are installed.

    Raises:
        ApproxError: naming `what` needs them, and the extra that installs them.
    """
    missing = []
    for package in packages:
        try:
            __import__(package)
        except ImportError:
            missing.append(package)
    if missing:
        raise ApproxError(
            f"{what} needs {' and '.join(missing)}, which cannot be imported. Install: {install(extra)}.",
            Exit.MISSING,
        )


def session(path: Path, runtime: str) -> Session:
    """Open a program on the CPU, in float32, with as many threads as PyTorch has.

    Args:
        path: The program.
        runtime: `torch`, `onnxruntime` or `openvino`.

    Raises:
        ApproxError: if the runtime is missing, or cannot open the file.
    """
    refuse_missing(runtime, what=f"The runtime '{runtime}'", extra="onnx" if runtime == "onnxruntime" else "openvino")
    try:
        return {"torch": _torch, "onnxruntime": _onnxruntime, "openvino": _openvino}[runtime](path)
    except Exception as error:
        # Runtimes raise many kinds here.
        raise ApproxError(f"{runtime} cannot open {path}: {first_line(error)}", Exit.UNAVAILABLE) from error


def _torch(path: Path) -> Session:
    program = torch.export.load(path)
    taken, call = [str(name) for name in program.graph_signature.user_inputs], program.module()

    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.no_grad():
            return dict(call(**{name: inputs[name] for name in taken}))

    return Session(f"torch {torch.__version__}", taken, run)


def _onnxruntime(path: Path) -> Session:
    import onnxruntime  # type: ignore[import-not-found]  # optional

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    # Threads that wait busily after a call would slow down whatever is timed next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    opened = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    taken, names = ([each.name for each in ports] for ports in (opened.get_inputs(), opened.get_outputs()))

    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        found = opened.run(None, {name: inputs[name].numpy() for name in taken})
        return {name: torch.from_numpy(array) for name, array in zip(names, found, strict=True)}

    return Session(f"onnxruntime {onnxruntime.__version__}", taken, run)


def _openvino(path: Path) -> Session:
    import openvino  # type: ignore[import-not-found]  # optional

    # Where the processor has bfloat16, float32 would be computed in it.
    how = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(
        str(path), "CPU", {**how, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    )
    taken, names = ([port.any_name for port in ports] for ports in (compiled.inputs, compiled.outputs))
    request = compiled.create_infer_request()

    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        request.infer({name: inputs[name].contiguous().numpy() for name in taken}, share_inputs=True)
        # The next call overwrites them.
        return {name: torch.from_numpy(request.get_tensor(name).data.copy()) for name in names}

    return Session(f"openvino {metadata.version('openvino')}", taken, run)


class ExportedModel(nn.Module):
    """A program behind the interface of the model it was exported from, for forward passes alone.

    Its class has the name of that model's, which tells its head. It has no weights and no layers.

    Attributes:
        config: The config of the model.
        runtime: Runtime, its version and the precision of the weights, such as `onnxruntime 1.32.0, int8`.
    """

    main_input_name = "input_ids"
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, source: Source, opened: Session, precision: str) -> None:
        super().__init__()
        self.config = source.config
        self.runtime = f"{opened.runtime}, {precision}"
        self._source, self._session = source, opened
        self.eval()

    @classmethod
    def of(cls, source: Source, opened: Session, precision: str) -> "ExportedModel":
        """A model whose class is named after the stock class of its source."""
        kind: Any = source.stock_class
        named = type(kind.__name__, (cls,), {"main_input_name": kind.main_input_name})
        return named(source, opened, precision)

    def forward(self, **inputs: Tensor) -> ModelOutput:
        """Run the program on the inputs of a tokenizer or feature extractor.

        Raises:
            ApproxError: if an input is missing or unknown, too long, or refused by the runtime.
        """
        main = inputs[self.main_input_name]
        given = self._given(inputs)
        limit = positions.limit(self.config)
        if self.main_input_name == "input_ids" and limit is not None and main.shape[1] > limit:
            raise ApproxError(
                f"The input has {main.shape[1]} tokens, but {self._source.name} was exported with {limit} positions. "
                "Shorten it, or export a checkpoint with more positions."
            )
        try:
            found = self._session.run(given)
        except MemoryError:
            raise
        except Exception as error:
            # Runtimes raise many kinds here.
            raise ApproxError(
                f"{self._source.name} does not take {main.shape[0]} inputs of {main.shape[1]}: {first_line(error)}",
                Exit.UNSUPPORTED,
            ) from error
        out = ModelOutput()
        for name, value in found.items():
            out[name] = value
        return out

    def _given(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inputs of the program: those that tokenizers leave out have their usual values."""
        main = inputs[self.main_input_name]
        given = {name: x for name, x in inputs.items() if x is not None}
        if "attention_mask" in self._session.inputs:
            given.setdefault("attention_mask", torch.ones(main.shape[:2], dtype=torch.long))
        if "token_type_ids" in self._session.inputs:
            given.setdefault("token_type_ids", torch.zeros_like(main))
        missing = [name for name in self._session.inputs if name not in given]
        # Exporting drops inputs that change nothing; a mask that hides nothing does neither.
        unread = [name for name in given if name not in self._session.inputs]
        idle = {"attention_mask": 1, "token_type_ids": 0}
        unread = [name for name in unread if name not in idle or not bool((given[name] == idle[name]).all())]
        if missing or unread:
            raise ApproxError(
                f"{self._source.name} takes {', '.join(self._session.inputs)}, but got {', '.join(given)}. Export the "
                "checkpoint again, or choose a task with its inputs.",
                Exit.UNSUPPORTED,
            )
        return given

    def can_generate(self) -> NoReturn:
        """Refuse, as `generate`."""
        self.generate()

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: programs have no cache.

        Raises:
            ApproxError: always.
        """
        raise ApproxError(
            f"{self._source.name} is an exported program, which does not generate. Use the checkpoint it was exported "
            "from.",
            Exit.UNSUPPORTED,
        )

    @functools.cached_property
    def _skeleton(self) -> Any:
        """The converted model without weights, which knows on which lengths it is exact."""
        with torch.device("meta"):
            return families.model_class(self._source.stock_class)(copy.deepcopy(self.config))

    def approximates(self, positions: int, widest: int) -> bool:
        """Whether any layer is not exact on an input of this length, see `ConvertedModel.approximates`."""
        return self._skeleton.approximates(positions, widest)

    def approximated_pairs(self, positions: int, widest: int) -> float:
        """The share of pairs whose weight is not exact, see `ConvertedModel.approximated_pairs`."""
        return self._skeleton.approximated_pairs(positions, widest)


def is_exported(name: str | Path) -> bool:
    """Whether a name is that of a folder with a program that `approx export` wrote; a stock checkpoint is an ordinary one."""
    path = Path(name).expanduser() / EXPORTED
    return path.is_file() and settings(path).get("format") != "stock"


def load(name: str | Path, *, runtime: str | None = None, dtype: str = "auto", device: str = "auto") -> Checkpoint:
    """Open an exported folder as a model that forward passes can be measured of.

    Args:
        name: The folder.
        runtime: `torch`, `onnxruntime` or `openvino`; None for the usual one of the format.
        dtype: `auto` or `float32`; the precision of the weights was chosen by the export.
        device: `auto` or `cpu`.

    Raises:
        ApproxError: if the runtime does not fit or is missing, or the folder is damaged.
    """
    source = locate(name)
    report = settings(source.folder / EXPORTED)
    able = RUNTIMES.get(str(report.get("format")))
    if able is None:
        raise ApproxError(
            f"{name} is a program of the format '{report.get('format')}'; measured are {' and '.join(RUNTIMES)}. Export "
            "it again with one of these as --format.",
            Exit.UNSUPPORTED,
        )
    if report.get("state"):
        raise ApproxError(
            f"{name} is a program that decodes from a state, which evaluate and bench do not run. Export the checkpoint again "
            "without --decode.",
            Exit.UNSUPPORTED,
        )
    if runtime is not None and runtime not in able:
        known = sorted({each for every in RUNTIMES.values() for each in every})
        what = f"does not run a program of the format '{report['format']}'" if runtime in known else "is unknown"
        raise ApproxError(f"The runtime '{runtime}' {what}; allowed for {name}: {', '.join(able)}.")
    if dtype not in ("auto", "float32") or device not in ("auto", "cpu"):
        raise ApproxError(
            f"{name} is an exported program, which is measured on the CPU with the precision of its export. Leave out "
            "--dtype and --device."
        )
    path = source.folder / FILES[report["format"]]
    if not path.is_file():
        raise ApproxError(f"{path} is missing. Export the checkpoint again.", Exit.UNAVAILABLE)
    opened = session(path, runtime or able[0])
    model = ExportedModel.of(source, opened, report.get("quantize") or "float32")
    files = [path, *(source.folder / data for data in _DATA if (source.folder / data).is_file())]
    digest = hashlib.sha256("".join(map(sha256, files)).encode()).hexdigest()
    return Checkpoint(source, model, digest, runtime=model.runtime)


def first_line(error: Exception) -> str:
    """The first line of an error's text that says something, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
