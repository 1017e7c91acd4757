"""A converted folder loads in every way that people load checkpoints, where approx cannot be imported."""

import pytest

from loading.__main__ import matrix
from loading.models import HEADS


@pytest.mark.slow
@pytest.mark.parametrize("family", HEADS)
def test_every_head_of_a_family_loads_in_every_way(family, tmp_path):
    results = matrix(family, tmp_path)
    assert results.keys() == HEADS[family].keys()
    told = {f"{head}, {way}": word for head, ways in results.items() for way, word in ways.items()}
    assert {where: word for where, word in told.items() if word != "ok" and not word.startswith("- ")} == {}
    # These apply to every head, so none of them may be left out.
    always = ("auto", "saved_again", "bfloat16", "float16", "device_map", "peft", "hub")
    assert {told[f"{head}, {way}"] for head in results for way in always} == {"ok"}
