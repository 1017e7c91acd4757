"""Convert a checkpoint into a folder: load, convert, write all files, check the result, and only then publish it."""

import ast
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import ModelCard, ModelCardData, metadata_load
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from yaml import YAMLError

from approx.checkpoints import checkpoint, families, foreign
from approx.checkpoints.atomic_folder import (
    atomic_folder,
    keep_failed,
    refuse_existing,
    refuse_overlap,
    refuse_unwritable,
)
from approx.checkpoints.checkpoint import (
    ADAPTER,
    INDEX,
    PICKLE_INDEX,
    Checkpoint,
    Source,
    processor,
    processor_class,
    settings,
    weight_files,
)
from approx.checkpoints.families import refuse_added
from approx.checkpoints.foreign import MODULES, Reference, is_code, names_only, never_ours, references
from approx.checkpoints.history import (
    RECEIPT,
    Base,
    CalibrationText,
    Check,
    Conversion,
    Receipt,
    Training,
    conversion,
    history,
    trainings,
)
from approx.checkpoints.manifest import MANIFEST, sha256
from approx.conversion import calibration, surgery, verify
from approx.conversion.calibration import CalibrationFile, calibration_batch, calibration_length
from approx.conversion.surgery import answers_questions, of_checkpoint, with_separator
from approx.errors import ApproxError, Exit
from approx.paths import inside, is_inside, refuse_leaving
from approx.planning import positions
from approx.planning.anatomy import anatomy
from approx.planning.plan import Plan, described
from approx.seam.internals import INSTALL
from approx.version import __version__

# How the list of modules names the folder of the transformer itself.
_OWN_FOLDER = ("", ".", "./")
# File of settings -> its key for the longest input.
_LENGTH_KEYS = {"tokenizer_config.json": "model_max_length", "sentence_bert_config.json": "max_seq_length"}
_NOT_COPIED = {"config.json", "README.md", INDEX, PICKLE_INDEX, ADAPTER, MANIFEST, RECEIPT, ".gitattributes"}
_SUFFIXES = {".json", ".txt", ".model", ".jinja"}
_LICENCES = re.compile(r"(?:licen[sc]e|notice|copying|use_policy)", re.IGNORECASE)
# Settings that name the class of a tokenizer or processor.
_CLASS_KEYS = (
    "tokenizer_class",
    "processor_class",
    "feature_extractor_type",
    "image_processor_type",
    "video_processor_type",
)
# A full hash of a commit: branches and tags can move.
_COMMIT = re.compile(r"[0-9a-f]{40}")


def copy_companions(source: Source, target: Path, carried: Mapping[str, str] | None = None) -> list[str]:
    """Copy the files of a checkpoint that are neither weights nor config nor code, and its licence.

    They are copied unchanged, except that settings no longer name code that stays behind.

    Args:
        source: The checkpoint.
        target: A folder.
        carried: Name -> sha256 of the files of custom code that are copied with the checkpoint.

    Returns:
        Notes for the user: what stays behind.

    Raises:
        ApproxError: as for `refuse_foreign`; if `modules.json` cannot be read, names a folder outside the checkpoint,
            or one whose weights are pickled.
    """
    carried = carried or {}
    left = refuse_foreign(source, carried)
    for path in sorted(source.folder.iterdir()):
        if path.is_file() and (_is_licence(path) or (path.suffix in _SUFFIXES and path.name not in _NOT_COPIED)):
            refuse_leaving(source.folder, path)
            shutil.copyfile(path, target / path.name)
    for name in _modules(source.folder):
        (target / name).mkdir(parents=True, exist_ok=True)
        for path in sorted((source.folder / name).iterdir()):
            if path.is_file() and path.suffix in {*_SUFFIXES, ".safetensors"}:
                refuse_leaving(source.folder, path)
                shutil.copyfile(path, target / name / path.name)
    for name, digest in carried.items():
        shutil.copyfile(inside(source.folder, name, source.folder / "config.json"), target / name)
        if sha256(target / name) != digest:
            raise ApproxError(
                f"{source.folder / name} is not the code that was converted. Convert the base again.", Exit.REFUSED
            )
    for one in left:
        if (target / one.file).is_file():
            _forget(target, one)
    return [
        f"{one.place} names code of others ({', '.join(one.classes)}); it was left out, and that code is not run."
        for one in left
    ]


def refuse_foreign(source: Source, carried: Mapping[str, str]) -> list[Reference]:
    """The custom code that the settings of a checkpoint name, its own or of another repository, and that is left out.

    Args:
        source: The checkpoint.
        carried: Name -> sha256 of the files of custom code that are copied with the checkpoint.

    Raises:
        ApproxError: naming the setting, if the checkpoint cannot be used without that code.
    """
    left = [one for one in _foreign(source) if not names_only(one, carried)]
    for one in left:
        if one.path[-1] == "custom_pipelines" or (one.path[-1] == "auto_map" and _reads(source, one.file)):
            continue
        raise ApproxError(
            f"{source.name} needs code that transformers and sentence-transformers do not have ({one.place} names "
            f"{', '.join(one.classes)}), and approx runs none. To take that code along unread, for whoever loads the "
            "converted model, pass --trust-remote-code, and for a model of the hub --revision with the commit that you "
            "read.",
            Exit.UNSUPPORTED,
        )
    return left


def code_to_carry(source: Source, revision: str | None) -> dict[str, str]:
    """Name -> sha256 of the files of custom code that the tokenizer and modules of a checkpoint need.

    Args:
        source: The checkpoint.
        revision: The revision that the user named.

    Raises:
        ApproxError: if a checkpoint of the hub is not pinned to a commit, or the code is not in the checkpoint.
    """
    if source.revision is not None and not _COMMIT.fullmatch(revision or ""):
        raise ApproxError(
            f"--trust-remote-code needs the commit whose code you read, but got {revision or 'no revision'}; it "
            f"is now --revision {source.revision}."
        )
    found: dict[str, str] = {}
    for one in _foreign(source):
        if one.path[-1] == "custom_pipelines":
            continue
        for name in one.classes:
            if "--" in name:
                raise ApproxError(
                    f"{one.place} of {source.name} names {name}: code of another repository, which no revision pins. "
                    "Save the tokenizer with its code next to the weights, and convert that folder.",
                    Exit.UNSUPPORTED,
                )
            _carry(source.folder, f"{name.rpartition('.')[0]}.py", one.place, found)
    return found


def _carry(folder: Path, name: str, place: str, found: dict[str, str]) -> None:
    """Add a file of code and the files next to it that it imports."""
    if name in found:
        return
    path = folder / name
    if Path(name).name != name or not path.is_file() or not never_ours([name]):
        raise ApproxError(
            f"{place} in {folder} names code in {name}, which is not a file next to the weights, or has a name that "
            "approx uses. Put it there, under another name.",
            Exit.UNSUPPORTED,
        )
    refuse_leaving(folder, path)
    found[name] = sha256(path)
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ApproxError(f"{path} is not Python: {error}. Download it again.", Exit.UNAVAILABLE) from None
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            for module in modules:
                _carry(folder, f"{module}.py", place, found)


def _foreign(source: Source) -> list[Reference]:
    """What the settings that go along name, apart from the code of the model itself."""
    modules = {f"{name.rstrip('/')}/" for name in _modules(source.folder)}
    return [
        one
        for one in references(source.folder)
        if (one.file, one.path[0]) != ("config.json", "auto_map")
        and ("/" not in one.file or any(one.file.startswith(name) for name in modules))
        and one.file not in _NOT_COPIED - {"config.json"}
    ]


def _reads(source: Source, file: str) -> bool:
    """Whether transformers reads the tokenizer or processor of a checkpoint as the class that a settings file names."""
    named = [settings(source.folder / file).get(key) for key in _CLASS_KEYS]
    # Without its code, transformers may silently take the usual tokenizer of the family.
    if any(isinstance(name, str) and not hasattr(transformers, name) for name in named):
        return False
    try:
        processor(source)
    except ApproxError:
        return False
    return True


def forget_code(folder: Path, *, but: str = "") -> None:
    """Take out of a folder's config what names code, except one of its keys."""
    for one in references(folder):
        if one.file == "config.json" and one.path != (but,):
            _forget(folder, one)


def _forget(folder: Path, reference: Reference) -> None:
    """Take a setting out of a file."""
    data = settings(folder / reference.file)
    *way, last = reference.path
    inner: Any = data
    for step in way:
        inner = inner[step]
    del inner[last]
    (folder / reference.file).write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _is_licence(path: Path) -> bool:
    return bool(_LICENCES.match(path.name)) and not is_code(path.name) and path.suffix not in {".safetensors", ".json"}


def set_longest(folder: Path, tokens: int) -> None:
    """Change the longest input, in tokens, in the settings of a folder that state one."""
    for name, key in _LENGTH_KEYS.items():
        if (folder / name).is_file() and (key == "model_max_length" or settings(folder / name).get(key) is not None):
            change(folder / name, {key: tokens})


def change(path: Path, changes: dict[str, Any]) -> None:
    """Write changed settings, if they differ from those in the file."""
    if changes != (before := settings(path)):
        path.write_text(json.dumps(before | changes, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _modules(source: Path) -> list[str]:
    """Names of the folders of sentence-transformers' modules, without that of the transformer."""
    path = source / MODULES
    if not path.is_file():
        return []
    try:
        named = [module["path"] for module in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, KeyError, TypeError, RecursionError, OSError):
        raise ApproxError(
            f"{path} is not a list of sentence-transformers' modules, each with its path. Download it again, or delete "
            "it to convert the transformer alone.",
            Exit.UNAVAILABLE,
        ) from None
    # A module without settings, such as a normalisation, may have no folder, and a name may be too long to be looked
    # for.
    folders = [name for name in named if name not in _OWN_FOLDER and os.path.isdir(inside(source, name, path))]
    for name in folders:
        if not [*(source / name).glob("*.safetensors")] and (pickled := [*(source / name).glob("*.bin")]):
            raise ApproxError(
                f"{pickled[0]} is pickled, and converted folders hold no pickle. Save the model again with a current "
                f"sentence-transformers, or delete {MODULES} to convert the transformer alone.",
                Exit.REFUSED,
            )
    return folders


def keep_dtypes(source: Path, target: Path) -> None:
    """Give the tensors of a written checkpoint the dtypes and numbers that they have in its source.

    transformers loads all tensors in one dtype, which may be wider or narrower than that of the file. Tensors that are
    not those of the source, because they are new or were trained, stay as they are.

    Args:
        source: Folder of the checkpoint that was loaded.
        target: Folder with the written one.
    """
    read = weight_files(source, allow_pickle=True)
    places = {name: path for path in read if path.suffix == ".safetensors" for name in _dtypes(path)}
    dtypes = {name: dtype for path in {*places.values()} for name, dtype in _dtypes(path).items()}
    changed = False
    for path in weight_files(target):
        differ = {name for name, dtype in _dtypes(path).items() if dtypes.get(name, dtype) != dtype}
        if not differ:
            continue
        tensors = load_file(path)
        for name in differ:
            with safe_open(places[name], framework="pt") as file:
                tensors[name] = as_stored(tensors[name], file.get_tensor(name))
        save_file(tensors, path, metadata={"format": "pt"})
        changed = True
    if changed and (target / INDEX).is_file():
        _count_bytes(target)


def _dtypes(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        names = file.keys()  # not iterable itself
        return {name: file.get_slice(name).get_dtype() for name in names}


def as_stored(written: Tensor, stored: Tensor) -> Tensor:
    """The stored tensor if the written one differs only in dtype; of a table of positions, as many rows as written."""
    if written.shape == stored.shape:
        return stored if torch.equal(stored.to(written.dtype), written) else written
    if written.dim() != stored.dim() or written.shape[1:] != stored.shape[1:]:
        return written
    rows = min(len(written), len(stored))
    if not torch.equal(stored[:rows].to(written.dtype), written[:rows]):
        return written
    # The rows of a longer table repeat those of the stored one.
    return torch.cat([stored[:rows], written[rows:].to(stored.dtype)])


def _count_bytes(folder: Path) -> None:
    """Correct the number of bytes in the index of a checkpoint of several files."""
    index = folder / INDEX
    data = json.loads(index.read_text(encoding="utf-8"))
    tensors = (tensor for path in weight_files(folder) for tensor in load_file(path).values())
    data["metadata"] = data.get("metadata", {}) | {"total_size": sum(tensor.nbytes for tensor in tensors)}
    index.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


CARD = "README.md"
# Description of the code of a folder in plain PyTorch, and of one with kernels.
_RUNS = {
    False: "That code is plain PyTorch; where the package `approx-attention` is installed, its faster C and Triton run "
    f"in its place. {INSTALL}",
    True: "That code includes C and Triton kernels, which are compiled if there is a compiler or a GPU.",
}
# Fields of the base's model card that the converted model inherits.
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
# The base of a base that is only in a folder is the closest model that the hub knows.
_ITS_BASE = ("base_model", "base_model_relation")
# Used if the base's card names no pipeline; importing the table of transformers would import every pipeline.
_PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForCTC": "automatic-speech-recognition",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}


@dataclass(frozen=True)
class Publication:
    """What a card adds once its folder has a place on a hub.

    Attributes:
        repo: Model id there.
        revision: The commit to pin; None before there is one.
        data: More metadata: `eval_results`, `datasets`, `metrics`, and a licence if the folder's card names none.
        results: The measured results, in Markdown; empty if nothing was measured.
        cautions: When not to use the model, one sentence each.
    """

    repo: str
    revision: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
    results: str = ""
    cautions: tuple[str, ...] = ()


def write_card(
    folder: Path, checkpoint: Checkpoint, receipt: Receipt, published: Publication | None = None
) -> list[str]:
    """Write the model card: replaced layers, base, error of each layer, history, and how to load the model.

    Args:
        folder: Folder of the converted model.
        checkpoint: The checkpoint, with its model converted; its card provides license, language and pipeline.
        receipt: Receipt of the conversion, with the error of each layer.
        published: Place on a hub and results, if the folder is being pushed.

    Returns:
        Notes for the user.
    """
    model = checkpoint.model
    record, stock = model.config.approx, families.stock_class(type(model))
    made = conversion(record)
    assert made is not None  # the history is written before the card
    base, auto, packages = made.base, families.auto_class(stock), families.outside(model.config)
    parts = [part for site in sorted(record["sites"].values(), key=lambda s: s["layer"]) for part in described(site)]
    # The hub would take the name of a local folder for a model id.
    named = {"base_model": base.name, "base_model_relation": "finetune"} if base.revision else {}
    reader, sentences = processor_class(stock), (folder / MODULES).is_file()
    from_base, from_hub = inherited(checkpoint.source.folder / CARD), {} if published is None else published.data
    if from_base.get("license") != from_hub.get("license", from_base.get("license")):
        # The name and the text belong to the other licence.
        from_base = {key: value for key, value in from_base.items() if key not in ("license_name", "license_link")}
    fields = {"pipeline_tag": pipeline_of(checkpoint), **from_base, **named, **from_hub}
    notes = []
    link = str(fields.get("license_link") or "")
    if link and "://" not in link and not (is_inside(link) and (folder / link).is_file()):
        del fields["license_link"]
        notes.append(f"The card's license_link '{link}' names no file of the folder; it was left out.")
    data = ModelCardData(
        **fields,
        library_name="sentence-transformers" if sentences else "transformers",
        tags=["approx-attention", *sorted({part.mechanism for part in parts})],
    )
    card = ModelCard.from_template(
        data,
        template_str=(resources.files("approx.conversion") / "card.md.j2").read_text(encoding="utf-8"),
        base=base,
        name=_code(from_hub.get("base_model", base.name)),
        stock=stock.__name__,
        parts=parts,
        errors=receipt.errors or {},
        masses=receipt.captured_mass or {},
        measured_on=receipt.measured_on,
        receipt=RECEIPT,
        steps=[_sentence(step) for step in history(record)],
        cautions=_cautions(receipt, trained=bool(trainings(record)), published=published),
        carried=sorted(made.carried),
        code="" if packages else _RUNS[bool(record.get("bundle_kernels"))],
        packages=packages,
        auto=auto,
        reader=reader,
        read="tokenizer" if reader == "AutoTokenizer" else "processor",
        sentences=sentences,
        pipeline=None if sentences else _PIPELINES.get(auto),
        published=published,
    )
    card.save(folder / CARD)
    return notes


def pipeline_of(checkpoint: Checkpoint) -> str | None:
    """The hub's name of what a model does: that of the folder's card, else that of its head."""
    named = inherited(checkpoint.source.folder / CARD).get("pipeline_tag")
    return named or _PIPELINES.get(families.auto_class(families.stock_class(type(checkpoint.model))))


def inherited(card: Path) -> dict[str, Any]:
    """Fields of a model card that also hold for the converted model; empty without a readable card."""
    try:
        fields = metadata_load(card) or {}
    except (OSError, ValueError, YAMLError):
        return {}
    taken = (
        {key: fields[key] for key in (*_INHERITED, *_ITS_BASE) if fields.get(key)} if isinstance(fields, dict) else {}
    )
    return taken | ({"base_model_relation": "finetune"} if "base_model" in taken else {})


def _cautions(receipt: Receipt, *, trained: bool, published: Publication | None) -> list[str]:
    """When not to use the model; what was measured comes first."""
    cautions = list(published.cautions) if published else []
    if not (published and published.results):
        cautions.append(
            "Its quality and speed were not measured here: compare it with its base on your data before you use it."
        )
    # Training changes the weights that these warnings are about.
    cautions += [] if trained else receipt.warnings
    if receipt.positions:
        before, after = receipt.positions
        cautions.append(
            f"Its position table was extended from {before:,} to {after:,}: the new positions are not trained."
        )
    cautions.append("For packed sequences and 4-D attention masks, use its base.")
    return [
        *cautions,
        "`output_attentions=True` gives the weights that its layers use, but computes them for all pairs of tokens, "
        "which needs as much memory as exact attention.",
    ]


def _sentence(step: Conversion | Training) -> str:
    """One step of a history, with everything that it depends on."""
    base = _code(step.base.name) + (f", revision {_plain(step.base.revision)}," if step.base.revision else "")
    merged = f" with its {_plain(step.base.adapter)} adapter merged" if step.base.adapter else ""
    start = f"from {base}{merged} (weights sha256 {_digest(step.base.weights_sha256)}) by approx {_plain(step.approx)}"
    if isinstance(step, Conversion):
        longer = f"; positions extended to {step.max_length:,}" if step.max_length else ""
        inputs = (
            f"{_code(step.calibration.name)}, sha256 {_digest(step.calibration.sha256)}"
            if step.calibration
            else "built-in inputs"
        )
        plan = "; ".join(_rule(rule) for rule in step.plan)
        rows = f"{step.calibration_length:,} tokens a row"
        return f"Converted {start}: {plan}{longer}. Calibration: {inputs}, {rows}."
    text = (
        f"Trained {start}: {_code(','.join(step.recover))} on {_plain(step.task or 'plain text')}, {step.steps:,} "
        f"steps, {step.examples:,} examples (sha256 {_digest(step.data_sha256)}), seed {step.seed}."
    )
    if step.teacher is not None:
        text += f" Teacher: {_code(step.teacher.name)} (weights sha256 {_digest(step.teacher.weights_sha256)})."
    if step.after is not None:
        scores = [("with exact attention", step.exact), ("before", step.before), ("after", step.after)]
        listed = ", ".join(f"{value:.4f} {when}" for when, value in scores if value is not None)
        text += f" {_plain(step.measure)} on {step.held_out:,} held-out training examples: {listed}."
    if step.kept_exact is not None:
        text += f" {_plain(step.kept_exact.sentence)}"
    options = ", ".join(
        f"{name} = {_plain(value)}" for name, value in step.options.items() if value not in (None, [], {})
    )
    return text + (f" Options: {options}." if options else "")


def _rule(rule: dict[str, Any]) -> str:
    settings = ", ".join(f"{_plain(name)} = {_plain(value)}" for name, value in (rule.get("settings") or {}).items())
    heads = f", heads {_plain(rule['heads'])}" if rule.get("heads", "all") != "all" else ""
    below = f", exact below {rule['exact_below']:,} tokens" if rule.get("exact_below") else ""
    where = f"layers {_plain(rule.get('layers', 'all'))}{heads}{below}"
    return f"{_code(rule['mechanism'])}{f' ({settings})' if settings else ''} on {where}"


def _plain(value: object) -> str:
    """A value of a history that others may have written: as code if anything in it could be markup."""
    text = str(value)
    return text if re.fullmatch(r"[\w ,.:/+='\[\]{}()-]*", text) and "](" not in text else _code(text)


def _digest(sha256: str) -> str:
    return _code(f"{sha256[:16]}…")


def _code(name: str) -> str:
    """A name as code in Markdown, where nothing in it is markup."""
    fence = "`" * (1 + max(map(len, re.findall("`+", name)), default=0))
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{' '.join(name.split())}{space}{fence}"


# Settings of a feature extractor that name its class.
_PROCESSOR_KEYS = {"feature_extractor_type", "image_processor_type"}


def write_checked(
    out: Path,
    checkpoint: Checkpoint,
    checks: Mapping[str, Callable[[Path], Check]],
    *,
    what: str,
    earlier: Sequence[Check] = (),
    receipt: Receipt | None = None,
    max_length: int | None = None,
    force: bool = False,
    sealed: bool = True,
    passed: Callable[[Path, list[Check]], None] = lambda folder, results: None,
    progress: Callable[[str], None] = lambda step: None,
) -> list[Check]:
    """Write a checkpoint into a new folder, which is published only if every check passes.

    Args:
        out: The folder to create.
        checkpoint: The checkpoint, with its model in the state to save.
        checks: Name of a step -> a check of the written folder, in order.
        what: Description of the work for the error, such as "The conversion of bert".
        earlier: Results of checks that ran before writing; they count as well.
        receipt: Receipt of a conversion; the folder then gets it and a model card.
        max_length: The tokenizer's maximum length in tokens, if the positions changed.
        force: Whether an existing `out` is replaced, once the new folder is complete.
        sealed: Whether the folder gets a manifest.
        passed: Called with the folder and the results once every check has passed, before the folder gets its name.
        progress: Called with the name of each step.

    Returns:
        The results of all checks, the earlier ones first.

    Raises:
        ApproxError: if a check fails (exit code 6; the result is kept next to `out` with the suffix `.failed`), or the
            folder cannot be written.
    """
    with atomic_folder(out, force=force, sealed=sealed) as folder:
        progress("writing")
        write(folder, checkpoint, max_length)
        results = list(earlier)
        for step, check in checks.items():
            progress(step)
            results.append(check(folder))
        if receipt is not None:
            receipt.checks = results
            (folder / RECEIPT).write_text(json.dumps(receipt.model_dump(), indent=1) + "\n", encoding="utf-8")
            checkpoint.notes += write_card(folder, checkpoint, receipt)
        if failed := [check for check in results if check.passed is False]:
            failed_folder = keep_failed(folder, out)
            details = "; ".join(f"{check.name}: {check.detail}" for check in failed)
            raise ApproxError(
                f"{what} did not pass its checks ({details}). Nothing was written to {out}; the result is kept as "
                f"{failed_folder} for inspection.",
                Exit.VERIFICATION,
            )
        passed(folder, results)
    return results


def write(folder: Path, checkpoint: Checkpoint, max_length: int | None = None) -> None:
    """Write model, processor files and code of a checkpoint into an empty folder.

    Args:
        folder: The target; usually the temporary one of `atomic_folder`.
        checkpoint: The checkpoint, with its model in the state to save, converted or reverted.
        max_length: The tokenizer's maximum length in tokens, if the positions changed.
    """
    carried = foreign.carried(checkpoint.model.config) or foreign.carried(checkpoint.source.config)
    checkpoint.notes += copy_companions(checkpoint.source, folder, carried)
    if not checkpoint.source.converted:
        # A checkpoint may have no processor.
        with suppress(ApproxError):
            _name_classes(folder, processor(checkpoint.source))
    checkpoint.model.save_pretrained(folder)
    forget_code(folder, but="auto_map" if families.is_converted(checkpoint.model) else "")
    keep_dtypes(checkpoint.source.folder, folder)
    if max_length is not None:
        set_longest(folder, max_length)


def _name_classes(folder: Path, processor: Any) -> None:
    """Name the classes in the settings of a processor, since a converted config's model type does not imply them."""
    whole = {"processor_class": type(processor).__name__} if isinstance(processor, ProcessorMixin) else {}
    for part in ("tokenizer", "feature_extractor", "image_processor") if whole else (None,):
        read = getattr(processor, part, None) if part else processor
        if isinstance(read, PreTrainedTokenizerBase):
            path, named = folder / "tokenizer_config.json", {"tokenizer_class": type(read).__name__}
        elif (path := folder / "preprocessor_config.json").is_file() and read is not None:
            named = {key: name for key, name in read.to_dict().items() if key in _PROCESSOR_KEYS}
        else:
            continue
        change(path, {**named, **whole, **settings(path)})


def conversion_step(
    checkpoint: Checkpoint,
    plan: list[dict[str, Any]],
    max_length: int | None,
    file: CalibrationFile | None,
    calibration_length: int,
    carried: Mapping[str, str],
) -> Conversion:
    """What this conversion appends to the history of the checkpoint."""
    return Conversion(
        approx=__version__,
        base=named_base(checkpoint),
        plan=plan,
        max_length=max_length,
        calibration=None if file is None else CalibrationText(name=file.name, sha256=file.sha256),
        calibration_length=calibration_length,
        carried=dict(carried),
    )


def named_base(checkpoint: Checkpoint) -> Base:
    """A checkpoint as histories name it."""
    source = checkpoint.source
    place = source.folder if source.adapter is None else source.adapter.folder
    return Base(
        # The path of a local folder may be private; the hash identifies the weights.
        name=source.name if source.revision else place.resolve().name,
        revision=source.revision,
        weights_sha256=checkpoint.weights_sha256,
        adapter=None if source.adapter is None else source.adapter.kind,
    )


class Converted(Receipt):
    """The receipt of a conversion, with what a user should know of the checkpoint.

    Attributes:
        notes: Messages about the checkpoint, e.g. about a newly initialised head.
    """

    notes: list[str]


def convert(
    name: str | Path,
    out: Path,
    plan: Plan,
    *,
    max_length: int | None = None,
    calibrate: Path | None = None,
    force: bool = False,
    revision: str | None = None,
    offline: bool = False,
    allow_pickle: bool = False,
    merge_adapter: bool = False,
    bundle_kernels: bool = False,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> Converted:
    """Convert a checkpoint into a new folder, verified before it is published.

    Args:
        name: A folder, a model id of the hub, or `quickstart`.
        out: The folder to create.
        plan: The mechanism of each layer.
        max_length: Usable positions afterwards, in tokens, to extend the position table.
        calibrate: A text, or for speech a recording, to fit mechanisms and measure the error of each layer; by default
            `calibration_batch` chooses.
        force: Whether an existing `out` is replaced, once the new folder is complete.
        revision: Commit on the hub.
        offline: Whether to use only local files and the hub's cache.
        allow_pickle: Whether pickled weights are accepted.
        merge_adapter: Whether a PEFT adapter next to the weights, or one named by its folder, is merged into them.
        bundle_kernels: Whether the folder includes the C and Triton of its mechanisms instead of plain PyTorch.
        trust_remote_code: Whether custom code of the tokenizer or modules is copied along; approx does not run
            it. A checkpoint of the hub needs `revision`, a commit.
        progress: Called with the name of each step.

    Raises:
        ApproxError: if the checkpoint, the plan or the calibration file is unusable, or a check fails (exit code 6; the
            result is kept next to `out` with the suffix `.failed`).
    """
    out = Path(out)
    refuse_existing(out, force=force)
    refuse_unwritable(out)
    progress("reading the config")
    where: dict[str, Any] = {
        "revision": revision,
        "offline": offline,
        "allow_pickle": allow_pickle,
        "merge_adapter": merge_adapter,
    }
    source = checkpoint.locate(name, **where)
    refuse_overlap(source.folder, out)
    if source.converted:
        raise ApproxError(
            f"{name} is converted already. Revert it first, or convert its base checkpoint.", Exit.REFUSED
        )
    carried = code_to_carry(source, revision) if trust_remote_code else {}
    refuse_foreign(source, carried)
    plan = with_separator(plan, lambda: of_checkpoint(source), answers=answers_questions(source.stock_class))
    facts = anatomy(source.config, source.stock_class)
    plan.resolve(facts)
    refuse_added((rule.mechanism for rule in plan.rules), bundle_kernels=bundle_kernels)
    if max_length is not None:
        positions.extendable(source.config, facts.architecture, max_length)
    file = None if calibrate is None else CalibrationFile.read(calibrate, source.stock_class.main_input_name)
    progress("loading the weights")
    verify.begin()
    opened = checkpoint.load(name, **where)
    model = opened.model
    progress("checking the exact limit")
    results = [verify.exact_limit(model, plan)]
    reference = dict(model.state_dict())
    progress("replacing attention")
    receipt = surgery.exchange(model, plan, max_length=max_length, bundle_kernels=bundle_kernels)
    length = calibration_length(model)
    batch = calibration_batch(source, model, length, file)
    calibration.calibrate(model, batch.inputs)
    model.config.approx["history"] = [
        conversion_step(opened, plan.to_data(), max_length, file, length, carried).model_dump()
    ]
    progress("checking padding and causality")
    results += [verify.padding(model), verify.causality(model)]
    receipt.lost(verify.layer_damage(model, batch.inputs), batch.description)
    receipt.warnings += verify.not_measured(model, receipt.measured_at or {})
    written_checks = {
        "comparing the weights": lambda folder: verify.weights(folder, reference),
        "reloading in a fresh process": lambda folder: verify.fresh_process(folder, model),
    }
    write_checked(
        out,
        opened,
        written_checks,
        what=f"The conversion of {name}",
        earlier=results,
        receipt=receipt,
        max_length=max_length,
        force=force,
        progress=progress,
    )
    return Converted(**dict(receipt), notes=facts.stays + opened.notes)


def revert(name: str | Path, out: Path, *, force: bool = False) -> None:
    """Write the base checkpoint of a converted folder: the same tensors, without the mechanisms.

    Args:
        name: The converted folder.
        out: The folder to make.
        force: Whether an existing `out` is replaced, and weights that were trained after the conversion are written
            too.

    Raises:
        ApproxError: if `name` is not a converted checkpoint or was trained, or `out` exists.
    """
    out = Path(out)
    refuse_existing(out, force=force)
    refuse_unwritable(out)
    opened = checkpoint.load(name, offline=True)
    refuse_overlap(opened.source.folder, out)
    if not opened.source.converted:
        raise ApproxError(f"{name} is not a converted checkpoint, so there is nothing to revert.", Exit.REFUSED)
    trained = [step for step in trainings(opened.model.config.approx) if step.moved_weights]
    if trained and not force:
        raise ApproxError(
            f"The weights of {name} were trained after its conversion "
            f"({', '.join(','.join(one.recover) for one in trained)}), so they are not those of its base. Write them "
            "with exact attention all the same with --force, or take the base itself.",
            Exit.REFUSED,
        )
    was_extended = opened.model.config.approx["base"]["positions"] is not None
    surgery.revert(opened.model)
    limit = positions.limit(opened.model.config) if was_extended else None
    what = f"The reversion of {name}"
    # A base is an ordinary checkpoint, without our manifest.
    write_checked(out, opened, {}, what=what, max_length=limit, force=force, sealed=False)
