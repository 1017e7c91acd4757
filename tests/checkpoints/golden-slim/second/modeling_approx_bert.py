# Travels with a checkpoint converted by approx (Apache-2.0); it needs torch and transformers, and nothing else.
"""The converted classes of the family."""

from transformers import (
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertLMHeadModel,
    BertModel,
)

from .approx_installed import installed_model
from .configuration_approx_bert import ApproxBertConfig

ApproxModel = installed_model(layout=1, version="0.1.0")
if ApproxModel is None:
    from .approx_seam import ApproxModel


class ApproxBertForMaskedLM(ApproxModel, BertForMaskedLM):
    """BertForMaskedLM with replaced attention."""

    config_class = ApproxBertConfig


class ApproxBertForMultipleChoice(ApproxModel, BertForMultipleChoice):
    """BertForMultipleChoice with replaced attention."""

    config_class = ApproxBertConfig


class ApproxBertForNextSentencePrediction(ApproxModel, BertForNextSentencePrediction):
    """BertForNextSentencePrediction with replaced attention."""

    config_class = ApproxBertConfig


class ApproxBertForPreTraining(ApproxModel, BertForPreTraining):
    """BertForPreTraining with replaced attention."""

    config_class = ApproxBertConfig


class ApproxBertForQuestionAnswering(ApproxModel, BertForQuestionAnswering):
    """BertForQuestionAnswering with replaced attention."""

    config_class = ApproxBertConfig


class ApproxBertForSequenceClassification(ApproxModel, BertForSequenceClassification):
    """BertForSequenceClassification with replaced attention."""

    config_class = ApproxBertConfig


class ApproxBertForTokenClassification(ApproxModel, BertForTokenClassification):
    """BertForTokenClassification with replaced attention."""

    config_class = ApproxBertConfig


class ApproxBertLMHeadModel(ApproxModel, BertLMHeadModel):
    """BertLMHeadModel with replaced attention."""

    config_class = ApproxBertConfig


class ApproxBertModel(ApproxModel, BertModel):
    """BertModel with replaced attention."""

    config_class = ApproxBertConfig
