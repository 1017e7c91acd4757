"""The folder as it will be on the hub: checked, scrubbed, with results and model card."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from approx.checkpoints import checkpoint
from approx.checkpoints.bundle import auto_map
from approx.checkpoints.checkpoint import Checkpoint, Source
from approx.checkpoints.families import outside, stock_class, write_code
from approx.checkpoints.foreign import carried, differences, is_code, never_ours
from approx.checkpoints.history import RECEIPT, Base, Receipt, conversion, read_receipt, trainings
from approx.checkpoints.manifest import MANIFEST, accept, names, seal
from approx.conversion.convert import CARD, Publication, inherited, pipeline_of, write_card
from approx.errors import ApproxError, Exit
from approx.pushing.privacy import Private, findings, private_here, rewritten, scrubbed, without_origins
from approx.pushing.results import Results, dataset_of, results_of
from approx.version import __version__

RECORDS = "records"
# Files next to the model that belong to it, though they were written after the manifest.
_TAKEN = {".json", ".txt", ".model", ".jinja"}
_SHOWN = 8


@dataclass
class Checked:
    """A converted folder that may be pushed.

    Attributes:
        opened: The checkpoint.
        receipt: Its receipt.
        base: The checkpoint that it was converted from.
        files: Names of the files to push.
        left: Names of the files that stay here.
        notes: What the user should know.
    """

    opened: Checkpoint
    receipt: Receipt
    base: Base
    files: list[str]
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(name: str | Path) -> Checked:
    """Open a converted folder and check that it is complete, undamaged and verified.

    Raises:
        ApproxError: if it is not a folder, not converted, damaged, or did not pass its checks.
    """
    folder = Path(name)
    if not folder.is_dir():
        raise ApproxError(f"{name} is not a folder. Give the folder that `approx convert` wrote.", Exit.UNAVAILABLE)
    source = checkpoint.locate(folder, offline=True)
    if not source.converted:
        raise ApproxError(
            f"{name} is not converted. Push a folder that `approx convert` wrote; for others there is `hf upload`.",
            Exit.REFUSED,
        )
    receipt = read_receipt(folder)
    if receipt is None or not receipt.verified:
        failed = [] if receipt is None else [one.name for one in receipt.checks if one.passed is False]
        why = f"failed {', '.join(failed)}" if failed else f"has no checks in {RECEIPT}"
        raise ApproxError(
            f"{name} {why}, and only verified folders are pushed. Convert its base with `approx convert`.",
            Exit.VERIFICATION,
        )
    made = conversion(source.raw.get("approx") or {})
    if made is None:
        raise ApproxError(f"{name} has no conversion in its history. Convert its base again.", Exit.UNAVAILABLE)
    opened = checkpoint.load(folder, offline=True)
    notes = _check_code(source, made.approx)
    sealed = names(folder)
    there = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    companions = [one for one in there if "/" not in one and Path(one).suffix in _TAKEN]
    files = sorted({*sealed, *companions, CARD} - {MANIFEST})
    return Checked(opened, receipt, made.base, files, [one for one in there if one not in {*files, MANIFEST}], notes)


def _check_code(source: Source, by: str) -> list[str]:
    """Notes about the code of a folder that a version of approx wrote.

    Raises:
        ApproxError: if the folder holds or names code that approx did not write.
    """
    differing = differences(source.folder, source.config, source.stock_class)
    if foreign := never_ours(differing) if by != __version__ else list(differing):
        raise ApproxError(
            f"{source.name} holds code that approx did not write: {', '.join(foreign)}. `approx verify` shows it. "
            "Convert the base again.",
            Exit.VERIFICATION,
        )
    notes = []
    if differing:
        notes.append(f"The folder's code is that of approx {by}; that of approx {__version__} is pushed in its place.")
    if extra := carried(source.config):
        notes.append(f"Code of the base, which approx does not run, is pushed too: {', '.join(extra)}.")
    if packages := outside(source.config):
        needed = ", ".join(f"'{name}' of {package}" for name, package in packages.items())
        notes.append(f"The model attends by code of other packages, which is not pushed: {needed}. The card says so.")
    return notes


def stage(
    checked: Checked,
    target: Path,
    repo: str,
    records: Sequence[Path],
    *,
    licence: dict[str, str],
    said: Mapping[str, Any],
    copies: bool,
) -> Publication:
    """Write the folder as it will be on the hub.

    Args:
        checked: The folder.
        target: An empty folder.
        repo: Model id.
        records: Records whose results the card shows.
        licence: Fields for a card that has no licence.
        said: Fields that the user states.
        copies: Whether to copy the weights too; otherwise links stand for them.

    Returns:
        What its card says.

    Raises:
        ApproxError: if a record is not about this folder, a file holds something private, or the card is not valid.
    """
    source, here = checked.opened.source.folder, private_here()
    model = checked.opened.model
    for name in checked.files:
        if name == CARD or (is_code(name) and name not in carried(model.config)):
            continue
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors" and not copies:
            path.symlink_to((source / name).resolve())
            continue
        shutil.copyfile(source / name, path)
        if path.suffix == ".json" and name != RECEIPT:
            rewritten(path, without_origins)
    # The same bytes as in the folder, unless an earlier version wrote it.
    write_code(target, model.config, stock_class(type(model)))
    rewritten(
        target / "config.json",
        lambda data: data | {"auto_map": auto_map(stock_class(type(model.config)), stock_class(type(model)))},
    )
    results = results_of(
        _scrubbed_records(records, target / RECORDS, here), checked.receipt, pipeline_of(checked.opened)
    )
    published = _publication(checked, repo, results, {**licence, **said}, said)
    checked.notes += write_card(target, checked.opened, checked.receipt, published)
    _check_card(target / CARD)
    refuse_private(target, f"{repo} {said.get('base_model', checked.base.name)}")
    seal(target)
    return published


def pin(checked: Checked, target: Path, published: Publication) -> None:
    """Write the card again with the commit that users should pin, and update its hash in the manifest."""
    write_card(target, checked.opened, checked.receipt, published)
    accept(target, [CARD])


def refuse_private(target: Path, known: str) -> None:
    """Check that no file of a folder holds a secret, a local path, a name of this user or machine, or a typed command.

    Raises:
        ApproxError: naming each file and line; secrets themselves are not repeated.
    """
    here = private_here()
    found = [
        line
        for path in sorted(target.rglob("*"))
        if path.is_file()
        for line in findings(path, path.relative_to(target).as_posix(), here, known)
    ]
    if found:
        more = f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        raise ApproxError(
            f"The files to push hold private data: {'; '.join(found[:_SHOWN])}{more}. Remove it from the "
            "base and convert again, or from the record.",
            Exit.REFUSED,
        )


def tree(folder: Path) -> list[tuple[str, int]]:
    """The files of a folder with their sizes in bytes."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(path.relative_to(folder).as_posix(), path.stat().st_size) for path in paths]


def _scrubbed_records(records: Sequence[Path], target: Path, here: Private) -> list[Path]:
    made: list[Path] = []
    for number, path in enumerate(records, start=1):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ApproxError(f"The record {path} cannot be read: {error.strerror}.", Exit.UNAVAILABLE) from None
        except (ValueError, RecursionError) as error:
            raise ApproxError(
                f"The record {path} is damaged: {error}. Make it again with the command that made it.", Exit.UNAVAILABLE
            ) from None
        target.mkdir(exist_ok=True)
        # The name of the file could be private too.
        made.append(target / f"record-{number}.json")
        made[-1].write_text(json.dumps(scrubbed(data, here), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return made


def _publication(
    checked: Checked, repo: str, results: Results, licence: dict[str, Any], said: Mapping[str, Any]
) -> Publication:
    record = checked.opened.model.config.approx
    trained = [one for step in trainings(record) if (one := dataset_of(step.task))]
    datasets, metrics = list(dict.fromkeys([*trained, *results.datasets])), results.metrics
    base_card = inherited(checked.opened.source.folder / CARD)
    data: dict[str, Any] = {key: value for key, value in licence.items() if key not in base_card or key in said}
    data |= {"datasets": datasets} if datasets else {}
    if results.evaluations:
        data |= {"metrics": metrics, "model_name": repo.split("/")[-1], "eval_results": results.evaluations}
    return Publication(repo, None, data, results.markdown, tuple(results.cautions))


def _check_card(path: Path) -> None:
    """Check a card without a hub: its metadata must be unchanged when they are read back.

    Raises:
        ApproxError: if it is not valid.
    """
    text = path.read_text(encoding="utf-8")
    try:
        card = ModelCard(text)
        again = ModelCard(str(card)).data.to_dict()
        if not card.text.strip() or again != card.data.to_dict():
            raise ValueError("its metadata change when they are read")
    except (ValueError, TypeError, KeyError) as error:
        raise ApproxError(
            f"The model card is not valid: {' '.join(str(error).split())}. Correct the card of the base and convert "
            "again.",
            Exit.VERIFICATION,
        ) from None
