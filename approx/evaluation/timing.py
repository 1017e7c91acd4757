"""Time calls: inputs, warm-up, interleaved rounds, rejection of disturbed ones, and peak memory."""

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.autograd.profiler_util import MEMORY_EVENT_NAME

from approx.errors import ApproxError, Exit
from approx.tasks.task import Example, Task


def text_inputs(
    task: Task, examples: Sequence[Example], processor: Any, device: torch.device | str
) -> Callable[[int, int], dict[str, Tensor]]:
    """Make inputs of any batch size and length from the texts of a task.

    The cost of clustering, hashing and top-k depends on the data, so random tokens would not be representative. Rows
    begin and end with the tokenizer's special tokens; short texts are repeated.

    Args:
        task: The task, whose `encode` tokenises an example.
        examples: At least one.
        processor: The tokenizer.
        device: Device of the tensors.

    Returns:
        (batch size B, tokens L) -> `{"input_ids": [B, L]}`.

    Raises:
        ApproxError: if the texts have only special tokens.
    """
    rows = [window["input_ids"] for example in examples for window in task.encode(example, processor)]
    special = set(processor.all_special_ids)
    content = [token for token in chain.from_iterable(rows) if token not in special]
    if not content:
        raise ApproxError(f"The texts of {task.name} have no tokens to time on.", Exit.UNAVAILABLE)
    first = rows[0]
    begin = first[:1] if first[0] in special else []
    end = first[-1:] if first[-1] in special and len(first) > 1 else []

    def make(batch: int, length: int) -> dict[str, Tensor]:
        stream = cycle(content)
        body = max(length - len(begin) - len(end), 0)
        made = [(begin + list(islice(stream, body)) + end)[:length] for _ in range(batch)]
        return {"input_ids": torch.tensor(made, device=device)}

    return make


def sound_inputs(
    task: Task,
    examples: Sequence[Example],
    processor: Any,
    samples: Callable[[int], int],
    device: torch.device | str,
    dtype: torch.dtype,
) -> Callable[[int, int], dict[str, Tensor]]:
    """Make inputs of any batch size and length from the joined recordings of a task; short ones are repeated.

    Args:
        task: The task, whose `encode` and `collate` make samples of an example.
        examples: At least one.
        processor: A processor with a feature extractor.
        samples: Number of positions -> number of samples.
        device: Device of the tensors.
        dtype: Dtype of the tensors.

    Returns:
        (batch size B, positions L) -> `{"input_values": [B, samples(L)]}`.
    """

    def make(batch: int, length: int) -> dict[str, Tensor]:
        size = samples(length)
        parts, missing = [], batch * size
        for example in cycle(examples):
            parts.append(task.collate(task.encode(example, processor), processor)[task.input_name][0, :missing])
            missing -= parts[-1].numel()
            if not missing:
                break
        return {task.input_name: torch.cat(parts).view(batch, size).to(device, dtype)}

    return make


def image_inputs(
    task: Task, examples: Sequence[Example], processor: Any, device: torch.device | str, dtype: torch.dtype
) -> Callable[[int, int], dict[str, Tensor]]:
    """Make inputs of any batch size from the images of a task, whose length is fixed.

    Returns:
        (batch size B, ignored) -> `{"pixel_values": [B, channels, height, width]}`.
    """

    def make(batch: int, length: int) -> dict[str, Tensor]:
        chosen = islice(cycle(examples), batch)
        made = task.collate([task.encode(example, processor)[0] for example in chosen], processor)
        return {task.input_name: made[task.input_name].to(device, dtype)}

    return make


def written_inputs(
    task: Task, examples: Sequence[Example], processor: Any, model: Any, usual: Callable[[int, int], dict[str, Tensor]]
) -> Callable[[int, int], dict[str, Tensor]]:
    """Make inputs of a model that writes what it hears: recordings of one length, and random tokens that are written.

    Args:
        task: The task, whose `encode` and `collate` make the input of an example.
        examples: At least one.
        processor: A processor with a feature extractor.
        model: The model.
        usual: Makes random inputs of a batch size and a number of tokens, whose tokens are taken.

    Returns:
        (batch size B, tokens L) -> `{"input_features": [B, bands, frames], "decoder_input_ids": [B, L]}`.
    """

    def make(batch: int, length: int) -> dict[str, Tensor]:
        chosen = islice(cycle(examples), batch)
        heard = task.collate([task.encode(example, processor)[0] for example in chosen], processor)
        name = model.main_input_name
        return {**usual(batch, length), name: heard[name].to(model.device, model.dtype)}

    return make


def peak_mb(call: Callable[[], object], device: torch.device) -> float:
    """Measure the peak memory of one untimed call in megabytes (1e6 bytes), beyond what was allocated before.

    CUDA: the caching allocator's own peak. CPU: the peak of the running sum of all allocations and releases that
    PyTorch's allocator reports to its profiler. It counts tensors and temporaries to the byte and is reproducible,
    unlike the resident set of the process, which keeps freed pages. Scratch space of MKL and oneDNN is not counted.
    """
    gc.collect()
    if device.type == "cuda":
        resident = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - resident) / 1e6

    # The profiler's native logger writes a line to stderr at every start unless this turns it off.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        call()
    # The stubs lack `nbytes`, and do not know that a finished profile has results.
    events: list[Any] = profile.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    total = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == MEMORY_EVENT_NAME:
            total += event.nbytes()
            peak = max(peak, total)
    return peak / 1e6


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on CPU or GPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = (
        "not enough memory",
        "can't allocate memory",
        "DefaultCPUAllocator",
        "out of memory",
        "ALLOC_FAILED",
    )
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


@contextmanager
def memory_limit(device: torch.device) -> Iterator[None]:
    """Make running out of CPU memory raise an exception within the context.

    Linux overcommits memory and kills the process that uses it. A limit on the process's data, at its current size
    plus the available memory, makes the allocation fail instead. Does nothing on CUDA, which raises by itself, and
    on systems without /proc.
    """
    status = Path("/proc/self/status")
    if device.type != "cpu" or not status.exists():
        yield
        return
    import resource

    current = next(int(line.split()[1]) * 1024 for line in status.open() if line.startswith("VmData:"))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = current + available_bytes(device)
    if soft != resource.RLIM_INFINITY:
        limit = min(limit, soft)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def available_bytes(device: torch.device) -> int:
    """Return the available memory of a device: on CPU the machine's or the container's, whichever is less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = psutil.virtual_memory().available
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return max(available, 0)


# Minimum duration of a repetition, well above the noise of the clock.
BLOCK_MS = 10.0
# A repetition with less than this share of the cores it can use was disturbed by other processes.
GATE = 0.85
# Warm-up ends when two consecutive medians, of this many calls each, agree to this fraction.
WINDOW = 3
AGREEMENT = 0.02


@dataclass(frozen=True)
class Sample:
    """One repetition: milliseconds per call, and CPU time as a share of all threads' time."""

    ms: float
    busy: float


def timed(call: Callable[[], object], repeats: int, device: torch.device) -> Sample:
    """Time `repeats` consecutive calls and return their mean.

    On CUDA, events measure the device's time; on the CPU, wall clock and CPU time of all threads are measured.
    """
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize(device)
        return Sample(begin.elapsed_time(end) / repeats, 1.0)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(repeats):
        call()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Sample(wall * 1e3 / repeats, cpu / max(wall * torch.get_num_threads(), 1e-9))


def warm_up(call: Callable[[], object], device: torch.device, seconds: float) -> tuple[float, float]:
    """Call until the time is stable or `seconds` have passed.

    Returns:
        Milliseconds of the first call, which compiles, allocates and fills caches, and the median of the last calls.
    """
    first = timed(call, 1, device).ms
    times: list[float] = []
    begun = time.perf_counter()
    while True:
        times.append(timed(call, 1, device).ms)
        last, before = times[-WINDOW:], times[-2 * WINDOW : -WINDOW]
        middle = statistics.median(last)
        stable = len(before) == WINDOW and abs(middle / statistics.median(before) - 1) < AGREEMENT
        if stable or time.perf_counter() - begun > seconds:
            return first, middle


def repeats_for(ms: float, block_ms: float = BLOCK_MS) -> int:
    """Return the number of calls that fill a repetition of `block_ms` if each takes `ms`."""
    return max(1, math.ceil(block_ms / max(ms, 1e-3)))


def undisturbed(samples: list[Sample]) -> np.ndarray:
    """Return which repetitions of one call were undisturbed, [rounds] bool.

    A call may use only some of the threads, so its share of CPU time is compared with its own 90th percentile, not with
    all cores.
    """
    busy = np.array([sample.busy for sample in samples])
    return busy >= GATE * np.quantile(busy, 0.9) if len(busy) else np.zeros(0, dtype=bool)


class Neighbours:
    """Measures the CPU time of other processes from its construction to `crowded()`.

    `undisturbed` compares a call with its own best repetitions, so it cannot see a constant load.
    """

    def __init__(self) -> None:
        self._begun = self._now()

    def crowded(self) -> bool:
        """Whether other processes left fewer cores than this process's threads can use."""
        wall, busy, mine = (now - then for now, then in zip(self._now(), self._begun, strict=True))
        taken = max(busy - mine, 0.0) / max(wall, 1e-9)
        return (psutil.cpu_count() or 1) - taken < GATE * torch.get_num_threads()

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times = psutil.cpu_times()._asdict()
        # Linux counts guest time inside user time as well.
        resting = ("idle", "iowait", "guest", "guest_nice")
        busy = sum(seconds for name, seconds in times.items() if name not in resting)
        return time.perf_counter(), busy, time.process_time()


def wait_idle(seconds: float, look: float = 1.0) -> bool:
    """Wait until other processes leave this one the cores that its threads can use.

    Args:
        seconds: Maximum wait.
        look: Seconds over which the load is measured.

    Returns:
        Whether the cores were free in the end.
    """
    begun = time.perf_counter()
    while True:
        neighbours = Neighbours()
        time.sleep(look)
        if not neighbours.crowded():
            return True
        if time.perf_counter() - begun > seconds:
            return False


T = TypeVar("T")

OK, OUT_OF_MEMORY = "ok", "out of memory"


@dataclass(eq=False)
class Runner:
    """One contender at one batch size and length: its call and its measurements.

    Args:
        call: Runs one forward pass, or decodes all new tokens.
        begin: Prepares a call, untimed; then every repetition is one call. None if calls need no preparation.
        turns: Turns in each round; a runner with two turns can be compared with itself.
        tokens: Tokens that a call decodes.
        prompts: Calls that read the prompt; several where implementations compete.
    """

    call: Callable[[], object]
    begin: Callable[[], object] | None = None
    turns: int = 1
    tokens: int | None = None
    status: str = OK
    first_ms: float | None = None
    peak_mb: float | None = None
    cache_mb: float | None = None
    prompts: list[Callable[[], object]] = field(default_factory=list)
    prompt_ms: float | None = None
    chosen: dict[str, str] | None = None
    repeats: int = 1
    rounds: list[list[Sample]] = field(default_factory=list)

    def prepared(self) -> Callable[[], object]:
        """The call, after its preparation."""
        if self.begin:
            self.begin()
        return self.call

    def attempt(self, action: Callable[[], T]) -> T | None:
        """Run an action; if memory runs out, set the status and return None."""
        try:
            return action()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.status = OUT_OF_MEMORY
        # Outside the handler, whose traceback keeps the tensors of the failed call alive.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None

    def by_turn(self) -> tuple[np.ndarray, np.ndarray]:
        """Return milliseconds [turns, rounds] and which of them were undisturbed."""
        samples = [sample for turns in self.rounds for sample in turns]
        shape = (len(self.rounds), self.turns)
        return (
            np.array([sample.ms for sample in samples]).reshape(shape).T,
            undisturbed(samples).reshape(shape).T,
        )

    def by_round(self) -> tuple[np.ndarray, np.ndarray]:
        """Return milliseconds [rounds], the mean of a round's undisturbed turns, and which rounds have any."""
        ms, good = self.by_turn()
        mean = (ms * good).sum(0) / np.maximum(good.sum(0), 1)
        return np.asarray(np.where(good.any(0), mean, ms.mean(0))), np.asarray(good.any(0))


# Rounds of a race that has no time left.
_FEWEST_ROUNDS = 3
# Readings of a prompt, whose median counts.
_READINGS = 3


def read_prompts(
    runners: Sequence[Runner], device: torch.device, progress: Callable[[int, int], None] | None = None
) -> None:
    """Time the reading of prompts, contenders in turns; of several implementations of one contender the fastest counts.

    `progress` is called before each reading with how many are done, and all.
    """
    times: dict[tuple[int, int], list[float]] = {}
    done, total = 0, _READINGS * sum(len(runner.prompts) for runner in runners if runner.status == OK)
    for _ in range(_READINGS):
        for number, runner in enumerate(runners):
            for way, read in enumerate(runner.prompts if runner.status == OK else ()):
                if progress:
                    progress(done, total)
                done += 1
                if sample := runner.attempt(lambda read=read: timed(read, 1, device)):
                    times.setdefault((number, way), []).append(sample.ms)
    for number, runner in enumerate(runners):
        medians = [float(np.median(ms)) for (of, _), ms in times.items() if of == number]
        runner.prompt_ms = min(medians, default=None) if runner.status == OK else None


def race(
    runners: Sequence[Runner],
    device: torch.device,
    *,
    rounds: int,
    seconds: float,
    warm_up_seconds: float,
    block_ms: float = BLOCK_MS,
    memory: bool = True,
    until: float = math.inf,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Warm up every runner, measure its memory, then time all of them in rounds.

    The order rotates by one place per round (A B C, B C A, …), so that no runner always follows the same one.

    Args:
        runners: Updated in place; a runner that runs out of memory drops out.
        device: The device.
        rounds: Minimum number of rounds; disturbed ones are repeated, at most doubling the number.
        seconds: Minimum duration of all rounds.
        warm_up_seconds: Maximum warm-up of each runner.
        block_ms: Minimum duration of a repetition.
        memory: Whether to measure memory, which takes one more call.
        until: When `time.monotonic` is past this, no further round begins, except for the first three.
        progress: Called first, and after each warm-up and each turn, with their number and how many there will be.
    """
    order = _order(runners)
    made, expected = -1, rounds

    def step() -> None:
        nonlocal made
        made += 1
        if progress:
            progress(made, max(made, len(runners) + expected * len(order)))

    step()

    for runner in runners:
        if runner.status != OK:
            continue
        # Warm-up and memory include the preparation, if there is one.
        call = (lambda runner=runner: runner.prepared()()) if runner.begin else runner.call
        warm = runner.attempt(lambda call=call: warm_up(call, device, warm_up_seconds))
        if warm:
            runner.first_ms, ms = warm
            runner.repeats = 1 if runner.begin else repeats_for(ms, block_ms)
            if memory:
                runner.peak_mb = runner.attempt(lambda call=call: peak_mb(call, device))
        step()

    gc.collect()
    gc.disable()
    try:
        begun, done = time.perf_counter(), 0
        while any(runner.status == OK for runner in runners):
            _round(order[done % len(order) :] + order[: done % len(order)], device, step)
            done += 1
            spent = time.perf_counter() - begun
            expected = max(rounds, math.ceil(seconds * done / spent))
            enough = done >= rounds and spent >= seconds
            late = done >= _FEWEST_ROUNDS and time.monotonic() > until
            if late or (enough and (done >= 2 * rounds or _believable(runners) >= rounds)):
                break
    finally:
        gc.enable()


def _order(runners: Sequence[Runner]) -> list[Runner]:
    """Return the order of turns; second turns come half a round after the first, so that drift shows."""
    once, twice = list(runners), [runner for runner in runners if runner.turns == 2]
    for runner in twice:
        place = once.index(runner) + 1 + len(once) // 2
        once.insert(place % (len(once) + 1), runner)
    return once


def _round(order: list[Runner], device: torch.device, step: Callable[[], None]) -> None:
    seen: dict[Runner, list[Sample]] = {runner: [] for runner in order}
    for runner in order:
        if runner.status == OK:
            sample = runner.attempt(lambda runner=runner: timed(runner.prepared(), runner.repeats, device))
            if sample:
                seen[runner].append(sample)
        step()
    for runner, samples in seen.items():
        if runner.status == OK:
            runner.rounds.append(samples)


def _believable(runners: Sequence[Runner]) -> int:
    """Return the smallest number of undisturbed rounds of any runner."""
    return min((int(runner.by_round()[1].sum()) for runner in runners if runner.status == OK), default=0)
