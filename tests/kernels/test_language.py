"""The assembler that Triton runs: which versions are refused on Hopper, and that a check is only valid for its own."""

from subprocess import CompletedProcess

import pytest

from approx_kernels.dispatch.checked import identity
from approx_kernels.gpu.language import HOPPER, assembler, assembler_obstacle

pytest.importorskip("triton")


@pytest.fixture
def ptxas(tmp_path, monkeypatch):
    """A function that makes Triton run a ptxas of some version."""

    def install(version):
        tool = tmp_path / f"ptxas-{version}"
        tool.write_text(
            f"#!/bin/sh\necho 'Cuda compilation tools, release {version.rpartition('.')[0]}, V{version}'\n", "utf-8"
        )
        tool.chmod(0o755)
        for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
            monkeypatch.setenv(name, str(tool))
        assembler.cache_clear()
        identity.cache_clear()
        return tool

    yield install
    assembler.cache_clear()
    identity.cache_clear()


@pytest.mark.parametrize(
    ("version", "refused"), [("12.8.93", True), ("13.0.88", True), ("13.1.80", False), ("13.4.59", False)]
)
def test_refuses_an_assembler_that_writes_out_of_bounds_on_hopper(ptxas, version, refused):
    tool = ptxas(version)
    used = assembler(HOPPER)
    assert used
    assert (used.path, used.version) == (str(tool), version)
    why = assembler_obstacle(*HOPPER)
    assert (why is not None) == refused
    if why:
        assert version in why
        assert f"set {used.variable} to" in why
    assert assembler_obstacle(8, 0) is None


def test_does_not_judge_an_assembler_of_unknown_version(monkeypatch, ptxas):
    ptxas("1.0.0")
    monkeypatch.setattr("subprocess.run", lambda command, **_: CompletedProcess(command, 0, "no version", ""))
    assert assembler(HOPPER) is None
    assert assembler_obstacle(*HOPPER) is None


def test_a_check_is_of_the_assembler_that_made_the_code(ptxas):
    ptxas("13.1.80")
    first = identity("linear_attention")
    ptxas("13.4.59")
    assert "ptxas 13.1.80" in first
    assert identity("linear_attention") == first.replace("13.1.80", "13.4.59")
