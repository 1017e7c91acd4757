"""Folders reload in a process that shares nothing with this one or with other folders."""

import signal

import pytest
import torch

from approx.conversion import surgery, verify
from approx.planning.plan import Plan
from approx.planning.positions import example_inputs
from approx_kernels.dispatch.implementation import implementation
from zoo import tiny


@pytest.fixture
def converted(tmp_path):
    """A folder, its inputs and its expected output."""
    model = tiny("BertModel")
    surgery.convert(model, Plan.of("local", left=3))
    model.save_pretrained(tmp_path / "folder")
    inputs = example_inputs(model, 20)
    with implementation("plain"), torch.inference_mode():
        return tmp_path / "folder", inputs, model(**inputs)[0]


def test_each_folder_is_loaded_by_itself_and_a_broken_one_costs_no_other(converted):
    folder, inputs, out = converted
    code = next(folder.glob("modeling_*.py"))
    written = code.read_text("utf-8")
    code.write_text(f"import approx\n{written}", encoding="utf-8")
    with pytest.raises(verify.ReloadError, match="approx is blocked in this check"):
        verify.first_outputs(folder, "AutoModel", [inputs])
    code.write_text(f"print(0)\n{written}", encoding="utf-8")
    assert torch.equal(verify.first_outputs(folder, "AutoModel", [inputs])[0], out)
    with pytest.raises(verify.ReloadError, match="nowhere"):
        verify.first_outputs(folder.with_name("nowhere"), "AutoModel", [inputs])


@pytest.mark.slow
def test_where_nothing_can_be_forked_a_process_loads_one_folder(converted, monkeypatch):
    folder, inputs, out = converted
    monkeypatch.setattr(verify, "_FORKS", False)
    monkeypatch.setattr(verify, "_current", None)
    assert torch.equal(verify.first_outputs(folder, "AutoModel", [inputs])[0], out)
    assert verify._current
    assert not verify._current.usable


def test_reports_and_replaces_a_process_that_died(converted, monkeypatch):
    folder, inputs, out = converted
    monkeypatch.setattr(verify, "_current", None)
    verify.begin()
    process = verify._current
    assert process
    process._process.send_signal(signal.SIGKILL)
    with pytest.raises(verify.ReloadError, match="the process died"):
        process.first_outputs(folder, "AutoModel", [inputs])
    assert not process.usable
    assert torch.equal(verify.first_outputs(folder, "AutoModel", [inputs])[0], out)
