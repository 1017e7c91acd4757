"""The plan of `bench/gpu.py` in order: the parts of its stages, their shares of the time, and who runs in them."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from bench import gpu_cases, gpu_models
from bench.gpu_cases import SUITES, TOKENS, of_suite
from bench.gpu_checks import ops_of
from bench.gpu_models import MEASURED
from bench.gpu_race import Part, compiled_for, importance
from bench.gpu_workers import Job

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ATTENTION, CAUSAL, PADDED = SUITES


class Stage(NamedTuple):
    """Parts that share a time.

    Attributes:
        name: Its name.
        share: Its share of the time; it passes on what it leaves, and the last stage has none of its own.
        parts: What is measured, the most informative first.
    """

    name: str
    share: float
    parts: tuple[Part, ...] = ()


def stages() -> tuple[Stage, ...]:
    """All stages, the most informative first."""

    def step(suite: str, mode: str, length: int, way: str = "graph", dtype: str = "bfloat16") -> Part:
        return Part(suite, mode, dtype, length, max(TOKENS // length, 1), way)

    def decoding(length: int, batch: int, way: str = "graph") -> Part:
        return Part("decode", "forward", "bfloat16", length, batch, way)

    few = (2048, 8192, 512)
    chosen = (
        Stage("machine", 0.04),
        Stage("attention", 0.32, tuple(step(ATTENTION, "forward", length) for length in few)),
        Stage("models", 0.2, tuple(step("roberta", "forward", length) for length in few)),
        Stage("training", 0.08, (step(ATTENTION, "train", 2048),)),
        Stage(
            "causal",
            0.12,
            (*(step(CAUSAL, "forward", length) for length in (2048, 8192)), step("gpt2", "forward", 2048)),
        ),
        Stage("decoding", 0.08, tuple(decoding(*size) for size in ((1024, 32), (4096, 32), (1024, 1)))),
        Stage("checks", 0.16),
    )
    known = {part for stage in chosen for part in stage.parts}
    return (
        *chosen,
        Stage("more", 0.0, tuple(part for part in dict.fromkeys(_others(step, decoding)) if part not in known)),
    )


def _others(step: Any, decoding: Any) -> Iterator[Part]:
    """What a longer run measures too, the most informative first."""
    short = [length for length in LENGTHS if length < TOKENS]
    yield from (step(ATTENTION, "forward", length) for length in LENGTHS)
    yield from (step(PADDED, "forward", length) for length in (512, 2048, 8192))
    yield from (step(CAUSAL, "train", length) for length in (2048, 8192))
    yield from (step(ATTENTION, "train", length) for length in LENGTHS)
    yield from (step("roberta", "forward", length) for length in LENGTHS)
    yield from (step("gpt2", "forward", length) for length in LENGTHS)
    yield from (step("roberta-padded", "forward", length) for length in (512, 2048, 8192))
    yield from (step(ATTENTION, "forward", length, "eager") for length in LENGTHS)
    yield from (step(ATTENTION, "forward", length)._replace(batch=1) for length in short)
    yield from (step(CAUSAL, mode, length) for length in LENGTHS for mode in ("forward", "train"))
    yield from (
        step(ATTENTION, mode, 2048, dtype=dtype) for dtype in ("float16", "float32") for mode in ("forward", "train")
    )
    yield from (step(PADDED, "train", length) for length in (512, 2048, 8192))
    yield from (
        step(suite, "forward", length, "eager") for suite in ("roberta", "gpt2") for length in (512, 2048, 8192)
    )
    yield from (decoding(length, batch) for length in (256, 1024, 4096) for batch in (32, 1))
    yield from (decoding(1024, batch, "eager") for batch in (32, 1))


def planned() -> list[Part]:
    """All parts, in order."""
    return list(dict.fromkeys(part for stage in stages() for part in stage.parts))


def tries(part: Part, device: torch.device) -> list[Job]:
    """One job for each contender of a part, in the order in which they are measured: is it right on these very shapes, and can it be
    captured?
    """
    kind = getattr(torch, part.dtype)
    if part.suite in SUITES:
        how = (part.suite, part.mode, part.length, kind, device, compiled_for(part))
        named = [(one.name, one.role) for one in gpu_cases.contenders(*how)]
    else:
        of_models = gpu_models.contenders(part.suite, part.length, part.batch, kind, device)
        named = [(name, role) for name, role, _ in of_models]
    named.sort(key=lambda pair: importance(*pair))
    return [
        Job(attempt(part, name), {"kind": "try", "part": part._asdict(), "name": name, "role": role})
        for name, role in named
    ]


def attempt(part: Part, name: str) -> str:
    """The name of the job that tries a contender of a part."""
    return f"try/{part.id}/{name}"


def decoded() -> list[str]:
    """The mechanisms whose decoding is verified: those that are timed, and another one with separate kernels for it."""
    return [case.name for case in of_suite("decode", 1) if case.mechanism in (*MEASURED["decode"], "performer")]


def checked() -> list[dict[str, str]]:
    """Everything to verify before `auto` uses kernels: every mechanism with kernels, in every dtype and suite."""
    jobs = []
    for dtype in ("bfloat16", "float16", "float32"):
        for suite in (*SUITES, "decode"):
            names = decoded() if suite == "decode" else [case.name for case in of_suite(suite, 1)]
            jobs += [{"suite": suite, "dtype": dtype, "name": name} for name in names if ops_of(suite, name)]
    return jobs


def verifications() -> list[Job]:
    """The jobs of all that is to be verified."""
    return [
        Job(f"verification/{one['suite']}/{one['dtype']}/{one['name']}", {"kind": "verification", **one})
        for one in checked()
    ]
