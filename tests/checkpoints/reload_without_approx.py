"""Run as a separate process: load converted folders without approx, its kernels or triton.

Usage: python -P reload_without_approx.py FOLDER, with one folder per model under FOLDER, and `<name>.inputs` next to
it. The results are written to FOLDER/results.safetensors and FOLDER/results.json.
"""

import json
import sys
from pathlib import Path


class Absent:
    """An importer, ahead of all others, that blocks the tool."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("approx", "approx_kernels", "triton"):
            raise ModuleNotFoundError(f"{name} is blocked in this process", name=name)


sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]  # the one method that imports call

import torch  # noqa: E402  # after the importer above
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

QUERIES = ("query.weight", "q_lin.weight", "q_proj.weight", "c_attn.weight")


def main(folder: Path) -> None:
    tensors, facts = {}, {}
    for inputs in sorted(folder.glob("*.inputs")):
        name, auto = inputs.stem.split("@")
        place = folder / name
        model = getattr(transformers, auto).from_pretrained(place, trust_remote_code=True).eval()
        arguments = load_file(inputs)
        with torch.no_grad():
            tensors[f"{name}/reloaded"] = model(**arguments)[0].contiguous()
        model(**arguments)[0].square().sum().backward()
        # The gradient at the first layer's queries passes through every layer above.
        tensors[f"{name}/gradient"] = next(
            p.grad for n, p in model.named_parameters() if n.endswith(QUERIES) and p.grad is not None
        )
        model.zero_grad()
        model.save_pretrained(folder / "again" / name)
        again = getattr(transformers, auto).from_pretrained(folder / "again" / name, trust_remote_code=True).eval()
        with torch.no_grad():
            tensors[f"{name}/saved again"] = again(**arguments)[0].contiguous()
        other = transformers.AutoModel.from_pretrained(folder / "again" / name, trust_remote_code=True)
        facts[name] = {
            "class": type(model).__name__,
            "backbone": type(other).__name__,
            "seam": getattr(sys.modules[type(model).__mro__[1].__module__], "__file__", ""),
        }
        half = getattr(transformers, auto).from_pretrained(place, trust_remote_code=True, dtype=torch.bfloat16)
        facts[name]["dtypes"] = {n: str(t.dtype) for n, t in half.state_dict().items()}
        if model.can_generate():
            torch.manual_seed(0)
            tensors[f"{name}/generated"] = model.generate(
                **arguments, max_new_tokens=5, min_new_tokens=5, pad_token_id=0
            )
        try:
            getattr(transformers, auto).from_pretrained(place)
            facts[name]["untrusted"] = "loaded"
        except Exception as error:
            facts[name]["untrusted"] = f"{type(error).__name__}: {error}"
    save_file(tensors, folder / "results.safetensors")
    (folder / "results.json").write_text(json.dumps(facts))


main(Path(sys.argv[1]))
