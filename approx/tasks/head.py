"""The head that a task needs of a model, and the auto class of transformers that makes models with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Head:
    """A task head.

    Args:
        name: As messages call it: `question-answering`.
        auto_class: Name of transformers' auto class, `AutoModelForQuestionAnswering`.
        older: Another ending of the names of its model classes.
    """

    name: str
    auto_class: str
    older: str | None = None

    def is_of(self, model_class: type) -> bool:
        """Whether a model class has this head: transformers names its classes by family and head."""
        endings = [self.auto_class.removeprefix("AutoModel"), *([self.older] if self.older else [])]
        return model_class.__name__.endswith(tuple(endings))


CAUSAL_LANGUAGE_MODELLING = Head("causal language-modelling", "AutoModelForCausalLM", "LMHeadModel")
CTC = Head("CTC", "AutoModelForCTC")
MASKED_LANGUAGE_MODELLING = Head("masked language-modelling", "AutoModelForMaskedLM")
QUESTION_ANSWERING = Head("question-answering", "AutoModelForQuestionAnswering")
SEQUENCE_CLASSIFICATION = Head("sequence-classification", "AutoModelForSequenceClassification")
