"""On a GPU `auto` uses only kernels that have passed their check there."""

import ast
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import approx_kernels
from approx.checkpoints import bundle
from approx_kernels.dispatch import checked, findings
from approx_kernels.dispatch.checked import OPS, Check, check_of, doubt, identity, keep_check, unchecked
from approx_kernels.dispatch.implementation import choose, implementation
from approx_kernels.gpu.language import ranked
from approx_kernels.ops.fastest import api, ways
from approx_kernels.ops.patterns.reference import Pattern

OP = "linear_attention"


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch, own_cache):
    """Names for GPUs that are not here; everything else about findings is real."""
    monkeypatch.setattr(findings, "_known", {})
    monkeypatch.setattr(findings, "machine", lambda device: f"a GPU, {torch.device(device).index or 0}")
    # A capability without shipped checks.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))


def on_gpu(dtype=torch.bfloat16):
    """A tensor without numbers on a GPU that need not be there."""
    with FakeTensorMode():
        return torch.empty(1, 2, 8, 16, dtype=dtype, device="cuda:0")


def chosen_for(x, impl="auto", op=OP, why=None):
    return choose(op, impl, ranked(x, why, reference=None), x)


def test_unchecked_kernels_run_only_on_explicit_request(caplog):
    caplog.set_level(logging.WARNING)
    x = on_gpu()
    assert [chosen_for(x), chosen_for(x)] == ["reference"] * 2
    (message,) = caplog.messages
    assert message.startswith(
        "linear_attention runs in PyTorch, not in its Triton kernels: they have not been checked on"
    )
    assert "`python bench/gpu.py -o FOLDER`" in message
    assert "impl='triton'" in message
    assert chosen_for(x, "triton") == "triton"
    with implementation("triton"):
        assert chosen_for(x) == "triton"
    with unchecked():
        assert chosen_for(x) == "triton"
    assert chosen_for(x) == "reference"


def test_exact_attention_uses_pytorchs_fused_kernels_instead_and_logs_it(caplog):
    caplog.set_level(logging.WARNING)
    x = on_gpu()
    assert choose("flash_attention", "auto", ranked(x, None, fused=None, reference=None), x) == "fused"
    assert "flash_attention runs in PyTorch" in caplog.text


def test_reports_an_obstacle_before_a_missing_check(caplog):
    caplog.set_level(logging.WARNING)
    assert chosen_for(on_gpu(), op="topk_attention", why="the head size is 24.") == "reference"
    assert "because 'triton' cannot run: the head size is 24." in caplog.text
    assert "checked" not in caplog.text


def test_uses_passed_kernels_in_their_dtypes_on_their_device_and_in_later_processes(monkeypatch):
    keep_check(OP, "cuda", Check(["bfloat16"], {}))
    assert chosen_for(on_gpu()) == "triton"
    monkeypatch.setattr(findings, "_known", {})
    assert chosen_for(on_gpu()) == "triton"
    assert chosen_for(on_gpu(torch.float16)) == "reference"
    assert "not been checked in float16" in (doubt(OP, on_gpu(torch.float16)) or "")
    assert chosen_for(on_gpu(), op="linear_decode") == "reference"
    assert check_of(OP, "cuda:1") is None


def test_under_autocast_both_dtypes_must_have_passed():
    keep_check(OP, "cuda", Check(["float32", "bfloat16"], {}))
    for dtype, expected in ((torch.bfloat16, "triton"), (torch.float16, "reference")):
        with torch.autocast("cuda", dtype=dtype):
            # Without a GPU it would not start by itself.
            torch.set_autocast_enabled("cuda", True)
            assert chosen_for(on_gpu(torch.float32)) == expected


def test_exact_attention_takes_flash_kernels_that_a_probe_found_only_where_they_passed(monkeypatch):
    ways_taken = []
    monkeypatch.setattr(api, "chosen", lambda case: (ways.OWN, lambda *arguments, **how: ways_taken.append(ways.OWN)))
    monkeypatch.setattr(api, "needs_pytorch", lambda *tensors: None)
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 2, 200, 16, dtype=torch.bfloat16, device="cuda:0") for _ in range(3))
        monkeypatch.setattr(api, "exact_attention", lambda *arguments, **how: ways_taken.append(ways.DEFAULT))
        api.fastest_attention(q, k, v, causal=False, scale=1.0)
        keep_check("flash_attention", "cuda", Check(["bfloat16"], {}))
        api.fastest_attention(q, k, v, causal=False, scale=1.0)
    assert ways_taken == [ways.DEFAULT, ways.OWN]


def test_skips_failed_kernels_and_logs_the_error():
    keep_check(OP, "cuda", Check(["float16"], {"bfloat16": "linear in attention failed: out has error 1"}))
    assert chosen_for(on_gpu(torch.float16)) == "triton"
    assert chosen_for(on_gpu()) == "reference"
    assert "failed in bfloat16: linear in attention failed: out has error 1. After a fix," in (
        doubt(OP, on_gpu()) or ""
    )
    assert chosen_for(on_gpu(), "triton") == "triton"


@pytest.mark.parametrize("changed", ["sources", "triton"])
def test_a_pass_is_void_once_sources_or_versions_change(monkeypatch, changed):
    keep_check(OP, "cuda", Check(["bfloat16"], {}))
    checked.identity.cache_clear()
    if changed == "triton":
        monkeypatch.setattr(checked, "triton", SimpleNamespace(__version__="0.1"))
    else:
        monkeypatch.setattr(checked, "digest", lambda op: "another")
    try:
        assert chosen_for(on_gpu()) == "reference"
    finally:
        checked.identity.cache_clear()


def test_on_other_devices_nothing_changes():
    x = torch.empty(1, 2, 8, 16)
    assert doubt(OP, x) is None
    assert chosen_for(x) == "reference"
    assert chosen_for(x, "triton") == "triton"
    assert not findings.file().exists()


def copied(folder, change=lambda name, text: text):
    """The sources of the package in another folder, changed."""
    root = Path(approx_kernels.__path__[0])
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(change(name.as_posix(), path.read_text("utf-8")), "utf-8")
    return checked._in_folders(folder)


def digest_of(files, op):
    return checked._digest(files, f"approx_kernels_ops_{OPS[op]}_api")


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("ops/linear/triton.py", {OP}),
        ("ops/lsh/triton_forward.py", {"lsh_attention"}),
        ("ops/topk/triton.py", set()),
        ("gpu/language.py", {OP, "local_attention", "lsh_attention"}),
        ("ops/linear/cpu.py", set()),
        ("ops/linear/reference.py", set()),
    ],
)
@pytest.mark.sample(2)
def test_digest_is_of_kernels_and_what_they_import(tmp_path, file, changes):
    ops = (OP, "local_attention", "lsh_attention")
    before = copied(tmp_path / "before")
    after = copied(tmp_path / "after", lambda name, text: f"{text}\nNEW = 1\n" if name == file else text)
    assert {op for op in ops if digest_of(before, op) != digest_of(after, op)} == changes


def reworded(name, text):
    """The same code without comments and line breaks, and with other docstrings."""
    return ast.unparse(ast.parse(text.replace('"""\n', ' In other words."""\n')))


def test_digest_ignores_comments_docstrings_and_formatting(tmp_path):
    assert all(checked.digest(op) == digest_of(copied(tmp_path, reworded), op) for op in (OP, "lsh_attention"))


def test_digest_ignores_how_pytorch_calls_the_kernels(tmp_path):
    def elsewhere(name, text):
        text = text.replace(
            "approx_kernels.dispatch.implementation import choose", "approx_kernels.runtime.new import choose"
        )
        return f"{text}\nNEW = 1\n" if name.startswith("runtime/") else text

    assert checked.digest(OP) == digest_of(copied(tmp_path, elsewhere), OP)


def test_digest_is_the_same_where_all_files_are_in_one_folder(tmp_path):
    # As in a converted checkpoint.
    waiting, seen = ["approx_kernels.ops.lsh.api"], set()
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            text, needed = bundle._flatten(module, kernels=True)
            (tmp_path / f"{bundle._flat(module)}.py").write_text(text, "utf-8")
            waiting += needed
    files = {path.stem: path for path in tmp_path.glob("*.py")}
    assert identity("lsh_attention").startswith(digest_of(files, "lsh_attention"))


def test_checks_are_read_during_compilation_without_a_graph_break():
    keep_check(OP, "cuda:0", Check(["float32"], {}))

    def take(x):
        left = checked._doubt(OP, "cuda:0", "torch.float32") or checked._doubt("flash", "cuda:0", str(x.dtype))
        return x if left is None else x + 1

    x = torch.zeros(2)
    assert torch.equal(torch.compile(take, fullgraph=True, backend="eager")(x), x + 1)


def test_lists_every_op_with_kernels_and_its_tensor():
    kernels = {}
    for path in Path(approx_kernels.__path__[0]).glob("ops/*/api.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "choose":
                # The op of a sparse pattern is named by its class.
                by_class = isinstance(node.args[0], ast.Attribute)
                names = [kind.op for kind in Pattern.__subclasses__()] if by_class else [ast.literal_eval(node.args[0])]
                if path.parent.name not in ("exact", "fastest", "exact_part", "near_keys"):
                    kernels |= dict.fromkeys(names, path.parent.name)
                    assert len(node.args) == 4, names
    assert kernels == dict(OPS)
