"""A recipe: a YAML file that says what to convert, how, and what to measure."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, PrivateAttr

from approx import yaml_text
from approx.errors import ApproxError, did_you_mean, shown
from approx.evaluation.options import BASE, CEILING, BenchStage, Device, Dtype, EvaluateStage, Quantize
from approx.finetuning.options import HealStage
from approx.planning.rule import Rules
from approx.pushing.options import PushStage
from approx.searching.options import SearchStage, contradictions
from approx.validation import Mistake, Model, error_lines, listed, salvage

HEALED, TRAINED = ", healed", f"{BASE}, trained"
"""The end of a healed variant's name, and the name of the base after the same training."""


class Study(Model):
    """The common keys of recipes and grids.

    Attributes:
        title: Title of the report.
        checkpoint: The checkpoint to convert.
        variants: Name -> rules.
        evaluate: Tasks to evaluate on, in order.
        bench: Grids of lengths and batch sizes to time at, in order.
        heal: Trainings of the converted variants, in order.
        revision: Commit on the hub.
        merge_adapter: Whether a PEFT adapter next to the weights, or one named by its folder, is merged into them.
        notice: A sentence shown above everything else in the report.
        seed: Seed of all random choices.
        device: `auto`, `cpu` or `cuda`.
        dtype: `auto` (the checkpoint's own), `float32`, `bfloat16` or `float16`.
        quantize: `int8` to evaluate and time all models with 8-bit weights, by torchao on the CPU; searches and trainings use the
            float weights.
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
    merge_adapter: bool = False
    notice: str | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    device: Device = "auto"
    dtype: Dtype = "auto"
    quantize: Quantize | None = None
    _text: str = PrivateAttr("")
    _mistakes: tuple[str, ...] = PrivateAttr(())
    _places: dict[tuple[Any, ...], str] = PrivateAttr(default_factory=dict)

    @property
    def text(self) -> str:
        """The text of the file."""
        return self._text

    @property
    def mistakes(self) -> tuple[str, ...]:
        """The mistakes in the file, one sentence each; mistakes concerning the checkpoint are found later."""
        return self._mistakes

    @property
    def sha256(self) -> str:
        """Hash of the file's text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def at(self, *path: Any) -> str:
        """File and line of a part, as the beginning of a message; empty if there is no file."""
        return self._places.get(path, "")

    @classmethod
    def parse(
        cls, path: Path, what: str, blanks: Mapping[str, Any], more: Callable[[Self], Iterator[Mistake]] | None = None
    ) -> Self:
        """Read a file.

        Args:
            path: The YAML file.
            what: The kind of file: `recipe`.
            blanks: Values for required keys that are missing or wrong.
            more: Finds further mistakes.

        Returns:
            The valid part of the file, with `mistakes` for the rest.

        Raises:
            ApproxError: if the file does not exist or is not a YAML mapping.
        """
        document = yaml_text.read(path, what)
        if not isinstance(document.data, dict):
            raise ApproxError(
                f"{what.capitalize()} {path} is not a mapping of keys and values, but {shown(document.data)}. "
                "Its keys are title, checkpoint, variants, …"
            )
        made, mistakes = salvage(cls, document.data, what, blanks)
        mistakes += [*_loose_ends(made, document.data, what), *(more(made) if more else ())]
        made._text = document.text
        made._mistakes = tuple(error_lines(mistakes, str(path), document))
        parts = {part: part for part in [("checkpoint",), *(("variants", name) for name in made.variants)]}
        for key in ("evaluate", "bench", "heal", "push"):
            count = len(getattr(made, key, ()))
            # If an invalid stage was left out, the numbers differ from those in the file.
            whole = len(listed(document.data.get(key))) == count
            parts |= {(key, number): (key, number) if whole else (key,) for number in range(count)}
        made._places = {part: f"{path}, line {document.line(place)}: " for part, place in parts.items()}
        return made


class Recipe(Study):
    """The input of `approx run`.

    Attributes:
        checkpoint: A folder, a hub model id, or `quickstart`.
        variants: Name -> plan: a rule or a list of rules.
        calibrate: A text, or for speech a recording, as in `approx convert --calibrate`.
        search: Name of a further variant -> the search for its plan, before everything else.
        push: Variants to push to a hub, after everything else.
    """

    checkpoint: str
    variants: dict[str, Rules]
    calibrate: str | None = None
    search: dict[str, SearchStage] = Field(default_factory=dict)
    push: Annotated[list[PushStage], BeforeValidator(listed, json_schema_input_type=list[PushStage] | PushStage)] = (
        Field(default_factory=list)
    )


def read(path: Path) -> Recipe:
    """Read a recipe.

    Args:
        path: The YAML file; paths in it are relative to the current folder.

    Returns:
        The valid part of the file, with `mistakes` for the rest, each with its line and the closest known name.

    Raises:
        ApproxError: if the file does not exist or is not a YAML mapping.
    """
    return Recipe.parse(path, "recipe", {"title": "", "checkpoint": "", "variants": {}}, _own_mistakes)


def find(name: str, what: str = "recipe") -> Path:
    """The file of a recipe or grid, given by its path or by the name of one that comes with the package.

    Raises:
        ApproxError: if there is neither.
    """
    if Path(name).is_file():
        return Path(name)
    known = named(what)
    if name not in known:
        hint = did_you_mean(name, known)
        raise ApproxError(
            f"{what.capitalize()} {name} does not exist.{hint} Give a YAML file, or one of: {', '.join(sorted(known))}."
        )
    return known[name]


def named(what: str) -> dict[str, Path]:
    """Name -> file of the recipes, or of the grids, that come with the package."""
    # Recipes are inside the installed package, but next to it in a checkout.
    folders = [Path(__file__).parent / "recipes", Path(__file__).parent.parent / "recipes"]
    files = [path for folder in folders for path in sorted(folder.glob("*.yaml"))]
    return {path.stem: path for path in files if path.stem.endswith("-grid") == (what == "grid")}


def _loose_ends(made: Study, data: dict[str, Any], what: str) -> Iterator[Mistake]:
    """Check a recipe or grid as a whole: names of variants, something to measure."""
    if not data.get("variants", True):
        example = "at least one variant is needed, e.g. {linear: {mechanism: linear}}."
        yield Mistake(("variants",), f"{what}.variants: {example}")
    slugs: dict[str, str] = {}
    for name in made.variants:
        place, where = ("variants", name), f"{what}.variants"
        if name in (BASE, CEILING) or name.endswith(HEALED):
            yield Mistake(place, f"{where}: '{name}' is reserved for a line of every report. Choose another name.")
        elif slug(name) in slugs:
            yield Mistake(place, f"{where}: '{name}' and '{slugs[slug(name)]}' would share a folder. Rename one.")
        else:
            slugs[slug(name)] = name
    # Checked in the file, not in its valid part: invalid stages are already reported.
    if not data.get("evaluate") and not data.get("bench"):
        yield Mistake((), f"{what}: nothing is measured. Add 'evaluate', 'bench' or both.")
    for number, stage in enumerate(made.heal):
        for name in stage.variants or []:
            if name not in made.variants:
                hint = did_you_mean(name, made.variants)
                known = f"Known: {', '.join(made.variants)}."
                yield Mistake(("heal", number), f"{what}.heal: there is no variant '{name}'.{hint} {known}")
    if any(stage.inputs == "real" for stage in made.bench) and not data.get("evaluate"):
        advice = "real inputs come from a task. Add 'evaluate', or set 'inputs: synthetic'."
        yield Mistake(("bench",), f"{what}.bench: {advice}")


def _own_mistakes(made: Recipe) -> Iterator[Mistake]:
    for name, stage in made.search.items():
        where = ("search", name)
        yield from (Mistake(where, f"recipe.search.{name}: {sentence}") for sentence in contradictions(stage))
        if name in (*made.variants, BASE, CEILING):
            yield Mistake(where, f"recipe.search: '{name}' is the name of another variant. Choose another one.")
    yield from _push_mistakes(made)


def _push_mistakes(made: Recipe) -> Iterator[Mistake]:
    """Check what is pushed where."""
    places: set[tuple[str, str | None]] = set()
    for number, push in enumerate(made.push):
        names = [*made.variants, *made.search]
        where, known = ("push", number), f"Known: {', '.join(names)}."
        if push.variant is None and len(names) > 1:
            yield Mistake(where, f"recipe.push: name the variant to push, e.g. 'variant: {names[0]}'.")
        elif push.variant is not None and push.variant not in names:
            hint = did_you_mean(push.variant, names)
            yield Mistake(where, f"recipe.push: there is no variant '{push.variant}'.{hint} {known}")
        if (place := (push.repo, push.revision)) in places:
            yield Mistake(where, f"recipe.push: {push.repo} is pushed to twice. Choose another repository or revision.")
        places.add(place)


def slug(name: str) -> str:
    """Name of a variant as a folder name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "variant"


def replaced(
    recipe: Recipe, *, checkpoint: str | None = None, data: Sequence[str] = (), limit: int | None = None
) -> Recipe:
    """A recipe with another checkpoint, other files or fewer examples; its text says so at the end.

    Args:
        recipe: The recipe.
        checkpoint: Checkpoint in place of the recipe's.
        data: Files in place of the recipe's: `PATH` for the only task, `TASK=PATH`, or `OLD=PATH` for a path that the
            recipe names.
        limit: Number of examples of every evaluation, from the first.

    Raises:
        ApproxError: if it is not clear whose files are replaced.
    """
    changes: dict[str, Any] = {} if checkpoint is None else {"checkpoint": checkpoint, "revision": None}
    files = dict(_replacement(recipe, one) for one in data)

    def path(old: str | None, task: str | None = None) -> str | None:
        return files.get(old or "", files.get(task or "", old))

    if files:
        changes["calibrate"] = path(recipe.calibrate)
    if files or limit is not None:
        defaults: dict[str, Any] = {} if limit is None else {"limit": limit}
        changes["evaluate"] = [
            stage.model_copy(update={"data": path(stage.data, stage.task), **defaults}) for stage in recipe.evaluate
        ]
        changes["heal"] = [
            stage.model_copy(
                update={
                    "data": path(stage.data, stage.task),
                    "text": None if stage.text is None else [path(file) for file in stage.text],
                }
            )
            for stage in recipe.heal
        ]
    made = recipe.model_copy(update=changes)
    replaced = [("checkpoint", checkpoint), *(("data", one) for one in data), ("limit", limit)]
    made._text = recipe.text + "".join(f"# Replaced: {name} {value}\n" for name, value in replaced if value is not None)
    return made


def _replacement(recipe: Recipe, replacement: str) -> tuple[str, str]:
    """What a replacement of files replaces, a task or a path, and the new path."""
    tasks = dict.fromkeys(stage.task for stage in (*recipe.evaluate, *recipe.heal) if stage.task)
    paths = [stage.data for stage in (*recipe.evaluate, *recipe.heal)] + [recipe.calibrate]
    paths += [file for stage in recipe.heal for file in stage.text or []]
    known = dict.fromkeys([*tasks, *(one for one in paths if one is not None)])
    which, equals, path = replacement.partition("=")
    if equals and which in known:
        return which, path
    if len(tasks) == 1 and not (equals and not Path(replacement).exists()):
        return next(iter(tasks)), replacement
    raise ApproxError(
        f"'--data {replacement}' does not say whose files it replaces. Give WHICH=PATH, where WHICH is one of "
        f"{', '.join(known)}."
    )
