"""Run as a separate process: load converted folders in every way that people do, where approx cannot be imported.

Usage: python -P without_approx.py FOLDER, after `models.write` filled the folder; the results are written to
FOLDER/results.json: head -> way -> `ok`, `-` with the reason why it does not apply, or the error.
"""

import copy
import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# An import of a name that has None here fails.
sys.modules.update(dict.fromkeys(("approx", "approx_kernels", "triton")))  # type: ignore[arg-type]  # see above

import torch  # noqa: E402  # after the line above
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parents[1]))
from loading.pipelines import PIPELINES, TEXT, Complaints  # noqa: E402  # found by the line above

TRUSTED: dict[str, Any] = {"trust_remote_code": True}
QUERIES = ["query", "q_proj", "c_attn"]


class NotApplicableError(Exception):
    """A way of loading that a head does not have."""


class Head:
    """One converted folder, its inputs, and what it computed of them before it was saved."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.place, self.scratch = name, folder / name, folder / "scratch" / name
        about = json.loads((folder / f"{name}.json").read_text("utf-8"))
        self.task, self.auto = about["pipeline"], getattr(transformers, about["auto"])
        self.inputs = load_file(folder / f"{name}.safetensors")
        self.expected = self.inputs.pop("expected")
        self.folder = folder

    def load(self, place: str | Path, **more: Any) -> Any:
        model = self.auto.from_pretrained(place, **TRUSTED, **more).eval()
        assert type(model).__name__ == f"Approx{self.name}", type(model)
        return model

    def out(self, model: Any) -> torch.Tensor:
        return self.out_of(model, self.inputs)

    def out_of(self, model: Any, inputs: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(**inputs)[0]

    def same(self, model: Any) -> None:
        difference = (self.out(model) - self.expected).abs().max()
        assert difference == 0.0, f"its outputs differ by {float(difference):.1e}"

    def labelled(self) -> dict[str, torch.Tensor]:
        """The inputs with labels that the head is trained on."""
        batch = self.expected.shape[0]
        if "QuestionAnswering" in self.name:
            return {
                **self.inputs,
                "start_positions": torch.ones(batch).long(),
                "end_positions": torch.ones(batch).long(),
            }
        if self.name.endswith("Model") and "LMHead" not in self.name:
            raise NotApplicableError("a backbone has no loss")
        if "Whisper" in self.name:
            return {**self.inputs, "labels": self.inputs["decoder_input_ids"]}
        if any(kind in self.name for kind in ("LM", "TokenClassification")):
            return {**self.inputs, "labels": self.inputs["input_ids"] % self.expected.shape[-1]}
        return {**self.inputs, "labels": torch.ones((batch, 2) if "CTC" in self.name else batch).long()}


def auto(head: Head) -> None:
    head.same(head.load(head.place))


def saved_again(head: Head) -> None:
    head.load(head.place).save_pretrained(head.scratch / "again")
    head.same(head.load(head.scratch / "again"))


def bfloat16(head: Head) -> None:
    half(head, torch.bfloat16, 0.2)


def float16(head: Head) -> None:
    half(head, torch.float16, 0.05)


def half(head: Head, dtype: torch.dtype, tolerance: float) -> None:
    model = head.load(head.place, dtype=dtype)
    assert model.dtype == dtype
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in head.inputs.items()}
    with torch.no_grad():
        out = model(**inputs)[0]
    assert out.dtype == dtype
    error = float((out.float() - head.expected).norm() / head.expected.norm())
    assert error < tolerance, f"it differs by {error:.1%} from float32"


def device_map(head: Head) -> None:
    if not find_spec("accelerate"):
        raise NotApplicableError("accelerate is not installed")
    head.same(head.load(head.place, device_map="cpu"))


def trainer(head: Head) -> None:
    if not find_spec("accelerate"):
        raise NotApplicableError("accelerate is not installed")
    inputs = head.labelled()
    rows = [{key: value[row] for key, value in inputs.items()} for row in range(len(head.expected))]
    arguments = transformers.TrainingArguments(
        str(head.scratch / "trained"),
        max_steps=2,
        save_steps=1,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    model = head.load(head.place)
    transformers.Trainer(model, arguments, train_dataset=rows).train()  # type: ignore[arg-type]  # any sequence of rows will do
    trained = head.out(model.eval())
    again = head.out(head.load(head.scratch / "trained" / "checkpoint-2"))
    assert torch.equal(again, trained), "its last checkpoint computes something else"
    assert not torch.equal(trained, head.expected), "nothing was trained"
    resumed = head.load(head.place)
    rest = transformers.Trainer(resumed, arguments, train_dataset=rows)  # type: ignore[arg-type]  # as above
    rest.train(resume_from_checkpoint=str(head.scratch / "trained" / "checkpoint-1"))
    assert torch.equal(head.out(resumed.eval()), trained), "training that is continued gives something else"


def peft(head: Head) -> None:
    if not find_spec("peft"):
        raise NotApplicableError("peft is not installed")
    from peft import LoraConfig, PeftModel, get_peft_model

    model: Any = get_peft_model(head.load(head.place), LoraConfig(r=2, target_modules=QUERIES, init_lora_weights=False))
    adapted = head.out(model.eval())
    assert not torch.equal(adapted, head.expected)
    model.save_pretrained(head.scratch / "adapter")
    again = PeftModel.from_pretrained(head.load(head.place), str(head.scratch / "adapter")).eval()
    assert torch.equal(head.out(again), adapted), "the adapter on a reloaded model computes something else"
    merged: Any = copy.deepcopy(again).merge_and_unload()
    merged.save_pretrained(head.scratch / "merged")
    torch.testing.assert_close(head.out(head.load(head.scratch / "merged")), adapted, rtol=1e-4, atol=1e-4)


def hub(head: Head) -> None:
    """A pinned revision from a hub whose main branch has moved on, and again from the cache alone."""
    where = {"revision": (head.folder / f"{head.name}.revision").read_text("utf-8")}
    calls = [{}, {"local_files_only": True}]
    for more in calls:
        head.same(head.load(f"ada/{head.name}", **where, **more))


def pipeline(head: Head) -> None:
    from transformers.pipelines import PIPELINE_REGISTRY

    if head.task is None:
        raise NotApplicableError("there is no pipeline for it")
    if head.task not in PIPELINE_REGISTRY.get_supported_tasks():
        raise NotApplicableError(f"this version has no pipeline for {head.task}")
    with Complaints() as complaints:
        pipe: Any = transformers.pipeline(head.task, model=str(head.place), **TRUSTED)  # type: ignore[call-overload]  # a name
    assert complaints.listed == []
    assert type(pipe.model).__name__ == f"Approx{head.name}"
    PIPELINES[head.task](head, pipe)


def sentences(head: Head) -> None:
    if head.task != "feature-extraction":
        raise NotApplicableError("sentence-transformers embeds texts with a backbone")
    if not find_spec("sentence_transformers"):
        raise NotApplicableError("sentence-transformers is not installed")
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(head.place), device="cpu", trust_remote_code=True)
    inputs = transformers.AutoTokenizer.from_pretrained(head.place, **TRUSTED)(TEXT, return_tensors="pt")
    expected = head.out_of(head.load(head.place), inputs)[0].mean(0)
    torch.testing.assert_close(torch.tensor(encoder.encode(TEXT)), expected, rtol=1e-5, atol=1e-6)
    encoder.save(str(head.scratch / "sentences"))
    again = SentenceTransformer(str(head.scratch / "sentences"), device="cpu", trust_remote_code=True)
    assert (again.encode(TEXT) == encoder.encode(TEXT)).all(), "saved again it computes something else"


WAYS = (auto, saved_again, bfloat16, float16, device_map, pipeline, sentences, trainer, peft, hub)


def tried(way: Callable[[Head], None], head: Head) -> str:
    """Try one way: `ok`, why it does not apply, or the error."""
    torch.manual_seed(0)
    try:
        way(head)
    except NotApplicableError as reason:
        return f"- {reason}"
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return "ok"


def main(folder: Path) -> None:
    """Try every way with every head of a folder."""
    torch.set_num_threads(1)
    heads = sorted(path.stem for path in folder.glob("*.json"))
    results = {head: {way.__name__: tried(way, Head(folder, head)) for way in WAYS} for head in heads}
    (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main(Path(sys.argv[1]))
