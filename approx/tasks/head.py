"""The model head that a task needs, and the auto class of transformers for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Head:
    """A task head.

    Args:
        name: Its name in messages: `question-answering`.
        auto_class: Name of transformers' auto class: `AutoModelForQuestionAnswering`.
        older: Another suffix of the names of its model classes.
    """

    name: str
    auto_class: str
    older: str | None = None

    def is_of(self, model_class: type) -> bool:
        """Whether a model class has this head, by its name: transformers names classes by family and head."""
        endings = [self.auto_class.removeprefix("AutoModel"), *([self.older] if self.older else [])]
        return model_class.__name__.endswith(tuple(endings))


CAUSAL_LANGUAGE_MODELLING = Head("causal language-modelling", "AutoModelForCausalLM", "LMHeadModel")
IMAGE_CLASSIFICATION = Head("image-classification", "AutoModelForImageClassification")
TOKEN_CLASSIFICATION = Head("token-classification", "AutoModelForTokenClassification")
CTC = Head("CTC", "AutoModelForCTC")
MASKED_LANGUAGE_MODELLING = Head("masked language-modelling", "AutoModelForMaskedLM")
SPEECH_SEQ2SEQ = Head("speech sequence-to-sequence", "AutoModelForSpeechSeq2Seq", "ForConditionalGeneration")
QUESTION_ANSWERING = Head("question-answering", "AutoModelForQuestionAnswering")
SEQUENCE_CLASSIFICATION = Head("sequence-classification", "AutoModelForSequenceClassification")
