"""Tasks of the Language Model Evaluation Harness, through its API where the package lm-eval is installed.

Source: Gao et al., 2021, "A framework for few-shot language model evaluation", Zenodo, doi 10.5281/zenodo.5371628.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar, Literal

from approx.errors import ApproxError, Exit, did_you_mean
from approx.tasks.generation import company_of, prompt, prompts, texts, written
from approx.tasks.head import CAUSAL_LANGUAGE_MODELLING, Head
from approx.tasks.language import check_causal
from approx.tasks.padding import padded
from approx.tasks.settings import whole_setting
from approx.tasks.task import Encoding, Example, Groups, Split, Task
from approx.version import install

PREFIX, ANY = "lm-eval/", "NAME"
# As in the harness's own evaluations, so that the examples in a prompt are the same.
_SHOTS_SEED = 1234
# Type of a request -> what it measures; and the most tokens of an answer where the task does not say.
_MEASURES: dict[str, Literal["likelihood", "generation"]] = {
    "loglikelihood": "likelihood",
    "generate_until": "generation",
}
_NEW_TOKENS = 256


class Harness(Task):
    """A task of the LM Evaluation Harness in which a causal model rates given continuations or generates its answer.

    Requests, filters of answers and scores are the harness's own; contexts that do not fit are truncated on the left. Answers are
    generated greedily, whatever the task says about sampling. The package lm-eval is needed.

    Args:
        task: Name of a task of the harness; `NAME` stands for any.
        shots: Examples in the prompt; None takes the task's own number.
        metric: A metric of the task that is a mean over examples, such as acc, acc_norm or exact_match.
        longest: Maximum tokens of a request, with its answer; None uses the model's positions.
        new_tokens: Maximum tokens of a generated answer; None takes the task's own number, or 256.

    Raises:
        ApproxError: if lm-eval is not installed, or a setting is out of range.
    """

    name = f"{PREFIX}{ANY}"
    head: ClassVar[Head] = CAUSAL_LANGUAGE_MODELLING
    groups: ClassVar[Groups] = Groups(None, "the harness does not say what its documents share")
    metrics = ("mean_score",)
    windowed: ClassVar[bool] = True

    def __init__(
        self,
        task: str,
        /,
        shots: int | None = None,
        metric: str = "acc",
        longest: int | None = None,
        new_tokens: int | None = None,
    ) -> None:
        self.name = f"{PREFIX}{task}"
        self._task, self._metric = task, str(metric)
        self._shots = None if shots is None else whole_setting(self.name, "shots", shots, 0)
        self._longest = None if longest is None else whole_setting(self.name, "longest", longest, 2)
        self._new_tokens = None if new_tokens is None else whole_setting(self.name, "new_tokens", new_tokens, 1)
        self._definitions: str | None = None
        if task != ANY and importlib.util.find_spec("lm_eval") is None:
            raise ApproxError(
                f"The task {self.name} needs the package lm-eval, which is not installed. Install it: "
                f"{install('lm-eval')}.",
                Exit.MISSING,
            )

    def check(self, model: Any) -> None:
        """Raise if the model has no language-modelling head, or is not causal."""
        super().check(model)
        check_causal(self.name, model)

    def read(
        self, data: Path | None = None, split: str | None = None, limit: int | None = None, *, streaming: bool = False
    ) -> Split:
        """Read the examples that the harness evaluates on.

        Args:
            data: A folder with task definitions of yours in YAML; None uses the harness's own, with datasets from the
                hub.
            split: None; the harness chooses it.
            limit: Keep the first `limit` examples.
            streaming: No effect.

        Raises:
            ApproxError: if no task was named, or its task or dataset cannot be loaded, or is not supported.
        """
        if self._task == ANY:
            raise ApproxError(f"{self.name} stands for any task of the harness. Name one, e.g. {PREFIX}hellaswag.")
        if split is not None:
            raise ApproxError(f"{self.name} has the split that the harness chooses. Leave out --split.")
        if limit is not None:
            whole_setting(self.name, "limit", limit, 1)
        self._definitions = None if data is None else str(data)
        made = self._opened()
        if made.aggregation().get(self._metric, _no).__name__ != "mean":
            means = [metric for metric, total in made.aggregation().items() if total.__name__ == "mean"]
            raise ApproxError(
                f"{self.name} has no metric '{self._metric}' that is a mean over examples. It has "
                f"{', '.join(means) or 'none'}; choose one with --set metric=NAME.",
                Exit.UNSUPPORTED,
            )
        examples = list(self._examples(made, limit))
        return Split(
            str(made.config.test_split or made.config.validation_split), examples, subset=limit == len(examples)
        )

    def _examples(self, made: Any, limit: int | None) -> Iterator[Example]:
        made.build_all_requests(limit=limit)
        for number, group in groupby(made.instances, key=lambda one: one.doc_id):
            requests = list(group)
            kind = " and ".join(sorted({one.request_type for one in requests}))
            if kind not in _MEASURES or (kind == "generate_until" and (len(requests) > 1 or requests[0].repeats > 1)):
                raise ApproxError(
                    f"{self.name} asks for {len(requests)} times {kind}; supported are the rating of given continuations "
                    "(loglikelihood) and one generated answer (generate_until) of each document.",
                    Exit.UNSUPPORTED,
                )
            self.measures = _MEASURES[kind]
            inputs = {"requests": [list(one.args) for one in requests], "doc": requests[0].doc}
            yield Example(f"{self._task}-{number}", inputs, 1.0)

    def encode(self, example: Example, processor: Any, max_length: int | None = None) -> list[Encoding]:
        """Each context with a continuation, of which the tokens of the continuation are scored; or a prompt to be answered."""
        window = min(one for one in (self._longest, max_length, 1 << 20) if one is not None)
        if self.measures == "generation":
            ((context, ways),) = example.inputs["requests"]
            count = self._new_tokens or ways.get("max_gen_toks", _NEW_TOKENS)
            if count >= window:
                raise ApproxError(
                    f"{self.name} lets an answer have {count} tokens, which leaves no room for a question: the limit is "
                    f"{window}. Set fewer with --set new_tokens={max(window // 2, 1)}."
                )
            until = ways.get("until") or ()
            one = prompt(processor, context, count, (until,) if isinstance(until, str) else until)
            return [one | {"input_ids": one["input_ids"][count - window :]}]
        return [
            {"input_ids": ids[-window:], "scored": min(scored, window - 1)}
            for context, continuation in example.inputs["requests"]
            for ids, scored in [_pair(processor, context, continuation)]
        ]

    def collate(self, encodings: Sequence[Encoding], processor: Any) -> dict[str, Any]:
        """Pad to the longest of the batch, on the right; prompts have no padding."""
        if self.measures == "generation":
            return prompts(encodings)
        return padded([{"input_ids": one["input_ids"]} for one in encodings], processor)

    def tokens(self, encoding: Encoding) -> int:
        """Tokens of a request, with what may follow it."""
        return len(encoding["input_ids"]) + encoding.get("new_tokens", 0)

    def company(self, encoding: Encoding, processor: Any, config: Any) -> int:
        """What is generated has no padding."""
        return company_of(encoding) if self.measures == "generation" else 0

    def outputs(self, model: Any, batch: dict[str, Any]) -> Any:
        """The tokens that the model writes, [B, n], or its outputs for the requests."""
        return written(model, batch) if self.measures == "generation" else super().outputs(model, batch)

    def targets(
        self, examples: Sequence[Example], encodings: Sequence[Encoding], processor: Any, config: Any
    ) -> dict[str, Any]:
        """Raise: the harness's examples are for evaluation."""
        raise ApproxError(
            f"{self.name} is for evaluation, not for training. Train on another task or text.", Exit.UNSUPPORTED
        )

    def predict(self, outputs: Any, encodings: Sequence[Encoding], config: Any) -> list[Any]:
        """Log probability of each continuation in nats, and whether it is the likeliest at every token; or the answer."""
        import torch

        if self.measures == "generation":
            return texts(outputs, encodings)
        predictions = []
        for logits, one in zip(outputs.logits, encodings, strict=True):
            end, scored = len(one["input_ids"]), one["scored"]
            rows = logits[end - scored - 1 : end - 1].float()
            if not rows.isfinite().all():
                raise ApproxError("its logits are not finite on some inputs, so it has no score.", Exit.VERIFICATION)
            tokens = torch.tensor(one["input_ids"][end - scored :], device=rows.device)
            chosen = rows.log_softmax(-1).gather(1, tokens[:, None])
            predictions.append([float(chosen.double().sum()), bool((rows.argmax(-1) == tokens).all())])
        return predictions

    def combine(self, example: Example, parts: list[Any]) -> float:
        """The harness's score of an example."""
        if self.measures == "generation":
            return float(self._scored(example, parts[0]))
        results = [(likelihood, greedy) for likelihood, greedy in parts]
        return float(self._opened().process_results(example.inputs["doc"], results)[self._metric])

    def _scored(self, example: Example, answer: str) -> float:
        """The score of an answer after the harness's first filter, such as one that looks for a number."""
        from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]  # an optional package

        made, (request,) = self._opened(), example.inputs["requests"]
        asked = Instance("generate_until", example.inputs["doc"], tuple(request), 0)
        asked.resps.append(answer)
        for chain in made._filters[:1]:
            chain.apply([asked])
            answer = asked.filtered_resps[chain.name]
        return made.process_results(example.inputs["doc"], [answer])[self._metric]

    def excerpt(self, example: Example) -> str:
        """The end of the context, which holds the question."""
        return str(example.inputs["requests"][0][0])[-200:]

    def correct(self, predictions: Sequence[Any], labels: Sequence[Any]) -> list[bool] | None:
        """Whether each score is full, where scores are 0 or 1."""
        return [score == 1 for score in predictions] if set(predictions) <= {0, 1} else None

    def _opened(self) -> Any:
        return _open(self._task, self._definitions, self._shots)


@functools.lru_cache(maxsize=4)
def _open(name: str, definitions: str | None, shots: int | None) -> Any:
    """A task of the harness.

    Raises:
        ApproxError: if there is none of this name, it is a group, or its dataset cannot be loaded.
    """
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]  # an optional package

    manager = TaskManager(include_path=definitions, include_defaults=definitions is None)
    if name not in manager.all_subtasks:
        where = f"{definitions} defines" if definitions else "the harness has"
        raise ApproxError(
            f"There is no task '{name}' among those that {where}.{did_you_mean(name, manager.all_subtasks)}"
        )
    try:
        made = manager.load([name])["tasks"][name]
    # Task definitions are code of many authors, and their datasets come from the hub.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ApproxError(f"The harness's task '{name}' could not be loaded: {reason}", Exit.UNAVAILABLE) from error
    if shots is not None:
        made.set_config(key="num_fewshot", value=shots)
    made.set_fewshot_seed(seed=_SHOTS_SEED)
    return made


def _pair(processor: Any, context: str, continuation: str) -> tuple[list[int], int]:
    """Tokens of a context with a continuation, and the number of tokens of the continuation.

    Spaces at the end of the context belong to the first word of the continuation.
    """
    stripped = context.rstrip()
    if not stripped:
        begun = processor.bos_token_id if processor.bos_token_id is not None else processor.eos_token_id
        ids = processor(context + continuation, add_special_tokens=False, verbose=False)["input_ids"]
        # Without a token before it, the first token has no prediction.
        return (ids, len(ids) - 1) if begun is None else ([begun, *ids], len(ids))
    # With the tokenizer's own special tokens, such as the first token of Llama.
    whole, before = (processor(text, verbose=False)["input_ids"] for text in (context + continuation, stripped))
    return whole, len(whole) - len(before)


def _no() -> None:
    """The metric of a task whose metric is not known yet."""
