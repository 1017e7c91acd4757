"""`import approx` from a user's view; each test in a separate process, since modules are imported once."""

import subprocess
import sys
from pathlib import Path

import pytest

import approx
from tiny_study import tiny_checkpoint

ROOT = Path(__file__).resolve().parent.parent
LOAD = """
model = AutoModelForSequenceClassification.from_pretrained({folder!r})
assert type(model).__name__ == "ApproxBertForSequenceClassification", type(model)
assert not hasattr(model.config, "trust_remote_code")
print(AutoConfig.from_pretrained({folder!r}).model_type)
print(pipeline("text-classification", model={folder!r})("the film is good")[0]["label"])
"""
IMPORT = "from transformers import AutoConfig, AutoModelForSequenceClassification, pipeline\n"
ORDERS = {
    "approx first": "import approx\n" + IMPORT,
    "transformers first": IMPORT + "import approx\n",
}


def python(code: str, cwd: Path) -> str:
    path = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'kernels')!r}]\n"
    done = subprocess.run([sys.executable, "-c", path + code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder written by transformers' own `save_pretrained`, as in the README."""
    import transformers

    base = tiny_checkpoint(tmp_path_factory.mktemp("base"))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base)
    receipt = approx.convert(model, approx.Plan.of("improved-clustered", clusters=25))
    assert [site.layer for site in receipt.swapped] == [0, 1]
    folder = tmp_path_factory.mktemp("converted")
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def test_the_import_is_light(tmp_path):
    heavy = "{'torch', 'transformers', 'numpy', 'yaml'} & set(sys.modules)"
    assert python(f"import approx; print({heavy} or 'nothing')", tmp_path).strip() == "nothing"


# The first order alone in `make test`.
@pytest.mark.parametrize(
    "order", [order if not place else pytest.param(order, marks=pytest.mark.slow) for place, order in enumerate(ORDERS)]
)
@pytest.mark.slow
def test_converted_folders_load_without_a_trust_flag_in_every_order_of_imports(saved, tmp_path, order):
    words = python(ORDERS[order] + LOAD.format(folder=str(saved)), tmp_path).split()
    assert words[0] == "approx_bert"
    assert words[1] in ("negative", "positive")


@pytest.mark.sample(1)
def test_without_the_import_a_converted_folder_fails_loudly(saved, tmp_path):
    code = IMPORT + f"AutoModelForSequenceClassification.from_pretrained({str(saved)!r}, trust_remote_code=False)"
    with pytest.raises(AssertionError, match="trust_remote_code"):
        python(code, tmp_path)


def test_a_folder_that_save_pretrained_wrote_is_opened_checked_and_reverted(saved):
    assert approx.inspect(str(saved)).converted
    model = approx.load(saved).model
    approx.revert(model)
    assert type(model).__name__ == "BertForSequenceClassification"


def test_the_package_offers_its_documented_names():
    for name in approx.__all__:
        assert getattr(approx, name) is not None
    assert set(approx.__all__) == set(dir(approx))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = approx.nothing


def test_the_documentation_names_every_mechanism():
    """The table in docs/mechanisms.md is handwritten."""
    from approx.mechanisms import MECHANISMS

    text = (ROOT / "docs" / "mechanisms.md").read_text(encoding="utf-8")
    mechanisms = text.split("| mechanism | idea |")[1].split("\n\n")[0]
    assert [name for name in MECHANISMS if f"`{name}`" not in mechanisms] == []
