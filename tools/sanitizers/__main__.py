"""Run the tests of the kernels with their C under AddressSanitizer and UndefinedBehaviorSanitizer, for so many minutes.

    python tools/sanitizers --minutes 20

The first thing that runs are errors planted in C, which must be noticed. Then come the tests, some of each file before
others of any, so that a short run sees all sources; it says how many it had no time for.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Code that is watched need not be fast, and takes a quarter of the time to compile so.
FLAGS = "-O0 -g -fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer"
PLANTED = {
    "heap-buffer-overflow": "int run(int n) { char *x = calloc(n, 1); int value = x[n]; free(x); return value; }",
    "signed integer overflow": "int run(int n) { return n + 2147483647; }",
    "outside the range of representable values": "int run(int n) { return (int)(1e10f * n); }",
    "misaligned address": "int run(int n) { char x[64] = {0}; return *(int *)(x + n % 2 + (((uintptr_t)x & 1) ^ 1)); }",
}
# Of no C, of how it is compiled, or of how fast it is.
LEFT_OUT = ("triton", "offline", "flash", "c_language", "c_sources", "cache_folder", "probe", "findings", "estimators")


def main() -> int:
    """Run; 0 where all that ran passed, 1 otherwise, 2 where nothing can be said."""
    parser = argparse.ArgumentParser(
        prog="make sanitize", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="when the last test begins")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    asked = parser.parse_args()
    compiler = os.environ.get("CC", "gcc")
    try:
        runtime = subprocess.run([compiler, "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"No compiler with sanitizers was found: {error}. Install gcc, or set $CC to it.")
        return 2
    if not Path(library := runtime.stdout.strip()).is_absolute():
        print(f"{compiler} has no libasan.so. Install the sanitizers of gcc, or set $CC to a gcc that has them.")
        return 2
    # libstdc++ is wanted by PyTorch and must be there before its exceptions are watched.
    standard = subprocess.run([compiler, "-print-file-name=libstdc++.so"], check=True, capture_output=True, text=True)
    environment = os.environ | {
        "CC": compiler,
        "LD_PRELOAD": f"{library} {standard.stdout.strip()}",
        # Python leaves memory to the end of the process.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "APPROX_C_FLAGS": FLAGS,
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", HERE))),
    }
    with ThreadPoolExecutor(asked.jobs) as pool:
        outputs = list(pool.map(lambda source: _run_planted(source, environment), PLANTED.values()))
    for words, output in zip(PLANTED, outputs, strict=True):
        if words not in output:
            print(f"A planted error was not noticed, '{words}':\n{output}")
            return 2
    files = [
        path for path in (ROOT / "tests" / "kernels").glob("test_*.py") if not any(x in path.name for x in LEFT_OUT)
    ]
    environment["APPROX_SANITIZE_UNTIL"] = str(time.time() + 60 * asked.minutes)
    # One test after the other as they are sorted, whoever is free.
    spread = ["-n", str(asked.jobs), "--dist", "load", "--maxschedchunk", "1"] if asked.jobs > 1 else []
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "budget",
        "-p",
        "no:cacheprovider",
        *spread,
        *map(str, files),
    ]
    return int(subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0)


def _run_planted(source: str, environment: dict[str, str]) -> str:
    call = (
        "import sys, tempfile, os\n"
        "os.environ['APPROX_CACHE'] = tempfile.mkdtemp()\n"
        "from approx_kernels.cpu.compile import load\n"
        "library = load('#include <stdint.h>\\n#include <stdlib.h>\\n' + sys.argv[1])\n"
        "print(library if isinstance(library, str) else library.run(5))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", call, source], env=environment, check=False, capture_output=True, text=True
    )
    return f"exit status {ran.returncode}\n{ran.stdout}{ran.stderr}"


if __name__ == "__main__":
    sys.exit(main())
