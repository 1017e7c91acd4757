"""Write weights in the dtypes in which they were stored, whatever dtype the model was loaded in."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from approx.checkpoints.integrity import INDEX, weight_files


def keep_dtypes(source: Path, target: Path) -> None:
    """Give the tensors of a written checkpoint the dtypes and numbers that they have in its source.

    transformers loads all tensors in one dtype, which may be wider or narrower than that of the file. Tensors that are not
    those of the source, because they are new or were trained, stay as they are.

    Args:
        source: Folder of the checkpoint that was loaded.
        target: Folder with the written one.
    """
    read = weight_files(source, allow_pickle=True)
    places = {name: path for path in read if path.suffix == ".safetensors" for name in _dtypes(path)}
    dtypes = {name: dtype for path in {*places.values()} for name, dtype in _dtypes(path).items()}
    changed = False
    for path in weight_files(target):
        differ = {name for name, dtype in _dtypes(path).items() if dtypes.get(name, dtype) != dtype}
        if not differ:
            continue
        tensors = load_file(path)
        for name in differ:
            with safe_open(places[name], framework="pt") as file:
                tensors[name] = _as_stored(tensors[name], file.get_tensor(name))
        save_file(tensors, path, metadata={"format": "pt"})
        changed = True
    if changed and (target / INDEX).is_file():
        _count_bytes(target)


def _dtypes(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 - a file, not a dictionary


def _as_stored(written: Tensor, stored: Tensor) -> Tensor:
    """The stored tensor, if the written one is it in another dtype; of a table of positions, as many rows as were written."""
    if written.shape == stored.shape:
        return stored if torch.equal(stored.to(written.dtype), written) else written
    if written.dim() != stored.dim() or written.shape[1:] != stored.shape[1:]:
        return written
    rows = min(len(written), len(stored))
    if not torch.equal(stored[:rows].to(written.dtype), written[:rows]):
        return written
    # The rows of a longer table repeat those of the stored one.
    return torch.cat([stored[:rows], written[rows:].to(stored.dtype)])


def _count_bytes(folder: Path) -> None:
    """Correct the number of bytes in the index of a checkpoint of several files."""
    index = folder / INDEX
    data = json.loads(index.read_text(encoding="utf-8"))
    tensors = (tensor for path in weight_files(folder) for tensor in load_file(path).values())
    data["metadata"] = data.get("metadata", {}) | {"total_size": sum(tensor.nbytes for tensor in tensors)}
    index.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")
