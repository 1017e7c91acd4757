"""All wrong settings of a mechanism are reported at once."""

import pytest

from approx.errors import Exit
from approx.mechanisms import MECHANISMS
from approx.mechanisms.refusals import refusals


def refused(name, settings, *, causal=False, heads=2, head_dim=8, scale=0.5):
    return refusals(name, MECHANISMS[name], settings, heads, head_dim, causal=causal, scale=scale)


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.parametrize("causal", [False, True])
def test_the_defaults_are_refused_only_in_a_form_that_is_missing(name, causal):
    kind = MECHANISMS[name]
    errors = refused(name, {}, causal=causal)
    if kind.supports_causal if causal else kind.supports_bidirectional:
        assert errors == []
    else:
        (error,) = errors
        assert error.exit_code is Exit.UNSUPPORTED
        assert f"no {'causal' if causal else 'bidirectional'} form yet" in str(error)


def test_reports_every_wrong_setting_with_its_value():
    settings = {"rounds": 0, "variant": "x", "cluster": 8, "seed": -1, "buckets": 3}
    messages = [str(error) for error in refused("lsh", settings)]
    assert [text.partition(";")[0] for text in messages] == [
        "Setting 'variant' is 'x'",
        "Setting 'rounds' is 0",
        "Setting 'buckets' is 3",
        "Setting 'seed' is -1",
    ]


def test_settings_of_a_layer_are_tried_as_the_first_layer_gets_them():
    assert refused("block", {"shift": "alternate", "size": 4}) == []
    (error,) = refused("strided", {"mode": "heads", "step": 1})
    assert "'mode' is 'heads'" in str(error)


def test_settings_are_checked_against_the_layers_sizes():
    for place, errors in (
        ("heads", refused("local", {}, heads=0)),
        ("head_dim", refused("local", {}, head_dim=0)),
        ("scale", refused("local", {}, scale=0.0)),
    ):
        (error,) = errors
        assert f"'{place}' is 0" in str(error)


def test_reports_impossible_sizes_together_with_wrong_settings():
    wrong, impossible = refused("performer", {"features": 2**48, "kernel": "x"})
    assert "'kernel' is 'x'" in str(wrong)
    assert str(impossible).startswith("'performer' cannot be made with these settings: ")
    assert "\n" not in str(impossible)


def test_lists_all_allowed_shifts_of_blocks():
    (error,) = refusals(
        "block", MECHANISMS["block"], {"shift": "foo", "size": 8}, heads=2, head_dim=8, causal=False, scale=0.25
    )
    assert "allowed is alternate, or a whole number from 0 to 7" in str(error)
