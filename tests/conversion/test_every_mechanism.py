"""Every mechanism, with all its settings, on the kinds of model that new users try first."""

import pytest

from approx.conversion import surgery, verify
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from forms import KINDS, SMALL, has_form
from zoo import difference, outputs, tiny

# Other tests cover the differences between families.
ARCHITECTURES = {
    "BertModel": (),
    "GPT2LMHeadModel": pytest.mark.slow,
    "RobertaModel": pytest.mark.slow,
    "Wav2Vec2Model": pytest.mark.slow,
}
REACHABLE = [
    pytest.param(name, architecture, marks=marks, id=f"{name}-{architecture}")
    for name in KINDS
    for architecture, marks in ARCHITECTURES.items()
    if has_form(name, causal=architecture.startswith("GPT2"))
]


@pytest.mark.parametrize(("name", "architecture"), REACHABLE)
@pytest.mark.sample(21)
def test_every_mechanism_converts_and_comes_back_from_its_folder(name, architecture, tmp_path):
    model = tiny(architecture)
    plan = Plan.of(name.split()[0], **SMALL.get(name, {}))
    inputs = example_inputs(model, 24, batch=2, padded=7)
    results = [verify.exact_limit(model, plan)]
    surgery.convert(model, plan, calibration=inputs)
    results += [verify.padding(model), verify.causality(model)]
    assert [check for check in results if check.passed is False] == []
    before = outputs(model, inputs)
    model.save_pretrained(tmp_path)
    assert difference(outputs(type(model).from_pretrained(tmp_path), inputs), before) == 0.0
