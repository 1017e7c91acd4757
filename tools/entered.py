"""How many files of approx a command imports and enters, and how often it comes back to one that it left.

python tools/entered.py convert quickstart -m local -o runs/local --force
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
sys.path.extend(str(ROOT / name) for name in (".", "kernels"))
OURS = (f"{ROOT}/approx/", f"{ROOT}/kernels/")


class Visits:
    """Which files are entered, by a profiler of calls.

    Attributes:
        calls: File -> calls of its functions.
        returns: File -> how often it was entered again after another file of ours.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.returns: Counter[str] = Counter()
        self._last = ""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Note a call; what a module runs while it is imported does not count."""
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(OURS) or frame.f_code.co_name.startswith("<"):
            return
        if file != self._last:
            self.returns[file] += file in self.calls
            self._last = file
        self.calls[file] += 1


def main() -> None:
    """Run the command of the arguments, and print the counts."""
    from approx.cli import main as run

    visits = Visits()
    sys.argv[0] = "approx"
    sys.setprofile(visits)
    try:
        run()
    except SystemExit as end:
        print(f"exit code {end.code or 0}")
    finally:
        sys.setprofile(None)
    files = {getattr(module, "__file__", None) or "" for module in sys.modules.values()}
    imported = sum(file.startswith(OURS) for file in files)
    print(f"{imported} files imported, {len(visits.calls)} entered, {visits.returns.total()} times again")
    for file, count in visits.returns.most_common(10):
        print(f"{count:6,} times again  {Path(file).relative_to(ROOT)}")


if __name__ == "__main__":
    main()
