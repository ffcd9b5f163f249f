"""Tables as text: for a terminal, as Markdown, as LaTeX (booktabs), as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from agfa.benchmark.tables import Cell, Line, Table, seeds_said

NOT_MEASURED, MISSING = "–", "What is missing"
_LATEX = str.maketrans(
    {
        **{c: f"\\{c}" for c in "&%$#_{}"},
        **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"},
        **{"±": r"$\pm$", "†": r"$^\dagger$", "–": "--", "η": r"$\eta$", "α": r"$\alpha$", "−": "$-$"},
    }
)
_MARKDOWN = str.maketrans({c: f"\\{c}" for c in "\\|*_`<>"})


def caption(table: Table) -> str:
    """What the numbers of a table are."""
    if not any(isinstance(cell, Cell) for line in table.lines for cell in line.cells):
        return ""
    seeds = seeds_said(table.lines)
    numbers = "Per cent, as published" if seeds is None else f"Per cent, mean ± standard error over {seeds}"
    if not table.compared:
        return f"{numbers}."
    apart = ", ours and the published apart" if len({line.origin == "measured" for line in table.lines}) > 1 else ""
    return f"{numbers}; the highest is bold{apart}."


def text(table: Table, cell: Cell | str | None) -> str:
    """A cell; `(n)` where fewer seeds than elsewhere in the table stand behind it."""
    if not isinstance(cell, Cell):
        return cell or NOT_MEASURED
    most = max((c.seeds or 0 for line in table.lines for c in line.cells if isinstance(c, Cell)), default=0)
    fewer = f" ({cell.seeds})" if cell.seeds and cell.seeds < most else ""
    error = "" if cell.error is None else f" ± {100 * cell.error:.{cell.decimals}f}"
    return f"{cell.shown}{error}{fewer}"


def terminal(tables: Sequence[Table], missing: Sequence[str], console: Console) -> None:
    """Print all tables, and what is missing; where it is no terminal, bold is left out."""
    for table in tables:
        grid = Grid(*table.header, box=box.SIMPLE_HEAD)
        for line in table.lines:
            cells = [
                Text(text(table, cell), style="bold" if table.best(line, i) else "")
                for i, cell in enumerate(line.cells)
            ]
            grid.add_row(Text(line.label), *cells)
        console.print(Text(table.title, style="bold"))
        console.print(grid)
        for note in said(table):
            console.print(Text(note))
        console.print()
    if missing:
        console.print(Text(MISSING, style="bold"))
    for sentence in missing:
        console.print(Text(f"- {sentence}"))


def markdown(tables: Sequence[Table], missing: Sequence[str] = ()) -> str:
    """All tables as Markdown, a heading above each, and what is missing."""

    def row(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    def one(table: Table, line: Line) -> str:
        cells = [_escaped(text(table, cell)) for cell in line.cells]
        marked = [f"**{cell}**" if table.best(line, i) else cell for i, cell in enumerate(cells)]
        return row([_escaped(line.label), *marked])

    blocks = []
    for table in tables:
        header = row([_escaped(name) for name in table.header])
        rule = row(["---", *["---:" if table.compared else "---"] * (len(table.header) - 1)])
        lines = [header, rule, *(one(table, line) for line in table.lines)]
        notes = [_escaped(note) for note in said(table)]
        blocks.append("\n\n".join([f"### {_escaped(table.title)}", "\n".join(lines), *notes]))
    if missing:
        blocks.append("\n".join([f"### {MISSING}", "", *(f"- {_escaped(sentence)}" for sentence in missing)]))
    return "\n\n".join(blocks) + "\n"


def latex(tables: Sequence[Table]) -> str:
    """All tables as LaTeX; it needs the package booktabs."""
    blocks = []
    for table in tables:
        rows = []
        for line in table.lines:
            cells = [text(table, cell).translate(_LATEX) for cell in line.cells]
            marked = [rf"\textbf{{{cell}}}" if table.best(line, i) else cell for i, cell in enumerate(cells)]
            rows.append(" & ".join([line.label.translate(_LATEX), *marked]) + r" \\")
        columns = ("c" if table.compared else "l") * (len(table.header) - 1)
        notes = " ".join([f"{table.title}.", *said(table)]).translate(_LATEX)
        blocks.append(
            "\n".join(
                [
                    r"\begin{table}",
                    r"\centering",
                    rf"\caption{{{notes}}}",
                    rf"\begin{{tabular}}{{l{columns}}}",
                    r"\toprule",
                    " & ".join(name.translate(_LATEX) for name in table.header) + r" \\",
                    r"\midrule",
                    *rows,
                    r"\bottomrule",
                    r"\end{tabular}",
                    r"\end{table}",
                ]
            )
        )
    return "\n\n".join(["% needs \\usepackage{booktabs}", *blocks]) + "\n"


def comma_separated(tables: Sequence[Table]) -> str:
    """All cells of all tables, a line each: fractions in full, so that nothing is lost to rounding."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(("table", "row", "origin", "column", "mean", "standard_error", "seeds", "text"))
    for table in tables:
        for line in table.lines:
            for column, cell in zip(table.header[1:], line.cells, strict=True):
                values: tuple[object, ...] = ("", "", "", cell)
                if isinstance(cell, Cell):
                    values = (_full(cell.mean), _full(cell.error), cell.seeds, "")
                writer.writerow((table.title, line.label, line.origin, column, *values))
    return file.getvalue()


def _full(fraction: float | None) -> float | None:
    return None if fraction is None else round(fraction, 12)  # 0.842, not 0.8420000000000001


def said(table: Table) -> list[str]:
    """What stands below a table."""
    return [note for note in (caption(table), *table.notes) if note]


def _escaped(words: str) -> str:
    return words.translate(_MARKDOWN)
