"""Try a tokenizer before it is used: damaged files may show only when a text is read."""

from typing import Any

from transformers import PreTrainedTokenizerBase


def try_out(reader: Any) -> None:
    """Check that the tokenizer of a checkpoint has a vocabulary and reads a text and a pair.

    Args:
        reader: A tokenizer, or a processor, which may have one.

    Raises:
        ValueError: if it does not.
    """
    tokenizer = getattr(reader, "tokenizer", reader)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    # Without its files, transformers builds one with an empty vocabulary, and every score would be noise.
    if not tokenizer.get_vocab().keys() - tokenizer.all_special_tokens:
        raise ValueError("the vocabulary is missing")
    if not tokenizer.is_fast:
        return
    try:
        tokenizer("a")
        tokenizer("a", "a")
    except BaseException as error:
        # A panic of Rust is no Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(f"it cannot read a text ({type(error).__name__}: {error})") from None
        raise
