"""Put the weights of a BERT checkpoint into the RoBERTa architecture, which computes the same function with them.

    python examples/roberta_model.py ../shared/checkpoints/minilm-sst2 -o runs/roberta-sst2

RoBERTa differs from BERT in where positions start, in its classification head, which contains BERT's pooler, and in the
tokenizer, which stays BERT's here. Outputs are equal to the bit, which this script checks. Task heads for sequence
classification and question answering move with the encoder; `--task-head` gives a checkpoint without one a new one, to
be trained:

    python examples/roberta_model.py MINILM -o runs/roberta-start --task-head classification
    approx finetune runs/roberta-start --task documents --data reviews.jsonl -o runs/roberta-imdb
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaForQuestionAnswering,
    RobertaForSequenceClassification,
    RobertaModel,
)

from approx.checkpoints.atomic_folder import atomic_folder, refuse_existing
from approx.checkpoints.checkpoint import load

PAIRS: dict[type[PreTrainedModel], type[PreTrainedModel]] = {
    BertForSequenceClassification: RobertaForSequenceClassification,
    BertForQuestionAnswering: RobertaForQuestionAnswering,
    BertModel: RobertaModel,
}
TASK_HEADS = {"classification": RobertaForSequenceClassification, "question-answering": RobertaForQuestionAnswering}


def to_roberta(bert: PreTrainedModel, kind: type[PreTrainedModel] | None = None) -> PreTrainedModel:
    """The RoBERTa with the weights of a BERT, which gives the same outputs.

    Args:
        bert: A BERT encoder, alone or with a head for sequence classification or question answering.
        kind: The class to make; by default the one like the BERT's. Another one has a new task head.
    """
    # Positions start after the padding token's, whose row is never used.
    first = bert.config.pad_token_id + 1
    settings = bert.config.to_dict()
    settings["max_position_embeddings"] += first
    for name in ("model_type", "architectures"):
        settings.pop(name, None)
    kind = kind or PAIRS[type(bert)]
    classifies = kind is RobertaForSequenceClassification
    roberta = kind._from_config(RobertaConfig(**settings), dtype=bert.dtype)
    state: dict[str, Tensor] = {}
    for name, tensor in bert.state_dict().items():
        renamed = name if type(bert) is BertModel and kind is RobertaModel else f"roberta.{name.removeprefix('bert.')}"
        if name.endswith("embeddings.position_embeddings.weight"):
            tensor = torch.cat([tensor.new_zeros(first, tensor.shape[1]), tensor])
        if "pooler." in name and kind is not RobertaModel:
            if not classifies or type(bert) is not BertForSequenceClassification:
                continue
            renamed = f"classifier.dense.{name.rpartition('.')[2]}"
        elif name.startswith("classifier."):
            renamed = f"classifier.out_proj.{name.rpartition('.')[2]}"
        elif name.startswith("qa_outputs."):
            renamed = name
        state[renamed] = tensor
    missing, unexpected = roberta.load_state_dict(state, strict=False)
    new = {name for name, _ in roberta.named_parameters() if not name.startswith(("roberta.", "encoder", "embeddings"))}
    if unexpected or (set(missing) - new if kind is not PAIRS[type(bert)] else missing):
        raise ValueError(f"The weights do not fit: {missing} are missing, {unexpected} are not used.")
    return roberta.eval()


@torch.inference_mode()
def largest_difference(bert: PreTrainedModel, roberta: PreTrainedModel) -> float:
    """Largest difference of the outputs on random tokens, padded, up to the longest input."""
    generator = torch.Generator().manual_seed(0)
    most = bert.config.max_position_embeddings
    found = 0.0
    for length in (7, most // 2, most):
        tokens = torch.randint(bert.config.pad_token_id + 1, bert.config.vocab_size, (2, length), generator=generator)
        mask = torch.ones_like(tokens)
        tokens[1, length // 2 :], mask[1, length // 2 :] = bert.config.pad_token_id, 0
        one, other = (model.eval()(input_ids=tokens, attention_mask=mask)[0] for model in (bert, roberta))
        # Outputs of padding are not defined, and the positions of padding differ.
        real = slice(None) if one.dim() == 2 and one.shape[1] != length else mask.bool()
        found = max(found, float((one[real] - other[real]).abs().max()))
    return found


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a BERT: a folder or a model id of the hub")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--task-head", choices=TASK_HEADS, help="give the encoder a new task head")
    parser.add_argument("--force", action="store_true", help="replace the folder if it exists")
    parser.add_argument("--seed", type=int, default=0, help="seed of the new task head")
    arguments = parser.parse_args()
    refuse_existing(arguments.out, force=arguments.force)
    torch.manual_seed(arguments.seed)
    bert: Any = load(arguments.checkpoint).model
    plain = to_roberta(bert if arguments.task_head is None else bert.base_model)
    if difference := largest_difference(bert if arguments.task_head is None else bert.base_model, plain):
        raise SystemExit(f"The outputs differ by {difference}.")
    made = plain if arguments.task_head is None else to_roberta(bert.base_model, TASK_HEADS[arguments.task_head])
    with atomic_folder(arguments.out, force=arguments.force) as folder:
        made.save_pretrained(folder)
        AutoTokenizer.from_pretrained(arguments.checkpoint).save_pretrained(folder)


if __name__ == "__main__":
    main()
