"""A case: one damaged file. How it is drawn, handed to approx, judged, stored and read again."""

import functools
import hashlib
import os
import shutil
import traceback
from dataclasses import dataclass
from pathlib import Path
from random import Random

from approx.errors import ApproxError
from fuzz.kinds import KINDS

FOUND = Path(__file__).with_name("found")
_OURS = ("approx", "approx_kernels")
# Of a message that nobody could read.
_LONGEST = 50_000


@dataclass(frozen=True)
class Case:
    """A damaged file.

    Attributes:
        kind: A key of `KINDS`.
        target: Its path in the place.
        content: What it holds; None if it is gone.
    """

    kind: str
    target: str
    content: bytes | None


@dataclass(frozen=True)
class Verdict:
    """What approx did with a case.

    Attributes:
        status: `read`, `refused` or `failed`.
        where: The kind of failure and its place in the code, the same for all cases of one defect.
        detail: The message or the traceback.
    """

    status: str
    where: str = ""
    detail: str = ""


def drawn(kind: str, seed: int, number: int, template: Path) -> Case:
    """The case of a number; the same whenever it is drawn."""
    random = Random(f"{seed} {kind} {number}")
    files = sorted(path for pattern in KINDS[kind].targets for path in template.glob(pattern) if path.is_file())
    path = random.choice(files)
    content = None if random.random() < 0.01 else KINDS[kind].mutate(random, path.read_bytes())
    return Case(kind, path.relative_to(template).as_posix(), content)


def judged(case: Case, place: Path, template: Path) -> Verdict:
    """Damage the file in the place, hand it to approx, and put the place in order again."""
    kind, target = KINDS[case.kind], Path(case.target)
    before = Path.cwd()
    os.chdir(place)
    try:
        target.unlink()
        if case.content is not None:
            target.write_bytes(case.content)
        kind.prepare(target)
        seen = _files(place)
        try:
            kind.read(target)
            verdict = Verdict("read")
        except ApproxError as error:
            verdict = Verdict("refused", detail=str(error))
            if not str(error).strip() or len(str(error)) > _LONGEST:
                verdict = Verdict("failed", f"a message of {len(str(error))} characters", str(error)[:500])
        except BaseException as error:  # a panic of Rust is no Exception
            verdict = Verdict("failed", _where(error), traceback.format_exc()[-4000:])
        if changed := sorted(name for name, _ in seen.symmetric_difference(_files(place))):
            verdict = Verdict("failed", f"changed {changed[0]}", f"{', '.join(changed)}\n{verdict}")
        return verdict
    finally:
        os.chdir(before)
        _restored(place, template)


def stored(case: Case, folder: Path) -> Path:
    """Write a case below a folder, for `read`."""
    digest = hashlib.sha256(repr(case).encode()).hexdigest()[:8]
    suffix = ".gone" if case.content is None else ".case"
    file = folder / case.kind / digest / (case.target + suffix)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(case.content or b"")
    return file


def read(folder: Path) -> list[Case]:
    """All cases below a folder."""
    cases = []
    for file in sorted(path for suffix in ("case", "gone") for path in folder.rglob(f"*.{suffix}")):
        kind, _, *parts = file.relative_to(folder).with_suffix("").parts
        cases.append(Case(kind, "/".join(parts), file.read_bytes() if file.suffix == ".case" else None))
    return cases


def _files(place: Path) -> set[tuple[str, tuple[int, int]]]:
    """Names, sizes and times of all files."""
    found = []
    folders, start = [str(place)], len(str(place)) + 1
    for folder in folders:
        for entry in os.scandir(folder):
            if entry.is_dir():
                folders.append(entry.path)
                continue
            status = entry.stat()
            found.append((entry.path[start:], (status.st_size, status.st_mtime_ns)))
    return set(found)


@functools.cache
def _undamaged(template: Path) -> set[tuple[str, tuple[int, int]]]:
    return _files(template)


def _restored(place: Path, template: Path) -> None:
    for name in {name for name, _ in _undamaged(template) ^ _files(place)}:
        if (template / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(template / name, place / name)
        else:
            (place / name).unlink()


def _where(error: BaseException) -> str:
    """The error's class, and the deepest function of approx that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        one for one in frames if any(f"/{name}/" in one.filename for name in _OURS) and "/fuzz/" not in one.filename
    ]
    deepest = (ours or frames)[-1]
    return f"{type(error).__name__} in {Path(deepest.filename).name}, {deepest.name}"
