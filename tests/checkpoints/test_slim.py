"""A slim folder is a few files of readable PyTorch that compute the same as the package."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from approx.checkpoints import bundle
from approx.conversion import surgery, verify
from approx.mechanisms import MECHANISMS
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from approx.seam.installed import installed_model
from approx.seam.model import ApproxModel
from approx_kernels.dispatch.implementation import implementation
from approx_kernels.ops.clustering.api import cluster_queries
from converted import auto_class, code, run
from forms import KINDS, SELF_ONLY, SMALL
from zoo import difference, tiny

ROOT = Path(__file__).resolve().parents[2]
HEADS = ("BertForSequenceClassification", "GPT2LMHeadModel", "LlamaForCausalLM", "Wav2Vec2ForCTC")
MOST_FILES, MOST_LINES = 12, 2500


def write(folder, architecture, *mechanisms):
    head = getattr(transformers, architecture)
    folder.mkdir(parents=True, exist_ok=True)
    return bundle.write_code(folder, head.config_class, head, mechanisms, kernels=False)


def everything(architecture):
    """A model with every mechanism in every form its layers allow, one per layer."""
    causal = architecture.startswith(("GPT2", "Llama"))
    able = [name for name, kind in KINDS.items() if (kind.supports_causal if causal else kind.supports_bidirectional)]
    # These cannot decode with a cache, but the decoders here generate.
    able = [name for name in able if not (causal and name in SELF_ONLY)]
    layers = "n_layer" if architecture.startswith("GPT2") else "num_hidden_layers"
    model = tiny(architecture, **{layers: len(able)})
    rules = (Rule(name.split()[0], str(layer), SMALL.get(name, {})) for layer, name in enumerate(able))
    surgery.convert(model, Plan(tuple(rules)), calibration=example_inputs(model, 24))
    return model


@pytest.mark.parametrize("name", MECHANISMS)
def test_the_code_of_one_mechanism_is_a_dozen_files_at_most(name, tmp_path):
    for architecture in HEADS:
        files = write(tmp_path / architecture, architecture, name)
        lines = sum(len(path.read_text("utf-8").splitlines()) for path in files)
        assert len(files) <= MOST_FILES, sorted(path.name for path in files)
        assert lines <= MOST_LINES, {path.name: len(path.read_text("utf-8").splitlines()) for path in files}


def test_generated_code_passes_ruff_and_imports_nothing_of_ours(tmp_path):
    folders = [write(tmp_path / name, "BertForSequenceClassification", name)[0].parent for name in MECHANISMS]
    folders += [write(tmp_path / "all", "GPT2LMHeadModel", *MECHANISMS)[0].parent]
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    checked = subprocess.run([sys.executable, "-m", "ruff", "check", *config, tmp_path], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout[-2000:]
    for path in (path for folder in folders for path in folder.glob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        taken = {
            node.module.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module and not node.level
        }
        taken |= {
            alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        }
        assert taken <= {"torch", "transformers", *sys.stdlib_module_names}, path


@pytest.mark.slow
def test_every_mechanism_works_where_approx_cannot_be_imported(tmp_path):
    expected = {}
    for architecture in HEADS:
        model = everything(architecture)
        model.save_pretrained(tmp_path / architecture)
        inputs = example_inputs(model, 20, batch=2, padded=0 if model.can_generate() else 6)
        save_file(inputs, tmp_path / f"{architecture}@{auto_class(architecture)}.inputs")
        expected[architecture] = model, inputs
    reader = Path(__file__).parent / "reload_without_approx.py"
    child = run("-P", reader, tmp_path, HF_MODULES_CACHE=tmp_path / "cache")
    assert child.returncode == 0, child.stderr[-2000:]
    # The copied folder has the same code, so the warning is not repeated.
    assert child.stderr.count("pip install approx-attention") == len(HEADS)
    reloaded = load_file(tmp_path / "results.safetensors")
    for architecture, (model, inputs) in expected.items():
        with implementation("plain"):
            model(**inputs)[0].square().sum().backward()
            # PyTorch's attention rounds differently when gradients are recorded.
            with torch.no_grad():
                out = model(**inputs)[0]
            if model.can_generate():
                tokens = model.generate(**inputs, max_new_tokens=5, min_new_tokens=5, pad_token_id=0)
                assert torch.equal(reloaded[f"{architecture}/generated"], tokens), architecture
        assert torch.equal(reloaded[f"{architecture}/reloaded"], out), architecture
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert any(torch.equal(reloaded[f"{architecture}/gradient"], gradient) for gradient in gradients.values())
        assert code(tmp_path / "again" / architecture) == code(tmp_path / architecture)


@pytest.mark.parametrize("name", ["clustered", "improved-clustered"])
def test_the_package_gives_the_same_clusters_and_the_same_outputs_but_for_rounding(name, tmp_path):
    model = tiny("BertModel", max_position_embeddings=512)
    surgery.convert(model, Plan.of(name, **SMALL[name]))
    model.save_pretrained(tmp_path)
    inputs = [example_inputs(model, length, batch=2, padded=length // 3) for length in (12, 64, 300)]
    with implementation("plain"), torch.inference_mode():
        plain = [model(**each)[0] for each in inputs]
    there = verify.first_outputs(tmp_path, "AutoModel", inputs)
    assert all(torch.equal(*pair) for pair in zip(plain, there, strict=True))
    with torch.inference_mode():
        # A different cluster would change an output by far more than rounding.
        here = [model(**each)[0] for each in inputs]
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)
    mechanism = model.encoder.layer[0].attention.self.mechanism
    for length in (12, 64, 300):
        q = torch.randn(4, length, 8, generator=torch.Generator().manual_seed(length))
        how = {"clusters": mechanism.clusters, "iterations": mechanism.iterations}
        plain, auto = (cluster_queries(q, mechanism.planes, mechanism.draws, **how, impl=i) for i in ("plain", "auto"))
        assert torch.equal(plain, auto)


def test_the_kind_of_folder_stays_what_it_was(tmp_path):
    for kernels in (False, True):
        model = tiny("BertModel")
        surgery.convert(model, Plan.of("local"), bundle_kernels=kernels)
        model.save_pretrained(tmp_path / f"{kernels}")
        again = type(model).from_pretrained(tmp_path / f"{kernels}")
        again.save_pretrained(tmp_path / f"{kernels} again")
        assert code(tmp_path / f"{kernels} again") == code(tmp_path / f"{kernels}")
    assert len(code(tmp_path / "False")) <= MOST_FILES < len(code(tmp_path / "True"))


def test_the_check_of_a_conversion_reloads_the_slim_folder(tmp_path):
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("improved-clustered", **SMALL["improved-clustered"]))
    model.save_pretrained(tmp_path)
    check = verify.fresh_process(tmp_path, model)
    assert check.passed
    assert "in plain PyTorch" in check.detail
    # The check detects code that computes something else.
    file = tmp_path / "approx_clustered.py"
    file.write_text(file.read_text().replace("torch.addcmul(rest, mass, own)", "torch.addcmul(rest, mass, own) + 1e-3"))
    assert verify.fresh_process(tmp_path, model).passed is False


def test_the_installed_package_runs_where_it_is_compatible(caplog):
    with caplog.at_level("INFO"):
        assert installed_model(1, "0.1.0") is ApproxModel
    assert "runs the code of the installed package" in caplog.text


@pytest.mark.parametrize(("layout", "version"), [(2, "0.1.0"), (1, "0.1.1"), (1, "7.0.0")])
def test_an_incompatible_package_is_left_alone_and_the_log_says_why(layout, version, caplog):
    assert installed_model(layout, version) is None
    assert f"this folder needs format {layout} and at least {version}" in caplog.text
    assert "pip install 'approx-attention>=" in caplog.text


_WITH_PACKAGE = """
import sys
from transformers import AutoModel
model = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
assert "approx.seam.model" in sys.modules
from approx.seam.model import ApproxModel
from approx.mechanisms import MECHANISMS
assert isinstance(model, ApproxModel) and type(model).__module__.startswith("transformers_modules")
assert type(model.encoder.layer[0].attention.self.mechanism) is MECHANISMS["local"]
model.save_pretrained(sys.argv[2])
again = AutoModel.from_pretrained(sys.argv[2])
again.save_pretrained(sys.argv[3])
"""


def test_with_trust_the_classes_of_an_installed_package_run_and_save_the_same_folder(tmp_path):
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("local", left=2, right=2))
    model.save_pretrained(tmp_path / "first")
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    folders = [tmp_path / name for name in ("first", "second", "third")]
    child = run("-c", _WITH_PACKAGE, *folders, PYTHONPATH=path, HF_MODULES_CACHE=tmp_path / "cache")
    assert child.returncode == 0, child.stderr[-2000:]
    assert code(folders[0]) == code(folders[1]) == code(folders[2])


GOLDEN = Path(__file__).parent / "golden-slim"


def test_a_folder_of_an_earlier_version_still_loads_and_gives_what_it_gave(tmp_path):
    # Written once by tests/checkpoints/golden.py; whatever breaks it breaks the folders that people have.
    stored = load_file(GOLDEN / "outputs.safetensors")
    inputs = {name: stored[name] for name in ("input_ids", "attention_mask")}
    there = verify.first_outputs(GOLDEN / "model", "AutoModel", [inputs])[0]
    torch.testing.assert_close(there, stored["last_hidden_state"], rtol=1e-5, atol=2e-6)
    model = transformers.AutoModel.from_pretrained(GOLDEN / "model")
    with torch.inference_mode():
        assert difference([model(**inputs)[0]], [stored["last_hidden_state"]]) < 1e-5
