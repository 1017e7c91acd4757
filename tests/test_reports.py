"""What stands under reports/ and in the README is what the records say."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_pages_and_readme_are_made_from_the_records():
    done = subprocess.run([sys.executable, "reports/refresh.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
