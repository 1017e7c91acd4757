"""The doorstep: `python cli.py …` runs the command line from a checkout, without installation."""

import sys
from pathlib import Path

# Appended, not put first: this folder is only the home of approx_kernels and must shadow nothing.
sys.path.append(str(Path(__file__).resolve().parent / "kernels"))

from approx.cli import main

if __name__ == "__main__":
    main()
