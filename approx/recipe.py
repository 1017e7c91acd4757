"""A recipe: one short YAML file that says what to convert, how, and what to measure."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, PrivateAttr

from approx import yaml_text
from approx.errors import ApproxError, did_you_mean, shown
from approx.evaluation.options import BenchStage, EvaluateStage
from approx.finetuning.options import HealStage
from approx.planning.rule import Rules
from approx.validation import Mistake, Model, listed, salvage, told

BASE, CEILING = "exact", "attention-free"
"""Names of the two lines that every report has: the base itself, and the base with its attention replaced by its values."""

HEALED, TRAINED = ", healed", f"{BASE}, trained"
"""What the name of a variant ends with once it was trained, and the name of the base that had the same training."""

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CHOICES = {"device": get_args(Device), "dtype": get_args(Dtype)}


class Study(Model):
    """What a recipe and a grid have in common.

    Attributes:
        title: Of the report.
        checkpoint: What is converted.
        variants: Name -> rules.
        evaluate: Tasks, in order.
        bench: Grids of lengths and batch sizes, in order.
        heal: Training of the variants after their conversion, one after the other.
        revision: Commit of the hub.
        notice: A sentence that the report shows above everything else.
        seed: Of everything random.
        device: `auto`, `cpu` or `cuda`.
        dtype: `auto` (what the checkpoint says), `float32`, `bfloat16` or `float16`.
    """

    title: str
    checkpoint: Any
    variants: dict[str, Any]
    evaluate: Annotated[
        list[EvaluateStage], BeforeValidator(listed, json_schema_input_type=list[EvaluateStage] | EvaluateStage)
    ] = Field(default_factory=list)
    bench: Annotated[
        list[BenchStage], BeforeValidator(listed, json_schema_input_type=list[BenchStage] | BenchStage)
    ] = Field(default_factory=list)
    heal: Annotated[list[HealStage], BeforeValidator(listed, json_schema_input_type=list[HealStage] | HealStage)] = (
        Field(default_factory=list)
    )
    revision: str | None = None
    notice: str | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    device: Device = "auto"
    dtype: Dtype = "auto"
    _text: str = PrivateAttr("")
    _mistakes: tuple[str, ...] = PrivateAttr(())
    _places: dict[tuple[Any, ...], str] = PrivateAttr(default_factory=dict)

    @property
    def text(self) -> str:
        """The file as it was read."""
        return self._text

    @property
    def mistakes(self) -> tuple[str, ...]:
        """What is wrong with the file, a sentence each; whoever uses it adds what is wrong with the checkpoint."""
        return self._mistakes

    @property
    def sha256(self) -> str:
        """Of the file's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def at(self, *path: Any) -> str:
        """Where a part of the file stands, to begin a message with; empty where there is no file."""
        return self._places.get(path, "")

    @classmethod
    def parse(
        cls, path: Path, what: str, blanks: Mapping[str, Any], more: Callable[[Self], Iterator[Mistake]] | None = None
    ) -> Self:
        """Read a file.

        Args:
            path: Of the YAML file.
            what: What such a file is called: `recipe`.
            blanks: What stands for keys that are needed and missing or wrong.
            more: Finds what else is wrong.

        Returns:
            What could be read; what could not is among its `mistakes`.

        Raises:
            ApproxError: if there is no such file, or it is no YAML mapping.
        """
        document = yaml_text.read(path, what)
        if not isinstance(document.data, dict):
            raise ApproxError(
                f"{what.capitalize()} {path} holds no mapping of keys and values, but {shown(document.data)}. "
                "Its keys are title, checkpoint, variants, …"
            )
        made, mistakes = salvage(cls, document.data, what, blanks)
        mistakes += [*_loose_ends(made, document.data, what), *(more(made) if more else ())]
        made._text = document.text
        made._mistakes = tuple(told(mistakes, str(path), document))
        parts = {part: part for part in [("checkpoint",), *(("variants", name) for name in made.variants)]}
        for key in ("evaluate", "bench", "heal"):
            count = len(getattr(made, key))
            # Where a stage was left out, the others have other numbers than in the file.
            whole = len(listed(document.data.get(key))) == count
            parts |= {(key, number): (key, number) if whole else (key,) for number in range(count)}
        made._places = {part: f"{path}, line {document.line(place)}: " for part, place in parts.items()}
        return made


class Recipe(Study):
    """Everything `approx run` needs.

    Attributes:
        checkpoint: A folder, a model id of the hub, or `quickstart`.
        variants: Name -> plan: a rule or a list of rules.
        calibrate: A text, or for speech a recording, as `approx convert --calibrate` takes it.
    """

    checkpoint: str
    variants: dict[str, Rules]
    calibrate: str | None = None


def read(path: Path) -> Recipe:
    """Read a recipe.

    Args:
        path: Of the YAML file; paths inside it are meant from the folder that the command runs in.

    Returns:
        What could be read; what could not is among its `mistakes`, each with its line and the nearest known name.

    Raises:
        ApproxError: if there is no such file, or it is no YAML mapping.
    """
    return Recipe.parse(path, "recipe", {"title": "", "checkpoint": "", "variants": {}})


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


def _loose_ends(made: Study, data: dict[str, Any], what: str) -> Iterator[Mistake]:
    """What is wrong with a recipe or a grid as a whole: names of variants, nothing to measure."""
    if not data.get("variants", True):
        example = "at least one variant is needed, e.g. {linear: {mechanism: linear}}."
        yield Mistake(("variants",), f"{what}.variants: {example}")
    slugs: dict[str, str] = {}
    for name in made.variants:
        place, where = ("variants", name), f"{what}.variants"
        if name in (BASE, CEILING) or name.endswith(HEALED):
            yield Mistake(place, f"{where}: '{name}' is the name of a line of every report. Choose another name.")
        elif slug(name) in slugs:
            yield Mistake(place, f"{where}: '{name}' and '{slugs[slug(name)]}' would share a folder. Rename one.")
        else:
            slugs[slug(name)] = name
    # Of the file, not of what could be read of it: a mistake is told once.
    if not data.get("evaluate") and not data.get("bench"):
        yield Mistake((), f"{what}: nothing is measured. Add 'evaluate', 'bench' or both.")
    for number, stage in enumerate(made.heal):
        for name in stage.variants or []:
            if name not in made.variants:
                hint = did_you_mean(name, made.variants)
                known = f"Known: {', '.join(made.variants)}."
                yield Mistake(("heal", number), f"{what}.heal: there is no variant '{name}'.{hint} {known}")
    if any(stage.inputs == "real" for stage in made.bench) and not data.get("evaluate"):
        advice = "real inputs are texts of a task. Add 'evaluate', or set 'inputs: synthetic'."
        yield Mistake(("bench",), f"{what}.bench: {advice}")


def slug(name: str) -> str:
    """Name of a variant as a folder name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "variant"
