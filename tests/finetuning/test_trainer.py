"""What the Trainer leaves behind, and a loss that nothing changes."""

import pytest
import torch

from approx.errors import ApproxError, Exit
from tiny_training import model_of, options_of, trained


def test_after_bfloat16_training_the_forward_pass_is_that_of_the_weights_again(sst2, tmp_path):
    model = model_of()
    trained(model, tmp_path / "work", options_of(sst2, steps=3, evaluate_every=3, bfloat16=True))
    inputs = {"input_ids": torch.arange(4, 12)[None]}
    fresh = type(model)(model.config).eval()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs).logits, fresh(**inputs).logits)


def test_a_mode_that_can_train_nothing_is_refused(sst2, tmp_path):
    # Spans as long as every input hide nothing.
    model = model_of("adaptive-span", max_span=64, ramp=4)
    options = options_of(sst2, recover=["transfer"], steps=2, penalty=0.0)
    with pytest.raises(ApproxError, match="'transfer' trains changes its loss") as refused:
        trained(model, tmp_path / "work", options)
    assert refused.value.exit_code == Exit.UNSUPPORTED
