"""Look at the attention of a checkpoint on one input: measure every head, draw the most telling ones, write a page."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from approx.checkpoints import checkpoint, families
from approx.checkpoints.atomic_folder import atomic_folder, refuse_existing
from approx.conversion.calibration import evaluating, exactly
from approx.conversion.verify import in_float32
from approx.errors import ApproxError, Exit
from approx.looking.inputs import Read, is_special, read, words
from approx.looking.inside import estimates, inside, member
from approx.looking.weights import Weights, mean_rows, membership, weights
from approx.measuring.measure import in_memory, label_of, open_all, open_pair
from approx.mechanisms import MECHANISMS
from approx.planning.anatomy import Site, anatomy
from approx.progress import Progress, silent
from approx.publishing.attention import Alignment, Axis, Head, Layer, Look, write
from approx.seam.observe import Call, observe

# Up to so many positions each is drawn; more in blocks, at most so many.
_SINGLE, _BLOCKS = 256, 128
# Sides of the small pictures of all heads, the largest that stays within so many numbers.
_SMALL, _SMALL_NUMBERS = (64, 48, 32, 24, 16), 650_000
# A layer whose outputs differ by more from its weights times its values has attention of another kind.
_REPRODUCED = 1e-3
# Heads that keep more differ by rounding alone.
_SAME = 1 - 1e-4
# Heads drawn large that were not asked for, and those over which an alignment is averaged.
_LARGE, _ALIGNING = 3, 4


@dataclass(frozen=True)
class Looked:
    """What `look` found and wrote.

    Attributes:
        files: The files, `index.html` first.
        input: What the model attended over, in words.
        layers: The measures of every head.
        large: Layer and head of those that are drawn large, with the reason.
        kept: Share of the exact weight that approximate heads give to the same keys, on average; None if all are exact.
    """

    files: list[str]
    input: str
    layers: list["LayerMeasures"]
    large: list["LargeHead"]
    kept: float | None


@dataclass(frozen=True)
class LayerMeasures:
    """The heads of one layer.

    Attributes:
        layer: Its number; None for cross-attention.
        name: Its name in the page.
        mechanism: What it runs.
        kept: Share of the exact weight that each head gives to the same keys.
        captured: Exact weight on the keys that each head sees; None for heads that skip no keys.
        error: Relative error of each head's output.
    """

    layer: int | None
    name: str
    mechanism: str
    kept: list[float]
    captured: list[float | None]
    error: list[float]


@dataclass(frozen=True)
class LargeHead:
    """A head that is drawn large, and why."""

    layer: int
    head: int
    why: str


@dataclass(frozen=True)
class _Seen:
    """A call of the model, measured: its place in the model and what was found."""

    path: str
    site: Site | None
    found: Weights


def look(
    model: str | Any,
    output: str | Path | None = None,
    *,
    text: str | None = None,
    audio: str | Path | None = None,
    image: str | Path | None = None,
    layer: int | None = None,
    head: int | None = None,
    against: str | Any | None = None,
    processor: Any = None,
    force: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    offline: bool = False,
    merge_adapter: bool = False,
    command: str = "",
    progress: Progress = silent,
) -> Looked:
    """Draw the attention of a checkpoint on one input: exact, approximate and their difference.

    Args:
        model: A folder, a hub model id, or `quickstart`; or a loaded model.
        output: The folder to write; `look` by default.
        text: A text, or the path of a .txt file.
        audio: Path of a recording, FLAC or WAV.
        image: Path of an image.
        layer: The layer to draw large; the most telling one by default. -1 is the last.
        head: The head to draw large; the most telling one by default. -1 is the last.
        against: An exact checkpoint to compare with; by default exact attention on the inputs of each layer.
        processor: The tokenizer or processor of a loaded model, or the folder that holds it.
        force: Whether an existing folder is replaced.
        device: `auto`, `cpu` or `cuda`.
        dtype: `auto` or the name of a torch dtype.
        offline: Whether to use only local files and the hub's cache.
        merge_adapter: Whether a PEFT adapter next to the weights, or one named by its folder, is merged into them.
        command: The command as typed, for the page.
        progress: Called with what happens, layers done and layers in all.

    Raises:
        ApproxError: if the input is missing, of another kind than the model's or too long, there is no such layer or head,
            the folder exists, or the attention cannot be observed.
    """
    folder = Path("look" if output is None else output)
    refuse_existing(folder, force=force)
    own, base = _opened(model, against, device, dtype, offline, processor, merge_adapter)
    sites = _sites(own.model)
    if base is not None:
        _refuse_others(own, base, sites)
    chosen_layer = _number("layer", layer, len(sites), own.source.name)
    heads = sites[chosen_layer].heads if chosen_layer is not None else max(site.heads for site in sites)
    chosen_head = _number("head", head, heads, own.source.name)
    progress("read the input", 0, 1)
    found = read(own, text=text, audio=audio, image=image)
    progress("read the input", 1, 1)

    small = _small_side(sites)
    # Weights of two checkpoints meet only in blocks, so these are as fine as those of large pictures.
    block = _block if base is not None else lambda size: -(-size // small)
    everything = _measured(own, base, sites, found.inputs, block, (), progress)
    self_attention = [seen for seen in everything if seen.site is not None]
    notes = [
        f"{_name(seen, sites)} is left out: it computes more than a softmax of scaled products."
        for seen in self_attention
        if _is_other(seen)
    ]
    drawable = [seen for seen in self_attention if not _is_other(seen)]
    if not drawable:
        raise ApproxError(
            f"The attention of {own.source.name} cannot be drawn: every layer computes more than a softmax of scaled products, "
            "such as a position bias or a soft cap.",
            Exit.UNSUPPORTED,
        )
    large = _telling(own, drawable, chosen_layer, chosen_head)
    details = _detailed(own, base, sites, found, large, progress)
    layers = [_layer(own, seen, sites, small) for seen in drawable]
    alignments = _alignments(own, base, found, everything, sites, progress)
    page = Look(
        title=f"Attention of {label_of(model)}",
        command=command,
        about=found.about,
        text=found.text,
        written=bool(found.written),
        exact_side=_exact_side(own, base),
        approximate_side=label_of(model),
        layers=layers,
        heads=[_head(details, one, layers, found, why) for one, why in large.items()],
        alignments=alignments,
        notes=[*notes, *_notes(drawable, self_attention)],
    )
    progress("draw", 0, 1)
    with atomic_folder(folder, force=force, sealed=False) as target:
        names = write(page, target)
    progress("draw", 1, 1)
    return Looked(
        files=[str(folder / name) for name in names],
        input=found.about,
        layers=[_measures(layer) for layer in layers],
        large=[LargeHead(number, head, why) for (number, head), why in large.items()],
        kept=page.kept,
    )


def _opened(
    model: str | Any,
    against: str | Any | None,
    device: str,
    dtype: str,
    offline: bool,
    processor: Any,
    merge_adapter: bool,
) -> tuple[checkpoint.Checkpoint, checkpoint.Checkpoint | None]:
    """The checkpoint, and the one it is compared with, if any."""
    if against is None:
        # Its own exact attention needs no second copy.
        if isinstance(model, str | Path):
            return open_all({"": str(model)}, device, dtype, offline=offline, merge_adapter=merge_adapter)[""], None
        return in_memory(model, processor, offline=offline), None
    pair = open_pair(model, against, device, dtype, offline, processor, merge_adapter=merge_adapter)
    base, own = pair.values()
    return own, base


def _sites(model: Any) -> list[Site]:
    """The self-attention layers of a model, in order.

    Raises:
        ApproxError: if it has none that can be observed.
    """
    found = anatomy(families.stock_config(model.config), families.stock_class(type(model))).sites
    return sorted(found, key=lambda site: site.layer)


def _refuse_others(own: checkpoint.Checkpoint, base: checkpoint.Checkpoint, sites: Sequence[Site]) -> None:
    """Raise unless two checkpoints have the same layers and heads."""
    others = _sites(base.model)
    if [(site.path, site.heads) for site in others] != [(site.path, site.heads) for site in sites]:
        raise ApproxError(
            f"{own.source.name} has {_counted(sites)}, and {base.source.name} {_counted(others)}: they cannot be laid side by side. "
            "Name a checkpoint of the same architecture with --against.",
            Exit.UNSUPPORTED,
        )


def _counted(sites: Sequence[Site]) -> str:
    return f"{len(sites)} layers of {', '.join(map(str, sorted({site.heads for site in sites})))} heads"


def _number(what: str, number: int | None, count: int, name: str) -> int | None:
    """A layer or head, counted from the end if it is below 0."""
    if number is None:
        return None
    if not -count <= number < count:
        raise ApproxError(
            f"--{what} {number} was given, but {name} has the {what}s 0-{count - 1}; -1 is the last. Choose one of them, or leave "
            f"out --{what}."
        )
    return number % count


def _small_side(sites: Sequence[Site]) -> int:
    """Side of the small pictures: three for each head."""
    heads = sum(site.heads for site in sites)
    return next((side for side in _SMALL if heads * side * side <= _SMALL_NUMBERS), _SMALL[-1])


def _block(length: int) -> int:
    """Positions of a block of a large picture."""
    return 1 if length <= _SINGLE else -(-length // _BLOCKS)


def _measured(
    own: checkpoint.Checkpoint,
    base: checkpoint.Checkpoint | None,
    sites: Sequence[Site],
    inputs: Mapping[str, Tensor],
    block: Callable[[int], int],
    only: Sequence[tuple[int, int]],
    progress: Progress,
    on_call: Callable[[Call, Weights], None] | None = None,
) -> list[_Seen]:
    """Measure the attention of each layer; with a base, exact weights and outputs are those of the base.

    Args:
        own: The checkpoint.
        base: The one it is compared with.
        sites: Its self-attention layers.
        inputs: One sample.
        block: Positions -> positions of a block.
        only: Layers and heads: measure these layers only, and compare these heads weight by weight. Empty for all layers.
        progress: Called with the layers done.
        on_call: Also receives each call.
    """
    of_path = {site.path: site for site in sites}
    numbers = {site.path: site.layer for site in sites}
    wanted = {layer for layer, _ in only}
    exact: dict[str, tuple[Weights, Tensor]] = {}
    seen: list[_Seen] = []

    def measure(call: Call, target: list[_Seen]) -> None:
        site = of_path.get(call.path)
        # Of layers that share their weights, the first stands for all.
        if any(one.path == call.path for one in target) or (wanted and (site is None or site.layer not in wanted)):
            return
        heads = [head for layer, head in only if site is not None and layer == site.layer]
        compared = tuple(head for head in heads if estimates(member(call, head)[0].mechanism))
        found = weights(call, block(call.q.shape[2]), block(call.k.shape[2]), compared)
        if target is seen and base is not None:
            found = _against(found, call.output, *exact[call.path])
        target.append(_Seen(call.path, site, found))
        if target is not seen:
            exact[call.path] = found, call.output
        elif on_call is not None:
            on_call(call, found)
        progress("measure the layers", min(len(target), len(sites)), len(wanted) or len(sites))

    for one, target in ((base, []), (own, seen)):
        if one is None:
            continue
        with (
            observe(one.model, lambda call, target=target: measure(call, target), layers=numbers),
            evaluating(one.model),
            in_float32(one.model),
            torch.inference_mode(),
        ):
            _forward(one.model, inputs)
    return seen


def _forward(model: Any, inputs: Mapping[str, Tensor]) -> None:
    uncached = {"use_cache": False} if "use_cache" in signature(model.base_model.forward).parameters else {}
    model.base_model(**inputs, **uncached)


def _against(found: Weights, output: Tensor, exact: Weights, exact_output: Tensor) -> Weights:
    """The weights of a layer beside those of another checkpoint; shares are of blocks, and outputs [1, H, L, E] compared."""
    shown = found.exact if found.approximate is None else found.approximate
    kept = torch.minimum(exact.exact, shown.clamp_min(0)).sum(-1).mean(-1)
    target = exact_output[0].float().flatten(1)
    error = (output[0].float().flatten(1) - target).norm(dim=1) / target.norm(dim=1).clamp_min(1e-20)
    return replace(found, exact=exact.exact, approximate=shown, kept=kept, error=error, entropy=exact.entropy)


def _is_other(seen: _Seen) -> bool:
    return seen.found.reproduced is not None and seen.found.reproduced > _REPRODUCED


def _telling(
    own: checkpoint.Checkpoint, seen: Sequence[_Seen], layer: int | None, head: int | None
) -> dict[tuple[int, int], str]:
    """Layer and head of those to draw large -> why."""
    able = [
        (one, number)
        for one in seen
        if one.site is not None and layer in (None, one.site.layer)
        for number in range(one.site.heads)
        if head in (None, number)
    ]
    if not able:
        raise ApproxError(f"Layer {layer} computes more than a softmax of scaled products, so it cannot be drawn.")
    chosen: dict[tuple[int, int], str] = {}

    def add(pair: tuple[_Seen, int], why: str) -> None:
        assert pair[0].site is not None
        chosen.setdefault((pair[0].site.layer, pair[1]), why)

    asked = " and ".join(name for name, number in (("--layer", layer), ("--head", head)) if number is not None)
    if layer is not None and head is not None:
        add(able[0], f"asked for with {asked}")
        return chosen
    among = f" of those that {asked} allows" if asked else ""
    changed = [pair for pair in able if pair[0].found.approximate is not None]
    if not changed:
        for pair in sorted(able, key=lambda pair: float(pair[0].found.entropy[pair[1]])):
            if len(chosen) < (_LARGE if not asked else 1) and all(
                pair[0].site is None or pair[0].site.layer != number for number, _ in chosen
            ):
                add(pair, f"the most focused head of its layer{among}" if chosen else f"the most focused head{among}")
        return chosen
    by_loss = sorted(changed, key=lambda pair: float(pair[0].found.kept[pair[1]]))
    # In a layer whose heads have different mechanisms, some may be exact.
    by_loss = [pair for pair in by_loss if pair[0].found.kept[pair[1]] < _SAME] or by_loss
    if asked:
        add(by_loss[0], f"keeps the least of exact attention{among}")
        return chosen
    kinds: dict[str, tuple[_Seen, int]] = {}
    for pair in by_loss:
        kinds.setdefault(_mechanism(own, pair[0].path, pair[1]), pair)
    for name, pair in kinds.items():
        add(pair, "keeps the least of exact attention" + (f" among the heads of {name}" if len(kinds) > 1 else ""))
    middle = by_loss[len(by_loss) // 2]
    for pair, why in (
        (middle, "keeps a middling share of exact attention"),
        (by_loss[-1], "keeps the most of exact attention"),
    ):
        if len(chosen) < _LARGE:
            add(pair, why)
    return chosen


def _mechanism(own: checkpoint.Checkpoint, path: str, head: int | None = None) -> str:
    """Name of the mechanism of a layer, or of a head in it."""
    site = (getattr(own.model.config, "approx", None) or {}).get("sites", {}).get(path)
    if site is None:
        return "exact"
    groups = site.get("groups") or [site]
    if head is not None and "groups" in site:
        groups = [one for one in groups if head in one["heads"]]
    return ", ".join(dict.fromkeys(one["mechanism"] or "exact" for one in groups))


def _settings(own: checkpoint.Checkpoint, path: str) -> str:
    """Mechanism of a layer and its settings, where they differ from the defaults."""
    site = (getattr(own.model.config, "approx", None) or {}).get("sites", {}).get(path)
    if site is None:
        return "Exact attention"
    described = []
    for one in site.get("groups") or [site]:
        defaults = MECHANISMS[one["mechanism"]].defaults() if one["mechanism"] in MECHANISMS else {}
        changed = {name: value for name, value in (one.get("settings") or {}).items() if value != defaults.get(name)}
        settings = ", ".join(f"{name}={value}" for name, value in sorted(changed.items()))
        heads = f" (heads {', '.join(map(str, one['heads']))})" if "heads" in one and "groups" in site else ""
        described.append(f"{one['mechanism'] or 'exact'}{heads}{f': {settings}' if settings else ''}")
    return "; ".join(described)


def _name(seen: _Seen, sites: Sequence[Site]) -> str:
    """The name of a layer; in an encoder-decoder with the half that it is in."""
    if seen.site is None:
        return f"cross-attention {seen.path}"
    halves = {part for site in sites for part in ("encoder", "decoder") if site.path.startswith(f"{part}.")}
    half = seen.path.split(".")[0] if len(halves) > 1 else ""
    return f"Layer {seen.site.layer}" + (f" ({half})" if half else "")


def _layer(own: checkpoint.Checkpoint, seen: _Seen, sites: Sequence[Site], small: int) -> Layer:
    assert seen.site is not None
    found = seen.found
    return Layer(
        number=seen.site.layer,
        name=_name(seen, sites),
        mechanism=_mechanism(own, seen.path),
        settings=_settings(own, seen.path),
        kept=found.kept.tolist(),
        captured=[None if math.isnan(value) else value for value in found.captured.tolist()],
        error=found.error.tolist(),
        exact=_pooled(found.exact, small),
        approximate=None if found.approximate is None else _pooled(found.approximate, small),
    )


def _pooled(weights: Tensor, side: int) -> Any:
    """Weights [H, n, m] in blocks, of which there are at most `side` on a side, as an array."""
    rows, columns = (-(-size // side) for size in weights.shape[1:])
    return mean_rows(weights @ membership(weights.shape[2], columns, weights), rows).cpu().numpy()


def _detailed(
    own: checkpoint.Checkpoint,
    base: checkpoint.Checkpoint | None,
    sites: Sequence[Site],
    found: Read,
    large: Mapping[tuple[int, int], str],
    progress: Progress,
) -> dict[tuple[int, int], tuple[Weights, tuple[int, int], list[Any]]]:
    """Layer and head -> the weights of its layer in large, its numbers of queries and keys, what its mechanism did."""
    of_path = {site.path: site.layer for site in sites}
    details: dict[tuple[int, int], tuple[Weights, tuple[int, int], list[Any]]] = {}

    def keep(call: Call, weights: Weights) -> None:
        for layer, head in large:
            if layer == of_path[call.path]:
                sizes = call.q.shape[2], call.k.shape[2]
                details[layer, head] = weights, sizes, inside(call, head, weights)

    _measured(own, base, sites, found.inputs, _block, list(large), progress, keep)
    return details


def _head(
    details: Mapping[tuple[int, int], tuple[Weights, tuple[int, int], list[Any]]],
    place: tuple[int, int],
    layers: Sequence[Layer],
    found: Read,
    why: str,
) -> Head:
    measured, (queries, keys), parts = details[place]
    layer = next(one for one in layers if one.number == place[0])
    number = place[1]
    approximate = measured.approximate
    return Head(
        layer=layer,
        number=number,
        why=why,
        exact=measured.exact[number].cpu().numpy(),
        approximate=None if approximate is None else approximate[number].cpu().numpy(),
        queries=_axis(found, layer.name, queries),
        keys=_axis(found, layer.name, keys),
        parts=parts,
    )


def _axis(found: Read, name: str, length: int) -> Axis:
    """The positions of a self-attention layer."""
    if found.decoder and "(decoder)" in name:
        return Axis(list(found.decoder), _block(length), "token")
    return found.axis(length, block=_block(length))


def _alignments(
    own: checkpoint.Checkpoint,
    base: checkpoint.Checkpoint | None,
    found: Read,
    everything: Sequence[_Seen],
    sites: Sequence[Site],
    progress: Progress,
) -> list[Alignment]:
    """What an encoder-decoder attends to in its input as it writes: with its own attention, and with exact attention throughout."""
    if not found.written or all(seen.site is not None for seen in everything):
        return []
    paths = {site.path for site in sites}

    def crossing(model: Any, within: Any) -> dict[str, Tensor]:
        calls: dict[str, Tensor] = {}

        def collect(call: Call) -> None:
            if call.path not in paths:
                calls[call.path] = weights(call, 1, 1).exact

        with (
            observe(model, collect, layers={site.path: site.layer for site in sites}),
            within,
            evaluating(model),
            in_float32(model),
            torch.inference_mode(),
        ):
            _forward(model, found.inputs)
        return calls

    progress("align", 0, 1)
    approximate = crossing(own.model, nullcontext())
    exact = None
    if base is not None:
        exact = crossing(base.model, nullcontext())
    elif own.source.converted:
        exact = crossing(own.model, exactly(own.model))
    progress("align", 1, 1)
    reference = approximate if exact is None else exact
    # Padding of the recording is not drawn, nor counted in the choice of heads.
    keys = next(iter(reference.values())).shape[2]
    shown = keys
    if found.heard is not None and found.seconds is not None:
        shown = min(keys, max(1, math.ceil(found.heard / found.seconds)))
    chosen = _aligning(reference, shown)
    # Signs to the model, such as that no times are wanted, are not heard.
    rows = [row for row in words(found.written) if not is_special(row[0])] or words(found.written)
    columns = found.axis(keys, block=1)
    block = -(-shown // _SINGLE)
    axis = Axis(columns.labels[:shown], block, columns.kind, columns.seconds)

    def picture(weights: Mapping[str, Tensor]) -> Any:
        mean = torch.stack([weights[path][head] for path, head in chosen]).mean(0)[:, :shown]
        by_word = torch.stack([mean[places].mean(0) for _, places in rows])
        padded = torch.nn.functional.pad(by_word, (0, -shown % block))
        return padded.unflatten(1, (-1, block)).sum(-1).cpu().numpy()

    named = ", ".join(f"{_decoder_layer(path)} head {head}" for path, head in chosen)
    return [
        Alignment(
            exact=picture(reference),
            approximate=None if exact is None else picture(approximate),
            words=[word for word, _ in rows],
            keys=axis,
            heads=named,
        )
    ]


def _aligning(weights: Mapping[str, Tensor], shown: int) -> list[tuple[str, int]]:
    """Path and head of those that follow the input in its order while the output is written, best first."""
    ranked = []
    for path, each in weights.items():
        of_input = each[:, :, :shown]
        places = torch.arange(shown, dtype=of_input.dtype, device=of_input.device)
        mass = of_input.sum(-1)
        middle = (of_input * places).sum(-1) / mass.clamp_min(1e-9)
        steps = torch.arange(middle.shape[1], dtype=middle.dtype, device=middle.device)
        for head in range(each.shape[0]):
            pair = torch.stack([middle[head], steps])
            together = float(torch.corrcoef(pair)[0, 1]) if len(steps) > 2 else 0.0
            reach = float(middle[head].max() - middle[head].min()) / max(shown - 1, 1)
            ranked.append((np.nan_to_num(together) * reach * float(mass[head].mean()), path, head))
    ranked.sort(key=lambda one: -one[0])
    return [(path, head) for _, path, head in ranked[:_ALIGNING]]


def _decoder_layer(path: str) -> str:
    """`decoder layer 2` for `decoder.layers.2.encoder_attn`."""
    number = next((part for part in path.split(".") if part.isdigit()), None)
    return path if number is None else f"decoder layer {number}"


def _exact_side(own: checkpoint.Checkpoint, base: checkpoint.Checkpoint | None) -> str:
    if base is not None:
        return f"the attention of {base.source.name}, layer by layer on its own hidden states"
    if own.source.converted:
        return "exact attention with the same weights, on the same inputs of each layer"
    return "the attention of the checkpoint, which is exact"


def _notes(drawable: Sequence[_Seen], everything: Sequence[_Seen]) -> list[str]:
    notes = []
    sampled = [seen.found.measured for seen in everything if seen.found.reproduced is None]
    if sampled:
        notes.append(
            f"Shares are measured on {sampled[0]:,} keys of each layer: the {sampled[0] // 2:,} that get the most weight, and as "
            "many drawn from the others, each of which stands for several. Pictures and errors are of all keys."
        )
    whole = [seen.found.reproduced for seen in drawable if seen.found.reproduced is not None]
    if whole:
        notes.append(
            f"These weights times the values are the outputs that the layers gave, up to a relative difference of {max(whole):.0e}."
        )
    return notes


def _measures(layer: Layer) -> LayerMeasures:
    return LayerMeasures(layer.number, layer.name, layer.mechanism, layer.kept, layer.captured, layer.error)
