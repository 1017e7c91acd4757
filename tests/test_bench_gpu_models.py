"""Models under every mechanism on a GPU: their use of transformers."""

from transformers.utils import import_utils

from bench import gpu_models


def test_models_without_padding_get_no_mask_for_being_captured(monkeypatch):
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    assert import_utils.is_tracing()
    with gpu_models._unmasked():
        assert not import_utils.is_tracing()
    assert import_utils.is_tracing()
