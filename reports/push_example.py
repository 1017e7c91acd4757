"""Make the example of what a push publishes: `python reports/push_example.py [FOLDER]`.

A variant of the quickstart is converted again, and `approx push --dry-run` writes the folder with the record of
`approx run quickstart`.
"""

import sys
import tempfile
from pathlib import Path

# In a checkout that is not installed, both packages lie beside this folder.
sys.path.extend(str(Path(__file__).resolve().parent.parent / name) for name in (".", "kernels"))

from approx import recipe
from approx.api import push
from approx.checkpoints.history import RECEIPT, Receipt
from approx.checkpoints.manifest import accept
from approx.conversion.convert import convert
from approx.evaluation import record
from approx.planning.plan import Plan

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "reports" / "push-example"
RECORD = ROOT / "reports" / "quickstart" / "report.json"
VARIANT, REPO = "improved-clustered 25", "me/needle-improved-clustered"


def main(out: Path) -> None:
    """Write the card and the list of files into a folder."""
    asked = recipe.read(recipe.find("quickstart"))
    receipt = next(one.receipt for one in record.load(RECORD).variants if one.name == VARIANT)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "converted")
        convert(asked.checkpoint, folder, Plan(tuple(asked.variants[VARIANT])))
        # Another processor measures the same errors but for their last digits, and the record has those of its own.
        (folder / RECEIPT).write_text(
            Receipt.model_validate(receipt).model_dump_json(indent=1) + "\n", encoding="utf-8"
        )
        accept(folder, [RECEIPT])
        made = push(folder, REPO, records=[RECORD], dry_run=Path(scratch, "pushed"), offline=True)
    rows = [f"| `{name}` | {size:,} |" for name, size in made.files.items()]
    total = sum(made.files.values()) / 1e6
    head = [
        f"{len(rows)} files, {total:.2f} MB. `README.md` is the [card](card.md); `records/record-1.json` is "
        f"[this record](../quickstart/{RECORD.name}) without its command.",
        "\n| file | bytes |\n|---|--:|",
    ]
    out.mkdir(parents=True, exist_ok=True)
    (out / "card.md").write_text(made.card.rstrip() + "\n", encoding="utf-8")
    (out / "files.md").write_text("\n".join(["# What a push writes", "", *head, *rows]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
