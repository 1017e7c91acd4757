"""The plan of `bench/gpu.py` in order: the parts of its stages, and what is verified and compiled before them."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch

from bench.gpu_cases import SUITES, TOKENS, contenders, of_suite
from bench.gpu_checks import ops_of
from bench.gpu_models import MEASURED
from bench.gpu_peers import COMPILED, peers
from bench.gpu_race import Part, compiled_for
from bench.gpu_workers import Job

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
ATTENTION, CAUSAL, PADDED = SUITES
# Suites whose verification covers the mechanisms of a model.
VERIFIED: Mapping[str, str] = MappingProxyType({"roberta": ATTENTION, "roberta-padded": PADDED, "gpt2": CAUSAL})


def planned() -> Iterator[Part]:
    """All parts, the most informative first."""

    def step(suite: str, mode: str, length: int, way: str, dtype: str = "bfloat16") -> Part:
        return Part(suite, mode, dtype, length, max(TOKENS // length, 1), way)

    def single(mode: str, length: int, way: str) -> Part:
        return Part(ATTENTION, mode, "bfloat16", length, 1, way)

    short = [length for length in LENGTHS if length < TOKENS]
    yield from (step(ATTENTION, "forward", length, "graph") for length in LENGTHS)
    yield from (step(ATTENTION, "forward", length, "eager") for length in (512, 2048))
    yield from (step(PADDED, "forward", length, "graph") for length in (512, 2048, 8192))
    yield from (step(CAUSAL, mode, length, "graph") for length in (2048, 8192) for mode in ("forward", "train"))
    yield from (step(ATTENTION, "train", length, "graph") for length in LENGTHS)
    yield from (step(ATTENTION, "forward", length, "eager") for length in (1024, 4096, 8192, 16384))
    yield from (single("forward", length, "graph") for length in short)
    yield from (step(CAUSAL, "forward", length, "graph") for length in (512, 1024, 4096, 16384))
    yield from (
        step(ATTENTION, mode, 2048, "graph", dtype) for dtype in ("float16", "float32") for mode in ("forward", "train")
    )
    yield from (step(PADDED, "train", length, "graph") for length in (512, 2048, 8192))
    yield from (single("forward", length, "eager") for length in short)
    yield from (step(ATTENTION, "train", length, "eager") for length in LENGTHS)
    yield from (single("train", length, "graph") for length in short)
    yield from (step(CAUSAL, "train", length, "graph") for length in (512, 1024, 4096, 16384))
    models = ("roberta", "gpt2")
    yield from (step(suite, "forward", length, "graph") for length in (2048, 512, 8192) for suite in models)
    yield from (step("roberta-padded", "forward", length, "graph") for length in (512, 2048))
    yield from (step(suite, "forward", length, "eager") for length in (2048, 512) for suite in models)
    yield from (step(suite, "forward", length, "graph") for length in (4096, 1024, 16384) for suite in models)
    yield step("roberta-padded", "forward", 8192, "graph")
    yield from (step("roberta-padded", "forward", length, "eager") for length in (512, 2048, 8192))
    yield from (step(suite, "forward", 8192, "eager") for suite in models)
    for length in (1024, 256, 4096):
        yield from (Part("decode", "forward", "bfloat16", length, batch, "graph") for batch in (32, 1))
    yield from (Part("decode", "forward", "bfloat16", 1024, batch, "eager") for batch in (32, 1))


def stage_of(part: Part) -> str:
    """The stage in whose time it is measured."""
    return "attention" if part.suite in SUITES else "decode" if part.suite == "decode" else "models"


def verifications(chosen: list[Part]) -> Iterator[Job]:
    """The contenders of some parts, once per dtype; then those that must be compiled for their shape."""
    wanted = {(part.dtype, VERIFIED.get(part.suite, part.suite)) for part in chosen}
    for dtype, suite in sorted(wanted, key=lambda pair: (pair[0] != "bfloat16", pair)):
        if suite == "decode":
            names = decoded()
        else:
            kind = getattr(torch, dtype)
            names = [one.name for one in contenders(suite, "train", 1, kind, torch.device("cpu"))]
            others = peers(suite == CAUSAL, suite == PADDED, compiled=True)
            names += [one.name for one in others if dtype == "bfloat16" or one.role == "exact"]
        for name in names:
            yield _verification(suite, dtype, name)
    # Both ways run the same shapes.
    for part in dict.fromkeys(part._replace(way="graph") for part in chosen):
        for name in compiled_in(part):
            yield Job(compilation(part, name), {"kind": "compilation", "part": part._asdict(), "name": name})
    # Those timed in none of the parts come last.
    suites = {suite for _, suite in wanted}
    for one in checked():
        if one["suite"] in suites:
            yield _verification(**one)


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


def _verification(suite: str, dtype: str, name: str) -> Job:
    given = {"kind": "verification", "suite": suite, "dtype": dtype, "name": name}
    return Job(f"verification/{suite}/{dtype}/{name}", given)


def compiled_in(part: Part) -> list[str]:
    """The contenders of a part that must be compiled for its shape."""
    causal, padded = part.suite == CAUSAL, part.suite == PADDED
    return [one.name for one in peers(causal, padded, True) if one.name in COMPILED] if compiled_for(part) else []


def compilation(part: Part, name: str) -> str:
    """The name of the job that compiles a contender for a part."""
    return f"compilation/{part._replace(way='graph').id}/{name}"
