"""The experiments of papers with the mechanisms of this project, small: a command for each experiment.

    python bench/papers.py copy -o reports/papers
    python bench/papers.py convergence -o reports/papers
    python bench/papers.py generation -o reports/papers
    python bench/papers.py layer -o reports/papers
    python bench/papers.py reversible -o reports/papers
    python bench/papers.py modes -o reports/papers

Models are GPT-2s of transformers with random weights, converted in memory; those of `copy` and `convergence`, which share their
trainings, and of `modes` are trained here from scratch. Everything runs on one thread of a CPU, and times are CPU seconds, since other programs
hardly change them. Each result is kept in `parts/` as soon as it is measured, so that the same command continues after a stop.
Writes `record.json`, `report.md` and pictures into a folder of the experiment; `--redraw` rebuilds the last two.

Source: Katharopoulos, Vyas, Pappas, Fleuret, 2020, Transformers are RNNs, arXiv 2006.16236; the reversible blocks are those of
Kitaev, Kaiser, Levskaya, 2020, Reformer, arXiv 2001.04451, and the residual block and its recomputation those of Child, Gray,
Radford, Sutskever, 2019, Generating Long Sequences with Sparse Transformers, arXiv 1904.10509.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from scipy.stats import t as student
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
from approx.publishing.plots import colour_of
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
# The activation of sparse transformers, by its name in transformers.
SPARSE = "quick_gelu"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Model:
    """A GPT-2.

    Attributes:
        layers: Its layers.
        hidden: Its size.
        heads: Its heads.
        inner: Size of its MLPs; four times the size if None.
        activation: Their activation. With `SPARSE`, x sigmoid(1.702 x), a layer is the residual block of sparse transformers,
            whose last weights of attention and MLP, as in every GPT-2, begin smaller by 1 / sqrt(2 layers).
        causal: Whether a token sees only those before it.
        deviation: Standard deviation of its weights at first.
    """

    layers: int
    hidden: int
    heads: int
    inner: int | None = None
    activation: str = "gelu_new"
    causal: bool = True
    deviation: float = 0.02


@dataclass(frozen=True)
class Modes:
    """How large the comparison of modes is.

    Attributes:
        model: The encoder.
        length: Symbols to copy.
        stride: Stride of all patterns. The distance of a symbol and its copy, length + 1, is no multiple of it, and larger.
        summary: Columns of a summary.
        batch: Sequences of a step.
        every: Steps from one point of a curve to the next.
        most: Steps after which a training ends in any case.
        seeds: Trainings of each contender.
        tested: Sequences of a test.
    """

    model: Model
    length: int
    stride: int
    summary: int
    batch: int
    every: int
    most: int
    seeds: int
    tested: int


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
        modes: The comparison of modes, with the same learning rate.
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
    modes: Modes


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
        modes=Modes(
            Model(2, 16, 2, activation=SPARSE, causal=False, deviation=0.1),
            length=6,
            stride=4,
            summary=1,
            batch=8,
            every=2,
            most=4,
            seeds=2,
            tested=16,
        ),
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
        modes=Modes(
            Model(2, 64, 4, 64, activation=SPARSE, causal=False, deviation=0.1),
            length=24,
            stride=7,
            summary=2,
            batch=16,
            every=20,
            most=240,
            seeds=3,
            tested=1024,
        ),
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
        modes=Modes(
            Model(4, 256, 8, activation=SPARSE, causal=False, deviation=0.1),
            length=512,
            stride=32,
            summary=8,
            batch=32,
            every=100,
            most=10_000,
            seeds=5,
            tested=4096,
        ),
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
        activation_function=model.activation,
        initializer_range=model.deviation,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=words - 1,
        eos_token_id=words - 1,
    )
    # Masks follow the config, attention modules their own attribute.
    vars(config)["is_causal"] = model.causal
    made = GPT2LMHeadModel(config)
    for block in made.transformer.h:
        attention: Any = block.attn
        attention.is_causal = model.causal
    if contender.mechanism is not None:
        convert(made, Plan.of(contender.mechanism, **contender.settings))
    return made


def to_copy(size: Size | Modes, count: int, generator: torch.Generator) -> Tensor:
    """Random symbols, a separator, and the same symbols again, [count, 2 length + 1]."""
    symbols = torch.randint(SYMBOLS, (count, size.length), generator=generator)
    return torch.cat([symbols, torch.full((count, 1), SYMBOLS), symbols], 1)


def copied(size: Size, model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the symbols after the separator, each given the true ones before, and these symbols."""
    states = model.transformer(ids, use_cache=False).last_hidden_state[:, size.length : -1]
    return model.lm_head(states), ids[:, size.length + 1 :]


def train(size: Size, contender: Contender, heads: int, seed: int) -> dict[str, Any]:
    """Train a model of so many heads to copy, see `taught`."""
    shape = replace(size.copier, heads=heads)
    model = make(shape, contender, positions=2 * size.length + 1, words=SYMBOLS + 1, seed=seed)

    def answered(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return copied(size, model, to_copy(size, count, generator))

    return {"name": contender.name, "heads": heads, **taught(model, answered, size, size.rate, seed)}


def taught(
    model: Any,
    answered: Callable[[int, torch.Generator], tuple[Tensor, Tensor]],
    how: Size | Modes,
    rate: float,
    seed: int,
) -> dict[str, Any]:
    """Train a model until it is right or `most` steps are over, and test it on new sequences.

    Args:
        model: The model.
        answered: From a number of sequences and a generator to the model's logits and the symbols wanted, the same number for each.
        how: The batch, the steps and the number of tested sequences.
        rate: The learning rate.
        seed: Of the sequences.

    Returns:
        The curve, [[step, loss, share right, CPU seconds]], whose losses and shares are means over new sequences since the point
        before; and how many of the tested sequences have 0, 1, ... symbols right.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    curve: list[list[float]] = []
    seen: list[tuple[float, float]] = []
    begun = time.process_time()
    for step in range(1, how.most + 1):
        out, wanted = answered(how.batch, generator)
        loss = F.cross_entropy(out.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if hasattr(model, "step_attention"):
            model.step_attention(step)
        seen.append((loss.item(), float((out.argmax(-1) == wanted).float().mean())))
        if step % how.every == 0:
            curve.append([step, *np.mean(seen, 0).tolist(), time.process_time() - begun])
            seen.clear()
            if all(share >= RIGHT for _, _, share, _ in curve[-2:]) and len(curve) > 1:
                break
    model.eval()
    test = torch.Generator().manual_seed(2**32 + seed)
    right: list[int] = []
    with torch.inference_mode():
        for first in range(0, how.tested, how.batch):
            out, wanted = answered(min(how.batch, how.tested - first), test)
            right += (out.argmax(-1) == wanted).sum(1).tolist()
    return {
        "seed": seed,
        "curve": curve,
        "sequences_by_right": np.bincount(right, minlength=how.length + 1).tolist(),
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
    """Bytes that autograd keeps and CPU seconds of a step with every kind of block, and how far gradients differ in float64.

    Recomputation is compared with plain blocks, reversible ones with their own form under ordinary autograd.
    """
    shape = Model(depth, size.copier.hidden, size.copier.heads, activation=SPARSE)
    model = make(shape, contender, positions=2 * size.length + 1, words=SYMBOLS + 1, seed=0)
    ids = to_copy(size, size.batch, torch.Generator().manual_seed(0))
    kept: dict[str, int] = {}
    seconds: dict[str, list[float]] = {name: [] for name in _BLOCKS}
    for name, logits in _BLOCKS.items():
        with reversible.held_by_autograd(model.parameters()) as held:
            _loss(logits(model, ids), ids).backward()
        kept[name] = held.peak
    for _ in range(size.rounds):
        for name, logits in _BLOCKS.items():
            begun = time.process_time()
            _loss(logits(model, ids), ids).backward()
            seconds[name].append(time.process_time() - begun)
    model.double()
    exact = {"recomputed": plain_logits, "reversible": partial(reversible.logits, run=reversible.plain)}
    differences = {}
    for name, ordinary in exact.items():
        parameters = list(model.parameters())
        gradients = []
        for logits in (ordinary, _BLOCKS[name]):
            # Recomputation of the reentrant kind works with `backward` alone.
            model.zero_grad()
            _loss(logits(model, ids), ids).backward()
            gradients.append([each.grad for each in parameters])
        largest = max(float(each.abs().max()) for each in gradients[0])
        differ = max(float((one - other).abs().max()) for one, other in zip(*gradients, strict=True))
        differences[name] = differ / largest
    return {"name": contender.name, "depth": depth, "kept": kept, "seconds": seconds, "differences": differences}


def plain_logits(model: Any, ids: Tensor) -> Tensor:
    """The logits of a GPT-2 with its own blocks."""
    return model(ids, use_cache=False).logits


def recomputed_logits(model: Any, ids: Tensor) -> Tensor:
    """The same, if each block keeps its input alone and is computed again in the backward pass."""
    # Of the two kinds, what is computed again in the reentrant one is counted by the hooks of autograd.
    model.gradient_checkpointing_enable({"use_reentrant": True})
    try:
        return plain_logits(model.train(), ids)
    finally:
        model.gradient_checkpointing_disable()


_BLOCKS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": plain_logits,
    "recomputed": recomputed_logits,
    "reversible": partial(reversible.logits, run=reversible.reversible),
}


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def without_activations(size: Size, folder: Path) -> dict[str, Any]:
    """Train one step with plain blocks, with recomputation, and with reversible blocks, at every depth."""
    todo = list(itertools.product((SOFTMAX, LINEAR), size.depths))
    rows = [
        _kept(folder, f"blocks {one.name} {depth}", lambda c=one, d=depth: backward(size, c, d))
        for one, depth in track(todo, "measuring", console=Console(stderr=True))
    ]
    return {"rows": rows}


STEPPED = ("strided", "fixed", "ltr", "rtl")
MODES = ("merged", "interleave", "heads")


def of_modes(size: Modes) -> list[Contender]:
    """Softmax, and each pattern in its modes.

    `interleave` and `heads` are there twice: with the settings of `merged`, where a query sees fewer keys, and with those that come
    closest to as many keys as it sees in `merged`: a longer stride of `strided`, more columns in a summary of the others.
    """
    found = [SOFTMAX]
    for name in STEPPED:
        least = {"stride": size.stride} | ({} if name == "strided" else {"summary": size.summary})
        knob, largest = ("stride", size.length) if name == "strided" else ("summary", size.stride)
        for mode in MODES:
            found.append(Contender(f"{name} {mode}", name, least | {"mode": mode}))
        wanted = keys_seen(size, found[-3])
        for mode in MODES[1:]:
            wider = [
                Contender(f"{name} {mode}, as many keys", name, least | {"mode": mode, knob: value})
                for value in range(least[knob], largest + 1)
            ]
            found.append(min(wider, key=lambda one: abs(keys_seen(size, one) - wanted)))
    return found


def keys_seen(size: Modes, contender: Contender) -> float:
    """Keys that a query sees, averaged over queries, heads and layers."""
    length = 2 * size.length + 1
    if contender.mechanism is None:
        return float(length)
    kind, shape = MECHANISMS[contender.mechanism], size.model
    seen = []
    for layer in range(shape.layers):
        settings = kind.for_layer(dict(contender.settings), layer)
        mechanism = kind(shape.heads, shape.hidden // shape.heads, causal=False, scale=1.0, **settings)
        seen.append((1 - mechanism.approximated_pairs(length)) * length)
    return statistics.fmean(seen)


def encode(size: Size, contender: Contender, seed: int) -> dict[str, Any]:
    """Train an encoder to write the symbols of the first half in place of the masks of the second, see `taught`."""
    how = size.modes
    model = make(how.model, contender, positions=2 * how.length + 1, words=SYMBOLS + 2, seed=seed)

    def answered(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        ids = to_copy(how, count, generator)
        wanted = ids[:, how.length + 1 :]
        hidden = torch.cat([ids[:, : how.length + 1], torch.full_like(wanted, SYMBOLS + 1)], 1)
        states = model.transformer(hidden, use_cache=False).last_hidden_state
        return model.lm_head(states[:, how.length + 1 :]), wanted

    made = {"name": contender.name, "mechanism": contender.mechanism, "settings": dict(contender.settings)}
    return made | {"keys": keys_seen(how, contender), **taught(model, answered, how, size.rate, seed)}


def modes(size: Size, folder: Path) -> dict[str, Any]:
    """Train softmax and each pattern in its modes."""
    todo = list(itertools.product(range(size.modes.seeds), of_modes(size.modes)))
    made = [
        _kept(folder, f"mode {one.name} {seed}", lambda c=one, s=seed: encode(size, c, s))
        for seed, one in track(todo, "training", console=Console(stderr=True))
    ]
    return {"trainings": made}


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


def _colour(name: str) -> str:
    """The colour of an attention, that of its mechanism."""
    return colour_of("full" if name == SOFTMAX.name else name)


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
            for contender, _, trainings in _named(made["trainings"]):
                for training in trainings:
                    points = [(point[column], max(point[1], LEAST_LOSS)) for point in training["curve"]]
                    axes.plot(
                        *zip(*points, strict=True),
                        color=_colour(contender),
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
                # Mechanisms of one colour differ in style.
                style = 10 * [_colour(other) for other in LAYERS[:number]].count(_colour(name))
                line(axes, style, name, list(found.items()), _colour(name))
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
    """The page of reversible blocks and recomputation."""
    head = ["attention", "layers", "kept by plain blocks, MB", "with recomputation, MB", "by reversible blocks, MB"]
    head += [
        "time with recomputation, plain = 1",
        "of reversible blocks",
        "gradients differ by",
        "of reversible blocks by",
    ]
    rows = []
    for row in made["rows"]:
        seconds = {name: statistics.median(row["seconds"][name]) for name in _BLOCKS}
        rows.append(
            [
                row["name"],
                f"{row['depth']}",
                *(f"{row['kept'][name] / 1e6:.2f}" for name in _BLOCKS),
                *(f"{seconds[name] / seconds['plain']:.2f}" for name in row["differences"]),
                *(f"{difference:.0e}" for difference in row["differences"].values()),
            ]
        )
    size = made["sizes"]
    text = (
        f"A step of the copy task in GPT-2s of {size['copier']['heads']} heads of {size['copier']['hidden'] // size['copier']['heads']}, batch "
        f"{size['batch']}, {2 * size['length'] + 1} tokens. Plain blocks are those of sparse transformers; recomputation is transformers' "
        "`gradient_checkpointing_enable`, by which each block keeps its input alone; of reversible blocks only the last outputs are kept. *Kept* is the most that "
        "autograd holds for the backward pass at any time, without parameters. Gradients differ in float64 by the largest difference over "
        "the largest gradient: from those of plain blocks, and for reversible blocks from those of their own form under ordinary autograd. "
        f"Times are medians of {size['rounds']} interleaved steps."
    )
    return _page("Reversible blocks and recomputation", text, table(head, rows), made)


def over_seeds(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of one value for each seed, and its 95 % interval by Student's t: each was tested on other sequences, so it covers these too."""
    mean, count = statistics.fmean(values), len(values)
    half = float(student.ppf(0.975, count - 1)) * statistics.stdev(values) / count**0.5
    return mean, mean - half, mean + half


def _shares(trainings: list[dict[str, Any]]) -> list[float]:
    """Percent of symbols right in each training."""
    return [100 * share for share in accuracy(trainings)[2]]


def modes_report(made: dict[str, Any], output: Path) -> str:
    """The page of modes: each beside its cost, their differences, and share right against keys."""
    cells: dict[str, list[dict[str, Any]]] = {}
    for training in made["trainings"]:
        cells.setdefault(training["name"], []).append(training)
    head = [
        "attention",
        "keys a query sees",
        "symbols right, %",
        "95 % interval",
        "each seed",
        "steps to 99 %",
        "CPU ms a step",
    ]
    rows = []
    for name, trainings in cells.items():
        shares, (_, (low, high), _) = _shares(trainings), accuracy(trainings)
        mean, least, most = over_seeds(shares)
        # Seeds that are all right do not make it certain.
        low, high = max(min(least, 100 * low), 0.0), min(max(most, 100 * high), 100.0)
        reached = [next((point for point in each["curve"] if point[2] >= 0.99), None) for each in trainings]
        pace = statistics.median(1e3 * each["curve"][-1][3] / each["curve"][-1][0] for each in trainings)
        rows.append(
            [
                name,
                f"{trainings[0]['keys']:.1f}",
                f"{mean:.2f}",
                f"{low:.2f} – {high:.2f}",
                ", ".join(f"{one:.2f}" for one in shares),
                ", ".join(f"{point[0]:.0f}" if point else "–" for point in reached),
                f"{pace:.1f}",
            ]
        )
    size = made["sizes"]["modes"]
    text = (
        f"{size['length']} of {SYMBOLS} symbols, a separator, and a mask for each symbol, which an encoder is to fill in: bidirectional, so that one task "
        f"serves all four patterns. A symbol and its mask are {size['length'] + 1} tokens apart, farther than a window or block reaches and no "
        f"multiple of the stride, {size['stride']}: no single step leads from one to the other, unless the symbol lies in a summary's columns, and "
        "the two steps do, by way of tokens between. GPT-2s without "
        f"the causal mask, {_shape(size['model'])}, with the residual block of sparse transformers, are trained from scratch on {size['batch']} new sequences a step, "
        f"until {100 * RIGHT:.2f} % are right or for {size['most']} steps; {size['seeds']} seeds each, tested on {size['tested']:,} new sequences. "
        f"Summaries have {size['summary']} columns. Intervals are over seeds, each with its own test sequences, by Student's t. *As many keys* has the "
        "stride, or the columns, that come closest to the keys of `merged`; with more columns, more of the symbols lie in them."
    )
    _draw_modes(cells, output / "keys.svg")
    parts = [_answer(cells), table(head, rows), _differences(cells), "![symbols right against keys](keys.svg)"]
    return _page("Attention modes", text, "\n\n".join(parts), made)


def _pairs(suffix: str) -> list[tuple[str, str]]:
    """Names of modes to compare, with the settings of `merged` or with as many keys."""
    interleave, heads = (f"{mode}{suffix}" for mode in MODES[1:])
    return [(interleave, MODES[0]), (heads, MODES[0]), (interleave, heads)]


def _apart(
    cells: dict[str, list[dict[str, Any]]], patterns: Sequence[str], one: str, other: str
) -> tuple[float, float, float]:
    """Mean difference of two modes in percentage points, over patterns and seeds, pairs of the same weights and sequences."""
    return over_seeds(
        [
            here - there
            for name in patterns
            for here, there in zip(_shares(cells[f"{name} {one}"]), _shares(cells[f"{name} {other}"]), strict=True)
        ]
    )


def _differences(cells: dict[str, list[dict[str, Any]]]) -> str:
    """A table of the differences of modes for each pattern and for all."""
    rows = []
    for patterns in [*((name,) for name in STEPPED), STEPPED]:
        for suffix, settings in (("", "as merged"), (", as many keys", "as many keys")):
            cell = [patterns[0] if len(patterns) == 1 else "all four", settings]
            for one, other in _pairs(suffix):
                mean, low, high = _apart(cells, patterns, one, other)
                text = f"{mean:+.1f} ({low:+.1f} – {high:+.1f})"
                cell.append(f"**{text}**" if low > 0 or high < 0 else text)
            rows.append(cell)
    return table(
        ["difference in points", "settings", "interleave − merged", "heads − merged", "interleave − heads"],
        rows,
        words=2,
    )


def _answer(cells: dict[str, list[dict[str, Any]]]) -> str:
    """The sentences that say which mode is best, from the differences over all patterns."""
    sentences = []
    for suffix, settings in (("", "With the same settings"), (", as many keys", "With as many keys")):
        names = [MODES[0], *(f"{mode}{suffix}" for mode in MODES[1:])]
        best, second = sorted(
            names, key=lambda mode: -statistics.fmean(x for name in STEPPED for x in _shares(cells[f"{name} {mode}"]))
        )[:2]
        mean, low, high = _apart(cells, STEPPED, best, second)
        lead = (
            f"{mean:.1f} points ({low:+.1f} – {high:+.1f}) ahead of {second.split(',')[0]}, over all patterns and seeds"
        )
        verdict = "is best" if low > 0 else "is first, but not by more than chance"
        sentences.append(f"**{settings}, {best.split(',')[0]} {verdict}**: {lead}.")
    return " ".join(sentences)


def _draw_modes(cells: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Share right against keys: a point for each cell, a line from the settings of `merged` to as many keys."""
    with figure(path, (7, 3.8)) as axes:
        softmax = cells[SOFTMAX.name]
        line(axes, 0, SOFTMAX.name, [(softmax[0]["keys"], statistics.fmean(_shares(softmax)))], _colour(SOFTMAX.name))
        for name in STEPPED:
            for number, mode in enumerate(MODES):
                found = [cells[each] for each in (f"{name} {mode}", f"{name} {mode}, as many keys") if each in cells]
                points = [(each[0]["keys"], statistics.fmean(_shares(each))) for each in found]
                line(axes, 10 * number, f"{name} {mode}", points, _colour(name))
        axes.set_xlabel("keys a query sees")
        axes.set_ylabel("symbols right, %")
        axes.grid(alpha=0.3)


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
    "modes": (modes, modes_report),
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
