"""A converted folder has a few whole files of this package, which compute what the package does in plain PyTorch."""

import ast
import os
import re
import subprocess
import sys
import tarfile
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from approx.checkpoints import bundle
from approx.conversion import convert, surgery, verify
from approx.mechanisms import MECHANISMS
from approx.planning.plan import Plan, Rule
from approx.planning.positions import example_inputs
from approx.seam.internals import INSTALL, installed_model
from approx.seam.model import ApproxModel
from approx_kernels.dispatch.implementation import implementation
from approx_kernels.ops.clustering.api import cluster_queries
from converted import auto_class, code, run
from forms import KINDS, SELF_ONLY, SMALL, has_form
from test_house import modules
from zoo import difference, tiny

ROOT = Path(__file__).resolve().parents[2]
HEADS = ("BertForSequenceClassification", "GPT2LMHeadModel", "LlamaForCausalLM", "Wav2Vec2ForCTC")
MOST_FILES, MOST_LINES = 14, 4000
# Mechanisms with exact keys have three more, and those with features the estimates of either.
WITH_EXACT_KEYS = {"linear", "performer", "clustered", "improved-clustered", "lsh"}


def write(folder, architecture, *mechanisms):
    head = getattr(transformers, architecture)
    folder.mkdir(parents=True, exist_ok=True)
    return bundle.write_code(folder, head.config_class, head, mechanisms, kernels=False)


def everything(architecture):
    """A model with every mechanism in every form its layers allow, one per layer."""
    causal = architecture.startswith(("GPT2", "Llama"))
    able = [name for name in KINDS if has_form(name, causal)]
    # These cannot decode with a cache, but the decoders here generate.
    able = [name for name in able if not (causal and name in SELF_ONLY)]
    layers = "n_layer" if architecture.startswith("GPT2") else "num_hidden_layers"
    model = tiny(architecture, **{layers: len(able)})
    rules = (Rule(name.split()[0], str(layer), SMALL.get(name, {})) for layer, name in enumerate(able))
    surgery.convert(model, Plan(tuple(rules)), calibration=example_inputs(model, 24))
    return model


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, list[Path]]:
    """The code for each mechanism alone, for a usual pair, and for all together."""
    place = tmp_path_factory.mktemp("written")
    mixes = {name: (name,) for name in MECHANISMS} | {"pair": ("exact", "improved-clustered"), "all": tuple(MECHANISMS)}
    return {name: write(place / name, HEADS[n % len(HEADS)], *used) for n, (name, used) in enumerate(mixes.items())}


def imported(text: str) -> set[str]:
    """Names of the files that a file imports, and the first parts of other modules' names."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module if node.level else node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
    return names


@pytest.mark.parametrize("name", MECHANISMS)
@pytest.mark.sample(13)
def test_code_of_one_mechanism_is_fourteen_files_at_most(name, written):
    lines = {path.name: len(path.read_text("utf-8").splitlines()) for path in written[name]}
    more = name.split()[0] in WITH_EXACT_KEYS
    assert len(lines) <= MOST_FILES + 3 * more, sorted(lines)
    assert sum(lines.values()) <= MOST_LINES + 1050 * more, lines


def test_second_mechanism_adds_few_files(written):
    # The file of the mechanism, that of its op, and one that the op needs.
    assert len(written["pair"]) <= MOST_FILES + 3
    assert sum(len(path.read_text("utf-8").splitlines()) for path in written["pair"]) <= MOST_LINES + 1050


def test_files_are_copies_but_for_their_imports(written):
    for path in written["all"]:
        if path.name.startswith(("modeling_", "configuration_")):
            continue
        module = next(name for name, _ in modules() if name.replace(".", "_") == path.stem)
        source = Path(dict(modules())[module]).read_text("utf-8").splitlines()
        note, *copy = path.read_text("utf-8").splitlines()
        assert note == bundle.NOTE
        changed = [new for old, new in zip(source, copy, strict=True) if old != new]
        assert all(line.lstrip().startswith("from .approx_") for line in changed), path.name


def test_uses_every_file_and_chooses_no_implementation(written):
    for name, paths in written.items():
        files = {path.stem: imported(path.read_text("utf-8")) for path in paths}
        used = set.union(*files.values())
        others = used - files.keys()
        assert others <= {"torch", "transformers", *sys.stdlib_module_names}, name
        assert files.keys() - used == {file for file in files if file.startswith("modeling_")}, name
        assert not [file for file in files if re.search("dispatch_|_cpu|_gpu|triton|_api", file)], name


def test_plain_ops_take_the_arguments_of_the_ops_that_choose():
    for path in sorted((ROOT / "kernels/approx_kernels/ops").glob("*/api.py")):
        api = import_module(f"approx_kernels.ops.{path.parent.name}.api")
        plain = import_module(bundle._plain(api.__name__))
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef) and hasattr(plain, node.name):
                arguments = {
                    name: each.default
                    for name, each in signature(getattr(api, node.name)).parameters.items()
                    if name != "impl"
                }
                accepted = {
                    name: each.default for name, each in signature(getattr(plain, node.name)).parameters.items()
                }
                assert arguments.items() <= accepted.items(), node.name


def test_code_passes_ruff(written):
    folders = {path.parent for path in (*written["all"], *written["pair"], *written["local"])}
    # Imports stay in the order of the source.
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", "--ignore", "I001"]
    checked = subprocess.run([sys.executable, "-m", "ruff", "check", *config, *folders], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout[-2000:]


_AGAIN = """
import sys
from pathlib import Path
from transformers import BertModel
from approx.checkpoints import bundle
bundle.write_code(Path(sys.argv[1]), BertModel.config_class, BertModel, ["local", "exact", "linear"], kernels=False)
"""


@pytest.mark.slow
def test_code_is_the_same_in_every_process(tmp_path):
    for seed in ("1", "2"):
        (tmp_path / seed).mkdir()
        child = run(
            "-c", _AGAIN, tmp_path / seed, PYTHONHASHSEED=seed, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
        )
        assert child.returncode == 0, child.stderr[-2000:]
    assert code(tmp_path / "1") == code(tmp_path / "2")


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
    assert child.stderr.count(INSTALL) == len(HEADS)
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


def test_keeps_the_kind_of_folder(tmp_path):
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
    file = tmp_path / "approx_kernels_ops_clustered_reference.py"
    file.write_text(file.read_text().replace("torch.addcmul(rest, mass, own)", "torch.addcmul(rest, mass, own) + 1e-3"))
    assert verify.fresh_process(tmp_path, model).passed is False


def test_the_installed_package_runs_where_it_is_compatible(caplog):
    with caplog.at_level("INFO"):
        assert installed_model(1, "0.1.0") is ApproxModel
    assert "runs the code of the installed package" in caplog.text


@pytest.mark.parametrize(("layout", "version"), [(2, "0.1.0"), (1, "0.2.1"), (1, "7.0.0")])
def test_ignores_an_incompatible_package_and_logs_why(layout, version, caplog):
    assert installed_model(layout, version) is None
    assert f"this folder needs format {layout} and at least {version}" in caplog.text
    assert INSTALL in caplog.text


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


@pytest.mark.slow
def test_with_trust_the_classes_of_an_installed_package_run_and_save_the_same_folder(tmp_path):
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("local", left=2, right=2))
    model.save_pretrained(tmp_path / "first")
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    folders = [tmp_path / name for name in ("first", "second", "third")]
    child = run("-c", _WITH_PACKAGE, *folders, PYTHONPATH=path, HF_MODULES_CACHE=tmp_path / "cache")
    assert child.returncode == 0, child.stderr[-2000:]
    assert code(folders[0]) == code(folders[1]) == code(folders[2])


@pytest.fixture
def golden(tmp_path):
    """Unpack a folder of an earlier version, of those that golden/README.md lists, and what it must compute."""

    def unpacked(name):
        with tarfile.open(Path(__file__).parent / "golden" / f"{name}.tar.gz") as archive:
            archive.extractall(tmp_path / name, filter="data")
        return tmp_path / name / "folder", load_file(tmp_path / name / "expected.safetensors")

    return unpacked


@pytest.mark.parametrize(("name", "auto"), [("first", "AutoModel"), ("second", "AutoModelForSequenceClassification")])
def test_folders_of_earlier_versions_load_with_the_same_outputs(name, auto, golden):
    # Whatever breaks these breaks the folders that people have.
    folder, stored = golden(name)
    inputs = {name: stored[name] for name in ("input_ids", "attention_mask")}
    there = verify.first_outputs(folder, auto, [inputs])[0]
    torch.testing.assert_close(there, stored["output"], rtol=1e-5, atol=2e-6)
    model = getattr(transformers, auto).from_pretrained(folder)
    with torch.inference_mode():
        assert difference([model(**inputs)[0]], [stored["output"]]) < 1e-5


def test_folder_of_an_earlier_version_is_verified_and_reverted_without_its_code(golden, tmp_path):
    folder, stored = golden("second")
    found = verify.verify(folder)
    checks = {check.name: check.passed for check in found.checks}
    # The code differs from that of this version, and no other file has a name that approx uses.
    assert checks.pop("code is what this version writes") is None
    assert False not in checks.values(), found.checks
    convert.revert(folder, tmp_path / "base")
    assert not [*(tmp_path / "base").glob("*.py")]
    inputs = {name: x for name, x in stored.items() if name != "output"}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    converted = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in converted.state_dict().items())
    with torch.inference_mode():
        assert not torch.equal(model(**inputs)[0], converted(**inputs)[0])
