import sys

from tiny_study import tiny_recipe

from .conftest import call

CANARY = "hf_canary0123456789abcdefghijklmnopq"


def test_a_token_of_the_environment_is_in_no_output_and_no_file(base, converted, data, tmp_path, monkeypatch):
    """Every command, and commands with the token typed as an argument by mistake."""
    monkeypatch.setenv("HF_TOKEN", CANARY)
    recipe = tiny_recipe(tmp_path / "r.yaml", base, data)
    task = ("--task", "glue/sst2", "--data", data)
    quick = ("--lengths", "8", "--rounds", "3", "--seconds", "0")
    commands = [
        ("mechanisms",),
        ("inspect", base, "--revision", CANARY),
        ("inspect", CANARY),
        ("plan", base, "-m", "linear", "--revision", CANARY, "-o", "plan.yaml"),
        ("convert", base, "-m", "linear", "--set", f"x={CANARY}", "-o", "no", "--debug"),
        ("verify", converted),
        ("revert", converted, "-o", "base"),
        ("evaluate", base, *task, "--split", CANARY, "--debug"),
        ("evaluate", converted, *task, "-o", "q.json", "--json"),
        ("bench", base, *quick, "--against", CANARY, "--debug"),
        ("bench", converted, *quick, "-o", "s.json"),
        ("run", recipe, "-o", "run", "--json"),
        ("report", "run/record.json", "q.json", "s.json", "-o", "report"),
        ("push", converted, "me/m", "--record", "q.json", "--dry-run", "--offline", "-o", "dry"),
        ("push", converted, CANARY, "--message", CANARY, "--debug"),
        ("pattern", "ltr", "-n", "8", "-o", "pictures"),
        ("pattern", CANARY, "-n", "8", "--debug"),
        ("doctor", "--offline"),
        ("--version", "--verbose"),
        ("frobnicate", CANARY),
        (CANARY,),
    ]
    for words in commands:
        # The command in a record.
        monkeypatch.setattr(sys, "argv", ["approx", *map(str, words), CANARY])
        answer = call(*words)
        assert CANARY not in answer.out + answer.err, words
        assert answer.code in (0, 2, 5), answer
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert tmp_path / "report" / "index.html" in files
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
