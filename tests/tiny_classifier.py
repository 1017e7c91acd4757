"""A classifier and a tokenizer of a few kilobytes: real transformers objects, without a download."""

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "film", "is", "not", "very", "good", "bad", "dull", "fine", "long"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Split words at spaces and add BERT's special tokens."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def tiny_model(
    outputs: int, labels: list[str] | None = None, positions: int = 32, vocabulary: int = len(WORDS)
) -> BertForSequenceClassification:
    """Make a BERT of two layers with random weights, drawn from torch's own generator."""
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=positions,
        vocab_size=vocabulary,
    )
    config.num_labels = outputs
    if labels is not None:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
    return BertForSequenceClassification(config).eval()
