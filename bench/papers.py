"""The figures of the linear-transformer paper with the mechanisms of this project, small: a command for each experiment.

    python bench/papers.py copy -o reports/papers
    python bench/papers.py convergence -o reports/papers
    python bench/papers.py generation -o reports/papers
    python bench/papers.py layer -o reports/papers
    python bench/papers.py reversible -o reports/papers

Models are GPT-2s of transformers with random weights, converted in memory; those of `copy` and `convergence` are trained here from
scratch, and each training is shared by both. Everything runs on one thread of a CPU, and times are CPU seconds, since other programs
hardly change them. Each result is kept in `parts/` as soon as it is measured, so that the same command continues after a stop.
Writes `record.json`, `report.md` and pictures into a folder of the experiment; `--redraw` rebuilds the last two.

Source: Katharopoulos, Vyas, Pappas, Fleuret, 2020, Transformers are RNNs, arXiv 2006.16236; the reversible blocks are those of
Kitaev, Kaiser, Levskaya, 2020, Reformer, arXiv 2001.04451.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from approx.conversion.surgery import convert
from approx.errors import ApproxError
from approx.evaluation.record import environment
from approx.evaluation.statistics import score_interval
from approx.evaluation.timing import Neighbours, is_out_of_memory, memory_limit, peak_mb
from approx.mechanisms import MECHANISMS
from approx.planning.plan import Plan
from bench import reversible
from bench.pages import PAGE, RECORD, figure, keep, line, stored, table, write_page, write_record

SYMBOLS = 10
# Training ends when so many symbols of `Size.every` steps are right, twice.
RIGHT = 0.9999
# To be shown: more symbols right than this.
COPIED = 0.999
PIXEL_VALUES = 256
# Pixels that each contender generates in its turn.
TURN = 49
# Shares of an image at which a model without state is timed.
STATELESS = (0.125, 0.25, 0.5, 0.75, 1.0)
# The loss that a picture still shows.
LEAST_LOSS = 1e-4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Model:
    """A GPT-2: layers, size, heads, and size of its MLPs, four times the size if None."""

    layers: int
    hidden: int
    heads: int
    inner: int | None = None


@dataclass(frozen=True)
class Size:
    """How large the experiments are.

    Attributes:
        copier: The model of the copy task.
        length: Symbols to copy.
        heads: Heads that its size is split into: the more, the fewer features has each. The first is also that of the other experiments.
        batch: Sequences of a step.
        rate: Learning rate, after 50 steps.
        every: Steps from one point of a curve to the next.
        most: Steps after which a training ends in any case.
        seeds: Trainings of each contender, with other weights and sequences.
        tested: Sequences of a test.
        cluster: Tokens of a bucket of LSH.
        painter: The model of the images.
        images: Pixels of an image, each a step, and images at a time.
        rounds: Times that each image, or layer, is measured.
        layer: The model whose single layer is measured.
        lengths: Its tokens.
        depths: Layers of reversible models, with the size of the copier.
    """

    copier: Model
    length: int
    heads: tuple[int, ...]
    batch: int
    rate: float
    every: int
    most: int
    seeds: int
    tested: int
    cluster: int
    painter: Model
    images: tuple[tuple[int, int], ...]
    rounds: int
    layer: Model
    lengths: tuple[int, ...]
    depths: tuple[int, ...]


SIZES = {
    "tiny": Size(
        copier=Model(1, 16, 2),
        length=4,
        heads=(2, 8),
        batch=8,
        rate=1e-2,
        every=5,
        most=10,
        seeds=2,
        tested=16,
        cluster=2,
        painter=Model(1, 16, 2),
        images=((98, 1), (98, 2)),
        rounds=2,
        layer=Model(1, 16, 2),
        lengths=(16, 32),
        depths=(1, 3),
    ),
    "small": Size(
        copier=Model(1, 64, 4, 64),
        length=32,
        heads=(4, 16),
        batch=32,
        rate=6e-3,
        every=20,
        most=1500,
        seeds=2,
        tested=4096,
        cluster=8,
        painter=Model(2, 256, 8),
        images=((784, 1), (784, 8), (3072, 1)),
        rounds=3,
        layer=Model(1, 64, 1),
        lengths=tuple(2**power for power in range(9, 15)),
        depths=(2, 4, 8, 16),
    ),
    "paper": Size(
        copier=Model(4, 256, 8),
        length=128,
        heads=(8, 16, 32, 64),
        batch=64,
        rate=1e-3,
        every=100,
        most=10_000,
        seeds=5,
        tested=4096,
        cluster=32,
        painter=Model(8, 256, 8),
        images=tuple(itertools.product((784, 3072), (1, 8, 32))),
        rounds=5,
        layer=Model(1, 512, 8),
        lengths=tuple(2**power for power in range(9, 17)),
        depths=(2, 4, 8, 16, 32),
    ),
}


class Contender(NamedTuple):
    """An attention: its name, its mechanism and settings; no mechanism for softmax attention as the model has it."""

    name: str
    mechanism: str | None = None
    settings: Mapping[str, Any] = MappingProxyType({})


SOFTMAX = Contender("softmax")
# As published: no exact keys beside the features.
LINEAR = Contender("linear", "linear", dict(MECHANISMS["linear"].published))


def lsh(size: Size) -> Contender:
    """LSH with four rounds, as in the paper's figure."""
    return Contender("lsh", "lsh", {"rounds": 4, "cluster": size.cluster})


def make(model: Model, contender: Contender, *, positions: int, words: int, seed: int) -> Any:
    """A GPT-2 with random weights that the seed alone determines, with the attention of a contender."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=words,
        n_positions=positions,
        n_embd=model.hidden,
        n_layer=model.layers,
        n_head=model.heads,
        n_inner=model.inner,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=words - 1,
        eos_token_id=words - 1,
    )
    made = GPT2LMHeadModel(config)
    if contender.mechanism is not None:
        convert(made, Plan.of(contender.mechanism, **contender.settings))
    return made


def to_copy(size: Size, count: int, generator: torch.Generator) -> Tensor:
    """Random symbols, a separator, and the same symbols again, [count, 2 length + 1]."""
    symbols = torch.randint(SYMBOLS, (count, size.length), generator=generator)
    return torch.cat([symbols, torch.full((count, 1), SYMBOLS), symbols], 1)


def copied(size: Size, model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the symbols after the separator, each given the true ones before, and these symbols."""
    states = model.transformer(ids, use_cache=False).last_hidden_state[:, size.length : -1]
    return model.lm_head(states), ids[:, size.length + 1 :]


def train(size: Size, contender: Contender, heads: int, seed: int) -> dict[str, Any]:
    """Train a model of so many heads to copy, until it does or `most` steps are over, and test it on new sequences.

    Returns:
        The curve, [[step, loss, share right, CPU seconds]], whose losses and shares are means over new sequences since the point
        before; and how many of the tested sequences have 0, 1, ... symbols right.
    """
    shape = replace(size.copier, heads=heads)
    model = make(shape, contender, positions=2 * size.length + 1, words=SYMBOLS + 1, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    curve: list[list[float]] = []
    seen: list[tuple[float, float]] = []
    begun = time.process_time()
    for step in range(1, size.most + 1):
        out, wanted = copied(size, model, to_copy(size, size.batch, generator))
        loss = F.cross_entropy(out.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        model.step_attention(step) if contender.mechanism else None
        seen.append((loss.item(), float((out.argmax(-1) == wanted).float().mean())))
        if step % size.every == 0:
            curve.append([step, *np.mean(seen, 0).tolist(), time.process_time() - begun])
            seen.clear()
            if all(share >= RIGHT for _, _, share, _ in curve[-2:]) and len(curve) > 1:
                break
    model.eval()
    test = torch.Generator().manual_seed(2**32 + seed)
    right: list[int] = []
    with torch.inference_mode():
        for first in range(0, size.tested, size.batch):
            out, wanted = copied(size, model, to_copy(size, min(size.batch, size.tested - first), test))
            right += (out.argmax(-1) == wanted).sum(1).tolist()
    return {
        "name": contender.name,
        "heads": heads,
        "seed": seed,
        "curve": curve,
        "sequences_by_right": np.bincount(right, minlength=size.length + 1).tolist(),
    }


def trained(size: Size, contenders: Sequence[tuple[Contender, int]], folder: Path) -> list[dict[str, Any]]:
    """All trainings of some contenders with so many heads, those made that are not kept."""
    todo = list(itertools.product(range(size.seeds), contenders))
    made = []
    for seed, (one, heads) in track(todo, "training", console=Console(stderr=True)):
        name = f"training {one.name} {heads} {seed}"
        made.append(_kept(folder, name, lambda c=one, h=heads, s=seed: train(size, c, h, s)))
    return sorted(made, key=lambda training: training["seed"])


def _kept(folder: Path, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A part that is kept, or else measured and kept."""
    found = stored(folder, name)
    if found is None:
        neighbours = Neighbours()
        found = measure() | {"crowded": neighbours.crowded()}
        keep(folder, name, found)
    return found


def copy(size: Size, folder: Path) -> dict[str, Any]:
    """Train softmax and linear attention with ever smaller heads."""
    return {"trainings": trained(size, list(itertools.product((SOFTMAX, LINEAR), size.heads)), folder)}


def convergence(size: Size, folder: Path) -> dict[str, Any]:
    """Train softmax, linear and LSH."""
    return {"trainings": trained(size, [(one, size.heads[0]) for one in (SOFTMAX, LINEAR, lsh(size))], folder)}


class _Room(DynamicLayer):
    """A layer of a KV cache with room for all tokens, so that a step copies only its own: the fastest fair baseline.

    Args:
        room: Tokens that it holds.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values behind the others."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            shape = (*key_states.shape[:2], self.room, key_states.shape[3])
            self.whole = key_states.new_empty(shape), value_states.new_empty(shape)
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        for whole, new in zip(self.whole, (key_states, value_states), strict=True):
            whole[:, :, begin:end] = new
        self.keys, self.values = (whole[:, :, :end] for whole in self.whole)
        return self.keys, self.values


def roomy(model: Any, room: int) -> DynamicCache:
    """A KV cache of layers with room for all tokens."""
    cache = DynamicCache()
    layers: list[Any] = [_Room(room) for _ in range(model.config.n_layer)]
    cache.layers = layers
    return cache


class Painter:
    """Generates images with one model, pixel by pixel, each drawn from the logits.

    Args:
        model: The model.
        cache: Makes an empty cache.
        batch: Images at a time.
    """

    def __init__(self, model: Any, cache: Callable[[], DynamicCache], batch: int) -> None:
        self._model, self._cache, self._batch = model, cache, batch
        self.begin()

    def begin(self) -> None:
        """Begin new images."""
        self._past, self._random = self._cache(), torch.Generator().manual_seed(0)
        self._word = torch.full((self._batch, 1), PIXEL_VALUES)

    @torch.inference_mode()
    def paint(self, pixels: int) -> float:
        """Draw more pixels; returns CPU seconds."""
        begun = time.process_time()
        for _ in range(pixels):
            out = self._model(input_ids=self._word, past_key_values=self._past, use_cache=True).logits[:, -1]
            self._word = torch.multinomial(out[:, :PIXEL_VALUES].softmax(-1), 1, generator=self._random)
        return time.process_time() - begun


def paint(size: Size, pixels: int, batch: int) -> dict[str, list[float]]:
    """Generate images with a KV cache, with one that has room for all pixels, and with the state of linear attention.

    All contenders generate them whole, by turns of `TURN` pixels whose order rotates.

    Returns:
        For each contender, CPU seconds of each turn.
    """
    softmax, linear = (
        make(size.painter, one, positions=pixels, words=PIXEL_VALUES + 1, seed=0).eval() for one in (SOFTMAX, LINEAR)
    )
    painters = {
        "softmax, KV cache": Painter(softmax, DynamicCache, batch),
        "softmax, KV cache with room": Painter(softmax, lambda: roomy(softmax, pixels), batch),
        "linear, state": Painter(linear, DynamicCache, batch),
    }
    for painter in painters.values():
        painter.paint(min(TURN, pixels))
        painter.begin()
    seconds: dict[str, list[float]] = {name: [] for name in painters}
    order = list(painters)
    for first in range(0, pixels, TURN):
        for name in order:
            seconds[name].append(painters[name].paint(min(TURN, pixels - first)))
        order = [*order[1:], order[0]]
    return seconds


def paint_without_state(size: Size, pixels: int) -> dict[str, Any]:
    """Time softmax attention that reads all earlier pixels for each new one, at a few lengths; an image is their integral.

    Returns:
        The lengths and, for each, the CPU seconds of a step in each round.
    """
    model = make(size.painter, SOFTMAX, positions=pixels, words=PIXEL_VALUES + 1, seed=0).eval()
    lengths = sorted({1, *(max(1, round(pixels * share)) for share in STATELESS)})
    generator = torch.Generator().manual_seed(0)
    seconds: list[list[float]] = [[] for _ in lengths]
    with torch.inference_mode():
        for turn in range(size.rounds + 1):
            for length, times in zip(lengths, seconds, strict=True):
                ids = torch.randint(PIXEL_VALUES, (1, length), generator=generator)
                begun = time.process_time()
                model(input_ids=ids, use_cache=False, logits_to_keep=1)
                # The first round is to warm up.
                times.extend([time.process_time() - begun] if turn else [])
    return {"pixels": pixels, "lengths": lengths, "seconds": seconds}


def generation(size: Size, folder: Path) -> dict[str, Any]:
    """Generate images of every size, and one at a time without a state."""
    rounds: dict[tuple[int, int], list[dict[str, Any]]] = {image: [] for image in size.images}
    todo = list(itertools.product(range(size.rounds), size.images))
    for turn, (pixels, batch) in track(todo, "generating", console=Console(stderr=True)):
        name = f"images {pixels} {batch} {turn}"
        part = _kept(folder, name, lambda p=pixels, b=batch: {"seconds": paint(size, p, b)})
        rounds[pixels, batch].append(part)
    without = [
        _kept(folder, f"without state {pixels}", lambda p=pixels: paint_without_state(size, p))
        for pixels in dict.fromkeys(pixels for pixels, _ in size.images)
    ]
    images = [{"pixels": pixels, "batch": batch, "rounds": made} for (pixels, batch), made in rounds.items()]
    return {"images": images, "without_state": without}


LAYERS = ("sdpa", "linear", "performer", "clustered", "lsh", "local")


def attend(size: Size, length: int) -> dict[str, Any]:
    """CPU seconds and peak memory of one layer's attention with each mechanism, in interleaved rounds."""
    heads, head_dim = size.layer.heads, size.layer.hidden // size.layer.heads
    q, k, v = torch.randn(3, 1, heads, length, head_dim, generator=torch.Generator().manual_seed(length))
    calls: dict[str, Callable[[], Tensor]] = {}
    for name in LAYERS:
        kind = MECHANISMS[name]
        mechanism = kind(heads, head_dim, causal=False, scale=head_dim**-0.5, **kind.published).eval()
        calls[name] = lambda one=mechanism: one(q, k, v)
    rows: dict[str, dict[str, Any]] = {name: {"seconds": [], "peak_mb": None} for name in calls}
    with torch.inference_mode(), memory_limit(CPU):
        for name, call in calls.items():
            try:
                call()
                rows[name]["peak_mb"] = peak_mb(call, CPU)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
        for _ in range(size.rounds):
            for name, call in calls.items():
                if rows[name]["peak_mb"] is not None:
                    begun = time.process_time()
                    call()
                    rows[name]["seconds"].append(time.process_time() - begun)
    return {"length": length, "rows": rows}


def layer(size: Size, folder: Path) -> dict[str, Any]:
    """Measure one layer at every length."""
    todo = track(size.lengths, "measuring", console=Console(stderr=True))
    return {"points": [_kept(folder, f"layer {length}", lambda n=length: attend(size, n)) for length in todo]}


def backward(size: Size, contender: Contender, depth: int) -> dict[str, Any]:
    """Bytes that autograd keeps and CPU seconds, with plain and with reversible blocks, and how far gradients differ in float64."""
    shape = Model(depth, size.copier.hidden, size.copier.heads)
    model = make(shape, contender, positions=2 * size.length + 1, words=SYMBOLS + 1, seed=0)
    ids = to_copy(size, size.batch, torch.Generator().manual_seed(0))
    kept, seconds = {}, {}
    for name, run in _RUNS.items():
        with reversible.held_by_autograd(model.parameters()) as held:
            _loss(model, ids, run).backward()
        kept[name] = held.peak
        begun = time.process_time()
        _loss(model, ids, run).backward()
        seconds[name] = time.process_time() - begun
    model.double()
    gradients = [torch.autograd.grad(_loss(model, ids, run), list(model.parameters())) for run in _RUNS.values()]
    largest = max(float(each.abs().max()) for each in gradients[0])
    differ = max(float((one - other).abs().max()) for one, other in zip(*gradients, strict=True)) / largest
    return {"name": contender.name, "depth": depth, "kept": kept, "seconds": seconds, "difference": differ}


_RUNS = {"plain": reversible.plain, "reversible": reversible.reversible}


def _loss(model: Any, ids: Tensor, run: Callable[..., Any]) -> Tensor:
    return F.cross_entropy(reversible.logits(model, ids, run)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def without_activations(size: Size, folder: Path) -> dict[str, Any]:
    """Train one step with plain and with reversible blocks, at every depth."""
    todo = list(itertools.product((SOFTMAX, LINEAR), size.depths))
    rows = [
        _kept(folder, f"reversible {one.name} {depth}", lambda c=one, d=depth: backward(size, c, d))
        for one, depth in track(todo, "measuring", console=Console(stderr=True))
    ]
    return {"rows": rows}


def _named(trainings: list[dict[str, Any]]) -> Iterator[tuple[str, int, list[dict[str, Any]]]]:
    """The trainings of each contender and number of heads."""
    for name, heads in dict.fromkeys((each["name"], each["heads"]) for each in trainings):
        yield name, heads, [each for each in trainings if (each["name"], each["heads"]) == (name, heads)]


def accuracy(trainings: list[dict[str, Any]]) -> tuple[float, tuple[float, float], list[float]]:
    """Share of symbols right, its 95 % interval over the sequences of all trainings, and the share of each training."""
    counts = [np.array(each["sequences_by_right"]) for each in trainings]
    symbols = len(counts[0]) - 1
    shares = [float((one * np.arange(symbols + 1)).sum() / (one.sum() * symbols)) for one in counts]
    right = np.repeat(np.arange(symbols + 1), sum(counts)) / symbols
    interval = score_interval(lambda rows: float(right[rows].mean()), len(right), seed=0)
    assert interval is not None, "more than one sequence is tested"
    return float(right.mean()), interval, shares


def _task(made: dict[str, Any]) -> str:
    size, shape = made["sizes"], made["sizes"]["copier"]
    return (
        f"{size['length']} of {SYMBOLS} symbols, a separator, the same symbols again. GPT-2s of {_shape(shape)} are trained from scratch "
        f"on new sequences, {size['batch']} a step, until {100 * RIGHT:.2f} % are right or for {size['most']:,} steps"
    )


def _shape(shape: dict[str, Any]) -> str:
    layers = f"{shape['layers']} layer{'s' if shape['layers'] > 1 else ''}"
    return f"{layers} with {shape['heads']} heads of {shape['hidden'] // shape['heads']}"


def copy_report(made: dict[str, Any], output: Path) -> str:
    """The page of the copy task."""
    size = made["sizes"]
    head = ["attention", "heads", "size, features", "symbols right, %", "95 % interval", "each seed", "steps"]
    head += ["in the last quarter of them", f"> {100 * COPIED:g} %"]
    rows = []
    for name, heads, trainings in _named(made["trainings"]):
        share, (low, high), shares = accuracy(trainings)
        curves = [training["curve"] for training in trainings]
        gained = [curve[-1][2] - curve[3 * len(curve) // 4 - 1][2] for curve in curves]
        rows.append(
            [
                name,
                f"{heads}",
                f"{size['copier']['hidden'] // heads}",
                f"{100 * share:.2f}",
                f"{100 * low:.2f} – {100 * high:.2f}",
                ", ".join(f"{100 * one:.2f}" for one in shares),
                ", ".join(f"{curve[-1][0]:.0f}" for curve in curves),
                ", ".join(f"{100 * one:+.1f}" for one in gained),
                "yes" if low > COPIED else "no" if high < COPIED else "open",
            ]
        )
    text = (
        f"{_task(made)}; {size['seeds']} seeds each, tested on {size['tested']:,} new sequences, every symbol given the true ones before. "
        f"The size, {size['copier']['hidden']}, is split into more and more heads, so that each has fewer features, "
        "elu(x) + 1 of its own size; softmax shows what the size of a head alone costs."
    )
    return _page("Copying with few features", text, table(head, rows), made)


def convergence_report(made: dict[str, Any], output: Path) -> str:
    """The page of convergence, with loss against steps and against time."""
    for name, column, label in (("steps", 0, "steps"), ("time", 3, "CPU seconds of one thread")):
        with figure(output / f"{name}.svg", (6, 3.2)) as axes:
            axes.set_yscale("log")
            for number, (contender, _, trainings) in enumerate(_named(made["trainings"])):
                for training in trainings:
                    points = [(point[column], max(point[1], LEAST_LOSS)) for point in training["curve"]]
                    axes.plot(
                        *zip(*points, strict=True),
                        color=f"C{number}",
                        lw=1,
                        label=contender if training["seed"] == 0 else None,
                    )
            axes.set_xlabel(label)
            axes.set_ylabel("loss")
            axes.grid(alpha=0.3)
    head = ["attention", "steps to 99 %", "CPU s to 99 %", "ms a step", "loss at the end"]
    rows = []
    for name, _, trainings in _named(made["trainings"]):
        reached = [next((point for point in each["curve"] if point[2] >= 0.99), None) for each in trainings]
        there = [[f"{point[0]:.0f}", f"{point[3]:.1f}"] if point else ["not reached"] * 2 for point in reached]
        pace = statistics.median(1e3 * each["curve"][-1][3] / each["curve"][-1][0] for each in trainings)
        losses = ", ".join(f"{each['curve'][-1][1]:.2g}" for each in trainings)
        rows.append([name, *(", ".join(column) for column in zip(*there, strict=True)), f"{pace:.1f}", losses])
    text = (
        f"{_task(made)}; a figure for each seed. LSH has 4 rounds and buckets of {made['sizes']['cluster']} tokens. Losses are means over "
        f"{made['sizes']['every']} steps."
    )
    pictures = "![loss against steps](steps.svg)\n\n![loss against time](time.svg)"
    return _page("Convergence", text, f"{table(head, rows)}\n\n{pictures}", made)


def of_image(seconds: list[list[float]]) -> tuple[float, list[float]]:
    """Seconds of an image: the sum of each turn's median over the rounds, and the sum of each round."""
    return float(np.median(seconds, 0).sum()), np.sum(seconds, 1).tolist()


def generation_report(made: dict[str, Any], output: Path) -> str:
    """The page of images."""
    head = [
        "attention",
        "pixels",
        "images at a time",
        "s an image, latency",
        "ms a pixel",
        "images a minute",
        "speed, best KV cache = 1",
    ]
    rows = []
    for part in made["images"]:
        pixels, batch = part["pixels"], part["batch"]
        names = part["rounds"][0]["seconds"]
        found = {name: of_image([one["seconds"][name] for one in part["rounds"]]) for name in names}
        best = min((name for name in found if "KV" in name), key=lambda name: found[name][0])
        for name, (seconds, by_round) in found.items():
            ratios = [there / here for there, here in zip(found[best][1], by_round, strict=True)]
            speed = f"{found[best][0] / seconds:.2f}" + (
                f" ({min(ratios):.2f} – {max(ratios):.2f})" if name != best else ""
            )
            rows.append(_image_row(name, pixels, batch, seconds, speed))
        if batch == 1:
            whole = next(each for each in made["without_state"] if each["pixels"] == pixels)
            seconds = float(np.trapezoid(np.median(whole["seconds"], 1), whole["lengths"]))
            rows.append(_image_row("softmax, stateless", pixels, 1, seconds, f"{found[best][0] / seconds:.3f}"))
    size = made["sizes"]
    text = (
        f"GPT-2s of {_shape(size['painter'])}, random weights, on one thread: {size['rounds']} interleaved rounds, all contenders by turns of {TURN} "
        "pixels, the median of each turn; in brackets the ratios of whole rounds, with their disturbed turns. *With room* is a cache allocated for the whole image, in "
        f"place of the one of transformers, which grows by copying. Stateless attention is timed at {len(STATELESS) + 1} lengths and integrated."
    )
    return _page("Images, pixel by pixel", text, table(head, rows), made)


def _image_row(name: str, pixels: int, batch: int, seconds: float, speed: str) -> list[str]:
    return [
        name,
        f"{pixels:,}",
        f"{batch}",
        f"{seconds:.2f}",
        f"{1e3 * seconds / pixels:.2f}",
        f"{60 * batch / seconds:.3g}",
        speed,
    ]


def layer_report(made: dict[str, Any], output: Path) -> str:
    """The page of one layer, with time and memory against the length."""
    points = made["points"]
    costs: dict[str, Callable[[dict[str, Any]], float]] = {
        "time": lambda row: 1e3 * statistics.median(row["seconds"]),
        "memory": lambda row: row["peak_mb"],
    }
    units = {"time": "CPU milliseconds", "memory": "peak memory, MB"}
    tables = []
    for cost, measure in costs.items():
        rows = []
        with figure(output / f"{cost}.svg", (6, 3.6)) as axes:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            for number, name in enumerate(LAYERS):
                found = {point["length"]: measure(row) for point in points if (row := point["rows"][name])["seconds"]}
                line(axes, number, name, list(found.items()))
                rows.append(
                    [
                        name,
                        *(
                            f"{found[point['length']]:,.3g}" if point["length"] in found else "out of memory"
                            for point in points
                        ),
                    ]
                )
            axes.set_xlabel("tokens")
            axes.set_ylabel(units[cost])
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.grid(alpha=0.3)
        tables.append(table([units[cost], *(f"{point['length']:,}" for point in points)], rows))
    size = made["sizes"]
    text = (
        f"A forward of one layer's attention, bidirectional, batch 1, {size['layer']['heads']} heads of "
        f"{size['layer']['hidden'] // size['layer']['heads']}, float32, random inputs, settings as published: medians of {size['rounds']} "
        "interleaved rounds on one thread, and the peak beyond the inputs."
    )
    pictures = "![time against length](time.svg)\n\n![memory against length](memory.svg)"
    return _page("One layer against length", text, "\n\n".join([*tables, pictures]), made)


def reversible_report(made: dict[str, Any], output: Path) -> str:
    """The page of reversible blocks."""
    head = [
        "attention",
        "layers",
        "kept by plain blocks, MB",
        "kept by reversible blocks, MB",
        "time, plain = 1",
        "gradients differ by",
    ]
    rows = [
        [
            row["name"],
            f"{row['depth']}",
            *(f"{row['kept'][name] / 1e6:.2f}" for name in _RUNS),
            f"{row['seconds']['reversible'] / row['seconds']['plain']:.2f}",
            f"{row['difference']:.0e}",
        ]
        for row in made["rows"]
    ]
    size = made["sizes"]
    text = (
        f"A step of the copy task in GPT-2s of {size['copier']['heads']} heads of {size['copier']['hidden'] // size['copier']['heads']}, batch "
        f"{size['batch']}, {2 * size['length'] + 1} tokens. *Kept* is the most that autograd holds for the backward pass at any time, without "
        "parameters. Gradients differ in float64 by the largest difference over the largest gradient. Times are single steps."
    )
    return _page("Reversible blocks", text, table(head, rows), made)


def _page(title: str, text: str, body: str, made: dict[str, Any]) -> str:
    machine = made["environment"]
    busy = "; other programs were using the cores" if made["crowded"] else ""
    where = f"Made by `{made['command']}` on {machine['processor']}, one thread, torch {machine['torch']}{busy}."
    return f"# {title}\n\n{text} {where}\n\n{body}\n"


EXPERIMENTS = {
    "copy": (copy, copy_report),
    "convergence": (convergence, convergence_report),
    "generation": (generation, generation_report),
    "layer": (layer, layer_report),
    "reversible": (without_activations, reversible_report),
}


def in_docs(text: str, records: Path) -> str:
    """docs/papers.md with what the records say below its introduction.

    Args:
        text: The document as it is.
        records: The folder of reports.
    """
    introduction = text.partition("\n## ")[0].rstrip()
    sections = []
    for name in EXPERIMENTS:
        page = records / "papers" / name / PAGE
        if page.is_file():
            sections.append("#" + page.read_text("utf-8").replace("](", f"](../reports/papers/{name}/").rstrip())
        else:
            sections.append(f"## {name}\n\nNot measured yet: `python bench/papers.py {name} -o reports/papers`.")
    return "\n\n".join([introduction, *sections]) + "\n"


def _crowded(made: Any) -> bool:
    """Whether any part was measured beside other programs."""
    if isinstance(made, dict):
        return bool(made.get("crowded")) or any(map(_crowded, made.values()))
    return isinstance(made, list) and any(map(_crowded, made))


def main() -> int:
    """Measure an experiment and write its record and page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="folder of the parts and of a folder for each experiment"
    )
    parser.add_argument(
        "--size", choices=SIZES, default="small", help="%(default)s by default; paper takes days on a CPU"
    )
    parser.add_argument("--redraw", action="store_true", help="measure nothing; make the page from the record")
    asked = parser.parse_args()
    measure, report = EXPERIMENTS[asked.experiment]
    folder = asked.output / asked.experiment
    try:
        if not asked.redraw:
            torch.set_num_threads(1)
            size = SIZES[asked.size]
            made = measure(size, asked.output / "parts" / asked.size)
            command = f"python bench/papers.py {asked.experiment}" + (
                f" --size {asked.size}" if asked.size != "small" else ""
            )
            record = {"command": command, "sizes": asdict(size), "crowded": _crowded(made), **made}
            write_record(folder / RECORD, record | {"environment": environment(1)})
        sys.stdout.write(write_page(report, folder, folder))
    except ApproxError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
