# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else.
"""The converted config of the family."""

from transformers import BertConfig


class ApproxBertConfig(BertConfig):
    """BertConfig of a checkpoint whose attention was replaced; the field `approx` says where and how."""

    model_type = "approx_bert"
    approx: dict | None = None
