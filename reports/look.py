"""Make the example pages of `approx look`: `python reports/look.py MINILM SMOLLM2 WHISPER RECORDING [PAGE…]`.

MINILM is a MiniLM fine-tuned on SST-2, SMOLLM2 and WHISPER are what `examples/real/smollm2.py` and `examples/real/whisper.py tiny.en`
write with `--dtype float32`, RECORDING is a file of LibriSpeech. Settings are small enough to matter on a text of this length.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "reports" / "look"
REVIEW = (
    "The harbour film opens on fog, and for ten minutes nothing happens except weather and work. Then the old pilot, who has "
    "not spoken since his brother drowned, takes the wheel of a ship that is too large for the channel, and every quiet scene "
    "before it begins to count. The director trusts her actors more than her script: the daughter's anger is in the way she "
    "coils a rope, the captain's fear in the coffee that he does not drink. Not all of it works. A subplot about insurance is as "
    "dull as it sounds, the music insists where it should wait, and the last storm was plainly shot in a tank. Yet the ending, "
    "in which the pilot finally says the name that he has kept to himself, is as moving as anything I have seen this year. "
    "Go for the fog, stay for the silence, and forgive the insurance."
)
# Name of a page -> its checkpoint, and how that is converted.
PAGES = {
    "bert-clustered": ("minilm-sst2", ["-m", "clustered", "--set", "clusters=16"]),
    "bert-lsh": ("minilm-sst2", ["-m", "lsh", "--set", "cluster=16"]),
    "bert-strided": ("minilm-sst2", ["-m", "strided", "--set", "stride=8"]),
    "bert-adaptive-span": ("minilm-sst2", ["-m", "adaptive-span"]),
    "smollm2-linear": ("smollm2", ["-m", "linear", "--set", "window=32"]),
    "smollm2-sinks": ("smollm2", ["-m", "sinks", "--set", "window=32"]),
    "whisper-clustered": ("whisper", ["-m", "clustered", "--set", "clusters=100"]),
}


def main(minilm: str, smollm2: str, whisper: str, recording: str, *names: str) -> None:
    """Convert, look, and keep the pages: all, or those named."""
    with tempfile.TemporaryDirectory() as scratch:
        # A page names its files as they were typed.
        work, audio = Path(scratch), Path(recording)
        given = {"minilm-sst2": minilm, "smollm2": smollm2, "whisper": whisper, audio.name: recording}
        for name, path in given.items():
            (work / name).symlink_to(Path(path).resolve())
        (work / "review.txt").write_text(REVIEW, encoding="utf-8")
        for name in names or PAGES:
            base, how = PAGES[name]
            read = ["--audio", audio.name] if base == "whisper" else ["--text", "review.txt"]
            for words in (
                ["convert", base, *how, "-o", name],
                ["look", name, *read, "--dtype", "float32", "-o", f"look-{name}"],
            ):
                subprocess.run([sys.executable, str(ROOT / "cli.py"), *words], check=True, cwd=work)
            OUT.mkdir(exist_ok=True)
            shutil.copy(work / f"look-{name}" / "index.html", OUT / f"{name}.html")


if __name__ == "__main__":
    main(*sys.argv[1:])
