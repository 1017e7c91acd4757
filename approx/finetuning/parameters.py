"""Trained parameters of a mode, and adapters."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from approx.checkpoints import families
from approx.errors import ApproxError, Exit
from approx.finetuning.options import Lora
from approx.planning.resolve import described
from approx.seam.observe import Call, observe

_PROJECTIONS = (nn.Linear, Conv1D)


def own_parameters(model: Any) -> list[str]:
    """Names of the mechanisms' parameters: feature maps, spans, mixtures."""
    return [name for name, _ in model.named_parameters() if ".mechanism." in name]


def attention_layers(model: Any, inputs: dict[str, Tensor]) -> dict[str, list[str]]:
    """Find the linear layers around attention, in the order in which they run.

    Args:
        model: Any model that dispatches its attention.
        inputs: A batch on its device.

    Returns:
        `before`: names of the projections to queries, keys and values; `after`: names of the output projections.
    """
    sites: list[nn.Module] = []
    modules = dict(model.named_modules())
    names = {module: name for name, module in modules.items()}
    ran: list[tuple[str, str]] = []

    def enter(call: Call) -> None:
        ran.append(("attention", call.path))
        sites.append(model.base_model.get_submodule(call.path))

    def run(module: nn.Module, args: Any, output: Any) -> None:
        ran.append(("layer", names[module]))

    hooks = [module.register_forward_hook(run) for module in modules.values() if isinstance(module, _PROJECTIONS)]
    training = model.training
    try:
        with observe(model, before=enter), torch.no_grad():
            model.eval()(**inputs)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    layers: dict[str, list[str]] = {"before": [], "after": []}
    for place, (kind, name) in enumerate(ran):
        if kind == "attention":
            site = names[model.base_model.get_submodule(name)]
            # Input projections are children of the attention module; the output projection may be its sibling.
            layers["before"] += [
                layer for what, layer in ran[:place] if what == "layer" and layer.startswith(f"{site}.")
            ]
            layers["after"] += [layer for what, layer in ran[place + 1 : place + 2] if what == "layer"]
    return {kind: list(dict.fromkeys(names)) for kind, names in layers.items()}


def chosen_parameters(model: Any, train: str, inputs: dict[str, Tensor]) -> list[str]:
    """Names of the parameters selected by `train`; the mechanisms' parameters are always included.

    Args:
        model: The model.
        train: `all`, `attention` or `head`.
        inputs: A batch on its device.

    Raises:
        ApproxError: if the model has no head.
    """
    names = [name for name, _ in model.named_parameters()]
    if train == "all":
        # Feature encoders of speech models stay frozen, as in the original fine-tuning.
        return [name for name in names if ".feature_extractor." not in f".{name}"]
    if train == "head":
        chosen = head_parameters(model)
    else:
        layers = attention_layers(model, inputs)
        places = tuple(f"{layer}." for kind in layers.values() for layer in kind)
        chosen = [name for name in names if name.startswith(places)]
    return list(dict.fromkeys([*chosen, *own_parameters(model)]))


def head_parameters(model: Any) -> list[str]:
    """Names of the task head's parameters.

    Raises:
        ApproxError: if the model has none.
    """
    prefix = f"{model.base_model_prefix}."
    head = [name for name, _ in model.named_parameters() if not name.startswith(prefix)]
    if model.base_model is model or not head:
        raise ApproxError(
            f"Only the task head was to be trained, but a {type(model).__name__} has none. Train all, or attention.",
            Exit.UNSUPPORTED,
        )
    return head


def add_adapters(model: Any, options: Lora, inputs: dict[str, Tensor], seed: int) -> list[str]:
    """Add low-rank adapters to linear layers, in place; outputs do not change.

    Source: Hu et al. 2021, LoRA, arXiv 2106.09685, by the package peft.

    Returns:
        Names of the adapters' parameters.

    Raises:
        ApproxError: if peft is not installed, or no layer has such a name.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ApproxError(
            f"The mode 'lora' needs the package peft ({error}). Install it: pip install 'approx-attention[train]'.",
            Exit.MISSING,
        ) from None
    known = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, _PROJECTIONS)}
    targets = options.targets
    if targets is None:
        targets = [name for names in attention_layers(model, inputs).values() for name in names]
    elif not set(targets) <= known:
        wrong = ", ".join(sorted(set(targets) - known))
        raise ApproxError(
            f"The lora targets {wrong} are not linear layers of this model. It has: {', '.join(sorted(known))}."
        )
    config = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # type: ignore[arg-type]  # peft only divides by the rank, which works with a float
        lora_dropout=options.dropout,
        target_modules=targets,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)
    return [name for name, _ in model.named_parameters() if ".lora_" in name]


def remove_adapters(model: Any, *, merge: bool) -> None:
    """Remove adapters, in place; with `merge` the weights take over what they learned."""
    from peft.tuners.lora import LoraLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            if merge:
                module.merge()  # type: ignore[operator]  # typed as an attribute of a module
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, module.get_base_layer())


def check_modes(modes: list[str], model: Any, *, text: bool, projections: bool) -> None:
    """Refuse modes that the model cannot use.

    Raises:
        ApproxError: if a mode cannot be used; the message names an alternative.
    """
    converted = families.is_converted(model)
    if modes[-1] == "lora":
        raise ApproxError(
            "'lora' comes last, so nothing is trained with adapters. Put a mode behind it, e.g. --recover lora,task."
        )
    if len(set(modes)) < len(modes):
        raise ApproxError(f"--recover {','.join(modes)} names a mode twice. Name each once.")
    for mode in ("transfer", "distill"):
        if mode in modes and not converted:
            raise ApproxError(
                f"'{mode}' fits a converted model to exact attention, but this {type(model).__name__} is exact already. "
                "Train it with 'task', 'clm' or 'mlm'.",
                Exit.UNSUPPORTED,
            )
    if "transfer" in modes and not (own_parameters(model) or projections):
        kinds = sorted(
            {part["mechanism"] for site in model.config.approx["sites"].values() for part in described(site)}
        )
        raise ApproxError(
            f"'transfer' trains the parameters of mechanisms, and {', '.join(kinds)} has none. Use 'distill' or 'task', or let "
            "it train the projections (--projections).",
            Exit.UNSUPPORTED,
        )
    for mode in ("clm", "mlm"):
        if mode in modes and not text:
            raise ApproxError(f"'{mode}' continues pre-training on plain text. Give it with --text, without --task.")
    if "task" in modes and text:
        raise ApproxError("'task' needs labels, which plain text has not. Give --task, or use 'clm' or 'mlm'.")


def default_modes(model: Any, *, text: bool, causal: bool) -> list[str]:
    """Default modes: attention transfer if mechanisms have parameters, then the task or language modelling."""
    first = ["transfer"] if families.is_converted(model) and own_parameters(model) else []
    return [*first, ("clm" if causal else "mlm") if text else "task"]
