"""The model card of a converted folder, through huggingface_hub's own classes."""

import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, metadata_load
from yaml import YAMLError

from approx.checkpoints import families
from approx.checkpoints.checkpoint import Checkpoint, processor_class
from approx.checkpoints.foreign import MODULES
from approx.checkpoints.history import Conversion, Training, conversion, history, trainings
from approx.checkpoints.receipt import RECEIPT, Receipt
from approx.paths import is_inside
from approx.planning.resolve import described

CARD = "README.md"
# Description of the code of a slim folder, and of one with kernels.
_RUNS = {
    False: "That code is plain PyTorch; where the package `approx-attention` is installed, its faster C and Triton run in its place. "
    "No package index has it: install it from its repository, in a clone of which `pip install .` does it.",
    True: "That code includes C and Triton kernels, which are compiled if there is a compiler or a GPU.",
}
# Fields of the base's model card that the converted model inherits.
_INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")
# The base of a base that is only in a folder is the closest model that the hub knows.
_ITS_BASE = ("base_model", "base_model_relation")
# Used if the base's card names no pipeline; importing transformers' own table would import every pipeline.
_PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForCTC": "automatic-speech-recognition",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}


@dataclass(frozen=True)
class Publication:
    """What a card says once its folder has a place on a hub.

    Attributes:
        repo: Model id there.
        revision: The commit to pin; None before there is one.
        data: More metadata: `eval_results`, `datasets`, `metrics`, and a licence if the folder's card has none.
        results: The measured results, in Markdown; empty if nothing was measured.
        cautions: When not to use the model, one sentence each.
    """

    repo: str
    revision: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
    results: str = ""
    cautions: tuple[str, ...] = ()


def write_card(
    folder: Path, checkpoint: Checkpoint, receipt: Receipt, published: Publication | None = None
) -> list[str]:
    """Write the model card: the replaced layers, the base, the error of each layer, the history, and how to load the model.

    Args:
        folder: Folder of the converted model.
        checkpoint: The checkpoint, with its model converted; its card provides license, language and pipeline.
        receipt: Receipt of the conversion, with the error of each layer.
        published: Place on a hub and results, if the folder is being pushed.

    Returns:
        Notes for the user.
    """
    model = checkpoint.model
    record, stock = model.config.approx, families.stock_class(type(model))
    made = conversion(record)
    assert made is not None  # whoever writes a card has written the history
    base, auto = made.base, families.auto_class(stock)
    parts = [part for site in sorted(record["sites"].values(), key=lambda s: s["layer"]) for part in described(site)]
    # The hub would take the name of a local folder for a model id.
    named = {"base_model": base.name, "base_model_relation": "finetune"} if base.revision else {}
    reader, sentences = processor_class(stock), (folder / MODULES).is_file()
    own, said = inherited(checkpoint.source.folder / CARD), {} if published is None else published.data
    if own.get("license") != said.get("license", own.get("license")):
        # The name and the text belong to the other licence.
        own = {key: value for key, value in own.items() if key not in ("license_name", "license_link")}
    fields = {"pipeline_tag": pipeline_of(checkpoint), **own, **named, **said}
    notes = []
    link = str(fields.get("license_link") or "")
    if link and "://" not in link and not (is_inside(link) and (folder / link).is_file()):
        del fields["license_link"]
        notes.append(f"The card's license_link '{link}' names no file of the folder; it was left out.")
    data = ModelCardData(
        **fields,
        library_name="sentence-transformers" if sentences else "transformers",
        tags=["approx-attention", *sorted({part["mechanism"] for part in parts})],
    )
    card = ModelCard.from_template(
        data,
        template_str=(resources.files("approx.conversion") / "card.md.j2").read_text(encoding="utf-8"),
        base=base,
        name=_code(said.get("base_model", base.name)),
        stock=stock.__name__,
        parts=parts,
        errors=receipt.errors or {},
        masses=receipt.captured_mass or {},
        measured_on=receipt.measured_on,
        receipt=RECEIPT,
        steps=[_told(step) for step in history(record)],
        cautions=_cautions(receipt, trained=bool(trainings(record)), published=published),
        carried=sorted(made.carried),
        code=_RUNS[bool(record.get("bundle_kernels"))],
        auto=auto,
        reader=reader,
        read="tokenizer" if reader == "AutoTokenizer" else "processor",
        sentences=sentences,
        pipeline=None if sentences else _PIPELINES.get(auto),
        published=published,
    )
    card.save(folder / CARD)
    return notes


def pipeline_of(checkpoint: Checkpoint) -> str | None:
    """The hub's name of what a model does: that of the folder's card, else that of its head."""
    named = inherited(checkpoint.source.folder / CARD).get("pipeline_tag")
    return named or _PIPELINES.get(families.auto_class(families.stock_class(type(checkpoint.model))))


def inherited(card: Path) -> dict[str, Any]:
    """Fields of a model card that also hold for the converted model; empty without a readable card."""
    try:
        said = metadata_load(card) or {}
    except (OSError, ValueError, YAMLError):
        return {}
    taken = {key: said[key] for key in (*_INHERITED, *_ITS_BASE) if said.get(key)} if isinstance(said, dict) else {}
    return taken | ({"base_model_relation": "finetune"} if "base_model" in taken else {})


def _cautions(receipt: Receipt, *, trained: bool, published: Publication | None) -> list[str]:
    """When not to use the model; what was measured comes first."""
    said = list(published.cautions) if published else []
    if not (published and published.results):
        said.append(
            "Its quality and speed were not measured here: compare it with its base on your data before you use it."
        )
    # Training changes the weights that these warnings are about.
    said += [] if trained else receipt.warnings
    if receipt.positions:
        before, after = receipt.positions
        said.append(f"Its position table was extended from {before:,} to {after:,}: the new positions are not trained.")
    said.append("For packed sequences and 4-D attention masks, use its base.")
    return [
        *said,
        "`output_attentions=True` gives the weights that its layers use, but computes them for all pairs of tokens, which needs as "
        "much memory as exact attention.",
    ]


def _told(step: Conversion | Training) -> str:
    """One step of a history, with everything that it depends on."""
    base = _code(step.base.name) + (f", revision {step.base.revision}," if step.base.revision else "")
    merged = f" with its {step.base.adapter} adapter merged" if step.base.adapter else ""
    start = f"from {base}{merged} (weights sha256 `{step.base.weights_sha256[:16]}…`) by approx {step.approx}"
    if isinstance(step, Conversion):
        longer = f"; positions extended to {step.max_length:,}" if step.max_length else ""
        text = (
            f"{_code(step.calibration.name)}, sha256 `{step.calibration.sha256[:16]}…`"
            if step.calibration
            else "built-in inputs"
        )
        plan = "; ".join(_rule(rule) for rule in step.plan)
        return f"Converted {start}: {plan}{longer}. Calibration: {text}, {step.calibration_length:,} tokens a row."
    said = f"Trained {start}: `{','.join(step.recover)}` on {step.task or 'plain text'}, {step.steps:,} steps, {step.examples:,} examples (sha256 `{step.data_sha256[:16]}…`), seed {step.seed}."
    if step.teacher is not None:
        said += f" Teacher: {_code(step.teacher.name)} (weights sha256 `{step.teacher.weights_sha256[:16]}…`)."
    if step.after is not None:
        scores = [("with exact attention", step.exact), ("before", step.before), ("after", step.after)]
        listed = ", ".join(f"{value:.4f} {when}" for when, value in scores if value is not None)
        said += f" {step.measure} on {step.held_out:,} held-out training examples: {listed}."
    options = ", ".join(f"{name} = {value}" for name, value in step.options.items() if value not in (None, [], {}))
    return said + (f" Options: {options}." if options else "")


def _rule(rule: dict[str, Any]) -> str:
    settings = ", ".join(f"{name} = {value}" for name, value in (rule.get("settings") or {}).items())
    heads = f", heads {rule['heads']}" if rule.get("heads", "all") != "all" else ""
    below = f", exact below {rule['exact_below']:,} tokens" if rule.get("exact_below") else ""
    return f"{_code(rule['mechanism'])}{f' ({settings})' if settings else ''} on layers {rule.get('layers', 'all')}{heads}{below}"


def _code(name: str) -> str:
    """A name as code in Markdown, where nothing in it is markup."""
    fence = "`" * (1 + max(map(len, re.findall("`+", name)), default=0))
    space = " " if len(fence) > 1 else ""
    return f"{fence}{space}{' '.join(name.split())}{space}{fence}"
