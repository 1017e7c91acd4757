"""Verify a converted folder again: its files, code and numbers, and that its attention is really replaced."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from approx.checkpoints import checkpoint, hub
from approx.checkpoints.checkpoint import Source
from approx.checkpoints.foreign import carried, code_files, differences, is_code, never_ours, plainly
from approx.checkpoints.history import conversion
from approx.checkpoints.integrity import adapter_names
from approx.checkpoints.receipt import Check
from approx.conversion import checks, clean_process
from approx.conversion.calibration import mechanisms
from approx.conversion.calibration_inputs import calibration_batch, calibration_length
from approx.conversion.layer_error import Damage, layer_damage
from approx.errors import ApproxError, Exit
from approx.planning.selection import ranges
from approx.seam import manifest
from approx.version import __version__

# Rounding alone gives smaller errors.
_APPROXIMATES = 1e-6


def verify(
    name: str | Path,
    *,
    accept: bool = False,
    revision: str | None = None,
    offline: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> dict[str, Any]:
    """Verify a converted folder, without running code in it: what runs is the same code, written by this version.

    Args:
        name: A converted folder, or the model id of one on the hub.
        accept: Whether edits of other files than weights and code are recorded in the manifest, if all else is well.
        revision: Commit on the hub.
        offline: Whether to use only local files and the hub's cache.
        progress: Called with the name of each step.

    Returns:
        As plain data: the checks; the names of the edited files, and whether they were accepted; `diffs`, file -> the
        difference between this version's code and the folder's.

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
    return {
        "folder": str(name),
        "revision": source.revision,
        "checks": [vars(check) for check in found],
        "edited": edited,
        "accepted": accepted,
        "diffs": diffs,
    }


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
        return Check(name, False, f"edited: {', '.join(edited)}. Accept your own edits with --accept")
    return Check(name, True, f"edited: {', '.join(edited)}" if edited else "every sha256 is right")


def _diffs(source: Source, *, offline: bool) -> tuple[dict[str, str], bool]:
    """Differences from this version's code to that of a folder, by file, and whether every file was seen."""
    found = differences(source.folder, source.config, source.stock_class)
    if source.revision is None:
        return found, True
    # Of a repository, only what a converted folder needs was downloaded.
    there = None if offline else hub.listed(source.name, source.revision)
    known = {*code_files(source.folder)}
    more = {plainly(name): "in the repository; it was not downloaded" for name in there or [] if is_code(name)}
    return found | {name: said for name, said in more.items() if name not in known}, there is not None


def _code(source: Source, diffs: Mapping[str, str], *, whole: bool) -> Check:
    name = "code is what this version writes"
    if not diffs:
        if extra := carried(source.config):
            said = f"beside it is code of the base, which approx does not know and did not run: {', '.join(extra)}. Read it"
            return Check(name, None, said)
        unseen = "" if whole else "; the hub was not asked what else is in the repository"
        return Check(name, True if whole else None, f"approx {__version__}{unseen}")
    made = conversion(source.raw.get("approx") or {})
    by = __version__ if made is None else made.approx
    told = f"{', '.join(diffs)} differs, and was not run; --verbose shows how"
    if by != __version__ and not never_ours(diffs):
        return Check(name, None, f"not checked: written by approx {by}, this is {__version__}: {told}")
    return Check(name, False, told)


def _model_checks(source: Source, edited: list[str], *, trusted: bool, progress: Callable[[str], None]) -> list[Check]:
    progress("loading the weights")
    if trusted:
        clean_process.begin()
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
    found += [checks.padding(model), checks.causality(model)]
    if trusted:
        progress("reloading in a fresh process")
        found.append(checks.fresh_process(source.folder, model))
    return found


def state(model: Any) -> Check:
    """Whether the buffers and parameters of all mechanisms have values in their range."""
    wrong = [
        f"{name} of a {type(mechanism).__name__} is {float(tensor.min()):.3g} … {float(tensor.max()):.3g}, not {low:g} … {high:g}"
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
    return Check(name, True if seen else None, "; ".join(parts), lengths)
