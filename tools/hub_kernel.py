"""Write the mechanisms as a repository of Hugging Face's `kernels`, for models that are not converted.

python tools/hub_kernel.py -o kernel    # then: hf upload OWNER/approx-attention kernel
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from approx.checkpoints.atomic_folder import atomic_folder  # noqa: E402  # after the path, to run from a checkout
from approx.checkpoints.bundle import write_kernel  # noqa: E402  # as above
from approx.errors import ApproxError  # noqa: E402  # as above

CARD = """---
library_name: kernels
license: apache-2.0
tags: [kernel]
---

# Cheaper attention in one line

Attention functions of [approx](https://pypi.org/project/approx-attention/) for models that are not converted:

```python
from transformers import AutoModel

model = AutoModel.from_pretrained(
    "bert-base-uncased", attn_implementation="OWNER/{name}:improved_clustered", allow_all_kernels=True
)
```

By name: {mechanisms}. Settings follow a name, each as `__SETTING_VALUE`: `local__left_64__right_64`,
`clustered__clusters_100`. Every self-attention layer gets the same mechanism. What is trained or fitted to a model needs a
conversion: `linear`, `performer`, `adaptive-span`, and `clustered` in decoders. The outputs are those of `approx convert` with
the same settings.
"""


def main() -> None:
    """Write the repository."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, required=True, help="the folder to create")
    parser.add_argument("--name", default="approx-attention", help="name of the repository, without its owner")
    parser.add_argument("--force", action="store_true", help="replace the folder")
    asked = parser.parse_args()
    try:
        with atomic_folder(asked.out, force=asked.force) as folder:
            mechanisms = write_kernel(folder, asked.name)
            named = ", ".join(f"`{each.replace('-', '_')}`" for each in mechanisms)
            (folder / "README.md").write_text(CARD.format(name=asked.name, mechanisms=named), encoding="utf-8")
    except ApproxError as error:
        sys.exit(str(error))
    print(f"{asked.out}: {len(mechanisms)} mechanisms. Publish it: hf upload OWNER/{asked.name} {asked.out}")


if __name__ == "__main__":
    main()
