"""What kept outputs depend on: whatever computes them otherwise computes them again."""

import pytest

from approx.pipeline import stages
from approx_kernels.c_language import library
from c_sources import needs_compiler
from tiny_study import tiny_checkpoint, tiny_data


@pytest.fixture
def anew():
    """Forget whether C can be compiled, before and after."""
    library.cache_clear()
    yield library.cache_clear
    library.cache_clear()


@needs_compiler
def test_outputs_of_compiled_code_are_not_taken_for_those_of_pytorch(tmp_path, monkeypatch, anew, own_cache):
    base, data = str(tiny_checkpoint(tmp_path / "base")), str(tiny_data(tmp_path))

    def ledgers() -> int:
        stages.evaluate(base, "glue/sst2", data=data, device="cpu")
        return len(list((own_cache / "outputs").rglob("*.jsonl")))

    assert (ledgers(), ledgers()) == (1, 1)
    monkeypatch.setenv("APPROX_COMPILE_C", "0")
    anew()
    assert (ledgers(), ledgers()) == (2, 2)
