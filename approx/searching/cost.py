"""What a plan costs: time and damage of each candidate at each site, and the divergence of a whole plan."""

import copy
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from approx.checkpoints import checkpoint
from approx.checkpoints.checkpoint import Checkpoint, state_sha256
from approx.conversion import surgery
from approx.conversion.calibration import TEXT, calibrate, calibration_batch, calibration_length, evaluating, mechanisms
from approx.conversion.surgery import answers_questions, of_checkpoint, with_separator
from approx.errors import ApproxError, Exit, did_you_mean
from approx.evaluation.evaluate import Prepared, Subject, fingerprint, prepare
from approx.evaluation.options import BASE, BenchStage, EvaluateStage
from approx.evaluation.quality import groups_of
from approx.evaluation.record import Speed, environment
from approx.evaluation.statistics import standard_error
from approx.finetuning.divergence import divergence, surrogate
from approx.measuring.measure import computed_by, identity, measure_speed
from approx.mechanisms import MECHANISMS
from approx.planning.anatomy import Anatomy, Site, ranges
from approx.planning.plan import Plan
from approx.planning.rule import Rule
from approx.progress import Progress
from approx.seam.observe import Call, observe
from approx.searching.options import SearchStage
from approx.tasks import open_task
from approx.tasks.classification import SEVERAL, kind_of_outputs
from approx.tasks.metrics import METRICS
from approx.tasks.task import Example, Split, Task
from approx.text_file import read_text
from approx_kernels.runtime.atomic_file import write_whole
from approx_kernels.runtime.cache_folder import cache_folder

_OF_HEADS = ", "
# The shares of its heads that a layer may convert.
_SHARES = (0.25, 0.5, 0.75)


class Candidate(NamedTuple):
    """What one layer may become.

    Attributes:
        name: Its name, unique in a search.
        rule: Mechanism and settings.
        heads: Number of heads that are converted; None for all.
    """

    name: str
    rule: Rule
    heads: int | None = None

    @property
    def whole(self) -> str:
        """Name of the candidate that converts all heads in the same way."""
        return self.name.partition(_OF_HEADS)[0]

    def on(self, site: Site) -> bool:
        """Whether a site can become this."""
        if site.kept is not None:
            return False
        mechanism = MECHANISMS[self.rule.mechanism]
        able = mechanism.supports_causal if site.causal else mechanism.supports_bidirectional
        if not able or (self.heads is not None and self.heads >= site.heads):
            return False
        settings = {**mechanism.defaults(), **self.rule.settings}
        try:
            probe = mechanism(self.heads or site.heads, site.head_dim, causal=site.causal, scale=site.scale, **settings)
        except ApproxError as error:
            # Some settings are not for every form.
            if error.exit_code != Exit.UNSUPPORTED:
                raise
            return False
        return not probe.reads_tokens or site.fixed_length is None


def candidates(stage: SearchStage, anatomy: Anatomy) -> list[Candidate]:
    """The candidates that some layer of a model can become.

    Args:
        stage: The options.
        anatomy: The model.

    Raises:
        ApproxError: if a mechanism or setting does not exist, or no layer of the model can run any of them.
    """
    if stage.candidates is not None:
        rules = list(stage.candidates)
    else:
        rules = list(
            _ladders(
                _names(stage.mechanisms, healed=stage.heal is not None),
                stage.length,
                by_name=stage.mechanisms is not None,
            )
        )
    chosen = stage.candidates is not None or stage.mechanisms is not None
    fitting = [rule for rule in rules if _refusal(rule, anatomy, by_name=chosen) is None]
    if not fitting:
        raise ApproxError(
            f"No layer of {anatomy.architecture} can run {', '.join(dict.fromkeys(rule.mechanism for rule in rules))}. "
            "`approx mechanisms --family …` lists what it can run.",
            Exit.UNSUPPORTED,
        )
    whole = [Candidate(name, rule) for name, rule in zip(_named(fitting), fitting, strict=True)]
    if stage.granularity == "layer":
        return whole
    counts = sorted({round(share * site.heads) for share in _SHARES for site in anatomy.convertible} - {0})
    parts = [Candidate(f"{one.name}{_OF_HEADS}{count} heads", one.rule, count) for one in whole for count in counts]
    return whole + [one for one in parts if any(one.on(site) for site in anatomy.sites)]


def proposals(
    names: Sequence[str] | None, length: int, anatomy: Anatomy, *, healed: bool
) -> tuple[list[Candidate], dict[str, str]]:
    """What to try in every layer of a model in place of exact attention, the first setting of each mechanism first.

    Args:
        names: Mechanisms; None for those that a search tries.
        length: Tokens of the longest input; windows that span it are left out, unless they are named.
        anatomy: The model.
        healed: Whether to include those that lose most without training.

    Returns:
        The candidates, and mechanism -> why the model cannot run it.

    Raises:
        ApproxError: if a named mechanism does not exist or cannot be run.
    """
    chosen = _names(names, healed=healed)
    if names is None:
        chosen = [name for name in chosen if not MECHANISMS[name].always_exact]
    fitting: list[Rule] = []
    refused: dict[str, str] = {}
    for rule in _ladders(chosen, length, by_name=names is not None):
        if (reason := _refusal(rule, anatomy, by_name=names is not None)) is None:
            fitting.append(rule)
        else:
            refused[rule.mechanism] = reason
    whole = [Candidate(name, rule) for name, rule in zip(_named(fitting), fitting, strict=True)]
    place = {
        id(one): sum(one.rule.mechanism == other.rule.mechanism for other in whole[:n]) for n, one in enumerate(whole)
    }
    able = {one.rule.mechanism for one in whole}
    return sorted(whole, key=lambda one: place[id(one)]), {
        name: reason for name, reason in refused.items() if name not in able
    }


def _names(names: Sequence[str] | None, *, healed: bool) -> list[str]:
    """Names of mechanisms, each once; without any those that are tried by default."""
    if names is None:
        when = ("always", "healed") if healed else ("always",)
        return [name for name, kind in MECHANISMS.items() if kind.searched in when]
    for name in names:
        if name not in MECHANISMS:
            raise ApproxError(
                f"Unknown mechanism '{name}'.{did_you_mean(name, MECHANISMS)} Known: {', '.join(MECHANISMS)}."
            )
    return list(dict.fromkeys(names))


def _ladders(names: Sequence[str], length: int, *, by_name: bool) -> Iterator[Rule]:
    for name in names:
        for settings in MECHANISMS[name].candidates:
            # A window as long as the input saves nothing, so it is tried only by name.
            if by_name or settings.get("window", settings.get("left", 0) + settings.get("right", 0)) < length:
                yield Rule(name, settings=dict(settings))


def _refusal(rule: Rule, anatomy: Anatomy, *, by_name: bool) -> str | None:
    """Why no layer of the model can run a rule; None if one can. Mistakes in what the user wrote are raised."""
    reasons: list[str] = []
    forms = {site.causal: site for site in anatomy.convertible}
    for site in forms.values():
        try:
            Plan((Rule(rule.mechanism, str(site.layer), rule.settings),)).resolve(anatomy)
        except ApproxError as error:
            if by_name or error.exit_code != Exit.UNSUPPORTED:
                raise
            reasons.append(str(error))
        else:
            return None
    return reasons[0] if reasons else "no layer can be converted"


def _named(rules: Sequence[Rule]) -> list[str]:
    """Short names of rules: the mechanism and the numbers among its settings; in full where two would be the same."""
    short = [_name(rule, lambda key, value: str(value) if type(value) is int else f"{key}={value}") for rule in rules]
    names = [
        _name(rule, lambda key, value: f"{key}={value}") if short.count(name) > 1 else name
        for name, rule in zip(short, rules, strict=True)
    ]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ApproxError(f"The candidate {twice[0]} is listed twice. List it once.")
    return names


def _name(rule: Rule, written: Callable[[str, Any], str]) -> str:
    # The base is called exact.
    mechanism = f"fastest {BASE}" if rule.mechanism == BASE else rule.mechanism
    return " ".join(dict.fromkeys([mechanism, *(written(*setting) for setting in rule.settings.items())]))


_BATCH, _GRADIENTS = 8, 64
# Fewer examples than this prove nothing.
_FEWEST = 10
_ROWS_OF_TEXT, _FEWEST_TOKENS = 4, 256


@dataclass(frozen=True)
class Batch:
    """Inputs of a model, and what a task needs to read its outputs.

    Attributes:
        inputs: Keyword arguments of the model's forward, on its device.
        rows: Index of each input among the encodings of its part.
    """

    inputs: dict[str, Tensor]
    rows: list[int]

    @property
    def mask(self) -> Tensor | None:
        """True at real tokens, [B, L]."""
        mask = self.inputs.get("attention_mask")
        return None if mask is None else mask.bool()


@dataclass(frozen=True)
class Part:
    """A part of the data.

    Attributes:
        batches: The inputs.
        prepared: The examples of a task as the model reads them; None for text.
    """

    batches: list[Batch]
    prepared: Prepared | None = None

    @property
    def inputs(self) -> int:
        """Number of inputs."""
        return sum(len(batch.rows) for batch in self.batches)


Parts = tuple[Part, Part, Part]
"""For gradients (which are the first of the next), for comparing plans, and for the proof."""


def of_task(base: Checkpoint, processor: Any, task: Task, stage: SearchStage, seed: int) -> Parts:
    """Divide the examples of a task; groups, such as the questions about one article, stay together.

    Raises:
        ApproxError: if the task does not fit the model, or there are too few examples.
    """
    task.check(base.model)
    loaded = task.load(None if stage.data is None else Path(stage.data), stage.split, stage.limit)
    examples = task.at_least(task.labelled(loaded), processor, stage.min_length).examples
    searched, proven = _divided(examples, stage.examples, seed)
    if min(len(searched), len(proven)) < _FEWEST:
        long = "" if stage.min_length is None else f" of at least {stage.min_length} tokens"
        units = len({example.unit for example in examples})
        if units < len(examples):
            long += f" in {units} groups by {task.groups.by}, which stay together"
        raise ApproxError(
            f"{task.name} has {len(examples)} examples{long}; that leaves {len(proven)} for the proof and "
            f"{len(searched)} to compare plans. Give more examples, or fewer to compare with --examples.",
            Exit.UNAVAILABLE,
        )
    if stage.calibration is not None and len(searched) < stage.calibration:
        raise ApproxError(
            f"--calibration is {stage.calibration} examples, but only {len(searched)} compare plans. "
            "Lower it, raise --examples, or give more data."
        )

    def part(some: list[Example]) -> Part:
        return _part(base, processor, task, Split(loaded.name, some, subset=True), truncate=stage.truncate)

    return part(searched[: stage.calibration or _GRADIENTS]), part(searched), part(proven[: stage.proof])


def of_text(base: Checkpoint, processor: Any, stage: SearchStage) -> Parts:
    """Cut a text into rows of the timed length: the first ones compare plans, the others prove.

    Raises:
        ApproxError: if the model reads no text, or the text cannot be read or is too short.
    """
    model: Any = base.model
    if model.main_input_name != "input_ids":
        raise ApproxError(
            f"A model that takes {model.main_input_name} is searched on the examples of a task. Name one with --task.",
            Exit.UNSUPPORTED,
        )
    text = TEXT if stage.text is None else _read(Path(stage.text))
    tokens = processor(text, add_special_tokens=False)["input_ids"]
    begin, end = _around(processor, text[:100])
    # A short text is read in shorter rows.
    body = max(min(stage.length - len(begin) - len(end), len(tokens) // (2 * _ROWS_OF_TEXT)), 1)
    rows = [begin + tokens[start : start + body] + end for start in range(0, len(tokens) - body + 1, body)]
    if len(tokens) < _FEWEST_TOKENS:
        raise ApproxError(
            f"The text has {len(tokens)} tokens, fewer than the {_FEWEST_TOKENS} that a search needs. Give a longer "
            "one with --text.",
            Exit.UNAVAILABLE,
        )
    if tokens.count(processor.unk_token_id) > len(tokens) / 2:
        raise ApproxError(
            f"The tokenizer of {base.source.name} does not know most words of the text. Give one in its language with "
            "--text, or a task with --task.",
            Exit.UNAVAILABLE,
        )
    rows = rows[: 2 * stage.examples]
    inputs = [{"input_ids": torch.tensor([row], device=model.device)} for row in rows]
    half = len(inputs) // 2
    search, proof = ([Batch(one, [row]) for row, one in enumerate(part)] for part in (inputs[:half], inputs[half:]))
    return Part(search[: stage.calibration or _GRADIENTS]), Part(search), Part(proof)


def placed(inputs: dict[str, Any], model: Any) -> dict[str, Tensor]:
    """Inputs on the device of a model; sounds get its dtype."""
    return {
        name: value.to(model.device, model.dtype if value.is_floating_point() else None)
        for name, value in inputs.items()
    }


def _around(processor: Any, text: str) -> tuple[list[int], list[int]]:
    """The special tokens before and after a text."""
    whole, inside = processor(text)["input_ids"], processor(text, add_special_tokens=False)["input_ids"]
    before = next(place for place in range(len(whole)) if whole[place : place + len(inside)] == inside)
    return whole[:before], whole[before + len(inside) :]


def _part(base: Checkpoint, processor: Any, task: Task, split: Split, *, truncate: bool) -> Part:
    model: Any = base.model
    subject = Subject("the model", model, processor)
    prepared = prepare([subject], task, split, batch_size=_BATCH, truncate=truncate)
    batches = []
    for rows in prepared.batches:
        encodings = [prepared.encodings[row] for row in rows]
        examples = [split.examples[prepared.owners[row]] for row in rows]
        inputs = task.collate(encodings, processor)
        # Decoders of speech need their targets as inputs.
        inputs |= task.targets(examples, encodings, processor, model.config)
        batches.append(Batch(placed(inputs, model), rows))
    return Part(batches, prepared)


def _divided(examples: Sequence[Example], count: int, seed: int) -> tuple[list[Example], list[Example]]:
    """The examples that compare plans, at most half, and those of the proof; groups stay together."""
    count = min(count, len(examples) // 2)
    groups: dict[tuple[str, str], list[Example]] = {}
    for example in examples:
        groups.setdefault(example.unit, []).append(example)
    searched: list[Example] = []
    proven: list[Example] = []
    names = list(groups)
    for place in np.random.default_rng(seed).permutation(len(names)):
        members = groups[names[place]]
        # A group that is much too large for the rest of the count goes to the proof.
        (searched if len(searched) + len(members) / 2 <= count else proven).extend(members)
    # The first ones are a sample of all.
    first, second = (np.random.default_rng(seed).permutation(len(one)) for one in (searched, proven))
    return [searched[place] for place in first], [proven[place] for place in second]


def _read(path: Path) -> str:
    text = read_text(path, settable=False)
    if not text.strip():
        raise ApproxError(f"{path} is empty. Give a plain text file with a few thousand words.", Exit.UNAVAILABLE)
    return text


@dataclass(frozen=True)
class Measured:
    """One plan on one part of the data.

    Attributes:
        divergence: Mean divergence of the outputs from the base's.
        loss: Loss of the task's metric, in points or percent of the base's score; None without a task.
        error: Standard error of the loss.
    """

    divergence: float
    loss: float | None = None
    error: float | None = None


class Judge:
    """Measures models on the parts of one split: for gradients, for comparing plans, and for the proof.

    Args:
        base: The exact checkpoint.
        stage: The options of the search.
        seed: Seed of the parts.

    Raises:
        ApproxError: if the task does not fit the model, or there are too few examples.
    """

    def __init__(self, base: Checkpoint, stage: SearchStage, seed: int) -> None:
        self.base, self.stage = base, stage
        self.task = None if stage.task is None else open_task(stage.task, **stage.settings)
        self.processor = checkpoint.processor(base.source)
        if self.task is None:
            divided = of_text(base, self.processor, stage)
        else:
            divided = of_task(base, self.processor, self.task, stage, seed)
        self.calibration, self.search, self.proof = divided
        self._known: dict[int, list[dict[str, Tensor]]] = {}
        self._base_scores: dict[int, tuple[Any, float]] = {}

    @property
    def unit(self) -> str:
        """The unit of losses."""
        if self.task is None:
            return "nats"
        return "points" if METRICS[self.task.metrics[0]].fraction else "%"

    @property
    def examples_sha256(self) -> str:
        """Hash of all inputs and labels by which plans are predicted and compared, without those of the proof."""
        digest = hashlib.sha256()
        for part in (self.calibration, self.search):
            for batch in part.batches:
                for name, value in batch.inputs.items():
                    digest.update(f"{name} {tuple(value.shape)} ".encode() + value.float().cpu().numpy().tobytes())
            labels = [] if part.prepared is None else [one.label for one in part.prepared.split.examples]
            digest.update(json.dumps(labels, default=str).encode())
        return digest.hexdigest()

    def of_task(self, part: Part) -> tuple[Task, Prepared]:
        """The task, and the examples of a part as the model reads them."""
        assert self.task is not None
        assert part.prepared is not None
        return self.task, part.prepared

    def measure(self, model: Any, part: Part) -> Measured:
        """Compare a model with the base on a part of the data."""
        apart, predictions = self._run(model, part)
        loss, error = self._loss(predictions, part) if self.task is not None else (None, None)
        return Measured(float(apart.mean()), loss, error)

    def divergences(self, model: Any, part: Part) -> NDArray[np.float64]:
        """The divergence of a model's outputs from the base's, per input, [n]."""
        return self._run(model, part)[0]

    @torch.inference_mode()
    def _run(self, model: Any, part: Part) -> tuple[NDArray[np.float64], list[Any]]:
        apart, several = np.zeros(part.inputs), kind_of_outputs(self.base.model.config) == SEVERAL
        predictions: list[Any] = [None] * part.inputs
        for number, batch in enumerate(part.batches):
            base_outputs = self._base_outputs(part, number)
            outputs = model(**batch.inputs)
            apart[batch.rows] = divergence(outputs, base_outputs, batch.mask, several=several).cpu().double().numpy()
            for row, one in zip(batch.rows, self._predictions(model, outputs, part, batch), strict=True):
                predictions[row] = one
        return apart, predictions

    def _base_outputs(self, part: Part, number: int) -> Any:
        """The base's outputs for a batch; stored if they are small."""
        known = self._known.setdefault(id(part), [])
        if number < len(known):
            return _Outputs(known[number])
        outputs = self.base.model(**part.batches[number].inputs)
        compared = {name: outputs[name] for name in outputs if name == "last_hidden_state" or "logits" in name}
        if number == len(known) and sum(x.numel() for x in compared.values()) * len(part.batches) < 1e8:
            known.append(compared)
        return _Outputs(compared)

    def _predictions(self, model: Any, outputs: Any, part: Part, batch: Batch) -> list[Any]:
        if self.task is None:
            return [None] * len(batch.rows)
        task, read = self.of_task(part)
        encodings = [read.encodings[row] for row in batch.rows]
        if type(task).outputs is not Task.outputs:
            # Such as transcripts, which are generated.
            outputs = task.outputs(model, placed(task.collate(encodings, self.processor), model))
        return task.predict(outputs, encodings, model.config)

    def _loss(self, predictions: list[Any], part: Part) -> tuple[float, float]:
        """Loss of the metric in points, and its standard error over the examples, or their groups."""
        task, read = self.of_task(part)
        predictions = _combined(task, read, predictions)
        metric = METRICS[task.metrics[0]]
        labels = [example.label for example in read.split.examples]
        evidence = metric.evidence(predictions, labels)
        if id(part) not in self._base_scores:
            base_predictions: list[Any] = [None] * part.inputs
            for number, batch in enumerate(part.batches):
                outputs = _Outputs(self._base_outputs(part, number))
                for row, one in zip(batch.rows, self._predictions(self.base.model, outputs, part, batch), strict=True):
                    base_predictions[row] = one
            base = metric.evidence(_combined(task, read, base_predictions), labels)
            self._base_scores[id(part)] = (base, metric.total(base))
        base, score = self._base_scores[id(part)]
        point = metric.acceptable(1.0, score)
        sign = 1 if metric.lower_is_better else -1

        def lost(rows: Any) -> float:
            return sign * (metric.total(evidence[rows]) - metric.total(base[rows])) / max(point, 1e-12)

        groups = groups_of(read.split.examples)
        return lost(slice(None)), standard_error(lost, len(labels), seed=0, groups=groups, resamples=100)


class _Outputs(dict[str, Tensor]):
    """Stored outputs of a model, by name and as attributes."""

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _combined(task: Task, read: Prepared, predictions: Sequence[Any]) -> list[Any]:
    pieces: list[list[Any]] = [[] for _ in read.split.examples]
    for row, owner in enumerate(read.owners):
        pieces[owner].append(predictions[row])
    return [task.combine(example, some) for example, some in zip(read.split.examples, pieces, strict=True)]


# Labels drawn for each input.
_DRAWS = 4
_SCHEMA = 1

Damages = dict[str, list[NDArray[np.float64] | None]]
"""Name of a candidate -> for each site the products of the effects of two heads, [H, H]; None where it is unusable."""


def measure_damage(
    model: Any,
    anatomy: Anatomy,
    running: Mapping[str, Any],
    batches: Sequence[Batch],
    seed: int,
    advance: Callable[[int, int], None],
) -> Damages:
    """Estimate the damage of candidates at every site of an exact model.

    Args:
        model: The exact model.
        anatomy: Its anatomy.
        running: Name of a candidate -> a model with it, for all heads, at every site that can become it.
        batches: Inputs.
        seed: Seed of the drawn labels.
        advance: Called with batches done and in all.
    """
    layers = {site.path: site.layer for site in anatomy.sites}
    mechanisms = {
        name: [getattr(one.base_model.get_submodule(site.path), "mechanism", None) for site in anatomy.sites]
        for name, one in running.items()
    }
    total: dict[tuple[str, int], Any] = {}
    count = 0
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for number, batch in enumerate(batches):
        advance(number, len(batches))
        for call, gradients in _with_gradients(model, batch, layers, generator):
            layer = call.layer or 0
            for name, at_sites in mechanisms.items():
                if at_sites[layer] is not None:
                    effects = _effects(at_sites[layer], call, gradients, batch)
                    total[name, layer] = total.get((name, layer), 0.0) + effects.T @ effects
        count += len(batch.rows) * _DRAWS
    advance(len(batches), len(batches))
    return {
        name: [None if one is None else total[name, layer] / (2 * count) for layer, one in enumerate(at_sites)]
        for name, at_sites in mechanisms.items()
    }


def of_heads(products: NDArray[np.float64], count: int | None) -> tuple[float, list[int]]:
    """The least damage of converting `count` heads of a layer, and which; all heads without a count.

    Heads are added one by one, each time the one that adds least.
    """
    if count is None:
        return max(float(products.sum()), 0.0), []
    chosen: list[int] = []
    while len(chosen) < count:
        waiting = [head for head in range(len(products)) if head not in chosen]
        added = {head: products[head, head] + 2 * products[head, chosen].sum() for head in waiting}
        chosen.append(min(waiting, key=lambda head: (added[head], head)))
    return max(float(products[np.ix_(chosen, chosen)].sum()), 0.0), sorted(chosen)


def save(path: Path, about: str, found: Damages) -> None:
    """Write sensitivities as JSON; `about` identifies the model, the candidates and the examples."""
    data = {name: [None if one is None else one.tolist() for one in sites] for name, sites in found.items()}
    made = {"schema": _SCHEMA, "about": about, "damages": data, "sha256": fingerprint(data)}
    write_whole(path, json.dumps(made))


def load(path: Path, about: str) -> Damages:
    """Read sensitivities.

    Raises:
        ApproxError: if the file cannot be read, or is about another model, other candidates or other examples.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = {
            name: [None if one is None else np.asarray(one, float) for one in sites]
            for name, sites in data["damages"].items()
        }
        known = data["about"]
        # Earlier versions stored no hash.
        if data.get("sha256") not in (None, fingerprint(data["damages"])):
            raise ValueError("its damages are not those that were measured")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ApproxError(
            f"{path} holds no sensitivities of a search: {' '.join(str(error).split())[:200]}. Leave it out, and they "
            "are measured.",
            Exit.UNAVAILABLE,
        ) from None
    if known != about:
        raise ApproxError(
            f"{path} was measured for another model, other candidates or other examples. Leave it out, and they are "
            "measured.",
            Exit.REFUSED,
        )
    return found


def _with_gradients(
    model: Any, batch: Batch, layers: Mapping[str, int], generator: torch.Generator
) -> Iterator[tuple[Call, list[Tensor]]]:
    """The attention calls of one forward pass, and at each output the gradients for several draws of labels."""
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with observe(model, layers=layers) as calls, evaluating(model), torch.enable_grad():
            outputs = model(**batch.inputs)
            seen = [call for call in calls if call.layer is not None]
            several = kind_of_outputs(model.config) == SEVERAL
            draws = (surrogate(outputs, batch.mask, generator, several=several) for _ in range(_DRAWS))
            gradients = [torch.autograd.grad(one, [call.output for call in seen], retain_graph=True) for one in draws]
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    for number, call in enumerate(seen):
        yield call, [drawn[number] for drawn in gradients]


@torch.no_grad()
def _effects(mechanism: Any, call: Call, gradients: Sequence[Tensor], batch: Batch) -> NDArray[np.float64]:
    """The change of each drawn loss by the error of each head, [draws x B, H]."""
    tokens = {"tokens": batch.inputs["input_ids"]} if mechanism.reads_tokens else {}
    q, k, v = (x.detach() for x in (call.q, call.k, call.v))
    error = mechanism(q, k, v, call.mask, **tokens).float() - call.output.detach().float()
    # Padding has no gradient.
    return torch.cat([(error * gradient).sum((2, 3)) for gradient in gradients]).cpu().double().numpy()


class Choice:
    """What one site becomes: a candidate, and the heads that it converts."""

    def __init__(self, candidate: Candidate | None, heads: Sequence[int] = ()) -> None:
        self.candidate, self.heads = candidate, tuple(sorted(heads))

    @property
    def name(self) -> str:
        """Its name in tables."""
        return "exact" if self.candidate is None else self.candidate.name

    def rule(self, site: Site) -> Rule | None:
        """The rule of a plan, without a layer; None for exact attention."""
        if self.candidate is None:
            return None
        heads = ranges(self.heads) if self.heads else "all"
        return dataclasses.replace(self.candidate.rule, layers=str(site.layer), heads=heads)


class Composer:
    """Makes models of one base by plans; their projections are the tensors of the base.

    Args:
        base: The exact checkpoint.
        anatomy: Its anatomy.
    """

    def __init__(self, base: Checkpoint, anatomy: Anatomy) -> None:
        self.base, self.anatomy = base, anatomy
        # Mechanism's state after fitting: (layer, candidate) -> its tensors.
        self.fitted: dict[tuple[int, str], dict[str, torch.Tensor]] = {}

    def plan(self, choices: Sequence[Choice]) -> Plan | None:
        """The plan that gives each site its choice, in as few rules as possible; None if every site stays exact."""
        alike: dict[tuple[str, str], tuple[Rule, list[int]]] = {}
        for site, choice in zip(self.anatomy.sites, choices, strict=True):
            rule = choice.rule(site)
            if rule is not None:
                alike.setdefault((choice.name, rule.heads), (rule, []))[1].append(site.layer)
        if not alike:
            return None
        rules = (dataclasses.replace(rule, layers=ranges(layers)) for rule, layers in alike.values())
        source = self.base.source
        answers = answers_questions(source.stock_class)
        return with_separator(Plan(tuple(rules)), lambda: of_checkpoint(source), answers=answers)

    def everywhere(self, candidate: Candidate) -> list[Choice]:
        """The candidate at every site that can become it."""
        return [
            Choice(candidate, range(candidate.heads or 0)) if candidate.on(site) else Choice(None)
            for site in self.anatomy.sites
        ]

    def make(self, choices: Sequence[Choice]) -> Checkpoint:
        """A checkpoint in memory with the plan of the choices; the base itself if every site stays exact."""
        plan = self.plan(choices)
        if plan is None:
            return self.base
        base: Any = self.base.model
        shared = {id(tensor): tensor for tensor in chain(base.parameters(), base.buffers())}
        model = copy.deepcopy(base, shared)
        surgery.exchange(model, plan)
        if any(mechanism.takes_calibration for mechanism in mechanisms(model)):
            calibrate(model, calibration_batch(self.base.source, model, calibration_length(model)).inputs)
        for site, choice in zip(self.anatomy.sites, choices, strict=True):
            if (state := self.fitted.get((site.layer, choice.name))) is not None:
                model.base_model.get_submodule(site.path).mechanism.load_state_dict(state)
        source = dataclasses.replace(self.base.source, raw=model.config.to_dict(), config=model.config, converted=True)
        states = [state_sha256(mechanism) for mechanism in mechanisms(model) if mechanism.state_dict()]
        return Checkpoint(source, model.eval(), fingerprint(self.base.weights_sha256, states))


# More partial plans than this are merged if their times differ by less than this share of the range of times.
_MOST_STATES, _RESOLUTION = 20_000, 1e-5

Floats = NDArray[np.float64]
Choices = tuple[int, ...]


class Front(NamedTuple):
    """The plans that no other plan beats in both time and damage, fastest first.

    Attributes:
        times: Time of each plan, the sum over its sites, [n], rising.
        damages: Damage of each plan, [n], falling.
        choices: Candidate of each site, [n, sites].
    """

    times: Floats
    damages: Floats
    choices: NDArray[np.int16]


def front(times: Floats, damages: Floats) -> Front:
    """Find every plan that no other plan beats in both time and damage.

    Args:
        times: Time of each candidate at each site, [sites, candidates], of any sign; infinite where it cannot be used.
        damages: Its damage, [sites, candidates], at least 0.

    Returns:
        The front. It is exact as long as there are at most 20,000 partial plans; beyond that, plans whose times differ
        by less than 0.001 % of the range are one.

    Raises:
        ValueError: if the shapes differ, or a site has no candidate.
    """
    if times.shape != damages.shape or times.ndim != 2:
        raise ValueError(f"times {times.shape} and damages {damages.shape} must both be [sites, candidates]")
    usable = np.isfinite(times) & np.isfinite(damages)
    if not usable.any(1).all():
        raise ValueError("a site has no candidate")
    worst, best = (np.where(usable, times, fill) for fill in (-np.inf, np.inf))
    range_ = float(worst.max(1).sum() - best.min(1).sum())
    time, damage = np.zeros(1), np.zeros(1)
    chosen = np.zeros((1, 0), np.int16)
    for at_site, lost, open_ in zip(times, damages, usable, strict=True):
        candidates = np.flatnonzero(open_)
        every_time = (time[:, None] + at_site[candidates]).ravel()
        every_damage = (damage[:, None] + lost[candidates]).ravel()
        undominated = _undominated(every_time, every_damage, range_)
        rows, columns = np.divmod(undominated, len(candidates))
        chosen = np.column_stack([chosen[rows], candidates[columns].astype(np.int16)])
        time, damage = every_time[undominated], every_damage[undominated]
    return Front(time, damage, chosen)


def _undominated(times: Floats, damages: Floats, range_: float) -> NDArray[np.intp]:
    """Indexes of the plans that no other beats, by rising time."""
    order = np.lexsort((damages, times))
    least = np.minimum.accumulate(damages[order])
    undominated = order[np.concatenate(([True], least[1:] < least[:-1]))]
    if len(undominated) > _MOST_STATES:
        cells = np.floor((times[undominated] - times[undominated[0]]) / max(range_ * _RESOLUTION, 1e-300))
        # The last plan of a cell has the least damage.
        undominated = undominated[np.concatenate((cells[1:] != cells[:-1], [True]))]
    return undominated


@dataclass(frozen=True)
class Exchange:
    """How many points of the task's metric a nat of divergence costs.

    The divergence of a plan is measured far more precisely than its score, and the two rise together, so the loss is
    estimated from both: the measured one weighted by its error, the exchanged one by half its size.
    """

    rate: float

    @classmethod
    def of(cls, plans: Sequence[Measured]) -> "Exchange":
        """The rate of the plans whose loss is beyond its noise; of the most damaging one if there is none."""
        clear = [one.loss / one.divergence for one in plans if one.loss and one.error and one.loss > 2 * one.error]
        if clear:
            return cls(float(np.exp(np.mean(np.log(clear)))))
        worst = max(plans, key=lambda one: one.divergence)
        return cls(max((worst.loss or 0.0) + (worst.error or 0.0), 1e-9) / max(worst.divergence, 1e-12))

    def loss(self, one: Measured) -> float:
        """The estimated loss of a plan, in points."""
        expected = self.rate * one.divergence
        if one.loss is None or not one.error:
            return expected if one.loss is None else one.loss
        precise, exchanged = one.error**-2, (0.5 * expected + 1e-9) ** -2
        return (precise * one.loss + exchanged * expected) / (precise + exchanged)


# The base as it is, which is compared with the fastest exact attention.
_UNCHANGED = "unchanged"
_ROUNDS, _SECONDS = 8, 0.5


@dataclass(frozen=True)
class Costs:
    """Median times of one forward pass, in milliseconds.

    Attributes:
        exact: With the fastest exact attention.
        unchanged: Of the base as it is.
        ceiling: Without attention.
        saved: What a candidate adds at each site, [sites, candidates], mostly negative; infinite where it cannot be
            used. The last candidate is to change nothing.
        crowded: Whether other programs took part of the machine.
    """

    exact: float
    unchanged: float
    ceiling: float
    saved: NDArray[np.float64]
    crowded: bool

    def speed(self, milliseconds: float) -> float:
        """The speed-up of a time over the fastest exact attention."""
        return self.exact / milliseconds


def measure_costs(
    composer: Composer, candidates: Sequence[Candidate], stage: SearchStage, *, seed: int, progress: Progress
) -> Costs:
    """Time every candidate at all sites of a kind at once, with the base and the base without attention.

    Times are medians of interleaved rounds. Sites are of a kind if they have the same heads and the same form.

    Raises:
        ApproxError: if the length does not fit the positions, or memory runs out.
    """
    base = composer.base
    kinds: dict[tuple[Any, ...], list[Site]] = {}
    for site in composer.anatomy.convertible:
        kinds.setdefault((site.heads, site.key_heads, site.head_dim, site.causal, site.fixed_length), []).append(site)
    timed: dict[str, tuple[Candidate, list[Site]]] = {}
    for number, sites in enumerate(kinds.values()):
        for one in candidates:
            if one.on(sites[0]):
                timed[f"{one.name} ({number})"] = (one, sites)
    # The key already includes a hash of the code.
    machine = {
        key: value for key, value in environment(torch.get_num_threads()).items() if key not in ("approx", "git_commit")
    }
    about = fingerprint(
        identity(base),
        [(label, one.rule.to_dict(), one.heads) for label, (one, _) in timed.items()],
        stage.length,
        stage.batch,
        stage.task,
        stage.data,
        stage.settings,
        stage.split,
        computed_by(base.model.device),
        machine,
        seed,
    )
    file = cache_folder() / "search" / f"{about}.json"
    medians = _stored(file, timed)
    if medians is None:
        medians = _medians(composer, timed, stage, seed=seed, progress=progress)
        if not medians["crowded"]:
            _store(file, medians)
    saved = np.full((len(composer.anatomy.sites), len(candidates) + 1), np.inf)
    saved[:, -1] = 0.0
    names = {one.name: column for column, one in enumerate(candidates)}
    for label, (one, sites) in timed.items():
        for site in sites:
            saved[site.layer, names[one.name]] = (medians[label] - medians[_UNCHANGED]) / len(sites)
    return Costs(medians[BASE], medians[_UNCHANGED], medians["ceiling"], saved, bool(medians["crowded"]))


def race(models: Mapping[str, Any], stage: SearchStage, *, seed: int, rounds: int, progress: Progress) -> Speed:
    """Time models, the base first, at the length of a search.

    Raises:
        ApproxError: as for `measure`.
    """
    texts = None
    if stage.task is not None:
        texts = EvaluateStage(task=stage.task, data=stage.data, settings=stage.settings, split=stage.split, limit=64)
    grid = BenchStage(
        lengths=[stage.length],
        batches=[stage.batch],
        rounds=rounds,
        seconds=_SECONDS,
        inputs="synthetic" if texts is None else "real",
    )
    (row,) = measure_speed(models, grid, texts, seed=seed, progress=progress)
    return row


def _medians(
    composer: Composer,
    timed: Mapping[str, tuple[Candidate, list[Site]]],
    stage: SearchStage,
    *,
    seed: int,
    progress: Progress,
) -> dict[str, Any]:
    models = {BASE: composer.base, _UNCHANGED: replace(composer.base)}
    for label, (one, sites) in timed.items():
        choices = [
            Choice(one, range(one.heads or 0)) if site in sites else Choice(None) for site in composer.anatomy.sites
        ]
        models[label] = composer.make(choices)
    row = race(models, stage, seed=seed, rounds=_ROUNDS, progress=progress)
    if row.base.median_ms is None or row.ceiling is None or row.ceiling.median_ms is None:
        raise ApproxError(
            f"Exact attention ran out of memory at {stage.length} tokens, so there is nothing to compare with. Search "
            "at a shorter --length or a smaller --batch-size.",
            Exit.MISSING,
        )
    medians: dict[str, Any] = {BASE: row.base.median_ms, "ceiling": row.ceiling.median_ms, "crowded": row.crowded}
    medians |= {one.name: np.inf if one.median_ms is None else one.median_ms for one in row.variants}
    return medians


def _stored(path: Any, timed: Mapping[str, Any]) -> dict[str, Any] | None:
    try:
        medians = json.loads(path.read_text(encoding="utf-8"))
        return medians if medians.keys() >= {BASE, "ceiling", _UNCHANGED, "crowded", *timed} else None
    except (OSError, ValueError, AttributeError):
        return None


def _store(path: Any, medians: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(medians))
