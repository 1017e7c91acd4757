"""Every op rejects tensors that do not match, in a sentence that names the actual and the expected value."""

import pytest
import torch

from approx_kernels.tokens import check_shapes

FITTING = {"q": (2, 3, 5, 8), "k": (2, 3, 7, 8), "v": (2, 3, 7, 4)}


def arguments(**other):
    made = {name: torch.zeros(shape) for name, shape in FITTING.items()}
    return {**made, "key_mask": torch.ones(2, 7, dtype=torch.bool), **other}


def test_accepts_matching_tensors():
    check_shapes(**arguments())
    check_shapes(**arguments(key_mask=None))
    check_shapes(**arguments(k=torch.zeros(2, 1, 7, 8), v=torch.zeros(2, 1, 7, 4)))


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("q", torch.zeros(2, 5, 8), r"q has shape \[2, 5, 8\]; expected \[batch, heads, queries, head size\]"),
        ("k", torch.zeros(2, 3, 7, 9), r"k has shape \[2, 3, 7, 9\]; expected \[2, heads, keys, 8\]"),
        ("k", torch.zeros(2, 2, 7, 8), "k has 2 heads for the 3 of q; expected a number that divides them"),
        ("v", torch.zeros(2, 1, 7, 4), r"v has shape \[2, 1, 7, 4\]; expected \[2, 3, 7, value size\]"),
        ("v", torch.zeros(2, 3, 6, 4), r"v has shape \[2, 3, 6, 4\]; expected \[2, 3, 7, value size\]"),
        ("q", torch.zeros(2, 3, 0, 8), r"q has shape \[2, 3, 0, 8\]; .* each at least 1"),
        ("k", torch.zeros(2, 3, 0, 8), r"k has shape \[2, 3, 0, 8\]; expected \[2, heads, keys, 8\]"),
        ("v", torch.zeros(2, 3, 7, 0), r"v has shape \[2, 3, 7, 0\]; expected \[2, 3, 7, value size\]"),
        (
            "v",
            torch.zeros(2, 3, 7, 4).half(),
            r"torch.float32, torch.float32, torch.float16; expected one of 16, 32 or 64 bits",
        ),
        ("k", torch.zeros(2, 3, 7, 8, device="meta"), "k is on meta, q on cpu; expected one device"),
        ("key_mask", torch.ones(2, 7), "key_mask is torch.float32; expected torch.bool"),
        ("key_mask", torch.ones(2, 6, dtype=torch.bool), r"key_mask has shape \[2, 6\]; expected \[2, 7\]"),
        ("key_mask", torch.ones(2, 7, dtype=torch.bool, device="meta"), "key_mask is on meta, q on cpu"),
    ],
)
def test_rejects_mismatched_tensors(name, tensor, message):
    with pytest.raises(ValueError, match=message):
        check_shapes(**arguments(**{name: tensor}))
