"""`make mutants`: kinds of planted errors, none in messages, and a made-up room whose tests notice one of two."""

import os
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "mutants"


def changed(source: str, texts: bool = False) -> set[str]:
    """The mutated lines of a text, without indentation."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); from changes import mutants_of\n"
    code += f"for one in mutants_of('a.py', sys.stdin.read(), {texts}): print(one.shown()[1])"
    command = [sys.executable, "-c", code, str(TOOL)]
    done = subprocess.run(command, input=textwrap.dedent(source), capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


def test_conditions_numbers_arguments_and_statements_are_changed():
    lines = changed("""
        def f(rows, count=1):
            rows.sort(key=len)
            if rows and count < 2:
                raise ValueError("no rows")
            return g(rows, strict=True)
    """)
    assert lines >= {
        "def f(rows, count=2):",
        "pass",
        "rows.sort(key=None)",
        "if rows or count < 2:",
        "if rows and count <= 2:",
        "if rows and count < 3:",
        "return g(None, strict=True)",
    }


@pytest.mark.slow
def test_leaves_messages_unchanged():
    assert (
        changed('''
        """A module."""
        import logging
        def f(name: "str") -> None:
            """Say it."""
            assert name
            logging.info("seen %s", name)
            print(f"{name + '!'}", 1)
    ''')
        == set()
    )
    assert changed("said = 'two words'") == {"said = None"}
    assert "said = f'{1 - 2} a'" not in changed("said = f'{1 + 2} a'")
    assert "said = f'{1 - 2} a'" in changed("said = f'{1 + 2} a'", texts=True)


def test_lines_of_equivalent_mutants_are_in_the_source():
    entries = tomllib.loads((TOOL / "equivalent.toml").read_text("utf-8"))["mutant"]
    sources = {one["file"]: (ROOT / one["file"]).read_text("utf-8") for one in entries}
    lines = {file: {line.strip() for line in text.splitlines()} for file, text in sources.items()}
    assert [(one["file"], one["was"]) for one in entries if one["was"] not in lines[one["file"]]] == []


@pytest.mark.slow
def test_a_room_is_counted_and_its_survivors_are_named(tmp_path):
    """The tests of this room check only one side of a comparison."""
    shutil.copytree(TOOL, tmp_path / "tools" / "mutants", ignore=shutil.ignore_patterns("__pycache__"))
    tool = tmp_path / "tools" / "mutants"
    for name, text in {
        "approx/__init__.py": "",
        "approx/room/__init__.py": "",
        "approx/room/sign.py": "LEAST = 0\n\n\ndef sign(x):\n    return x > LEAST\n",
        "kernels/nothing.py": "",
        # What a conftest.py imports is seen too.
        "tests/room/conftest.py": "import approx.room.sign\n",
        "tests/room/test_sign.py": "from approx.room.sign import sign\n\n\ndef test_sign():\n    assert sign(2)\n"
        "    assert not sign(0)\n",
        "tests/room/test_ran.py": "import os\n\n\ndef test_ran():\n    with open(os.environ['RAN'], 'a') as file:\n"
        "        file.write('x')\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tool / "rooms.toml").write_text('survivors = 0.1\npreloaded = []\n[room]\nsources = "approx/room"\n')
    (tool / "equivalent.toml").write_text("")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)

    def run() -> tuple[int, str]:
        command = [sys.executable, "tools/mutants", "room"]
        environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "COV_CORE_SOURCE")}
        environment["RAN"] = str(tool / "ran")
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
        return done.returncode, done.stdout + done.stderr

    code, said = run()
    # These tests cannot detect a limit of 1, which gives the same for 0 and 2.
    assert code == 1, said
    assert "room: 3 mutants, 3 taken (seed 1); 2 killed, 1 survived, 0 equivalent: 67% of 3" in said
    ran = (tool / "ran").read_text()
    report = tmp_path / "runs" / "mutants" / "room.toml"
    assert 'was = "LEAST = 0"\nnow = "LEAST = 1"' in report.read_text()
    (tool / "equivalent.toml").write_text(report.read_text().replace('why = ""', 'why = "Nobody asks for 1."'))
    code, said = run()
    assert code == 0, said
    assert "3 taken (seed 1); 2 killed, 0 survived, 1 equivalent: 100% of 2" in said
    # A new test counts at once, and unmutated code is not tested again without a change.
    (tool / "equivalent.toml").write_text("")
    with (tmp_path / "tests" / "room" / "test_sign.py").open("a") as file:
        file.write("    assert sign(1)\n")
    code, said = run()
    assert code == 0, said
    assert "3 killed, 0 survived" in said
    assert (tool / "ran").read_text() == ran
