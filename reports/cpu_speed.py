"""The page about speed on a CPU and the README's table of it, from the record of `bench/cpu.py`, where there is one."""

import json
from pathlib import Path

BEGIN, END = "<!-- speed: made by reports/refresh.py -->", "<!-- end of speed -->"


def write(reports: Path, out: Path) -> None:
    """Make the page in `out / "cpu"` from the record in `reports / "cpu"`."""
    if (reports / "cpu" / "record.json").is_file():
        from bench import cpu_page

        cpu_page.write(reports / "cpu", out / "cpu")


def in_readme(readme: str, reports: Path) -> str:
    """The README with its table of speeds made again; as it is without a record."""
    kept = reports / "cpu" / "record.json"
    if not kept.is_file():
        return readme
    from bench import cpu_page

    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = cpu_page.readme_table(json.loads(kept.read_text(encoding="utf-8")))
    return f"{before}{BEGIN}\n{table}\n\n[All of it](reports/cpu/report.md), made by `python bench/cpu.py -o reports/cpu`.\n{END}{after}"
