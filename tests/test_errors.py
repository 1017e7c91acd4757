import pytest

from approx.errors import did_you_mean


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("clusterd", ["clustered", "linear"], " Did you mean 'clustered'?"),
        ("sst2", ["glue/sst2", "squad"], " Did you mean 'glue/sst2'?"),
        ("glue/sst", ["glue/sst2", "glue/stsb"], " Did you mean 'glue/sst2'?"),
        ("zzz", ["clustered", "linear"], ""),
        ("x", [], ""),
    ],
)
def test_the_nearest_known_name_is_offered(name, known, hint):
    assert did_you_mean(name, known) == hint
