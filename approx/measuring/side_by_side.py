"""One model beside its exact base, on single inputs: the texts that both generate, what both predict."""

from typing import Any

from approx.measuring.generation import continued
from approx.measuring.pair import label_of, open_pair
from approx.measuring.prediction import compare


def generate(
    model: str | Any,
    prompts: list[str],
    *,
    against: str | Any | None = None,
    processor: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    offline: bool = False,
    merge_adapter: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Continue prompts with a decoder and with its exact base.

    Args:
        model: A folder, a hub model id, or a loaded model, which keeps its device and dtype.
        prompts: The texts to continue.
        against: The base, as for `evaluate`.
        processor: The tokenizer of a loaded model, or the folder that holds it.
        device: `auto`, `cpu` or `cuda`.
        dtype: `auto` or the name of a torch dtype.
        offline: Whether to use only local files and the hub's cache.
        merge_adapter: Whether an adapter of PEFT beside the weights, or one whose folder is given, is merged into them.
        options: Options of `approx.measuring.generation.continued`: max_new_tokens, sample, temperature, seed.

    Returns:
        `model`, and for each of the `prompts` the texts with their speed and cache, and the first token that differs.

    Raises:
        ApproxError: if a model does not continue a text, or a prompt does not fit it.
    """
    opened = open_pair(model, against, device, dtype, offline, processor, merge_adapter=merge_adapter)
    return {"model": label_of(model), "prompts": continued(opened, prompts, **options)}


def predict(
    model: str | Any,
    inputs: list[str],
    *,
    against: str | Any | None = None,
    processor: Any = None,
    device: str = "auto",
    dtype: str = "auto",
    offline: bool = False,
    merge_adapter: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Predict from single inputs with a model and with its exact base.

    Args: as for `generate`, and
        inputs: Texts, or paths of .txt files, recordings or images.
        options: Options of `approx.measuring.prediction.compare`: question, top.

    Returns:
        `model`, and for each of the `inputs` what every model predicts.

    Raises:
        ApproxError: if the head predicts nothing, or an input does not fit the model.
    """
    opened = open_pair(model, against, device, dtype, offline, processor, merge_adapter=merge_adapter)
    return {"model": label_of(model), "inputs": [compare(opened, one, **options) for one in inputs]}
