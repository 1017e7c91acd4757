"""The pages about speed on a CPU and the tables of docs/speed.md, from the records of `bench/cpu.py`, one a processor."""

import json
from pathlib import Path

BEGIN, END = "<!-- speed: made by reports/refresh.py -->", "<!-- end of speed -->"


def write(reports: Path, out: Path) -> None:
    """Make the page of each processor, in a folder of the same name as its record's."""
    from bench import cpu_page

    for folder in _folders(reports):
        cpu_page.write(folder, out / folder.name)


def in_page(page: str, reports: Path) -> str:
    """The page with its tables of speeds made again between the two markers, a table a processor."""
    from bench import cpu_page
    from bench.cpu_record import processor

    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    tables = []
    for folder in _folders(reports):
        made = json.loads((folder / "record.json").read_text(encoding="utf-8"))
        name = f"reports/{folder.name}"
        tables.append(
            f"## {processor(made['environment'])}\n\n{cpu_page.processor_table(made)}\n\n"
            f"[The whole report](../{name}/report.md), made by `python bench/cpu.py -o {name}`.\n"
        )
    return "\n".join([before + BEGIN, *tables, END]) + after


def _folders(reports: Path) -> list[Path]:
    return sorted(path.parent for path in reports.glob("cpu*/record.json"))
