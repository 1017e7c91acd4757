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
from fuzz import mutations
from fuzz.kinds import KINDS
from fuzz.mutations import HERE, OUTSIDE, PATHS

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
        content: What it holds, with `HERE` for the folder of the place; None if it is gone.
        link: Whether it is a symbolic link; its content is where it leads.
    """

    kind: str
    target: str
    content: bytes | None
    link: bool = False


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
    target, chosen = random.choice(files).relative_to(template).as_posix(), random.random()
    if chosen < 0.01:
        return Case(kind, target, None)
    if chosen < 0.03:
        same = f"{'../' * target.count('/')}{OUTSIDE}/{Path(target).name}"
        return Case(kind, target, random.choice((same, *PATHS[1:])).encode(), link=True)
    if chosen < 0.2 and KINDS[kind].added:
        name = random.choice(KINDS[kind].added)
        return Case(kind, f"{target.partition('/')[0]}/{name}", mutations.added(random, name))
    return Case(kind, target, KINDS[kind].mutate(random, (template / target).read_bytes()))


def judged(case: Case, place: Path, template: Path) -> Verdict:
    """Damage the file in the place, hand it to approx, and put the place in order again."""
    kind, target = KINDS[case.kind], Path(case.target)
    before = Path.cwd()
    os.chdir(place)
    os.environ["APPROX_FUZZ_PLACE"] = str(place)
    try:
        _damage(case, place)
        kind.prepare(target)
        seen = _files(place)
        _unread(place)
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
        if not kind.roams and (left := _unread(place)):
            verdict = Verdict("failed", f"read {left[0]}", f"{', '.join(left)}\n{verdict}")
        return verdict
    finally:
        os.chdir(before)
        _restored(place, template)


def _damage(case: Case, place: Path) -> None:
    target = Path(case.target)
    target.unlink(missing_ok=True)
    if case.content is None:
        return
    content = case.content.replace(f"{HERE}/".encode(), f"{place}/".encode())
    target.parent.mkdir(parents=True, exist_ok=True)
    # No link leads to a name with NUL, or to none.
    if case.link and content and b"\0" not in content:
        target.symlink_to(os.fsdecode(content))
    else:
        target.write_bytes(content)


def _unread(place: Path) -> list[str]:
    """The files outside of the damaged folders that were read since the last call, by their time of access."""
    found = []
    for path in sorted((place / OUTSIDE).rglob("*")):
        status = path.stat()
        if path.is_file() and status.st_atime_ns:
            found.append(path.relative_to(place).as_posix())
            os.utime(path, ns=(0, status.st_mtime_ns))
    return found


def stored(case: Case, folder: Path) -> Path:
    """Write a case below a folder, for `read`."""
    digest = hashlib.sha256(repr(case).encode()).hexdigest()[:8]
    suffix = ".gone" if case.content is None else ".link" if case.link else ".case"
    file = folder / case.kind / digest / (case.target + suffix)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(case.content or b"")
    return file


def read(folder: Path) -> list[Case]:
    """All cases below a folder."""
    cases = []
    for file in sorted(path for suffix in ("case", "gone", "link") for path in folder.rglob(f"*.{suffix}")):
        kind, _, *parts = file.relative_to(folder).with_suffix("").parts
        content = None if file.suffix == ".gone" else file.read_bytes()
        cases.append(Case(kind, "/".join(parts), content, link=file.suffix == ".link"))
    return cases


def _files(place: Path) -> set[tuple[str, tuple[int, int]]]:
    """Names, sizes and times of all files, and the names of folders; links are not followed."""
    found = []
    folders, start = [str(place)], len(str(place)) + 1
    for folder in folders:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
                found.append((f"{entry.path[start:]}/", (0, 0)))
                continue
            status = entry.stat(follow_symlinks=False)
            found.append((entry.path[start:], (status.st_size, status.st_mtime_ns)))
    return set(found)


@functools.cache
def _undamaged(template: Path) -> set[tuple[str, tuple[int, int]]]:
    return _files(template)


def _restored(place: Path, template: Path) -> None:
    changed = sorted({name for name, _ in _undamaged(template) ^ _files(place)})
    # What is too much, the inner first; then what is missing, the outer first.
    for name in reversed(changed):
        if name.endswith("/"):
            if not (template / name).is_dir():
                (place / name).rmdir()
        else:
            (place / name).unlink(missing_ok=True)
    for name in changed:
        if (template / name).is_dir():
            (place / name).mkdir(exist_ok=True)
        elif (template / name).is_file():
            shutil.copy2(template / name, place / name)


def _where(error: BaseException) -> str:
    """The error's class, and the deepest function of approx that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        one for one in frames if any(f"/{name}/" in one.filename for name in _OURS) and "/fuzz/" not in one.filename
    ]
    deepest = (ours or frames)[-1]
    return f"{type(error).__name__} in {Path(deepest.filename).name}, {deepest.name}"
