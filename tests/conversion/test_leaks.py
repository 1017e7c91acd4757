"""A conversion detects leaks that a mechanism has only where it approximates, and writes no folder."""

import json

import pytest
import torch

from approx.conversion import convert, surgery, verify
from approx.conversion.calibration import mechanisms
from approx.errors import ApproxError, Exit
from approx.mechanisms import MECHANISMS
from approx.planning.plan import Plan, Rule
from zoo import tiny

# Exact on 40 tokens, the only length that conversions once checked.
BEYOND_40 = {
    "exact-topk": {"topk": 44},
    "clustered": {"clusters": 44, "chunk": 44},
    "improved-clustered": {"clusters": 44, "chunk": 48, "topk": 44},
    "linear": {"window": 44},
    "local": {"left": 44, "right": 44},
    "block": {"size": 44, "shift": 0},
    "strided": {"stride": 44},
    "fixed": {"stride": 44, "summary": 4},
    "ltr": {"stride": 50, "summary": 44},
    "rtl": {"stride": 50, "summary": 44},
    "longformer": {"window": 88},
    "bigbird": {"block": 9, "random": 1},
    "sinks": {"sinks": 4, "window": 40},
    "lsh": {"cluster": 44},
    "adaptive-span": {"max_span": 44, "ramp": 4},
    # They approximate from two tokens on.
    "performer": {"features": 16},
}
ARCHITECTURES = {False: ("BertForSequenceClassification", {}), True: ("GPT2LMHeadModel", {"n_positions": 200})}
APPROXIMATE = [
    (name, causal)
    for name in BEYOND_40
    for causal in (False, True)
    if (MECHANISMS[name].supports_causal if causal else MECHANISMS[name].supports_bidirectional)
]
every = pytest.mark.parametrize(
    ("name", "causal"), APPROXIMATE, ids=[f"{name}-{'causal' if causal else 'both'}" for name, causal in APPROXIMATE]
)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folder of a small model with enough positions, for each form."""
    folders = {}
    for causal, (architecture, changes) in ARCHITECTURES.items():
        folders[causal] = tmp_path_factory.mktemp("bases") / architecture
        size = changes or {"max_position_embeddings": 200}
        tiny(architecture, **size).save_pretrained(folders[causal])
    return folders


def drops_the_mask(honest, mechanism, q, k, v, mask, more):
    return honest(mechanism, q, k, v, None, **more)


def lets_a_padded_key_in(honest, mechanism, q, k, v, mask, more):
    out = honest(mechanism, q, k, v, mask, **more)
    return out if mask is None else out + 1e-3 * (v * ~mask[:, None, :, None]).sum(2, keepdim=True)


def sees_the_next_token(honest, mechanism, q, k, v, mask, more):
    out = honest(mechanism, q, k, v, mask, **more)
    later = v if mask is None else v * mask[:, None, :, None]
    return out + 1e-3 * torch.nn.functional.pad(later[:, :, 1:], (0, 0, 0, 1))


def differs_from_its_file(honest, mechanism, q, k, v, mask, more):
    return honest(mechanism, q, k, v, mask, **more) * (1 + 1e-6)


LEAKS = {
    drops_the_mask: "padding cannot matter",
    lets_a_padded_key_in: "padding cannot matter",
    sees_the_next_token: "no leak from the future",
    differs_from_its_file: "reload without approx is bit-equal",
}


def plant(monkeypatch, name, *leaks):
    """Make a mechanism leak where it approximates, in this process only; the folder's code is that of its file."""
    kind = MECHANISMS[name]

    def leaking(inner, leak):
        def forward(self, q, k, v, mask=None, **more):
            start = self.approximates_from()
            if start is None or k.shape[2] < start:
                return inner(self, q, k, v, mask, **more)
            return leak(inner, self, q, k, v, mask, more)

        return forward

    forward = kind.forward
    for leak in leaks:
        forward = leaking(forward, leak)
    monkeypatch.setattr(kind, "forward", forward)


def refused(base, out, plan):
    """Names of the checks that a conversion fails, from the receipt it keeps."""
    with pytest.raises(ApproxError) as caught:
        convert.convert(base, out, plan)
    assert caught.value.exit_code == Exit.VERIFICATION == 6
    assert not out.exists()
    results = json.loads((out.with_name(f"{out.name}.failed") / convert.RECEIPT).read_text())["checks"]
    return {check["name"] for check in results if check["passed"] is False}


@every
@pytest.mark.sample(4)
def test_every_leak_of_every_mechanism_is_refused(name, causal, bases, tmp_path, monkeypatch):
    # The leaks do not hide each other: the second changes real tokens, and the third is the same in every call.
    leaks = [drops_the_mask, *([sees_the_next_token] if causal else []), differs_from_its_file]
    plant(monkeypatch, name, *leaks)
    failed = refused(bases[causal], tmp_path / "out", Plan((Rule(name, "1", BEYOND_40[name]),)))
    assert failed == {LEAKS[leak] for leak in leaks}


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__)
@pytest.mark.parametrize("name", ["local", "block"])
@pytest.mark.sample(2)
def test_a_leak_fails_the_check_that_is_made_for_it(name, leak, bases, tmp_path, monkeypatch):
    plant(monkeypatch, name, leak)
    failed = refused(bases[True], tmp_path / "out", Plan((Rule(name, "all", BEYOND_40[name]),)))
    # The mechanism's file does not leak, so the reloaded model differs in any case.
    assert failed == {LEAKS[leak], LEAKS[differs_from_its_file]}


def test_default_settings_are_checked_where_they_approximate(bases, tmp_path, monkeypatch):
    plant(monkeypatch, "block", drops_the_mask, sees_the_next_token)
    failed = refused(bases[True], tmp_path / "out", Plan.of("block"))
    assert failed >= {"padding cannot matter", "no leak from the future"}


def test_exact_below_hides_nothing(bases, tmp_path, monkeypatch):
    plant(monkeypatch, "local", lets_a_padded_key_in)
    plan = Plan((Rule("local", "all", BEYOND_40["local"], exact_below=150),))
    assert LEAKS[lets_a_padded_key_in] in refused(bases[False], tmp_path / "out", plan)


def test_checks_leave_exact_below_as_it_was():
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("local", exact_below=50, left=3))
    assert verify.padding(model).passed
    assert {mechanism.exact_below for mechanism in mechanisms(model)} == {50}


def test_the_receipt_says_at_which_lengths_each_check_ran(bases, tmp_path):
    results = convert.convert(bases[True], tmp_path / "out", Plan.of("local", left=60)).checks
    lengths = {check.name: check.lengths for check in results}
    # 62 keys are the first that do not fit into the window.
    assert lengths == {
        "exact limit equals the base": [40],
        "padding cannot matter": [30, 70],
        "no leak from the future": [40, 78],
        "base weights are bit-equal": [],
        "reload without approx is bit-equal": [40, 70],
    }
    details = " ".join(check.detail for check in results)
    assert "at 30 and 70 positions" in details
    assert "exact" not in details


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (61, "at 30 and 63 positions"),
        (62, "exact at every length this model takes: layers 0-2"),
        (5000, "exact at every length this model takes: layers 0-2"),
    ],
)
def test_notes_layers_that_are_exact_at_every_length(left, words):
    model = tiny("GPT2LMHeadModel")
    surgery.convert(model, Plan.of("local", left=left))
    for check in (verify.padding(model), verify.causality(model)):
        assert check.passed
        assert check.lengths[-1] in (63, 64)
    assert words in verify.padding(model).detail


def test_images_have_one_length_and_speech_any():
    images, speech = tiny("ViTForImageClassification"), tiny("Wav2Vec2Model")
    for model in (images, speech):
        surgery.convert(model, Plan.of("local", left=50, right=50))
    assert verify.trials(images) == [(37, 0)]
    assert verify.not_approximated(images, 37) == "; exact at every length this model takes: layers 0-2"
    assert verify.trials(speech) == [(40, 10), (68, 8)]
    assert verify.padding(speech).passed
    surgery.revert(speech)
    surgery.convert(speech, Plan.of("local", left=5000, right=5000))
    assert (
        verify.not_approximated(speech, 4096) == "; not checked where they approximate, from 5002 tokens on: layers 0-2"
    )
