"""Check a conversion, when it is made and again later.

Files, code, exact limit, padding, causality, reload in a clean process, error of each layer.
"""

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, get_num_threads

from approx.checkpoints import checkpoint, manifest
from approx.checkpoints.bundle import auto_map
from approx.checkpoints.checkpoint import Source, adapter_names, settings, weight_files
from approx.checkpoints.families import outside, stock_class, stock_config, write_code
from approx.checkpoints.foreign import carried, code_files, differences, is_code, never_ours, plainly
from approx.checkpoints.history import Check, conversion, trainings
from approx.conversion import clean_process, surgery
from approx.conversion.calibration import (
    all_open,
    calibration_batch,
    calibration_length,
    evaluating,
    exact_below,
    mechanisms,
)
from approx.conversion.clean_process import in_float32, widened
from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS
from approx.mechanisms.mechanism import Mechanism, latest
from approx.planning import positions
from approx.planning.anatomy import anatomy, ranges
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from approx.seam.internals import auto_classes
from approx.seam.observe import Call, observe
from approx.version import __version__
from approx_kernels.dispatch.implementation import implementation, without_warnings
from approx_kernels.ops.exact.api import exact_attention
from approx_kernels.runtime.cache_folder import cache_folder

SHORT = 40
# Limits the time of a check, which is a few forward passes on a CPU.
LONGEST = 4096
# Tokens beyond the shortest approximated length, so that a block starting there holds more than one token.
_MARGIN = 8


class Trial(NamedTuple):
    """The size of an input.

    Attributes:
        length: Positions of a row: tokens, or frames of speech.
        padded: Number of padded positions in padded rows.
    """

    length: int
    padded: int

    @property
    def real(self) -> int:
        """Number of real positions in padded rows."""
        return self.length - self.padded


class _Layer(NamedTuple):
    number: int
    start: int | None
    fixed: int | None


def trials(model: Any) -> list[Trial]:
    """A short input, and one on which every layer of a converted model approximates, even in padded rows.

    Only one if the short one is long enough, or all inputs have the same size. The longer one has at most the model's
    positions, and at most 4,096.
    """
    layers = _layers(model)
    free = [layer for layer in layers if layer.fixed is None]
    if not free:
        return [Trial(max(layer.fixed or 0 for layer in layers), 0)]
    most = min(positions.limit(model.config) or LONGEST, LONGEST)
    short = Trial(min(SHORT, most), min(SHORT, most) // 4)
    start = latest(layer.start for layer in free) or 0
    real = start + _MARGIN
    if real <= short.real:
        return [short]
    padded = max(_MARGIN, real // 8)
    length = min(real + padded, most)
    # With few positions, reduce the padding so that the real tokens are still approximated.
    return [short, Trial(length, min(padded, max(length - start, 1)))]


def not_approximated(model: Any, tokens: int) -> str:
    """A note about layers that are exact on inputs of this many tokens, the longest tried; empty if there are none."""
    exact = [layer for layer in _layers(model) if layer.start is not None and layer.start > (layer.fixed or tokens)]
    if not exact:
        return ""
    numbers = ranges(layer.number for layer in exact)
    limit = positions.limit(model.config)
    if all(layer.fixed or (limit is not None and limit <= LONGEST) for layer in exact):
        return f"; exact at every length this model takes: layers {numbers}"
    start = latest(layer.start for layer in exact)
    return f"; not checked where they approximate, from {start} tokens on: layers {numbers}"


def _layers(model: Any) -> list[_Layer]:
    observed = anatomy(stock_config(model.config), stock_class(type(model))).sites
    fixed = {site.path: site.fixed_length for site in observed}
    return [
        _Layer(site["layer"], model.base_model.get_submodule(path).mechanism.approximates_from(), fixed[path])
        for path, site in model.config.approx["sites"].items()
    ]


def difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest expected value; infinite if any value is not finite."""
    largest = expected.float().abs().max().clamp_min(1e-6)
    error = float((actual.float() - expected.float()).abs().max() / largest)
    return error if error < torch.inf else torch.inf


def padding_by_layer(model: Any, trial: Trial) -> float:
    """Largest relative difference between the outputs of padded rows and those of their real tokens alone.

    One row is padded on the right; with causal layers, which never see that padding, another one on the left.

    Args:
        model: A converted model whose inputs have an `attention_mask`.
        trial: Size of its inputs.
    """
    causal = any(site["causal"] for site in model.config.approx["sites"].values())
    inputs = example_inputs(model, trial.length, batch=3 if causal else 2, padded=trial.padded, device=model.device)
    mask_name = "attention_mask"
    if causal and "decoder_input_ids" in inputs:
        mask_name = "decoder_attention_mask"
        if mask_name in signature(model.base_model.forward).parameters:
            inputs[mask_name] = torch.ones_like(inputs["decoder_input_ids"])
            inputs[mask_name][-1, trial.real :] = 0
    if causal and mask_name in inputs:
        inputs[mask_name][1] = inputs[mask_name][-1].flip(0)

    def compare(mechanism: Mechanism, call: Call) -> float:
        mask = inputs.get(mask_name if mechanism.causal else "attention_mask")
        # Speech has fewer frames than samples, and only the model knows which frames are padding.
        real = mask.bool() if mask is not None and mask.shape == call.k.shape[::2] else call.mask
        if real is None:
            return 0.0
        errors = [0.0]
        for row in (~real.all(1)).nonzero().squeeze(1).tolist():
            place = real[row].nonzero().squeeze(1)
            one = slice(row, row + 1)
            alone = _attend(
                mechanism,
                *(x[one, :, place] for x in (call.q, call.k, call.v)),
                tokens=None if call.tokens is None else call.tokens[one, place],
            )
            errors.append(difference(call.output[one, :, place], alone))
        return max(errors)

    return _largest(model, inputs, compare)[0]


def causality_by_layer(model: Any, trial: Trial, inputs: dict[str, Tensor]) -> tuple[float, Tensor]:
    """Largest relative change of earlier outputs of causal layers when the last tokens change, and the hidden states.

    Args:
        model: A converted model.
        trial: Size of the inputs; the tokens that would be padding count as the last ones.
        inputs: Inputs without padding.
    """

    def compare(mechanism: Mechanism, call: Call) -> float:
        if not mechanism.causal:
            return 0.0
        # A leak may end at the border of a block; of two adjacent cuts at least one is inside a block.
        first = call.k.shape[2] - trial.padded
        errors = []
        for cut in (first - 1, first):
            other = (torch.cat([x[:, :, :cut], 5 - 3 * x[:, :, cut:]], 2) for x in (call.q, call.k, call.v))
            changed = _attend(mechanism, *other, tokens=call.tokens)
            errors.append(difference(changed[:, :, :cut], call.output[:, :, :cut]))
        return max(errors)

    return _largest(model, inputs, compare)


def _attend(mechanism: Mechanism, *qkv: Tensor, tokens: Tensor | None) -> Tensor:
    return mechanism(*qkv) if tokens is None else mechanism(*qkv, tokens=tokens)


def _largest(
    model: Any, inputs: dict[str, Tensor], compare: Callable[[Mechanism, Call], float]
) -> tuple[float, Tensor]:
    differences = [0.0]

    def on_call(call: Call) -> None:
        if call.mechanism is not None and not call.exact:
            differences.append(compare(call.mechanism, call))

    with observe(model, on_call), evaluating(model), in_float32(model), torch.inference_mode():
        hidden = model.base_model(**inputs)[0]
    return max(differences), hidden


# Largest difference allowed, relative to the largest output: rounding through a whole model, but no approximation.
_TOLERANCE = 2e-5


def exact_limit(model: Any, plan: Plan) -> Check:
    """Whether the plan with exact settings of its mechanisms gives the outputs of the stock model.

    Args:
        model: The stock model; it is converted and reverted.
        plan: The plan of the conversion.
    """
    name = "exact limit equals the base"
    rules, inexact = [], []
    observed = anatomy(model.config, type(model))
    # Images may have more positions than any text that is tried.
    longest = max(LONGEST, *(site.fixed_length or 0 for site in observed.sites))
    for rule in chain.from_iterable(plan.resolve(observed).values()):
        limit = MECHANISMS[rule.mechanism].exact_settings(longest)
        if limit is None:
            inexact.append(rule.mechanism)
        else:
            rules.append(replace(rule, settings={**rule.settings, **limit}, exact_below=0))
    if not rules:
        return Check(name, None, f"{', '.join(sorted(set(inexact)))}: no settings are exact")
    length = min(SHORT, positions.limit(model.config) or SHORT)
    inputs = _examples(model, Trial(length, length // 4))
    before = _run(model, inputs)
    # At the exact limit, calibration has no effect.
    surgery.exchange(model, Plan(tuple(rules)))
    try:
        # Warnings about slow settings would concern the exact settings, not the plan's.
        with without_warnings():
            after = _run(model, inputs)
    finally:
        surgery.revert(model)
    error = max(difference(*pair) for pair in zip(_real(after, inputs), _real(before, inputs), strict=True))
    skipped = f"; not checked: {', '.join(sorted(set(inexact)))}" if inexact else ""
    return Check(name, error <= _TOLERANCE, f"relative difference {error:.1e}{skipped}", [length])


def padding(model: Any) -> Check:
    """Whether padding a batch leaves the outputs of padded rows unchanged.

    On a short input the whole model is compared. On an input that its mechanisms approximate, each layer is compared
    with the same inputs, since rounding may change which keys or clusters later layers choose.
    """
    name = "padding cannot matter"
    tried = trials(model)
    padded = _examples(model, tried[0])
    if "attention_mask" not in padded:
        return Check(name, None, f"{type(model).__name__} takes no padding")
    real = padded["attention_mask"][-1].sum().item()
    alone = {key: tensor[-1:, :real] for key, tensor in padded.items()}

    def change() -> float:
        single = _run(model, alone)
        return difference(_run(model, padded)[-1:, : single.shape[1]], single)

    with all_open(model):
        error = change()
        layers = [padding_by_layer(model, trial) for trial in tried]
    if error > _TOLERANCE:
        with exact_below(model, sys.maxsize):
            exact_error = change()
        if exact_error > _TOLERANCE:
            # As Wav2Vec2 with group norm does, which is meant to be used without a mask.
            error = 0.0
            if max(layers) <= _TOLERANCE:
                return Check(
                    name,
                    None,
                    "with exact attention too, padding changes this model's outputs (relative difference "
                    f"{exact_error:.1e})",
                )
    errors = [error, *layers]
    return _compared(name, model, max(errors), [trial.real for trial in tried])


def causality(model: Any) -> Check:
    """Whether earlier outputs of a causal model, and of its causal layers, ignore changes of the last tokens."""
    name = "no leak from the future"
    sites = model.config.approx["sites"].values()
    tried, errors = trials(model), []
    for trial in tried:
        inputs = {key: tensor[:1] for key, tensor in _examples(model, trial).items() if key != "attention_mask"}
        tokens = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
        if not any(site["causal"] for site in sites) or tokens not in inputs:
            return Check(name, None, "no converted layer is causal")
        changed = {**inputs, tokens: inputs[tokens].clone()}
        changed[tokens][:, trial.real :] = (
            changed[tokens][:, trial.real :] + 1
        ) % model.config.get_text_config().vocab_size
        with all_open(model):
            error, before = causality_by_layer(model, trial, inputs)
            after = _run(model, changed)
            errors += [error, difference(after[:, : trial.real], before[:, : trial.real])]
    return _compared(name, model, max(errors), [trial.length for trial in tried])


def weights(folder: Path, reference: dict[str, Tensor], whose: str = "base") -> Check:
    """Whether every tensor of a model is in the written folder, bit for bit; an extended table begins with the old one.

    A tensor may be stored in another dtype than the model computes in.
    """
    written: dict[str, Tensor] = {}
    for path in weight_files(folder):
        written.update(load_file(path))
    shared = {name: tensor for name, tensor in reference.items() if name in written}
    stored = {tensor.data_ptr() for tensor in shared.values()}
    wrong = [name for name, tensor in reference.items() if name not in written and tensor.data_ptr() not in stored]
    wrong += [name for name, tensor in shared.items() if not _begins_with(written[name], tensor.cpu())]
    detail = f"{len(shared)} tensors compared" if not wrong else f"missing or different: {', '.join(wrong[:3])}"
    return Check(f"{whose} weights are bit-equal", not wrong, detail)


def _begins_with(tensor: Tensor, start: Tensor) -> bool:
    return torch.equal((tensor[: start.shape[0]] if start.dim() else tensor).to(start.dtype), start)


def fresh_process(folder: Path, model: Any) -> Check:
    """Whether a new process without approx, approx_kernels and triton loads the folder and gives bit-equal outputs.

    A folder without kernels runs plain PyTorch there, so it is compared with plain PyTorch here. The process runs the
    code that this version writes, and only if the code in the folder equals it. A folder that needs the code of other
    packages is loaded here.
    """
    packages = outside(model.config)
    name = "reload with the packages it needs is bit-equal" if packages else "reload without approx is bit-equal"
    stock = stock_class(type(model))
    if foreign := differences(folder, model.config, stock):
        return Check(name, False, f"not run, since {', '.join(foreign)} is not what this version writes")
    kind = stock.config_class.model_type  # type: ignore[attr-defined]  # every model class has it
    auto = next((a for a, head in auto_classes(kind).items() if head == stock.__name__), None)
    # Some task heads identify padding by a token that not every config has; without it they take only one row.
    rows = 2 if getattr(model.config, "pad_token_id", None) is not None else 1
    model.to("cpu")
    tried = trials(model)
    # Some mechanisms decode differently from a whole forward pass; only the first call may have a cache.
    uncached = {"use_cache": False} if "use_cache" in signature(model.base_model.forward).parameters else {}
    inputs = [{key: tensor[:rows] for key, tensor in _examples(model, tried[0]).items()}]
    # Long inputs need only the padded row, and no language model head, whose outputs would be large.
    longer = tried[1:] or (tried if uncached else [])
    inputs += [{key: tensor[-1:] for key, tensor in _examples(model, trial).items()} for trial in longer]
    slim = not model.config.approx.get("bundle_kernels", False)

    def outputs(one: Any) -> list[Tensor]:
        with implementation("plain") if slim else nullcontext(), evaluating(one), widened(one), all_open(one):
            first = one(**inputs[0])[0]
            return [first, *(one.base_model(**each, **uncached)[0] for each in inputs[1:])]

    with torch.inference_mode():
        here = outputs(model)
    try:
        if packages:
            again = checkpoint.load(folder, offline=True).model
            with torch.inference_mode():
                there = outputs(again)
        else:
            with TemporaryDirectory(prefix="approx-copy-") as scratch:
                _copy_with_our_code(folder, Path(scratch), model)
                there = first_outputs(Path(scratch), auto or "AutoModel", inputs)
    except (ReloadError, ApproxError) as error:
        return Check(name, False, str(error))
    pairs = list(zip(here, there, strict=True))
    largest = max(float((one.float() - other.float()).abs().max()) for one, other in pairs)
    lengths = [tried[0].length, *(trial.real for trial in tried[1:])]
    same = all(torch.equal(*pair) for pair in pairs)
    ran = f" with {_named(packages)}" if packages else " in plain PyTorch" if slim else ""
    return Check(name, same, f"largest difference {largest:.1e}{ran}{_at(model, lengths)}", lengths)


def _named(packages: Mapping[str, str]) -> str:
    return ", ".join(f"'{name}' of {package}" for name, package in packages.items())


def _copy_with_our_code(folder: Path, target: Path, model: Any) -> None:
    """Link the data of a folder next to code written here, so that changing the folder meanwhile changes no code."""
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix == ".safetensors":
            (target / path.name).symlink_to(path.resolve())
        elif path.is_file() and path.suffix == ".json":
            shutil.copyfile(path, target / path.name)
    config = settings(target / "config.json")
    config["auto_map"] = auto_map(stock_class(type(model.config)), stock_class(type(model)))
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_code(target, model.config, stock_class(type(model)))


def _compared(name: str, model: Any, error: float, lengths: list[int]) -> Check:
    detail = f"relative difference {error:.1e}{_at(model, lengths)}"
    return Check(name, error <= _TOLERANCE, detail, lengths)


def _at(model: Any, lengths: list[int]) -> str:
    return f" at {' and '.join(map(str, lengths))} positions{not_approximated(model, max(lengths))}"


def _examples(model: Any, trial: Trial) -> dict[str, Tensor]:
    """Two rows, the second padded if the family takes padding."""
    return example_inputs(model, trial.length, batch=2, padded=trial.padded, device=model.device)


def _run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Last hidden states, [B, L, hidden]: task heads that pool or rescale would hide changes at single positions."""
    with evaluating(model), in_float32(model), torch.inference_mode():
        return model.base_model(**inputs)[0]


def _real(hidden: Tensor, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Both rows without padded positions, where outputs are undefined; speech has fewer positions than samples."""
    mask = inputs.get("attention_mask")
    real = hidden.shape[1] if mask is None else int(hidden.shape[1] * mask[-1].float().mean())
    return hidden[0], hidden[1, :real]


class Damage(NamedTuple):
    """The error of one layer.

    Attributes:
        error: ‖o − o_exact‖ / ‖o_exact‖ of the layer's attention output over the real tokens of the batch; o_exact is
            the output of exact attention on the same q, k and v.
        captured_mass: Exact attention weight on the keys that the layer still sees, from 0 to 1, averaged over the real
            queries and the heads that skip keys; None if no head does. A query with mass m whose weights on these keys
            are proportional to the exact ones has an error of at most 2 (1 − m) max ‖v‖.
        tokens: Number of tokens the layer attended over.
    """

    error: float
    captured_mass: float | None
    tokens: int


def layer_damage(model: Any, inputs: dict[str, Tensor]) -> dict[int, Damage]:
    """Compare each layer of a converted model with exact attention.

    Args:
        model: A converted model.
        inputs: A calibration batch. Layers whose `exact_below` exceeds its length are exact.

    Returns:
        Layer -> its error.
    """
    damage = {}
    for path, site in model.config.approx["sites"].items():
        sparse = model.base_model.get_submodule(path).mechanism.sparse
        damage[site["layer"]] = Damage(0.0, 1.0 if sparse else None, 0)

    def measure(call: Call) -> None:
        if call.mechanism is None:
            return
        lost = damage[call.layer]._replace(tokens=call.q.shape[2])
        if not call.exact:
            form = {"causal": call.mechanism.causal, "scale": call.mechanism.scale}
            target = exact_attention(call.q, call.k, call.v, call.mask, **form)
            mass = [
                _captured(part, part.mechanism) for part in call.members() if part.mechanism and part.mechanism.sparse
            ]
            lost = lost._replace(
                error=_error(call.output, target, call.mask),
                captured_mass=float(torch.cat(mass).mean()) if mass else None,
            )
        damage[call.layer] = lost

    with observe(model, measure), evaluating(model), in_float32(model), torch.inference_mode():
        model.base_model(**inputs)
    return damage


def not_measured(model: Any, measured_at: Mapping[int, int]) -> list[str]:
    """Warnings about layers that are still exact at the length of the measurement, one sentence per length.

    Args:
        model: The converted model.
        measured_at: Layer -> tokens.
    """
    limit, exact = positions.limit(model.config), {}
    for path, site in model.config.approx["sites"].items():
        mechanism = model.base_model.get_submodule(path).mechanism
        start, tokens = mechanism.differs_from(), measured_at[site["layer"]]
        if start is not None and tokens < (start := max(start, mechanism.exact_below)):
            exact.setdefault((start, tokens), []).append(str(site["layer"]))
    return [
        f"With these settings layers {', '.join(layers)} are exact on fewer than {start:,} tokens, "
        + (
            f"and the model takes no more than {limit:,}: they never approximate."
            if limit is not None and limit < start
            else f"but errors were measured on {tokens:,}, so they are 0. Pass longer inputs with --calibrate to "
            "measure them."
        )
        for (start, tokens), layers in exact.items()
    ]


def _error(out: Tensor, target: Tensor, key_mask: Tensor | None) -> float:
    if key_mask is not None and out.shape[-2] == key_mask.shape[-1]:
        keep = key_mask[:, None, :, None]
        out, target = out * keep, target * keep
    return float((out - target).float().norm() / target.float().norm().clamp_min(1e-20))


def _captured(call: Call, mechanism: Mechanism) -> Tensor:
    """Exact attention weight on the keys that each head of a mechanism sees, averaged over the real queries, [H]."""
    if call.exact:
        return torch.ones(mechanism.heads, device=call.q.device)
    q, k, key_mask = call.q.float(), call.k.float(), call.mask
    more = {} if call.tokens is None else {"tokens": call.tokens}
    seen = mechanism.weights(q, k, key_mask, **more) > 0
    mass = (_exact(mechanism).weights(q, k, key_mask) * seen).sum(-1)
    if key_mask is None or q.shape[-2] != key_mask.shape[-1]:
        return mass.mean((0, 2))
    real = key_mask[:, None, :]
    return (mass * real).sum((0, 2)) / real.sum()


def _exact(mechanism: Mechanism) -> Mechanism:
    return MECHANISMS["full"](mechanism.heads, mechanism.head_dim, causal=mechanism.causal, scale=mechanism.scale)


# macOS libraries do not survive a fork, and Windows has no fork.
_FORKS = sys.platform == "linux"
# The check runs on the CPU, and a process that has initialised CUDA cannot be forked. The code in a folder gets no
# token.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "HF_TOKEN": "", "HUGGING_FACE_HUB_TOKEN": ""}


class ReloadError(Exception):
    """The folder did not load or gave no outputs; the message is the reason."""


class Reloader:
    """The process that reloads folders; it starts importing at once."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._home = tempfile.TemporaryDirectory(prefix="approx-fresh-")
        self._log = Path(self._home.name, "log")
        # In append mode, writes restart at the beginning after the file is truncated.
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", clean_process.__file__, *(["forks"] if _FORKS else [])],
                cwd=self._home.name,
                env={**os.environ, **_ENVIRONMENT, "HF_MODULES_CACHE": f"{self._home.name}/modules"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        atexit.register(self.close)

    @property
    def usable(self) -> bool:
        """Whether it still runs and belongs to this process, not to a parent that was forked."""
        return self._owner == os.getpid() and self._process.poll() is None

    def first_outputs(
        self, folder: Path, auto: str, inputs: list[dict[str, Tensor]], *, stock: bool = False
    ) -> list[Tensor]:
        """See the module's function of the same name."""
        assert self._process.stdin
        assert self._process.stdout
        with tempfile.TemporaryDirectory(dir=self._home.name) as scratch:
            for number, each in enumerate(inputs):
                save_file({key: x.contiguous() for key, x in each.items()}, f"{scratch}/{number}.safetensors")
            request = {"folder": str(folder.resolve()), "auto": auto, "scratch": scratch, "calls": len(inputs)}
            # Share the compiled code and probe results: another implementation would round differently.
            request |= {"threads": get_num_threads(), "cache": str(cache_folder().absolute()), "stock": stock}
            try:
                print(json.dumps(request), file=self._process.stdin, flush=True)
                status = self._process.stdout.readline().strip()
            except BrokenPipeError:
                status = ""
            if status != "0":
                lines = self._log.read_text("utf-8", "replace").strip().splitlines()
                raise ReloadError(lines[-1] if lines else "the process died")
            outputs = load_file(f"{scratch}/outputs.safetensors")
            return [outputs[str(number)] for number in range(len(inputs))]

    def close(self) -> None:
        """Kill the process."""
        atexit.unregister(self.close)
        if self._owner == os.getpid():
            self._process.kill()
            self._process.communicate()
            self._home.cleanup()


_current: Reloader | None = None
_lock = Lock()


def begin() -> None:
    """Start the process, so that it imports while other work is done."""
    with _lock:
        _usable()


def first_outputs(folder: Path, auto: str, inputs: list[dict[str, Tensor]], *, stock: bool = False) -> list[Tensor]:
    """Load a folder in a fresh process and run it there, ignoring its `exact_below`.

    Args:
        folder: Folder of the checkpoint.
        auto: The auto class of transformers that loads it.
        inputs: Inputs of each call; the first calls the model, the others its base model, without a cache.
        stock: Whether it is a folder without code: it is loaded in float32, and each call is one of the model, without a
            cache.

    Returns:
        The first output of each call.

    Raises:
        ReloadError: if loading or running fails.
    """
    with _lock:
        reloader = _usable()
        try:
            return reloader.first_outputs(folder, auto, inputs, stock=stock)
        finally:
            if not _FORKS:
                reloader.close()


def _usable() -> Reloader:
    global _current
    if _current is None or not _current.usable:
        _current = Reloader()
    return _current


# Rounding alone gives smaller errors.
_APPROXIMATES = 1e-6


@dataclass(frozen=True)
class Verified:
    """What the verification of a folder found.

    Attributes:
        folder: The folder, or the model id.
        revision: Commit on the hub.
        checks: The checks.
        edited: Names of the files that the user has edited.
        accepted: Whether these edits were recorded in the manifest.
        diffs: File -> the difference between this version's code and the folder's.
    """

    folder: str
    revision: str | None
    checks: list[Check]
    edited: list[str]
    accepted: bool
    diffs: dict[str, str]


def verify(
    name: str | Path,
    *,
    accept: bool = False,
    revision: str | None = None,
    offline: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> Verified:
    """Verify a converted folder, without running code in it: what runs is the same code, written by this version.

    Args:
        name: A converted folder, or the model id of one on the hub.
        accept: Whether edits of other files than weights and code are recorded in the manifest, if all else is well.
        revision: Commit on the hub.
        offline: Whether to use only local files and the hub's cache.
        progress: Called with the name of each step.

    Raises:
        ApproxError: if it does not exist, is not converted, or edits on the hub were to be accepted.
    """
    progress("checking the files")
    source = checkpoint.locate(name, revision=revision, offline=offline)
    if not source.converted:
        raise ApproxError(f"{name} is not a converted checkpoint, so there is nothing to verify.", Exit.REFUSED)
    if accept and source.revision is not None:
        raise ApproxError(f"{name} is on the hub. Edits can be accepted only in a local folder.", Exit.REFUSED)
    differing = manifest.differing(source.folder)
    edited = [one for one in differing if manifest.is_editable(one) and (source.folder / one).is_file()]
    damaged = [one for one in differing if one not in edited] + _unlisted(source.folder)
    diffs, whole = _diffs(source, offline=offline)
    found = [_files(damaged, edited, accept=accept), _code(source, diffs, whole=whole)]
    if not damaged:
        found += _model_checks(source, edited, trusted=not diffs, progress=progress)
    accepted = accept and bool(edited) and all(check.passed is not False for check in found)
    if accepted:
        manifest.accept(source.folder, edited)
    return Verified(str(name), source.revision, checks=found, edited=edited, accepted=accepted, diffs=diffs)


def _unlisted(folder: Path) -> list[str]:
    """Weights and code that the manifest does not name, but transformers might load."""
    known = {manifest.MANIFEST, *manifest.names(folder)}
    there = {*code_files(folder), *(path.name for path in folder.glob("*.safetensors*")), *adapter_names(folder)}
    return sorted(map(plainly, there - known))


def _files(damaged: list[str], edited: list[str], *, accept: bool) -> Check:
    name = "files are those of the manifest"
    if damaged:
        return Check(name, False, f"missing, different or not listed: {', '.join(damaged)}. Copy the folder again")
    if edited and not accept:
        return Check(name, False, f"edited: {', '.join(edited)}. Accept edits of yours with --accept")
    return Check(name, True, f"edited: {', '.join(edited)}" if edited else "every sha256 is right")


def _diffs(source: Source, *, offline: bool) -> tuple[dict[str, str], bool]:
    """Differences from this version's code to that of a folder, by file, and whether every file was seen."""
    found = differences(source.folder, source.config, source.stock_class)
    if source.revision is None:
        return found, True
    # Of a repository, only what a converted folder needs was downloaded.
    there = None if offline else checkpoint.listed(source.name, source.revision)
    known = {*code_files(source.folder)}
    more = {plainly(name): "in the repository; it was not downloaded" for name in there or [] if is_code(name)}
    return found | {name: where for name, where in more.items() if name not in known}, there is not None


def _code(source: Source, diffs: Mapping[str, str], *, whole: bool) -> Check:
    name = "code is what this version writes"
    if not diffs:
        notes = []
        if extra := carried(source.config):
            names = ", ".join(extra)
            notes.append(
                f"the folder has code of the base too, which approx does not know and did not run: {names}. Read it"
            )
        if packages := outside(source.config):
            names = _named(packages)
            notes.append(
                f"it attends by code of installed packages, which approx does not know and these checks run: {names}"
            )
        if notes:
            return Check(name, None, "; ".join(notes))
        unseen = "" if whole else "; other files in the repository on the hub were not listed"
        return Check(name, True if whole else None, f"approx {__version__}{unseen}")
    made = conversion(source.raw.get("approx") or {})
    by = __version__ if made is None else made.approx
    detail = f"{', '.join(diffs)} differs, and was not run; --verbose shows how"
    if by != __version__ and not never_ours(diffs):
        return Check(name, None, f"not checked: written by approx {by}, this is {__version__}: {detail}")
    return Check(name, False, detail)


def _model_checks(source: Source, edited: list[str], *, trusted: bool, progress: Callable[[str], None]) -> list[Check]:
    progress("loading the weights")
    if trusted:
        begin()
    loads = "weights load and are finite"
    try:
        model = checkpoint.load(source.folder, offline=True, edited=edited).model
    except ApproxError as error:
        return [Check(loads, False, str(error))]
    found = [Check(loads, True, f"{len(model.state_dict())} tensors"), state(model)]
    progress("comparing with exact attention")
    batch = calibration_batch(source, model, calibration_length(model), None)
    found.append(active(model, layer_damage(model, batch.inputs)))
    progress("checking padding and causality")
    found += [padding(model), causality(model)]
    if trusted:
        progress("reloading in a fresh process")
        found.append(fresh_process(source.folder, model))
    return found


def state(model: Any) -> Check:
    """Whether the buffers and parameters of all mechanisms have values in their range."""
    wrong = [
        f"{name} of a {type(mechanism).__name__} is {float(tensor.min()):.3g} … {float(tensor.max()):.3g}, not {low:g} "
        f"… {high:g}"
        for mechanism in mechanisms(model)
        for name, (low, high) in mechanism.ranges.items()
        if (tensor := getattr(mechanism, name, None)) is not None and not ((tensor >= low) & (tensor <= high)).all()
    ]
    checked = sum(1 for mechanism in mechanisms(model) for _ in (*mechanism.buffers(), *mechanism.parameters()))
    detail = f"wrong: {'; '.join(wrong[:3])}" if wrong else f"{checked} tensors of mechanisms"
    return Check("buffers are in range", not wrong, detail)


def active(model: Any, damage: Mapping[int, Damage]) -> Check:
    """Whether each layer differs from exact attention where it should.

    Args:
        model: A converted model.
        damage: Layer -> its error on a calibration batch.
    """
    name = "attention is really replaced"
    exact, short, same = [], [], []
    for path, site in model.config.approx["sites"].items():
        mechanism, layer = model.base_model.get_submodule(path).mechanism, site["layer"]
        start = mechanism.differs_from()
        if start is None:
            exact.append(layer)
        elif damage[layer].tokens < max(start, mechanism.exact_below):
            short.append(layer)
        elif damage[layer].error < _APPROXIMATES:
            same.append(layer)
    if same:
        return Check(name, False, f"layers {ranges(same)} give the outputs of exact attention where they approximate")
    seen = [one for layer, one in damage.items() if layer not in {*exact, *short}]
    lengths = sorted({one.tokens for one in seen})
    parts = (
        [f"relative errors {min(one.error for one in seen):.1e} … {max(one.error for one in seen):.1e}"] if seen else []
    )
    parts += [f"exact with these settings: layers {ranges(exact)}"] if exact else []
    parts += [f"not checked where they approximate: layers {ranges(short)}"] if short else []
    for step in trainings(model.config.approx):
        if step.kept_exact is not None:
            parts.append(f"{step.kept_exact.sentence[:1].lower()}{step.kept_exact.sentence[1:].rstrip('.')}")
    return Check(name, True if seen else None, "; ".join(parts), lengths)
