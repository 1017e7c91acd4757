"""A recipe: one short YAML file that says what to convert, how, and what to measure."""

import dataclasses
import hashlib
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from approx import yaml_text
from approx.errors import ApproxError, did_you_mean, shown


@dataclass(frozen=True)
class EvaluateStage:
    """One task on which base and variants are compared.

    Attributes:
        task: Name of the task, e.g. `glue/sst2`.
        data: Folder or file in the official layout; the hub or the task's generator without it.
        split: Which split; the task's own default without it.
        limit: Use only so many examples; the result is then labelled a subset.
        streaming: Whether a hub dataset is read as it is downloaded, no further than the limit, and not kept.
        batch_size: Inputs per batch, or `auto`: as many as fit, by their length.
        margin: Loss in points that would be acceptable.
        max_length: Read no more tokens than this, with `truncate`; as many as the positions allow without it.
        truncate: Whether inputs that are longer are cut instead of refused.
        settings: Of the task itself, e.g. the length of generated documents.
        seeds: How many draws of each variant's mechanisms are scored, its own first.
        fast_products: Whether all models run within `approx.fast_products()`.
    """

    task: str
    data: str | None = None
    split: str | None = None
    limit: int | None = None
    streaming: bool = field(default=False, kw_only=True)
    batch_size: int | typing.Literal["auto"] = 32
    margin: float = 1.0
    max_length: int | None = field(default=None, kw_only=True)
    truncate: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    seeds: int = 1
    fast_products: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class BenchStage:
    """One grid of lengths and batch sizes at which base and variants are timed.

    Attributes:
        lengths: Tokens per sequence.
        batches: Sequences per call.
        max_length: Extend the position tables to so many tokens, for the timing only.
        inputs: `real` (texts of the first task) or `synthetic` (random tokens).
        rounds: Rounds at least.
        seconds: Seconds of rounds at least, for each length and batch size.
        fast_products: Whether all models run within `approx.fast_products()`.
    """

    lengths: list[int]
    batches: list[int] = field(default_factory=lambda: [1])
    max_length: int | None = None
    inputs: str = "real"
    rounds: int = 12
    seconds: float = 1.0
    fast_products: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Recipe:
    """Everything `approx run` needs.

    Attributes:
        title: Of the report.
        checkpoint: A folder, a model id of the hub, or `quickstart`.
        variants: Name -> plan, as plain data: a rule or a list of rules.
        evaluate: Tasks, in order.
        bench: Grids, in order.
        calibrate: A text, or for speech a recording, as `approx convert --calibrate` takes it.
        revision: Commit of the hub.
        notice: A sentence that the report shows above everything else.
        seed: Of everything random.
        device: `auto`, `cpu` or `cuda`.
        dtype: `auto` (what the checkpoint says), `float32`, `bfloat16` or `float16`.
        text: The file as it was read.
        mistakes: What is wrong with the file, a sentence each; `run` refuses it, and tells what the checkpoint adds.
    """

    title: str
    checkpoint: str
    variants: dict[str, Any]
    evaluate: list[EvaluateStage] = field(default_factory=list)
    bench: list[BenchStage] = field(default_factory=list)
    calibrate: str | None = None
    revision: str | None = None
    notice: str | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    text: str = ""
    mistakes: tuple[str, ...] = ()

    EMPTY: ClassVar = {"title": "", "checkpoint": "", "variants": {}}  # for needed keys that are missing or wrong

    @property
    def sha256(self) -> str:
        """Of the file's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()


BASE, CEILING = "exact", "attention-free"
"""Names of the two lines that every report has: the base itself, and the base with its attention replaced by its values."""

CHOICES: dict[str, tuple[str, ...]] = {"device": ("auto", "cpu", "cuda"), "inputs": ("real", "synthetic")}
CHOICES |= {"dtype": ("auto", "float32", "bfloat16", "float16")}
_LEAST = {"limit": 1, "batch_size": 1, "lengths": 1, "batches": 1, "max_length": 1}
_LEAST |= {"rounds": 3, "seconds": 0, "margin": 0, "seed": 0, "seeds": 0}
_NOT_IN_THE_FILE = ("text", "mistakes", "points")
_WRONG = object()  # stands for a value that was refused: its key keeps its default while the rest is looked at


def read(path: Path) -> Recipe:
    """Read a recipe.

    Args:
        path: Of the YAML file; paths inside it are meant from the folder that the command runs in.

    Returns:
        What could be read; what could not is among its `mistakes`, each with the nearest known name.

    Raises:
        ApproxError: if there is no such file, or it is no YAML mapping.
    """
    recipe, data, mistakes = parse(Recipe, path, "recipe")
    mistakes += loose_ends(recipe, data, "recipe")
    return dataclasses.replace(recipe, mistakes=tuple(f"{path}: {mistake}" for mistake in mistakes))


def parse(kind: type, path: Path, what: str) -> tuple[Any, dict[str, Any], list[str]]:
    """Read a file that says what to do, a recipe or another.

    Args:
        kind: The dataclass to make; its `EMPTY` stands for what is missing.
        path: Of the YAML file.
        what: What such a file is called: `recipe`.

    Returns:
        What could be read, the plain data, and what is wrong, a sentence each.

    Raises:
        ApproxError: if there is no such file, or it is no YAML mapping.
    """
    called = f"{what.capitalize()} {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ApproxError(f"{called} cannot be read: {error.strerror}. Give the path of a YAML file.") from None
    except UnicodeDecodeError:
        raise ApproxError(f"{called} is not UTF-8 text. Give the path of a YAML file.") from None
    try:
        data, mistakes = yaml_text.load(text)
    except yaml.YAMLError as error:
        raise ApproxError(f"{called} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ApproxError(
            f"{called} holds no mapping of keys and values, but {shown(data)}. Its keys are title, checkpoint, variants, …"
        )
    return dataclasses.replace(_make(kind, data, what, mistakes), text=text), data, mistakes


def find(name: str, what: str = "recipe") -> Path:
    """The file of a recipe, or of a grid: a path, or the name of one that comes with the package.

    Raises:
        ApproxError: if there is no such file and no such recipe.
    """
    if Path(name).is_file():
        return Path(name)
    # Installed, recipes lie inside the package; in a checkout they lie beside it.
    folders = [Path(__file__).parent / "recipes", Path(__file__).parent.parent / "recipes"]
    files = [path for folder in folders for path in sorted(folder.glob("*.yaml"))]
    known = {path.stem: path for path in files if path.stem.endswith("-grid") == (what == "grid")}
    if name not in known:
        hint = did_you_mean(name, known)
        raise ApproxError(
            f"{what.capitalize()} {name} does not exist.{hint} Give a YAML file, or one of: {', '.join(sorted(known))}."
        )
    return known[name]


def _make(kind: type, data: Any, where: str, mistakes: list[str]) -> Any:
    """An instance of a dataclass from plain data; what is wrong is added to `mistakes` and left out."""
    if not isinstance(data, dict):
        mistakes.append(f"{where}: a mapping of keys and values is needed, found {shown(data)}.")
        return _WRONG
    fields = {f.name: f for f in dataclasses.fields(kind) if f.name not in _NOT_IN_THE_FILE}
    hints = typing.get_type_hints(kind)
    for key in data:
        if key not in fields:
            hint = did_you_mean(str(key), fields)
            mistakes.append(f"{where}: unknown key '{key}'.{hint} Known: {', '.join(fields)}.")
    values, needed = {}, set()
    for name, f in fields.items():
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            needed.add(name)
            if name not in data:
                mistakes.append(f"{where}: the key '{name}' is missing.")
        if name in data:
            values[name] = _value(hints[name], data[name], f"{where}.{name}", mistakes)
    values = getattr(kind, "EMPTY", {}) | {name: value for name, value in values.items() if value is not _WRONG}
    return kind(**values) if needed <= values.keys() else _WRONG


def _value(hint: Any, value: Any, where: str, mistakes: list[str]) -> Any:
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        kinds = typing.get_args(hint)
        words = [word for kind in kinds if typing.get_origin(kind) is typing.Literal for word in typing.get_args(kind)]
        if value in words or (value is None and type(None) in kinds):
            return value
        hint = next(kind for kind in kinds if isinstance(kind, type) and kind is not type(None))
        if words and not isinstance(value, hint):
            mistakes.append(f"{where}: {_words(hint)} or {', '.join(words)} is needed, found {shown(value)}.")
            return _WRONG
    if typing.get_origin(hint) is list:
        (inner,) = typing.get_args(hint)
        items = value if isinstance(value, list) else [value]
        if not items:
            mistakes.append(f"{where}: at least one is needed, found an empty list.")
        places = [f"{where}[{i}]" if len(items) > 1 else where for i in range(len(items))]
        made = [_value(inner, item, place, mistakes) for item, place in zip(items, places, strict=True)]
        return [item for item in made if item is not _WRONG] or _WRONG
    if typing.get_origin(hint) is dict:
        if not isinstance(value, dict):
            mistakes.append(f"{where}: a mapping of names is needed, found {shown(value)}.")
            return _WRONG
        return value
    if dataclasses.is_dataclass(hint):
        return _make(typing.cast(type, hint), value, where, mistakes)
    return _scalar(hint, value, where, mistakes)


def _scalar(hint: type, value: Any, where: str, mistakes: list[str]) -> Any:
    name = where.rpartition(".")[2].partition("[")[0]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        mistakes.append(f"{where}: {_words(hint)} is needed, found {shown(value)}.")
    elif name in _LEAST and not _LEAST[name] <= value < float("inf"):
        mistakes.append(f"{where}: a finite number of at least {_LEAST[name]} is needed, found {shown(value)}.")
    elif name in CHOICES and value not in CHOICES[name]:
        mistakes.append(f"{where}: one of {', '.join(CHOICES[name])} is needed, found {shown(value)}.")
    else:
        return value
    return _WRONG


def _words(hint: type) -> str:
    return {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[hint]


def loose_ends(made: Any, data: dict[str, Any], what: str) -> list[str]:
    """What is wrong with a recipe or a grid as a whole: names of variants, nothing to measure."""
    mistakes = []
    if not data.get("variants", True):
        mistakes.append(f"{what}.variants: at least one variant is needed, e.g. {{linear: {{mechanism: linear}}}}.")
    slugs: dict[str, str] = {}
    for name in made.variants:
        if not isinstance(name, str):
            mistakes.append(f"{what}.variants: names are texts, found {name!r}. Put it in quotes.")
        elif name in (BASE, CEILING):
            mistakes.append(f"{what}.variants: '{name}' is the name of a line of every report. Choose another name.")
        elif slug(name) in slugs:
            mistakes.append(f"{what}.variants: '{name}' and '{slugs[slug(name)]}' would share a folder. Rename one.")
        else:
            slugs[slug(name)] = name
    # Of the file, not of what could be read of it: a mistake is told once.
    if not data.get("evaluate") and not data.get("bench"):
        mistakes.append(f"{what}: nothing is measured. Add 'evaluate', 'bench' or both.")
    if any(stage.inputs == "real" for stage in made.bench) and not data.get("evaluate"):
        mistakes.append(f"{what}.bench: real inputs are texts of a task. Add 'evaluate', or set 'inputs: synthetic'.")
    return mistakes


def slug(name: str) -> str:
    """Name of a variant as a folder name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "variant"
