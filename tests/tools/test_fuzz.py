"""Some seconds of `make fuzz`, always the same cases: everything damaged is refused or read, and damages are found."""

import shutil
from random import Random

import pytest

from approx.errors import ApproxError
from fuzz import kinds, workers
from fuzz.cases import Case, drawn, judged
from fuzz.minimise import minimised
from fuzz.place import made

EACH = 8
# Modules that readers of these tests use.
KNOWN = ("ctypes", "os", "pathlib", "subprocess", "sys", "time")
# A report takes seconds, as does the reload of a converted folder in another process.
SLOW = {
    "record",
    "config of converted, sealed again",
    "converted, sealed again",
    "converted",
    "to be pushed, sealed again",
    "stopped training",
}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    return made(tmp_path_factory.mktemp("fuzz") / "place")


@pytest.fixture(scope="module")
def judge(template):
    """The verdict of another process on a case."""
    with workers.workers(template, 1) as (worker,):

        def asked(order):
            worker.ask(order)
            return worker.answer()

        yield asked


def broken(monkeypatch, read):
    """Let a reader of plans stand for approx."""
    monkeypatch.setitem(kinds.KINDS, "plan", kinds.Kind(("plan.yaml",), kinds.KINDS["plan"].mutate, read))


@pytest.mark.parametrize("kind", kinds.KINDS)
@pytest.mark.sample(2)
def test_what_is_damaged_is_refused_or_read(kind, template, judge):
    failed = []
    for number in range(2 if kind in SLOW else EACH):
        case, verdict = judge((kind, 0, number))
        failed += [(number, verdict)] if verdict.status == "failed" else []
        assert case == drawn(kind, 0, number, template)
    assert failed == []


@pytest.mark.sample(0)
def test_an_error_a_crash_a_hang_and_a_change_are_noticed(judge, template, tmp_path, monkeypatch):
    case = Case("plan", "plan.yaml", b"")
    assert judge(case)[1].status == "refused"
    monkeypatch.setattr(workers, "SECONDS", 2)
    monkeypatch.setattr(workers, "_WAITING", 1)
    for body, where in (
        ("raise KeyError('x')", "KeyError in"),
        ("raise ApproxError('')", "a message of 0 characters"),
        ("raise MemoryError", "MemoryError in"),
        ("bytearray(3 * 2**30)", "MemoryError in"),
        ("os._exit(9)", "a crash of plan"),
        ("ctypes.string_at(0)", "a crash of plan"),
        ("time.sleep(60)", "a hang of plan"),
        ("pathlib.Path('kept/mine.txt').write_text('yours')", "changed kept/mine.txt"),
        ("pathlib.Path('new').mkdir() or pathlib.Path('new/x').touch()", "changed new/"),
        ("pathlib.Path('empty').mkdir()", "changed empty/"),
        ("pathlib.Path('kept/link').symlink_to('mine.txt')", "changed kept/link"),
        ("pathlib.Path('outside/secret.json').read_bytes()", "read outside/secret.json"),
        ("import approx_canary", "changed ran.txt"),
        ("subprocess.run([sys.executable, 'outside/approx_canary.py'])", "changed ran.txt"),
    ):
        space = {"ApproxError": ApproxError, **{name: __import__(name) for name in KNOWN}}
        exec(f"def read(target):\n    {body}", space)
        broken(monkeypatch, space["read"])
        with workers.workers(template, 1, reloads=False) as (worker,):
            worker.ask(case)
            verdict = worker.answer()[1]
            assert (verdict.status, where in f"{verdict.where} {verdict.detail}") == ("failed", True), verdict
            # It goes on, with the place in order.
            worker.ask(Case("recipe", "recipe.yaml", b""))
            assert worker.answer()[1].status == "refused"


def test_a_case_is_stored_read_again_and_leaves_the_place_as_it_was(template, tmp_path):
    from fuzz import cases

    some = [
        Case("plan", "plan.yaml", b"\0"),
        Case("config", "bert/config.json", None),
        Case("config", "bert/config.json", b"../outside/config.json", link=True),
    ]
    for case in some:
        cases.stored(case, tmp_path)
    assert sorted(cases.read(tmp_path), key=repr) == sorted(some, key=repr)
    place = shutil.copytree(template, tmp_path / "place")
    for case in some:
        assert judged(case, place, template).status == "refused"
        assert not (place / case.target).is_symlink()
        assert (place / case.target).read_bytes() == (template / case.target).read_bytes()
    added = Case("plan", "new/sub/x.py", b"x")
    assert judged(added, place, template).status == "refused"
    assert not (place / "new").exists()


def test_mutations_change_something_and_repeat():
    for mutate, content in (
        (kinds.mutations.of_bytes, b"hello world"),
        (kinds.mutations.of_lines, b"a\tb\nc\td\n"),
        (kinds.mutations.of_json, b'{"a": [1, 2], "b": {"c": "d"}}'),
        (kinds.mutations.of_yaml, b"a: [1, 2]\nb: {c: d}\n"),
    ):
        changed = [mutate(Random(number), content) for number in range(50)]
        assert changed == [mutate(Random(number), content) for number in range(50)]
        assert sum(one != content for one in changed) > 40
        assert len(set(changed)) > 25


def test_what_fails_is_made_smaller():
    assert minimised(b"aaaaaaaaXbbbbbbbbYcccc", lambda x: b"X" in x and b"Y" in x) == b"XY"
    tree = b'{"a": {"b": [1, 2, 3, {"c": 7}], "d": 4}, "e": 5, "f": 6, "g": 8}'
    assert minimised(tree, lambda x: b'"c": 7' in x) == b'{"a": {"b": [{"c": 7}]}}'
    assert minimised(b"x" * 100, lambda x: True, tries=1) == b"x" * 50
