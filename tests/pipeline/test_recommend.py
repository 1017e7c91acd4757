"""Recommendations: each answer, the stages that end early, the promise of time, and what the next command is.

Scores, checks and training are real; times are those of a clock, so that answers repeat exactly.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

import approx
from approx.checkpoints.checkpoint import Checkpoint
from approx.errors import ApproxError, Exit
from approx.evaluation.options import BASE
from approx.evaluation.record import Speed
from approx.measuring.measure import open_all
from approx.pipeline import recommend as module
from approx.pipeline.recommend import recommend
from approx.publishing.report import write_report
from approx.publishing.summary import answer, conclude
from approx.searching.options import RecommendStage
from approx.searching.search import Scores
from approx.tasks.needle import FILLERS
from typed import known, part_of


@dataclass
class Clock:
    """In place of `measure_speed` and of time: how fast each mechanism is, and how long things take.

    Attributes:
        ratios: Start of a name -> speed-up; 0.5 for those that are not named.
        from_: The length from which they hold; below all are slower.
        ceiling: Speed-up without attention.
        wide: Half the width of each interval, as a share.
        now: Seconds that have passed.
        race: Seconds of a race.
        example: Seconds that a model takes for an example.
        scored: Model -> numbers of examples that it was scored on.
    """

    ratios: dict[str, float] = field(default_factory=dict)
    from_: int = 0
    ceiling: float = 3.0
    wide: float = 0.01
    now: float = 0.0
    race: float = 1.0
    example: float = 0.001
    scored: dict[str, list[int]] = field(default_factory=dict)

    def monotonic(self) -> float:
        return self.now

    def __call__(self, opened: Any, stage: Any, texts: Any, *, seed: int, progress: Any) -> list[Speed]:
        self.now += self.race
        return [self._row(opened, length) for length in stage.lengths]

    def _row(self, opened: Any, length: int) -> Speed:
        def timed(ratio: float) -> dict[str, Any]:
            interval = [ratio * (1 - self.wide), ratio * (1 + self.wide)]
            return {"status": "ok", "ratio": ratio, "interval": interval, "median_ms": 10 / ratio, "samples": 12}

        def ratio(name: str) -> float:
            fast = next((one for start, one in self.ratios.items() if name.startswith(start)), 0.5)
            return fast if length >= self.from_ else 0.5

        row = part_of(
            Speed,
            device="cpu",
            dtype="float32",
            threads=1,
            batch=1,
            mode="forward",
            inputs="real",
            length=length,
            base={"status": "ok", "median_ms": 10.0, "samples": 24},
            ceiling=timed(self.ceiling),
            variants=[{"name": name, **timed(ratio(name))} for name in opened if name != BASE],
        )
        for one in row.variants:
            one.share_of_ceiling, one.verdict = row.share(one), row.verdict(one)
        return row


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made, predicted = Clock(), Scores.add

    def add(scores: Scores, name: str, one: Checkpoint) -> None:
        predicted(scores, name, one)
        count = len(scores.read.split.examples)
        made.scored.setdefault(name, []).append(count)
        made.now += count * made.example

    monkeypatch.setattr(module, "measure_speed", made)
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(module._Recommending, "_first_calls", lambda *_: (0.01, 0.01 / made.ceiling))
    monkeypatch.setattr(module._Recommending, "_seconds", lambda *_: 0.005)
    monkeypatch.setattr(Scores, "add", add)
    return made


@pytest.fixture(scope="module")
def base() -> Checkpoint:
    return open_all({BASE: "quickstart"}, "cpu", "auto")[BASE]


def asked(base: Checkpoint, length: int = 128, **options: Any) -> Any:
    about = {"task": "needle", "settings": {"length": length}, "examples": 40, "margin": 20.0, "heal": False}
    return recommend(base, RecommendStage(**{**about, **options}), model="quickstart")


def test_uses_what_is_faster_and_as_good(base, clock):
    clock.ratios = {"improved-clustered": 2.0, "local": 2.5}
    found = asked(base, mechanisms=["improved-clustered", "local"])
    assert (found.decision, found.best) == ("use", "improved-clustered 25")
    assert found.answer.startswith(
        "Use improved-clustered 25 at 128 tokens: 2.00× the speed of exact attention, no loss on "
    )
    assert found.command == "approx convert quickstart -m improved-clustered --set clusters=25 -o converted"
    decisions = {one.name: one.decision for one in found.tried}
    assert decisions["local 32"] == "do not use"
    assert found.share == 1.0


def test_stays_exact_where_attention_is_a_small_part_and_measures_nothing_else(base, clock):
    clock.ceiling, clock.ratios = 1.05, {"local": 1.04}
    found = asked(base)
    assert found.answer == (
        "Stay exact: attention is 5 % of the time at 128 tokens, so that no mechanism can gain more than 1.05×."
    )
    assert (found.tried, found.promised, clock.scored, found.record.quality) == ([], None, {}, [])
    assert found.command == "approx plan quickstart --lengths 128,512,2048"


def test_stays_exact_where_nothing_is_faster_without_scoring_anything(base, clock):
    found = asked(base, mechanisms=["local", "block"])
    assert found.decision == "stay exact"
    assert "none of 4 variants is worth it at 128 tokens" in found.answer
    assert (clock.scored, found.command.split()[1]) == ({}, "plan")


def test_stays_exact_where_what_is_faster_loses_too_much(base, clock):
    # Windows of 128 tokens on either side are exact here.
    clock.ratios = {"local 32": 2.0, "local 64": 2.0}
    found = asked(base, mechanisms=["local"], margin=1.0)
    assert found.answer.startswith(
        "Stay exact: all 2 variants that were scored lose too much; the least loss is that of local"
    )
    assert found.command.startswith(
        "approx search quickstart --task needle --set length=128 --budget 'loss<=1' --length 128"
    )
    # The first few examples were enough.
    assert clock.scored == {BASE: [40], "local 32": [40], "local 64": [40]}


def test_says_how_many_examples_and_how_long_would_settle_it(base, clock):
    clock.ratios, clock.example = {"improved-clustered 25": 2.0}, 0.5
    found = asked(base, mechanisms=["improved-clustered"], margin=1.0, time_budget="1h")
    (waiting,) = (one for one in found.tried if one.needed_examples)
    assert (found.decision, waiting.name) == ("not settled", "improved-clustered 25")
    # Two models of half a second for each example.
    assert waiting.needed_seconds == pytest.approx(waiting.needed_examples, rel=0.01)
    assert "needs about" in found.answer
    assert " min." in found.answer
    words = found.command.split()
    assert words[:3] == ["approx", "recommend", "quickstart"]
    assert int(words[words.index("--examples") + 1]) >= known(waiting.needed_examples)
    assert "--set examples" not in found.command


def test_data_that_are_too_few_are_said_to_be(base, clock):
    clock.ratios = {"improved-clustered 25": 2.0}
    found = asked(base, settings={"length": 128, "examples": 30}, mechanisms=["improved-clustered"], margin=1.0)
    assert found.decision == "not settled"
    assert found.command.endswith("&& approx evaluate converted --task needle --data MORE")
    few = asked(base, settings={"length": 128, "examples": 12}, mechanisms=["improved-clustered"])
    assert few.left_out["scores"] == "only 12 examples; 20 are needed"
    assert few.answer.endswith("its quality was not measured.")


def test_a_busy_machine_settles_nothing_but_the_scores(base, clock):
    clock.ratios, clock.wide = {"improved-clustered 25": 2.0}, 0.5
    found = asked(base, mechanisms=["improved-clustered"])
    assert found.decision == "not settled"
    assert "the machine was busy" in found.answer
    assert clock.scored["improved-clustered 25"]
    assert found.command.startswith(
        "approx recommend quickstart --task needle --set length=128 --mechanisms improved-clustered"
    )


def test_without_data_there_are_only_speeds(base, clock):
    clock.ratios = {"local": 2.0}
    found = recommend(base, RecommendStage(lengths=[128, 512]), model="quickstart")
    assert (found.lengths, found.record.quality, sorted(found.ceilings)) == (None, [], [128, 512])
    assert found.answer.startswith("Not settled: local")
    assert found.answer.endswith("its quality was not measured.")
    assert found.command == "approx recommend quickstart --task NAME --data FILE"
    assert {one.rule.mechanism for one in found.tried}.isdisjoint({"exact", "flash", "linear"})


def test_heals_on_other_examples_than_those_that_score(base, clock, monkeypatch):
    trained, fit = [], module.transfer

    def watched(model: Any, task: Any, read: Any, *rest: Any, **more: Any) -> int:
        trained.extend(example.id for example in read.split.examples)
        return fit(model, task, read, *rest, **more)

    scored = []
    predicted = Scores.add
    monkeypatch.setattr(module, "transfer", watched)
    monkeypatch.setattr(
        Scores,
        "add",
        lambda self, name, one: (scored.extend(e.id for e in self.read.split.examples), predicted(self, name, one)),
    )
    monkeypatch.setattr(module, "_MOST_STEPS", 20)
    clock.ratios = {"linear": 2.0}
    found = asked(base, length=256, mechanisms=["linear"], margin=1.0, heal=None, time_budget="5m")
    (one,) = (one for one in found.tried if one.healed is not None)
    assert one.without is not None
    assert one.healed is not None
    assert one.healed[0].examples == one.without[0].examples
    assert trained
    assert not set(trained) & set(scored)
    assert {"linear", "linear, healed"} <= {variant.name for variant in found.record.variants}
    assert "attention transfer of" in known(found.record.notice)


def test_the_time_is_promised_and_kept_and_what_does_not_fit_is_named(base, clock):
    said = []
    clock.ratios = {"improved-clustered": 2.0, "clustered": 2.0, "local": 2.0, "linear": 3.0}
    # Every example takes twenty times as long as its forward pass did.
    clock.example, clock.race = 0.2, 20.0
    stage = RecommendStage(task="needle", settings={"length": 64}, time_budget="2m", margin=1.0)
    found = recommend(base, stage, model="quickstart", announce=said.append)
    assert said[0].startswith("This takes about ")
    assert "score what is faster on up to 500 examples" in said[0]
    assert found.seconds <= 1.2 * known(found.promised) <= 1.2 * 120
    assert any("no room for" in why for why in found.left_out.values())


def test_a_budget_for_nothing_is_refused_with_the_smallest(base, clock):
    with pytest.raises(ApproxError, match=r"timing one mechanism takes about \d+ s. Give --time-budget \d+s or more"):
        asked(base, time_budget="0.1s")


def test_lengths_and_models_that_do_not_fit_are_refused(base, clock):
    with pytest.raises(ApproxError, match=r"Length 4096 is too long: .* takes 2048 positions"):
        asked(base, lengths=[4096])
    with pytest.raises(ApproxError) as refused:
        asked(base, task="squad", settings={})
    assert refused.value.exit_code == Exit.UNSUPPORTED
    with pytest.raises(ApproxError, match=r"Did you mean .local."):
        asked(base, mechanisms=["locl"])


def test_long_examples_alone_score_what_is_faster_on_long_inputs(clock, tmp_path, base):
    clock.ratios, clock.from_ = {"local": 2.0}, 300
    rows = [
        {"text": f"{FILLERS[0]} {FILLERS[1]} " * (40 if number % 3 else 180), "label": "red"} for number in range(90)
    ]
    file = tmp_path / "texts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    stage = RecommendStage(
        data=str(file), settings={"labels": "black,blue,brown,green,grey,red,white,yellow"}, heal=False
    )
    found = recommend(base, stage, model="quickstart")
    lengths = known(found.lengths)
    assert lengths.ninetieth == lengths.longest > 300 > lengths.quartiles[0]
    (task,) = found.record.quality
    assert (task.task, task.examples) == ("text-classification", 30)
    assert any("only inputs of at least" in note for note in task.notes)


def test_a_record_gives_the_same_answer_in_a_report(base, clock, tmp_path):
    clock.ratios = {"improved-clustered 25": 2.0}
    found = asked(base, mechanisms=["improved-clustered"])
    assert answer(found.record) == found.answer
    assert known(conclude(found.record)).decision == found.decision
    write_report([found.record], tmp_path / "report")
    assert "improved-clustered 25" in (tmp_path / "report" / "report.md").read_text()
    assert found.to_data()["record"] == found.record.to_data()


def test_python_takes_options_by_name():
    with pytest.raises(ApproxError, match=r"recommend: .*tsk"):
        approx.recommend("quickstart", tsk="needle")
