"""Export a converted checkpoint as an ordinary one of transformers, where one of its architectures attends in the same way."""

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING

from approx.checkpoints import checkpoint, families
from approx.checkpoints.atomic_folder import atomic_folder, refuse_existing, refuse_overlap, refuse_unwritable
from approx.checkpoints.checkpoint import weight_files
from approx.conversion import export as exporting
from approx.conversion import surgery, verify
from approx.conversion.calibration import evaluating
from approx.conversion.convert import as_stored, copy_companions, forget_code
from approx.conversion.verify import ReloadError, difference
from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS
from approx.mechanisms.bigbird import BigBirdAttention
from approx.mechanisms.local import LocalAttention
from approx.mechanisms.longformer import LongformerAttention
from approx.mechanisms.mechanism import BY_CONTENT, HeadGroups, Mechanism, chosen_by_content, latest
from approx.planning import positions
from approx.planning.anatomy import anatomy, ranges
from approx.planning.plan import Plan, site_record
from approx.planning.positions import example_inputs
from approx.planning.rule import Rule
from approx.seam.dispatch import build
from approx.version import __version__

# Largest difference relative to the largest output: rounding of other kernels, through a whole model in float32.
TOLERANCE = 1e-5
# Rows of the three inputs that are compared; of several, some are padded.
_ROWS = (1, 3, 2)
# Inputs of the check that are longer take minutes; longer windows are compared with --lengths.
_LONGEST = 8192
# Tokens beyond the last window.
_MARGIN = 24
_SLIDING, _FULL = "sliding_attention", "full_attention"
# The settings that an error shows: those that decide whether a stock architecture has them.
_SHOWN: dict[type, tuple[str, ...]] = {
    LocalAttention: ("left", "right"),
    LongformerAttention: ("window", "global_tokens"),
    BigBirdAttention: ("block", "random", "compatible"),
}
# Decoders whose layers have no window of their own -> the family with the same layers that has one.
_WITH_WINDOWS = {"llama": "ministral", "mistral": "ministral"}
# What the config of such a decoder may say and the other family's cannot, except with these values.
_PLAIN = {"attention_bias": False, "mlp_bias": False}
# Families with the layers and the embeddings of BERT.
_LIKE_BERT = ("bert", "roberta", "xlm-roberta", "camembert")


_ENCODERS = (
    *(f"Longformer{head}" for head in ("Model", "ForSequenceClassification", "ForTokenClassification")),
    *(f"Longformer{head}" for head in ("ForMaskedLM", "ForQuestionAnswering")),
    *(f"BigBird{head}" for head in ("Model", "ForMaskedLM", "ForTokenClassification")),
)


@dataclass(frozen=True)
class Engine:
    """What the code of an engine that serves models says of an architecture.

    Attributes:
        name: The engine.
        runs: Architecture -> whether it runs there, and its windows; one that is missing is not known.
        source: What was read: repository, commit, file.
        read: When.
    """

    name: str
    runs: dict[str, str]
    source: str
    read: str


# The only place that states this; the date is that of reading, and engines change.
ENGINES: tuple[Engine, ...] = (
    Engine(
        "vLLM",
        {
            "MinistralForCausalLM": "yes, by its Transformers backend, with the window of each layer",
            "Qwen3ForCausalLM": "loads, but its own Qwen3 ignores layer_types: pass --model-impl transformers, which reads them",
            "ModernBertForSequenceClassification": "yes, with the window of each layer",
            "ModernBertForTokenClassification": "yes, with the window of each layer",
            **dict.fromkeys(_ENCODERS, "no: not in its registry"),
        },
        "models/registry.py at 0002bff0, models/transformers/base.py at 03bf3c92, models/modernbert.py, issue 39514",
        "2026-11-28",
    ),
    Engine(
        "SGLang",
        {
            "MinistralForCausalLM": "by its Transformers fallback, with the window of each layer, passed on unchanged where its "
            "own models subtract the token itself: compare outputs beyond the window first",
            "Qwen3ForCausalLM": "loads, but its own Qwen3 ignores layer_types",
        },
        "srt/models/transformers.py at 0465eebc, issue 22528",
        "2026-11-28",
    ),
    Engine(
        "llama.cpp",
        {
            "MinistralForCausalLM": "no: its converter does not know it, and its llama graph has no windows",
            "Qwen2ForCausalLM": "converts, but without the windows",
            "Qwen3ForCausalLM": "converts, but without the windows",
            **dict.fromkeys(_ENCODERS, "no: its converter does not know it"),
        },
        "conversion/__init__.py at 00bdaa10, conversion/qwen.py at 03173d5e, src/models/llama.cpp at 069be0ae",
        "2026-11-28",
    ),
    Engine(
        "MLX-LM",
        {
            "MinistralForCausalLM": "no: it has no model type ministral; its llama reads layer_types and sliding_window, if "
            "model_type says llama",
            "Qwen2ForCausalLM": "loads, but ignores the windows",
            "Qwen3ForCausalLM": "loads, but ignores the windows",
            "Gemma2ForCausalLM": "loads, but ignores the windows",
            "Gemma3ForCausalLM": "loads, but takes a window in all but each sixth layer, whatever layer_types says",
            "Olmo3ForCausalLM": "yes, with the window of each layer",
            **dict.fromkeys(_ENCODERS, "no: it has no such model type"),
        },
        "mlx_lm/utils.py and mlx_lm/models at d78bf58e",
        "2026-11-28",
    ),
)


@dataclass(frozen=True)
class StockExported(exporting.Exported):
    """A stock checkpoint, and how it compares with the converted model.

    Attributes:
        architecture: Its model class, of transformers.
        window: Tokens that a query of a layer with a window sees, as the config counts them; None without windows.
        layers: The layers with a window, as `0-3,8`.
        global_attention_mask: Which tokens it has to mark; None if the model needs none.
        engines: Engine -> whether it runs the architecture.
    """

    architecture: str = ""
    window: Any = None
    layers: str = ""
    global_attention_mask: str | None = None
    engines: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Layer:
    """A layer of self-attention, as a plan made it.

    Attributes:
        number: Its number.
        causal: Whether a query sees only its past.
        mechanism: What attends; None if the layer is as in the base.
        window: The window that it has in the base, as `Site.window`.
        said: How an error names its mechanism.
    """

    number: int
    causal: bool
    mechanism: Mechanism | None
    window: int | None
    said: str


@dataclass(frozen=True)
class Stock:
    """A stock architecture that attends as a converted model does.

    Attributes:
        kind: The model class.
        config: Its config.
        state: Makes its tensors from those of the base's class.
        window: As in `StockExported`.
        layers: Numbers of the layers with windows.
        starts: Fewest tokens at which every layer differs from exact attention; None if none does.
        marks: What a `global_attention_mask` has to mark; None if the class does so by itself.
        padded: Whether padding is compared: it counts in the blocks of BigBird, though not in ours.
        notes: What a user should know.
    """

    kind: type
    config: Any
    state: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
    window: Any = None
    layers: tuple[int, ...] = ()
    starts: int | None = None
    marks: "Marks | None" = None
    padded: bool = True
    notes: tuple[str, ...] = ()


def export(
    name: str | Path,
    out: Path,
    *,
    lengths: Sequence[int] | None = None,
    force: bool = False,
    revision: str | None = None,
    offline: bool = False,
    merge_adapter: bool = False,
    progress: Callable[[str], None] = lambda step: None,
) -> StockExported:
    """Write a converted checkpoint as an ordinary one without code, and compare it in a process without approx.

    Args and errors: as for `export.export`, of which this is one format.
    """
    out = Path(out)
    refuse_existing(out, force=force)
    refuse_unwritable(out)
    progress("reading the config")
    where: dict[str, Any] = {"revision": revision, "offline": offline, "merge_adapter": merge_adapter}
    source = checkpoint.locate(name, **where)
    refuse_overlap(source.folder, out)
    if not source.converted:
        raise ApproxError(f"{name} is not converted, so it is a stock checkpoint already.", Exit.REFUSED)
    stock = expressed(source.config, source.stock_class, separator=surgery.of_checkpoint(source))
    verify.begin()
    progress("loading the weights")
    opened = checkpoint.load(name, **where)
    model = opened.model
    notes = [*opened.notes, *stock.notes]
    with (
        evaluating(model),
        torch.inference_mode(False),
        torch.no_grad(),
        atomic_folder(out, force=force, sealed=False) as folder,
    ):
        progress("writing")
        notes += copy_companions(source, folder)
        _write(folder, stock, model, source.folder)
        forget_code(folder)
        progress("comparing in a process without approx")
        model.float()
        sizes = _sizes(stock, model, lengths)
        found = _compare(folder, stock, model, sizes)
        longest = max(length for _, length in sizes)
        if stock.starts is not None and longest < stock.starts:
            notes.append(
                f"Its windows reach beyond {longest:,} tokens, the longest input that was compared. Compare one of "
                f"{stock.starts:,} or more with --lengths."
            )
        report = {
            "file": _main_file(folder),
            "format": "stock",
            "inputs": list(_inputs(stock, model, 1, sizes[0][1])),
            "largest_relative_difference": found,
            "versions": {
                "approx": __version__,
                "torch": torch.__version__,
                "transformers": version("transformers"),
            },
            "architecture": stock.kind.__name__,
            "window": stock.window,
            "layers": ranges(stock.layers),
            "global_attention_mask": None if stock.marks is None else stock.marks.said,
            "engines": engines(stock.kind.__name__),
        }
        (folder / checkpoint.EXPORTED).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if wrong := [f"{size}: {error:.1e}" for size, error in found.items() if not error <= TOLERANCE]:
            raise ApproxError(
                f"As a {stock.kind.__name__}, {name} computes something else, at {', '.join(wrong)} (batch x length; "
                f"{TOLERANCE:.0e} is allowed): this family's layers with windows differ from its other layers in more "
                "than that. Nothing was written; --format torch-export needs no such architecture.",
                Exit.VERIFICATION,
            )
    return StockExported(str(out), quantize=None, equal_predictions=None, **report, notes=notes)  # type: ignore[arg-type]  # the keys are its fields


def engines(architecture: str) -> dict[str, str]:
    """What is known of each engine that could run an architecture, and where it was read."""
    return {
        engine.name: f"{engine.runs[architecture]} ({engine.source}; read {engine.read})"
        if architecture in engine.runs
        else "not known"
        for engine in ENGINES
    }


def expressed(config: Any, stock_class: type, *, separator: int | None = None) -> Stock:
    """The stock architecture that attends as a converted model does, from its config alone.

    Args:
        config: The converted config.
        stock_class: The stock class of the model.
        separator: Id of the separator token, if the tokenizer has one.

    Raises:
        ApproxError: naming the layers and mechanisms that no stock architecture has, and what is allowed.
    """
    return _of_sites(families.stock_config(config), config.approx["sites"], stock_class, separator)


def of_plan(config: Any, stock_class: type, plan: Plan) -> Stock:
    """The stock architecture that a plan for a model comes to, from its stock config alone.

    Raises:
        ApproxError: as for `expressed`, or if the plan does not fit the model.
    """
    assignment = plan.resolve(anatomy(config, stock_class))
    return _of_sites(
        config, {site.path: site_record(site, rules) for site, rules in assignment.items()}, stock_class, None
    )


@dataclass(frozen=True)
class Mix:
    """Rules that the layers of one stock architecture may follow.

    Attributes:
        rules: Their numbers.
        exact: Whether other layers may stay as they are.
    """

    rules: tuple[int, ...]
    exact: bool


def mixes(config: Any, stock_class: type, rules: Sequence[Rule]) -> list[Mix]:
    """The sets of rules, each for whole layers, that stock architectures can express in one model.

    Args:
        config: The stock config.
        stock_class: The stock class of the model.
        rules: Mechanisms and settings.

    Raises:
        ApproxError: naming what is allowed, if none of them can be.
    """
    numbers = [site.layer for site in anatomy(config, stock_class).convertible]

    def able(*chosen: tuple[int, Sequence[int]]) -> bool:
        parts = (replace(rules[rule], layers=ranges(layers)) for rule, layers in chosen if layers)
        try:
            of_plan(config, stock_class, Plan(tuple(parts)))
        except ApproxError as error:
            if error.exit_code != Exit.UNSUPPORTED:
                raise
            return False
        return True

    def together(one: int, other: int) -> bool:
        return able((one, numbers[:1]), (other, numbers[1:])) and able((other, numbers[:1]), (one, numbers[1:]))

    usable = [rule for rule in range(len(rules)) if able((rule, numbers))]
    if not usable:
        named = ", ".join(dict.fromkeys(rule.mechanism for rule in rules))
        raise ApproxError(
            f"No stock architecture of transformers expresses {named} here. {allowed(config.model_type)}",
            Exit.UNSUPPORTED,
        )
    found: dict[tuple[int, ...], Mix] = {}
    for first in usable:
        mix = [first]
        for rule in usable:
            if rule != first and all(together(rule, other) for other in mix):
                mix.append(rule)
        found.setdefault(tuple(sorted(mix)), Mix(tuple(sorted(mix)), able((first, numbers[:1]))))
    return list(found.values())


def _of_sites(base: Any, sites: Mapping[str, Mapping[str, Any]], stock_class: type, separator: int | None) -> Stock:
    layers = _layers(sites, base, stock_class)
    changed = [layer for layer in layers if not _is_whole(layer)]
    if not changed:
        return Stock(stock_class, base)
    family = base.model_type
    kinds = {type(layer.mechanism) for layer in changed if layer.mechanism is not None}
    if odd := [layer for layer in changed if not _is_pure(layer)]:
        raise _refusal(odd, family)
    if kinds == {BigBirdAttention} and family == "bert":
        return _big_bird(base, stock_class, layers)
    if family in _LIKE_BERT and (kinds == {LongformerAttention} or kinds == {LocalAttention}):
        return _longformer(base, stock_class, layers, separator)
    if kinds == {LocalAttention} and (family in _WITH_WINDOWS or hasattr(base, "layer_types")):
        return _windows(base, stock_class, layers)
    raise _refusal(changed, family)


def _layers(sites: Mapping[str, Mapping[str, Any]], base: Any, stock_class: type) -> list[Layer]:
    found = []
    for site in anatomy(base, stock_class).sites:
        mechanism = build(sites[site.path]) if site.path in sites else None
        said = _said(mechanism) if mechanism else site.kept or "exact attention"
        found.append(Layer(site.layer, site.causal, mechanism, site.window, said))
    return found


def _said(mechanism: Mechanism) -> str:
    if isinstance(mechanism, HeadGroups):
        return f"{' and '.join(dict.fromkeys(_said(part) for _, part in mechanism.members()))} in groups of heads"
    name = next((name for name, kind in MECHANISMS.items() if type(mechanism) is kind), type(mechanism).__name__)
    shown = _SHOWN.get(type(mechanism), ())
    if mechanism.causal:
        shown = tuple(key for key in shown if key != "right")
    settings = [f"{key} {mechanism.settings[key]}" for key in shown]
    if mechanism.exact_below:
        settings.append(f"exact below {mechanism.exact_below:,} tokens")
    return f"{name} ({', '.join(settings)})" if settings else name


def _is_whole(layer: Layer) -> bool:
    """Whether a layer is that of the base, with exact attention or the window that it has there."""
    return layer.mechanism is None or (layer.mechanism.always_exact and not isinstance(layer.mechanism, HeadGroups))


def _is_pure(layer: Layer) -> bool:
    """Whether a layer computes the same at every length, or what transformers computes below one."""
    mechanism = layer.mechanism
    assert mechanism is not None
    if isinstance(mechanism, BigBirdAttention):
        return mechanism.compatible and mechanism.exact_below == _blocks(mechanism) + 1
    # Below the window it is exact in any case.
    harmless = mechanism.exact_below <= (mechanism.differs_from() or 0)
    if isinstance(mechanism, LocalAttention):
        return harmless and (mechanism.causal or mechanism.left == mechanism.right)
    return isinstance(mechanism, LongformerAttention) and harmless and not mechanism.causal


def _blocks(mechanism: BigBirdAttention) -> int:
    """The longest input that BigBird of transformers computes exactly."""
    return (5 + 2 * mechanism.random) * mechanism.block


def _refusal(layers: Iterable[Layer], family: str, why: str = "") -> ApproxError:
    said: dict[str, list[int]] = {}
    for layer in layers:
        said.setdefault(layer.said, []).append(layer.number)
    named = "; ".join(f"layer{'s' * (len(some) > 1)} {ranges(some)}: {what}" for what, some in said.items())
    return ApproxError(
        f"No stock architecture of transformers attends as this {family} does ({named}{why}). {allowed(family)}",
        Exit.UNSUPPORTED,
    )


def allowed(family: str) -> str:
    """What a plan for a family may have so that a stock architecture can express it, as a sentence."""
    exact = "exact, sdpa, full or flash"
    if family in _LIKE_BERT:
        choice = "in all layers longformer (window 2 or more), or in all layers local with left = right"
        if family == "bert":
            choice += ", or in all layers bigbird with compatible and --exact-below (5 + 2 x random) x block + 1"
    elif family in _WITH_WINDOWS or _has_windows(family):
        choice = f"local in any layers, with one window (that of the base's own sliding layers if it has any), and {exact} in the others"
    else:
        choice = exact
    return f"Allowed for {family}, for all heads of a layer: {choice}."


def _has_windows(family: str) -> bool:
    return family in CONFIG_MAPPING and hasattr(CONFIG_MAPPING[family](), "layer_types")


# Decoders, and encoders with windows of their own


def _windows(base: Any, stock_class: type, layers: list[Layer]) -> Stock:
    """The layers of a family that has a list of their types, some full and some with one window."""
    family = base.model_type
    sliding = [layer for layer in layers if not _is_whole(layer) or layer.window is not None]
    sizes: dict[int, list[int]] = {}
    for layer in sliding:
        sizes.setdefault(_window(layer), []).append(layer.number)
    if len(sizes) > 1:
        listed = "; ".join(
            f"{size:,} tokens in layer{'s' * (len(numbers) > 1)} {ranges(numbers)}" for size, numbers in sizes.items()
        )
        raise ApproxError(
            f"No stock architecture of transformers attends as this {family} does: it has several windows ({listed}). "
            f"{allowed(family)}",
            Exit.UNSUPPORTED,
        )
    size = next(iter(sizes))
    config, kind = _family_with_windows(base, stock_class)
    types = [_FULL] * len(layers)
    for layer in sliding:
        types[layer.number] = _SLIDING
    before = getattr(base, "layer_types", None)
    if before is not None and (len(before) != len(layers) or {*before} - {_SLIDING, _FULL}):
        raise _refusal(sliding, family, why=f"; its config has layers of types {', '.join(sorted({*before}))}")
    config.layer_types = types
    if hasattr(config, "use_sliding_window"):
        config.use_sliding_window = True
    config.sliding_window = size
    _keep_rotary_positions(config, layers, types, family)
    renamed = _renamer(stock_class, kind)
    return Stock(
        kind,
        config,
        lambda tensors: {renamed(name): tensor for name, tensor in tensors.items()},
        window=size,
        layers=tuple(layer.number for layer in sliding),
        starts=_starts(sliding),
    )


def _window(layer: Layer) -> int:
    """The window as transformers counts it: with the token itself if it is causal, otherwise to either side."""
    if _is_whole(layer):
        assert layer.window is not None
        return layer.window
    assert isinstance(layer.mechanism, LocalAttention)
    return layer.mechanism.left + layer.causal


def _family_with_windows(base: Any, stock_class: type) -> tuple[Any, type]:
    """The config and the class of the family with the same layers and a list of their types."""
    family = base.model_type
    if family not in _WITH_WINDOWS:
        return copy.deepcopy(base), stock_class
    if odd := [f"{key}={getattr(base, key)}" for key, plain in _PLAIN.items() if getattr(base, key, plain) != plain]:
        raise ApproxError(
            f"A {family} with {', '.join(odd)} cannot become a {_WITH_WINDOWS[family]}, whose layers have no biases. "
            f"{allowed(family)}",
            Exit.UNSUPPORTED,
        )
    kind = _counterpart(stock_class, _WITH_WINDOWS[family])
    return kind.config_class(**_said_by(base, without=(*_PLAIN, "pretraining_tp"))), kind


def _said_by(base: Any, without: Iterable[str] = ()) -> dict[str, Any]:
    """What a config says, without what names the family or the file."""
    own = {"model_type", "architectures", "transformers_version", "_name_or_path", *without}
    return {key: value for key, value in base.to_dict().items() if key not in own}


def _counterpart(stock_class: type, family: str) -> Any:
    """The class of another family for the same task."""
    old, new = (
        CONFIG_MAPPING[one].__name__.removesuffix("Config") for one in (stock_class.config_class.model_type, family)
    )  # type: ignore[attr-defined]  # every model class has it
    task = stock_class.__name__.removeprefix(old)
    kind = getattr(transformers, f"{new}{task}", None)
    if kind is None:
        raise ApproxError(
            f"transformers has no {new}{task}, which the {stock_class.__name__} would become. Export its backbone, or use "
            "--format torch-export.",
            Exit.UNSUPPORTED,
        )
    return kind


def _keep_rotary_positions(config: Any, layers: list[Layer], types: list[str], family: str) -> None:
    """Give layers with a new window the rotary positions that they had, if the family has others for each type."""
    rotary = getattr(config, "rope_parameters", None)
    if not isinstance(rotary, dict) or not {_SLIDING, _FULL} <= {*rotary} or rotary[_SLIDING] == rotary[_FULL]:
        return
    own = [layer.number for layer in layers if layer.window is not None]
    if own:
        new = [number for number, kind in enumerate(types) if kind == _SLIDING and number not in own]
        raise ApproxError(
            f"No stock architecture of transformers attends as this {family} does: its own sliding layers ({ranges(own)}) "
            f"have other rotary positions (rope_parameters) than those that local gave a window ({ranges(new)}). Allowed "
            "for this checkpoint: exact, sdpa, full or flash in its full layers.",
            Exit.UNSUPPORTED,
        )
    config.rope_parameters = {**rotary, _SLIDING: copy.deepcopy(rotary[_FULL])}


# Encoders like BERT


@dataclass(frozen=True)
class Marks:
    """The tokens that a `global_attention_mask` marks.

    Attributes:
        tokens: `first`, `separator`, `question`, or their positions among the real tokens.
        separator: Id of the separator, where content chooses them.
    """

    tokens: str | tuple[int, ...]
    separator: int | None = None

    @property
    def said(self) -> str:
        """What is in the mask, as the end of a sentence."""
        if self.tokens == "first":
            return "1 at the first token and 0 elsewhere"
        if self.tokens == "separator":
            return f"1 at each token {self.separator}, the separator, and 0 elsewhere"
        if self.tokens == "question":
            return f"1 from the first token to the first {self.separator}, the separator, and 0 elsewhere"
        places = ", ".join(map(str, self.tokens))
        return f"1 at the tokens {places}, counted from 0, and 0 elsewhere" if places else "0 everywhere"

    def mask(self, tokens: Tensor, real: Tensor) -> Tensor:
        """The mask of a batch: ids of its tokens and whether they are real, both [B, S]."""
        if self.tokens in BY_CONTENT:
            return chosen_by_content(
                self.tokens, self.separator, tokens, real, (tokens.shape[0], tokens.shape[1])
            ).long()
        mask = torch.zeros_like(tokens)
        for place in (0,) if self.tokens == "first" else self.tokens:
            assert isinstance(place, int)
            mask[:, place : place + 1] = 1
        return mask * real


# What a class of Longformer marks if it gets no mask; the others mark nothing.
_BY_ITSELF = {
    "LongformerForSequenceClassification": "marks the first token",
    "LongformerForQuestionAnswering": "takes only inputs of three separators, and marks what is before the first",
}
# Tensors of BERT's heads -> their names in other classes. The pooler of a classifier is part of Longformer's head.
_OF_HEADS = {
    "LongformerForSequenceClassification": {
        "bert.pooler.dense.": "classifier.dense.",
        "classifier.": "classifier.out_proj.",
    },
    "LongformerForMaskedLM": {
        "cls.predictions.transform.dense.": "lm_head.dense.",
        "cls.predictions.transform.LayerNorm.": "lm_head.layer_norm.",
        "cls.predictions.": "lm_head.",
    },
    "BigBirdModel": {"pooler.dense.": "pooler."},
}
# Heads of the same name that compute something else, and what.
_OTHER_HEADS = {
    "BigBirdForSequenceClassification": "its head has the activation of the layers in place of tanh",
    "BigBirdForQuestionAnswering": "its head has a layer more",
}
# What configs of BERT say that means nothing to a Longformer.
_NOT_OF_LONGFORMER = ("is_decoder", "add_cross_attention", "use_cache", "classifier_dropout", "position_embedding_type")


def _longformer(base: Any, stock_class: type, layers: list[Layer], separator: int | None) -> Stock:
    family = base.model_type
    if exact := [layer for layer in layers if _is_whole(layer)]:
        raise _refusal(exact, family, why="; a Longformer has a window in every layer")
    sizes, marks = [], []
    for layer in layers:
        mechanism = layer.mechanism
        if isinstance(mechanism, LongformerAttention):
            sizes.append(mechanism.window // 2 * 2)
            tokens = mechanism.global_tokens
            by_content = tokens in BY_CONTENT
            marks.append(
                Marks(
                    tuple(tokens) if isinstance(tokens, list) else tokens, mechanism.separator if by_content else None
                )
            )
        else:
            assert isinstance(mechanism, LocalAttention)
            sizes.append(2 * mechanism.left)
            marks.append(Marks(()))
    if odd := [layer for layer, size in zip(layers, sizes, strict=True) if size < 2]:
        raise _refusal(odd, family)
    if any(max(sizes) % size for size in sizes):
        raise _refusal(
            layers, family, why="; a Longformer pads inputs to its largest window, which the others have to divide"
        )
    if len({*marks}) > 1:
        raise _refusal(layers, family, why="; a Longformer has the same global tokens in every layer")
    kind = _counterpart(stock_class, "longformer")
    if family == "bert" and kind.__name__.endswith("MaskedLM") and base.hidden_act != "gelu":
        raise _other_head(stock_class, kind, f"its head has gelu in place of {base.hidden_act}")
    # Positions of real tokens begin after the id of the padding token, as RoBERTa's do.
    rows = base.pad_token_id + 1 if family == "bert" else 0
    config = kind.config_class(**_said_by(base, without=_NOT_OF_LONGFORMER))
    config.attention_window = sizes
    config.max_position_embeddings = base.max_position_embeddings + rows
    if separator is not None:
        config.sep_token_id = separator
    renamed = _renamer(stock_class, kind)

    def state(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {renamed(name): tensor for name, tensor in tensors.items()}
        for name, tensor in [*made.items()]:
            for part in ("query", "key", "value"):
                if f".self.{part}." in name:
                    # Global tokens have projections of their own.
                    made[name.replace(f".{part}.", f".{part}_global.")] = tensor.clone()
            if rows and name.endswith("embeddings.position_embeddings.weight"):
                made[name] = torch.cat([tensor.new_zeros(rows, tensor.shape[1]), tensor])
        return made

    notes = []
    if rows:
        notes.append(
            "It counts the positions of real tokens alone, so pad inputs on the right, as BERT's tokenizers do."
        )
    one, itself = marks[0], _BY_ITSELF.get(kind.__name__)
    needed = (
        one != Marks("first") if kind.__name__.endswith("ForSequenceClassification") else bool(itself or one.tokens)
    )
    if needed:
        otherwise = itself or "marks no token"
        notes.append(f"Pass global_attention_mask with {one.said}: without it, {kind.__name__} {otherwise}.")
    return Stock(
        kind,
        config,
        state,
        window=sizes[0] if len({*sizes}) == 1 else sizes,
        layers=tuple(layer.number for layer in layers),
        starts=_starts(layers),
        marks=one if needed else None,
        notes=tuple(notes),
    )


def _big_bird(base: Any, stock_class: type, layers: list[Layer]) -> Stock:
    if exact := [layer for layer in layers if _is_whole(layer)]:
        raise _refusal(exact, base.model_type, why="; a BigBird has blocks in every layer")
    mechanisms = [layer.mechanism for layer in layers if isinstance(layer.mechanism, BigBirdAttention)]
    if len({(one.block, one.random) for one in mechanisms}) > 1:
        raise _refusal(layers, base.model_type, why="; a BigBird has the same blocks in every layer")
    first = mechanisms[0]
    kind = _counterpart(stock_class, "big_bird")
    if (why := _OTHER_HEADS.get(kind.__name__)) is not None:
        raise _other_head(stock_class, kind, why)
    config = kind.config_class(**_said_by(base))
    config.attention_type = "block_sparse"
    config.block_size, config.num_random_blocks = first.block, first.random
    renamed = _renamer(stock_class, kind)

    def state(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        made = {renamed(name): tensor for name, tensor in tensors.items()}
        if kind.__name__ != "BigBirdModel":
            # These heads have a pooler too, but do not read it.
            size = config.hidden_size
            table = made["bert.embeddings.word_embeddings.weight"]
            made |= {"bert.pooler.weight": table.new_zeros(size, size), "bert.pooler.bias": table.new_zeros(size)}
        return made

    notes = (
        f"After an input of {_blocks(first):,} tokens or fewer, transformers' BigBird stays exact for longer ones too, "
        "until model.set_attention_type('block_sparse').",
        "Its last block is that of the longest row of a batch, padding included, and was compared without padding.",
    )
    return Stock(
        kind,
        config,
        state,
        window=first.block,
        layers=tuple(layer.number for layer in layers),
        starts=_blocks(first) + 1,
        padded=False,
        notes=notes,
    )


def _other_head(stock_class: type, kind: type, why: str) -> ApproxError:
    return ApproxError(
        f"A {stock_class.__name__} cannot become a {kind.__name__}: {why}. Convert and export a model with another head, "
        "or its backbone.",
        Exit.UNSUPPORTED,
    )


def _renamer(stock_class: Any, kind: Any) -> Callable[[str], str]:
    """The names of the tensors of one class in another that has the same ones."""
    heads = _OF_HEADS.get(kind.__name__, {}) if stock_class.config_class.model_type == "bert" else {}
    old, new = stock_class.base_model_prefix, kind.base_model_prefix

    def renamed(name: str) -> str:
        for start, other in heads.items():
            if name.startswith(start):
                return f"{other}{name.removeprefix(start)}"
        return f"{new}{name.removeprefix(old)}" if name.startswith(f"{old}.") else name

    return renamed


def _starts(layers: Iterable[Layer]) -> int | None:
    return latest(layer.mechanism.approximates_from() for layer in layers if layer.mechanism is not None)


# Writing and comparing


def _write(folder: Path, stock: Stock, model: Any, source: Path) -> None:
    """Write the config and the tensors, each in the dtype in which the converted folder stores it."""
    stored = {name: path for path in weight_files(source) for name in _names(path)}
    tensors = {}
    for name, tensor in _base_state(model).items():
        if name in stored:
            with safe_open(stored[name], framework="pt") as file:
                tensor = as_stored(tensor, file.get_tensor(name))
        tensors[name] = tensor
    made = stock.state(tensors)
    with torch.device("meta"):
        written: Any = stock.kind(stock.config)
    expected = {name: tensor.shape for name, tensor in written.state_dict().items()}
    if odd := [name for name in {**expected, **made} if name not in made or made[name].shape != expected.get(name)]:
        raise ApproxError(
            f"A {families.stock_class(type(model)).__name__} of this checkpoint does not have the tensors of a {stock.kind.__name__}: "
            f"{', '.join(sorted(odd)[:3])} {'differ' if len(odd) > 1 else 'differs'}. It cannot become one.",
            Exit.UNSUPPORTED,
        )
    written.load_state_dict(made, assign=True)
    written.tie_weights()
    if getattr(model, "generation_config", None) is not None and hasattr(written, "generation_config"):
        written.generation_config = copy.deepcopy(model.generation_config)
    written.save_pretrained(folder)


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def _base_state(model: Any) -> dict[str, Tensor]:
    """The tensors of a converted model without those of its mechanisms."""
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    mechanisms = tuple(f"{prefix}{path}.mechanism." for path in model.config.approx["sites"])
    return {name: x for name, x in model.state_dict().items() if not name.startswith(mechanisms)}


def _main_file(folder: Path) -> str:
    whole = "model.safetensors"
    return whole if (folder / whole).is_file() else f"{whole}.index.json"


def _sizes(stock: Stock, model: Any, lengths: Sequence[int] | None) -> list[tuple[int, int]]:
    """Batch and length of each comparison; the last one is long enough for every window, if the model takes as much."""
    chosen = exporting.check_lengths(model, lengths)
    if lengths is None and stock.starts is not None:
        most = min(positions.limit(model.config) or _LONGEST, _LONGEST)
        chosen[-1] = max(chosen[-1], min(stock.starts + _MARGIN, most))
    # Classifiers find the last token of a row by the padding token.
    alone = model.config.pad_token_id is None and type(model).__name__.endswith("ForSequenceClassification")
    rows = (1, 1, 1) if alone or not stock.padded else _ROWS
    # BigBird stays exact after a short input.
    return sorted(zip(rows, chosen, strict=True), key=lambda size: -size[1])


def _inputs(stock: Stock, model: Any, batch: int, length: int) -> dict[str, Tensor]:
    """Random inputs; the last row is padded on the right, and of a decoder another one on the left."""
    inputs = example_inputs(model, length, batch=batch, padded=length // 4 if batch > 1 else 0)
    if (tokens := inputs.get("input_ids")) is None or model.config.is_encoder_decoder:
        return inputs
    mask = inputs.setdefault("attention_mask", torch.ones_like(tokens))
    if batch > 2 and any(site["causal"] for site in model.config.approx["sites"].values()):
        mask[1] = mask[-1].flip(0)
    if stock.marks is not None:
        if stock.marks.separator is not None:
            tokens[:, length // 3] = tokens[:, length // 2] = stock.marks.separator
        inputs["global_attention_mask"] = stock.marks.mask(tokens, mask)
    return inputs


def _compare(folder: Path, stock: Stock, model: Any, sizes: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Batch x length -> the largest relative difference between the first outputs of the two models, in float32."""
    inputs = [_inputs(stock, model, *size) for size in sizes]
    try:
        found = verify.first_outputs(folder, families.auto_class(stock.kind), inputs, stock=True)
    except ReloadError as error:
        raise ApproxError(
            f"The {stock.kind.__name__} could not be run by transformers alone: {error}. Nothing was written.",
            Exit.VERIFICATION,
        ) from error
    errors = {}
    for (batch, length), given, actual in zip(sizes, inputs, found, strict=True):
        taken = {name: x for name, x in given.items() if name != "global_attention_mask"}
        expected, mask = model(**taken)[0], given.get("attention_mask")
        if mask is not None and expected.shape[:2] == mask.shape:
            # Outputs of padding are undefined.
            expected, actual = expected[mask.bool()], actual[mask.bool()]
        errors[f"{batch} x {length}"] = difference(actual, expected)
    return dict(sorted(errors.items(), key=lambda one: int(one[0].split()[-1])))
