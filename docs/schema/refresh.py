"""Write the JSON Schemas beside this file from the models: `python docs/schema/refresh.py [--check]`.

Editors complete recipes, grids and plans by them; names and settings of mechanisms and names of tasks are put in.
"""

import json
import sys
import typing
from pathlib import Path
from typing import Any

# In a checkout that is not installed, both packages lie two folders above.
sys.path.extend(str(Path(__file__).resolve().parents[2] / name) for name in (".", "kernels"))

from pydantic import TypeAdapter

from approx.checkpoints.history import Receipt
from approx.cli.docstrings import arguments
from approx.evaluation.record import Record
from approx.grid import Grid
from approx.mechanisms import MECHANISMS
from approx.planning.rule import RuleList, Rules
from approx.recipe import Recipe
from approx.tasks import TASKS
from approx.tasks.harness import PREFIX

HERE = Path(__file__).resolve().parent
SCHEMAS = {
    "recipe": Recipe,
    "grid": Grid,
    "plan": Rules,
    "record": Record,
    "receipt": Receipt,
}


def with_parts(kind: Any) -> dict[str, type]:
    """Name -> class, of all models and dataclasses within a type."""
    parts = {kind.__name__: kind} if hasattr(kind, "__pydantic_fields__") else {}
    inner = [field.annotation for field in getattr(kind, "__pydantic_fields__", {}).values()]
    for part in (*inner, *typing.get_args(kind)):
        parts |= with_parts(part)
    return parts


KINDS = {name: kind for one in (*SCHEMAS.values(), RuleList) for name, kind in with_parts(one).items()}


def settings_of_mechanisms() -> list[dict[str, Any]]:
    """A condition for each mechanism: the settings that it has."""
    return [
        {
            "if": {"properties": {"mechanism": {"const": name}}, "required": ["mechanism"]},
            "then": {
                "properties": {
                    "settings": {
                        "additionalProperties": False,
                        "properties": {key: {"default": value} for key, value in kind.defaults().items()},
                    }
                }
            },
        }
        for name, kind in sorted(MECHANISMS.items())
    ]


def schema(name: str) -> dict[str, Any]:
    """One schema, with the descriptions of its docstrings and the names that are known."""
    made = TypeAdapter(SCHEMAS[name]).json_schema()
    for part in (made, *made.get("$defs", {}).values()):
        if "description" in part:
            part["description"] = part["description"].partition("\n\n")[0]
        texts = arguments(KINDS[part["title"]], "Attributes") if part.get("title") in KINDS else {}
        for key, value in part.get("properties", {}).items():
            value.pop("title", None)
            # Keys that are words of Python have an underscore in the model.
            if text := texts.get(key) or texts.get(f"{key}_"):
                value["description"] = text
        if part.get("title") in ("Rule", "GridRule"):
            part["properties"]["mechanism"]["enum"] = sorted(MECHANISMS)
            part["allOf"] = settings_of_mechanisms()
        if part.get("title") == "EvaluateStage":
            task = part["properties"]["task"]
            task["anyOf"] = [{"enum": sorted(TASKS)}, {"pattern": f"^{PREFIX}."}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def main() -> int:
    """Write the schemas, or with --check say which are not what the models say; 1 if any is not."""
    stale = []
    for name in SCHEMAS:
        file, text = HERE / f"{name}.json", json.dumps(schema(name), indent=1, ensure_ascii=False) + "\n"
        if "--check" not in sys.argv:
            file.write_text(text, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(file.name)
    for name in stale:
        sys.stderr.write(f"{name} is not what the models say; run python docs/schema/refresh.py\n")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
