"""Push a random Llama of 570 MB to a hub on this machine, beside the hub client alone: bench/push.py -o RECORD.

The hub is the one of the tests. `approx push` does more than send files: it checks the folder, downloads what it sent,
loads it in a clean process and compares outputs.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("tests", ".", "kernels")]

from bench.big_model import GIGABYTE, make  # noqa: E402 - it is found by the path above
from hub_server import serve  # noqa: E402 - the same
from hub_state import Hub  # noqa: E402 - the same

TOKEN = "hf_" + "0" * 34
CLIENT = "import sys; from huggingface_hub import HfApi; api = HfApi(); api.create_repo(sys.argv[2]); \
api.upload_folder(folder_path=sys.argv[1], repo_id=sys.argv[2])"


def seconds(command: list[str]) -> float:
    """Run a command to its end, and return how long it took."""
    began = time.monotonic()
    subprocess.run(command, check=True)
    return round(time.monotonic() - began, 1)


def main() -> None:
    """Make the model, convert it, send it both ways, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True, help="the record, a JSON file")
    chosen = parser.parse_args()
    approx = [sys.executable, str(ROOT / "cli.py")]
    server = serve(hub := Hub(tokens={TOKEN: ("ada", "write")}))
    with tempfile.TemporaryDirectory() as room:
        # The hub client reads these when it is imported.
        os.environ |= {
            "HF_ENDPOINT": hub.endpoint,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HOME": f"{room}/home",
        }
        os.environ.pop("HF_HUB_OFFLINE", None)
        base, converted = f"{room}/base", f"{room}/converted"
        size = make(Path(base), 3)
        seconds([*approx, "convert", base, "-o", converted, "-m", "local", "--quiet"])
        record = {
            "checkpoint_gb": round(size / GIGABYTE, 2),
            "client_seconds": seconds([sys.executable, "-c", CLIENT, converted, "ada/client"]),
        }
        # The hub stores equal files once, and the client would not send them again.
        hub.objects.clear()
        record["push_seconds"] = seconds([*approx, "push", converted, "ada/pushed", "-y", "--quiet"])
    server.shutdown()
    chosen.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
