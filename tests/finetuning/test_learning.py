"""Every mechanism learns in every family: the loss of labels goes down, and gradients pass through the attention."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from approx.conversion import surgery
from approx.finetuning.finetune import finetune
from approx.finetuning.options import FinetuneStage
from approx.mechanisms import MECHANISMS
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from approx.seam.observe import Call, observe
from forms import SMALL
from tiny_speech import recogniser, some_utterances, sound, speech_processor, write_utterances
from zoo import FAMILIES, tiny

LENGTH, STEPS = 40, 8
# Whether layers of a family attend causally; of all others none does.
CAUSAL = {
    "GPT2LMHeadModel": [True],
    "LlamaForCausalLM": [True],
    "WhisperForConditionalGeneration": [True, False],
}
PAIRS = [
    (name, architecture)
    for name, kind in sorted(MECHANISMS.items())
    for architecture in FAMILIES
    if all(
        kind.supports_causal if causal else kind.supports_bidirectional for causal in CAUSAL.get(architecture, [False])
    )
]


# Each family once, with another mechanism; `make test-all` runs the others.
QUICK = [[pair for pair in PAIRS if pair[1] == architecture][number] for number, architecture in enumerate(FAMILIES)]


@pytest.mark.parametrize(
    ("mechanism", "architecture"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in PAIRS],
)
@pytest.mark.sample(4)
def test_the_loss_goes_down(mechanism, architecture):
    model = tiny(architecture)
    inputs = example_inputs(model, LENGTH, batch=2, padded=7)
    surgery.convert(model, Plan.of(mechanism, **SMALL.get(mechanism, {})), calibration=inputs)
    with torch.no_grad():
        classes = model(**inputs)[0].shape
    targets = torch.randint(classes[-1], classes[:-1], generator=torch.Generator().manual_seed(0))

    def loss() -> Tensor:
        return F.cross_entropy(model(**inputs)[0].flatten(0, -2), targets.flatten())

    queries: list[Tensor] = []

    def keep(call: Call) -> None:
        if call.mechanism is not None:
            call.q.retain_grad()
            queries.append(call.q)

    model.train()
    with observe(model, keep):
        first = loss()
    first.backward()
    assert queries
    assert all(query.grad is not None and query.grad.isfinite().all() for query in queries)
    # Attention to a single key does not depend on the query.
    assert any(bool(query.grad.abs().max() > 0) for query in queries if query.grad is not None)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        last = loss()
        last.backward()
        optimizer.step()
    assert float(last.detach()) < 0.95 * float(first.detach())


def test_speech_is_learnt_and_counted_in_frames(tmp_path):
    spoken = {name: (words, sound(1.0, tone=300)) for name, (words, _) in some_utterances(6).items()}
    write_utterances(tmp_path / "train-clean-100", spoken)
    model = recogniser()
    surgery.convert(model, Plan.of("local", left=2, right=2))
    options = FinetuneStage(
        task="librispeech/train-clean-100",
        data=str(tmp_path),
        recover=["task"],
        steps=6,
        batch_size=2,
        learning_rate=3e-3,
        evaluate_every=6,
    )
    done = finetune(model, speech_processor(tmp_path / "processor"), options, folder=tmp_path / "work")
    (phase,) = done.phases
    assert (phase.mode, done.measure) == ("task", "wer")
    # Twelve seconds of 50 frames.
    assert phase.tokens == 6 * 2 * 50
    losses = [point["loss"] for point in phase.curve if "loss" in point]
    assert losses[-1] < losses[0]
