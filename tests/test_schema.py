"""The JSON Schemas for editors match the models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SCHEMAS = ROOT / "docs" / "schema"


def test_schemas_equal_those_of_the_models():
    command = [sys.executable, str(SCHEMAS / "refresh.py"), "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["recipe", "grid"])
def test_schema_describes_each_key_and_lists_names(name):
    schema = json.loads((SCHEMAS / f"{name}.json").read_text("utf-8"))
    described = [schema["properties"], *(part["properties"] for part in schema["$defs"].values())]
    assert [key for keys in described for key, value in keys.items() if "description" not in value] == []
    assert "glue/sst2" in schema["$defs"]["EvaluateStage"]["properties"]["task"]["anyOf"][0]["enum"]
    rule = schema["$defs"]["Rule" if name == "recipe" else "GridRule"]
    assert "improved-clustered" in rule["properties"]["mechanism"]["enum"]
    settings = {
        one["if"]["properties"]["mechanism"]["const"]: one["then"]["properties"]["settings"]["properties"]
        for one in rule["allOf"]
    }
    assert settings["local"].keys() == {"left", "right"}
