"""Tables on a terminal: words stay whole, whatever the width."""

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from approx.cli.terminal import visible

# Longer words, such as paths, are folded.
_LONGEST_WORD = 28


class _Whole(Table):
    """A table that breaks no word of a cell; where that does not fit, its rows are printed as lists."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table, in the widths that fit best."""
        free = options.max_width - self._extra_width
        drawn = self._calculate_column_widths(console, options.update_width(free))
        if any(width < due + 1 for width, due in zip(drawn, self._least(), strict=True)):
            gaps = len(self.columns)
            tries = [(self._least(), 1), (self._least(), 0), (self._least(headings=False), 1)]
            fitting = [(least, gap) for least, gap in tries if sum(least) + gap * gaps <= free]
            if not fitting:
                yield from self._list()
                return
            least, gap = fitting[0]
            self.padding = (0, gap, 0, 0)
            for column, width in zip(self.columns, self._shared(least, free - gap * gaps), strict=True):
                column.width = width
        yield from super().__rich_console__(console, options)

    def _least(self, *, headings: bool = True) -> list[int]:
        """Width of each column in which every word fits."""

        def longest(cells: Iterable[str]) -> int:
            return max((min(cell_len(word), _LONGEST_WORD) for cell in cells for word in cell.split()), default=1)

        return [
            # A column without a heading holds names, which stay on one line.
            max(map(cell_len, cells), default=1)
            if column.no_wrap
            else longest([*([str(column.header)] if headings else []), *cells])
            for column, cells in zip(self.columns, self._cells(), strict=True)
        ]

    def _shared(self, least: list[int], free: int) -> list[int]:
        """The least widths, and the rest of the line for the columns that need more."""
        natural = [
            max(map(cell_len, [str(column.header), *cells]))
            for column, cells in zip(self.columns, self._cells(), strict=True)
        ]
        widths = [*least]
        for _ in range(free - sum(least)):
            needy = [number for number, width in enumerate(widths) if width < natural[number]]
            if not needy:
                break
            # Widen the column that would wrap most.
            widths[max(needy, key=lambda number: natural[number] / widths[number])] += 1
        return widths

    def _cells(self) -> list[list[str]]:
        return [[str(cell) for cell in column.cells] for column in self.columns]

    def _list(self) -> Iterator[Text]:
        if self.title:
            yield Text(str(self.title), style="bold")
        headings = [str(column.header) for column in self.columns]
        for row in zip(*self._cells(), strict=True):
            first, *rest = [(heading, cell) for heading, cell in zip(headings, row, strict=True) if cell]
            yield Text(f"\n{first[1]}")
            for heading, cell in rest:
                yield Text(f"  {heading}: {cell}" if heading else f"  {cell}")


def table(columns: Sequence[str], rows: Iterable[Sequence[str] | None], title: str | None = None) -> Table:
    """A table whose cells wrap between words instead of being cut; empty columns are left out.

    A column without a heading, which holds names, is not wrapped.

    Args:
        columns: Headings.
        rows: Cells of each row; None draws a line.
        title: Printed above the headings.
    """
    rows = list(rows)
    filled = [index for index in range(len(columns)) if any(row and row[index] for row in rows)]
    made = _Whole(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index in filled:
        made.add_column(columns[index], overflow="fold", no_wrap=not columns[index])
    for row in rows:
        if row is None:
            made.add_section()
        else:
            # Escape control characters before rich measures the width.
            made.add_row(*(visible(row[index]) for index in filled))
    return made
