"""Folding resolves choices of implementation and removes unused code; everything else stays unchanged."""

import pytest

from approx.checkpoints import shaking
from approx.checkpoints.folding import folded
from approx.checkpoints.slim import slim_sources

SOURCE = '''
def attend(q, k, dropout, impl: str = "auto"):
    """Attend.

    Args:
        dropout: A share.
        impl: One of many,
            in two lines.

    Raises:
        ValueError: if the shapes do not fit, or `impl` cannot run.
    """
    why = obstacle(q)
    ways = ranked(q, why, cpu=None, tiles=None, reference=None)
    # Why one is chosen.
    run = choose("attend", impl, ways, q)

    def kernels(q):
        return launch(q)

    if run == "triton":
        return kernels(q)
    elif run == "cpu":
        return in_c(q)
    else:
        # Why it is plain.
        union = dense if run == "reference" or watched() else tiles
    if never(q) and dropout:
        raise ValueError
    return union(q, k, impl=impl)
'''
PLAIN = '''
def attend(q, k, dropout):
    """Attend.

    Args:
        dropout: A share.

    Raises:
        ValueError: if the shapes do not fit.
    """

    # Why it is plain.
    union = dense if watched() else tiles
    return union(q, k)
'''


def test_the_branches_of_other_implementations_go_with_all_that_they_alone_read():
    assert folded(SOURCE, {"never"}) == PLAIN


def test_what_asks_for_nothing_stays_to_the_letter():
    text = "def f(x):\n    # Why.\n    y = x  # odd  spacing\n    if y == 'reference' and g():\n        return 1\n    return y\n"
    assert folded(text, ()) == text


def test_names_that_collide_or_change_are_refused(monkeypatch):
    real = shaking.source
    for change, wrong in (
        (("def _tiles(", "def past_rows("), "both define past_rows"),
        (("import flat_index", "import flat_index as flat"), "as flat"),
    ):
        text = real("approx_kernels.ops.clustered.own").replace(*change).replace("_tiles(groups", "past_rows(groups")
        text = text.replace(" flat_index(", " flat(") if "flat" in wrong else text
        monkeypatch.setattr(
            shaking, "source", lambda module, text=text: text if module.endswith("clustered.own") else real(module)
        )
        shaking._plain.cache_clear()
        slim_sources.cache_clear()
        with pytest.raises(RuntimeError, match=wrong):
            slim_sources(frozenset({"clustered"}))
    monkeypatch.undo()
    shaking._plain.cache_clear()
    slim_sources.cache_clear()
