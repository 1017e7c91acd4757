"""A folder with invalid tensors of a mechanism is rejected on loading, before any code uses them."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from approx.checkpoints import families
from approx.conversion import surgery
from approx.errors import ApproxError, Exit
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from zoo import tiny

# One per layer: random draws, fitted tensors, and learned ones.
KINDS = {
    "clustered": {"clusters": 4},
    "bigbird": {"block": 4},
    "improved-clustered": {"clusters": 4, "topk": 4, "frozen": True},
    "performer": {},
    "lsh": {"cluster": 8},
    "linear": {"feature_map": "hedgehog"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = tiny("BertModel", num_hidden_layers=len(KINDS))
    rules = (Rule(name, str(layer), settings=settings) for layer, (name, settings) in enumerate(KINDS.items()))
    surgery.convert(model, Plan(tuple(rules)), calibration=example_inputs(model, 24))
    made = tmp_path_factory.mktemp("state") / "converted"
    model.save_pretrained(made)
    return made


def changed(tensor, how):
    wrong = tensor.clone()
    wrong.view(-1)[0] = {"negative": -1, "huge": 2**40, "NaN": torch.nan, "infinite": torch.inf}[how]
    return wrong


@pytest.mark.parametrize("how", ["negative", "huge", "NaN", "infinite"])
@pytest.mark.sample(2)
def test_refuses_to_load_a_folder_with_unusable_state(folder, tmp_path, how):
    weights = load_file(folder / "model.safetensors")
    for file in folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    model_class = families.model_class(families.stock_class(type(tiny("BertModel"))))
    drawn, tried = how in ("negative", "huge"), 0
    for name, tensor in weights.items():
        if ".mechanism." not in name or drawn == tensor.is_floating_point():
            continue
        save_file(weights | {name: changed(tensor, how)}, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(
            ApproxError, match=r"The checkpoint is damaged: .*Convert the base checkpoint again"
        ) as caught:
            model_class.from_pretrained(tmp_path)
        assert name in str(caught.value)
        assert caught.value.exit_code == Exit.UNAVAILABLE
        tried += 1
    assert tried >= (2 if drawn else 5)


def test_loads_usable_state_unchanged(folder):
    model_class = families.model_class(families.stock_class(type(tiny("BertModel"))))
    assert model_class.from_pretrained(folder).config.approx
