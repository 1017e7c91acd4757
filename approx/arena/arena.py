"""Train one encoder from scratch for each task, mechanism and seed, time a training step of each, and compare them.

Source: Tay et al., 2021, "Long Range Arena: A Benchmark for Efficient Transformers", arXiv 2011.04006.
"""

import math
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from approx.arena import results
from approx.arena.options import EXACT, ArenaStage, Size, TaskName
from approx.arena.results import ArenaRecord, Contestant, TaskResult, Trial
from approx.arena.tasks import PROCESSOR, Arena, Material, material
from approx.checkpoints.atomic_folder import CLAIM, claim, locked_output, refuse_unclaimed, remove
from approx.conversion import surgery
from approx.errors import ApproxError, Exit, did_you_mean
from approx.evaluation.evaluate import place, predict
from approx.evaluation.inputs import Subject, prepare
from approx.evaluation.record import environment, in_lines
from approx.evaluation.statistics import mean_interval, ratio_interval
from approx.evaluation.timing import OK, Neighbours, Runner, is_out_of_memory, memory_limit, race
from approx.finetuning.trainer import Measure, Phase, TrainingData, train
from approx.mechanisms import MECHANISMS
from approx.pipeline.store import Here, Stage, Store, complete, stage_key
from approx.planning.plan import Plan, seeded
from approx.progress import Progress, silent
from approx.tasks.task import Example, Split
from approx_kernels.dispatch.implementation import chosen_in
from approx_kernels.runtime.atomic_file import write_whole

_WHAT = "a comparison from scratch"
# A window of the paper's lengths divided by this is as wide as what is usual for a converted model.
_WINDOWS = 16
_NARROWEST = 4
_WARM_UP_SECONDS = 2.0


@dataclass(frozen=True)
class _Contender:
    """A mechanism at one size.

    Args:
        name: `exact`, or the name of a mechanism.
        settings: Its settings that are not its defaults.
        size: The encoder and its training.
    """

    name: str
    settings: dict[str, Any]
    size: Size

    def encoder(self, task: Arena, seed: int, calibration: dict[str, Tensor] | None = None) -> Any:
        """A new encoder with the mechanism in every layer."""
        model = task.encoder(self.size, seed)
        if self.name != EXACT:
            surgery.convert(model, seeded(Plan.of(self.name, **self.settings), seed), calibration=calibration)
        return model


def arena(
    stage: ArenaStage,
    out: Path,
    *,
    resume: bool = False,
    force: bool = False,
    device: str = "cpu",
    command: str = "",
    progress: Progress = silent,
) -> ArenaRecord:
    """Train, score and time every mechanism on every task; write `lra.json`, `lra.md` and `lra.svg`.

    A training that fails stops no other one; its error is in the record.

    Args:
        stage: The options.
        out: Folder for the results and, in `stages`, each finished training and timing.
        resume: Keep what an earlier call finished in the folder, and continue a training that was interrupted.
        force: Delete an earlier comparison in the folder.
        device: Device to train on.
        command: The command as typed, for the record.
        progress: Called with the current activity, steps done and all steps.

    Raises:
        ApproxError: if an option does not fit, data are missing or damaged, the folder is not ours or holds an earlier
            comparison, or several processes run this.
    """
    _check(stage)
    _refuse(out, resume=resume, force=force)
    parts: list[tuple[TaskName, Material, list[_Contender]]] = []
    for number, task in enumerate(stage.tasks):
        progress(f"data of {task}", number, len(stage.tasks))
        parts.append((task, *_prepared(stage, task)))
    with locked_output(out):
        # Another process may have claimed the folder since the check above.
        _refuse(out, resume=resume, force=force)
        if force:
            remove(out, "arena")
        claim(out, "arena", _WHAT)
        store, study = Store(out), _Study(stage, out, torch.device(device), progress)
        trainings = [
            study.training(task, made, contender, seed)
            for task, made, contenders in parts
            for contender in contenders
            for seed in range(stage.seeds)
        ]
        timings = [study.timing(task, made, contenders) for task, made, contenders in parts]
        complete(
            [*trainings, *timings],
            store,
            Here(),
            keep_going=True,
            progress=lambda name, done, total: progress(f"cells: {name}" if name else "cells", done, total),
        )
        record = _record(stage, store, parts, trainings, timings, device, command)
        _write(out, record)
    return record


def _check(stage: ArenaStage) -> None:
    """Refuse what cannot run, before any data are read."""
    if place()[1] > 1:
        raise ApproxError("A comparison from scratch runs in one process. Start it without torchrun or accelerate.")
    for name in stage.contenders:
        if name != EXACT and name not in MECHANISMS:
            raise ApproxError(
                f"The mechanism '{name}' is unknown.{did_you_mean(name, MECHANISMS)} `approx mechanisms` lists them."
            )
    unused = sorted(set(stage.settings) - set(stage.contenders) | (set(stage.settings) & {EXACT}))
    if unused:
        raise ApproxError(
            f"Settings were given for {', '.join(unused)}, but settings are for the mechanisms that take part: "
            f"{', '.join(name for name in stage.contenders if name != EXACT) or 'none'}."
        )
    if unread := sorted(set(stage.data) - set(stage.tasks)):
        raise ApproxError(
            f"Data were given for {', '.join(unread)}, but the tasks are {', '.join(stage.tasks)}. Name the task, or leave the "
            "data out."
        )
    if len(set(stage.tasks)) < len(stage.tasks):
        raise ApproxError(f"The tasks {', '.join(stage.tasks)} name one twice. Name each once.")


def _refuse(out: Path, *, resume: bool, force: bool) -> None:
    if resume and force:
        raise ApproxError("--resume continues a comparison and --force starts it over. Give one of them.")
    refuse_unclaimed(out, "arena", _WHAT)
    if not (resume or force) and out.is_dir() and {path.name for path in out.iterdir()} - {CLAIM}:
        raise ApproxError(
            f"{out} holds an earlier comparison. Continue it with --resume, or start over with --force.", Exit.REFUSED
        )


def _prepared(stage: ArenaStage, task: TaskName) -> tuple[Material, list[_Contender]]:
    """The examples of a task and the contenders, each of which can be built."""
    size = stage.of(task)
    made = material(task, size, stage.data.get(task), stage.pool)
    contenders = [
        _Contender(name, {**_usual(name, size.length), **stage.settings.get(name, {})} if name != EXACT else {}, size)
        for name in stage.contenders
    ]
    for contender in contenders:
        # Wrong settings show now and not after hours of other trainings.
        contender.encoder(made.task, 0, _batch(made, size, "cpu"))
    return made, contenders


def _usual(name: str, length: int) -> dict[str, Any]:
    """Windows and blocks that fit the length; at the defaults many mechanisms are exact on short inputs."""
    kind = MECHANISMS[name]
    widest = max(length // _WINDOWS, _NARROWEST)
    given = {key: kind.defaults()[key] for key in kind.token_settings}
    return {key: widest for key, value in given.items() if isinstance(value, int) and value > widest}


def _batch(made: Material, size: Size, device: torch.device | str) -> dict[str, Tensor]:
    """The longest training inputs of the size of a batch, with labels."""
    rows = sorted(made.train, key=lambda one: -sum(map(len, one.inputs.values())))[: size.batch]
    encodings = [made.task.encode(one, PROCESSOR)[0] for one in rows]
    batch = made.task.collate(encodings, PROCESSOR)
    batch["labels"] = torch.tensor([one.label for one in rows])
    return {name: x.to(device) for name, x in batch.items()}


@dataclass(frozen=True)
class _Supervised:
    """Cross-entropy of the task's own outputs."""

    task: Arena

    def loss(self, model: Any, inner: Any, inputs: dict[str, Tensor]) -> Tensor:
        """See `approx.finetuning.trainer.Objective`."""
        return F.cross_entropy(self.task.outputs(model, inputs).logits, inputs["labels"])


@dataclass(frozen=True)
class _Study:
    """Makes the stages of a comparison."""

    options: ArenaStage
    out: Path
    device: torch.device
    progress: Progress

    def training(self, name: TaskName, made: Material, contender: _Contender, seed: int) -> Stage:
        """Train one encoder and score it."""
        about = (made.sha256, asdict(contender), seed, self.options.pool, self.options.seconds, self.device.type)
        title = f"{name}, {contender.name}, seed {seed}"
        key = stage_key("arena training", *about)
        return Stage(title, key, partial(self._train, made, contender, seed, title, self.out / "training" / key[:16]))

    def timing(self, name: TaskName, made: Material, contenders: list[_Contender]) -> Stage:
        """Time a training step of all encoders of a task, in turns."""
        about = (made.sha256, [asdict(one) for one in contenders], self.options.pool, self.device.type)
        title = f"{name}, speed"
        key = stage_key("arena timing", *about, torch.get_num_threads())
        return Stage(title, key, partial(self._time, made, contenders, title), alone=True)

    def _train(self, made: Material, contender: _Contender, seed: int, title: str, folder: Path) -> dict[str, Any]:
        size, task = contender.size, made.task
        model = contender.encoder(task, seed, _batch(made, size, "cpu")).to(self.device)
        data = TrainingData(
            task=task,
            split=Split("train", made.train, subset=False),
            held_out=Split("train", made.held_out, subset=True),
            rows=[(number, 0) for number in range(len(made.train))],
            encodings=[task.encode(one, PROCESSOR)[0] for one in made.train],
            labelled=True,
            limit=None,
            processor=PROCESSOR,
            config=model.config,
        )
        phase = Phase(
            mode="task",
            objective=_Supervised(task),
            trained=[name for name, _ in model.named_parameters()],
            steps=size.steps,
            batch_size=size.batch,
            learning_rate=size.learning_rate,
            mechanism_learning_rate=size.learning_rate,
            seconds=self.options.seconds or math.inf,
            warm_up=0.1,
            weight_decay=0.01,
            seed=seed,
        )
        measure = Measure("accuracy", False, lambda: _accuracy(model, task, made.held_out, size.batch))

        def say(activity: str, done: int, total: int) -> None:
            self.progress(f"train {title} | {activity.removeprefix('task | ')}", done, total)

        folder.mkdir(parents=True, exist_ok=True)
        try:
            outcome = train(model, phase, data, measure, folder, resume=True, progress=say)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise ApproxError(
                f"It ran out of memory at a batch of {size.batch} inputs of {size.length:,} symbols. Give a smaller "
                "--batch-size.",
                Exit.MISSING,
            ) from None
        score = _accuracy(model, task, made.test, size.batch)
        shutil.rmtree(folder, ignore_errors=True)
        trial = Trial(
            seed=seed,
            score=score,
            steps=outcome.steps,
            best_step=outcome.best_step,
            ended=outcome.ended,
            seconds=outcome.seconds,
            curve=[results.Point.model_validate(point) for point in outcome.curve],
        )
        return {"trial": trial.to_data(), "parameters": sum(one.numel() for one in model.parameters())}

    def _time(self, made: Material, contenders: list[_Contender], title: str) -> dict[str, Any]:
        batch = _batch(made, contenders[0].size, self.device)
        runners = {one.name: Runner(_step(one, made, batch, self.device)) for one in contenders}
        neighbours = Neighbours()
        with memory_limit(self.device):
            race(
                list(runners.values()),
                self.device,
                rounds=contenders[0].size.rounds,
                seconds=0.0,
                warm_up_seconds=_WARM_UP_SECONDS,
                progress=lambda done, total: self.progress(f"time {title}", done, total),
            )
            for runner in runners.values():
                if runner.status == OK:
                    runner.chosen = chosen_in(runner.call)
        base = runners[EXACT]
        return {
            "tokens": int(batch["input_ids"].shape[1]),
            "crowded": self.device.type == "cpu" and neighbours.crowded(),
            "speeds": {name: _speed(runner, base) for name, runner in runners.items()},
        }


def _step(
    contender: _Contender, made: Material, batch: dict[str, Tensor], device: torch.device
) -> Callable[[], object]:
    """A training step on a fixed batch."""
    model = contender.encoder(made.task, 0, _batch(made, contender.size, "cpu")).to(device).train()
    objective = _Supervised(made.task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        objective.loss(model, model, batch).backward()
        optimizer.step()

    return step


def _speed(runner: Runner, base: Runner) -> dict[str, Any]:
    """The keys of `Contestant` about speed."""
    if runner.status != OK:
        return {"status": runner.status}
    ms, good = runner.by_round()
    made: dict[str, Any] = {
        "steps_per_second": 1e3 / float(np.median(ms[good])),
        "peak_mb": runner.peak_mb,
        "samples": int(good.sum()),
        "chosen": runner.chosen,
    }
    if base.status == OK:
        base_ms, base_good = base.by_round()
        both = good & base_good
        chosen = both if both.sum() >= both.size / 2 else np.ones_like(both)
        ratio = float(np.median(base_ms[chosen]) / np.median(ms[chosen]))
        made |= {
            "ratio": ratio,
            "ratio_interval": list(ratio_interval(base_ms[chosen].tolist(), ms[chosen].tolist(), 0)),
        }
    return made


def _accuracy(model: Any, task: Arena, examples: list[Example], batch: int) -> float:
    subject = Subject("the encoder", model, PROCESSOR)
    prepared = prepare([subject], task, Split("examples", examples, subset=False), batch_size=4 * batch)
    predictions = predict(subject, task, prepared, device=model.device, halve=True)
    return task.score(predictions, [one.label for one in examples])["accuracy"]


def _record(
    stage: ArenaStage,
    store: Store,
    parts: list[tuple[TaskName, Material, list[_Contender]]],
    trainings: list[Stage],
    timings: list[Stage],
    device: str,
    command: str,
) -> ArenaRecord:
    """Combine the outcomes of all stages; one that failed leaves its error."""
    made, queue = [], iter(trainings)
    for (name, data, contenders), timing in zip(parts, timings, strict=True):
        timed = store.read(timing)
        speeds = timed.result["speeds"] if timed and timed.result else {}
        contestants = []
        for contender in contenders:
            outcomes = [store.read(next(queue)) for _ in range(stage.seeds)]
            done = [one.result for one in outcomes if one and one.result]
            trials = [
                Trial(**one.result["trial"])
                if one and one.result
                else Trial(seed=seed, score=None, error=one and one.error, exit_code=one and one.exit_code)
                for seed, one in enumerate(outcomes)
            ]
            scores = [trial.score for trial in trials if trial.score is not None]
            interval = mean_interval(scores)
            untimed = {"status": (timed and timed.error) or "not timed"}
            contestants.append(
                Contestant(
                    mechanism=contender.name,
                    settings=contender.settings,
                    parameters=done[0]["parameters"] if done else None,
                    score=float(np.mean(scores)) if scores else None,
                    interval=None if interval is None else [max(interval[0], 0.0), min(interval[1], 1.0)],
                    trials=trials,
                    **speeds.get(contender.name, untimed),
                )
            )
        counts = Counter(one.label for one in data.test)
        made.append(
            TaskResult(
                task=name,
                source=data.source,
                size=asdict(contenders[0].size),
                train=len(data.train),
                held_out=len(data.held_out),
                test=len(data.test),
                tokens=timed.result["tokens"] if timed and timed.result else None,
                chance=max(counts.values()) / len(data.test),
                crowded=bool(timed and timed.result and timed.result["crowded"]),
                contestants=contestants,
            )
        )
    gpu = torch.cuda.get_device_name() if torch.device(device).type == "cuda" else None
    return ArenaRecord(
        notice=results.NOTICE,
        command=command,
        options=results.options_of(stage),
        tasks=made,
        environment=environment(torch.get_num_threads(), gpu),
    )


def _write(out: Path, record: ArenaRecord) -> None:
    drawn = results.figure(record)
    if drawn is not None:
        write_whole(out / "lra.svg", drawn)
    write_whole(out / "lra.md", results.markdown(record, None if drawn is None else "lra.svg"))
    # `kind` is a default, and would be left out.
    write_whole(out / "lra.json", in_lines({"kind": record.kind, **record.to_data()}) + "\n")
