"""`agfa report`: from run folders to tables and figures."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Literal

from agfa.cli.app import app
from agfa.cli.show import console
from agfa.errors import UsageError
from agfa.files import put


@app.command
def report(
    runs: list[Path] | None = None,
    /,
    *,
    format: Literal["terminal", "markdown", "latex", "csv", "html"] = "terminal",
    selection: Literal["training-domain", "leave-one-domain-out", "oracle"] = "training-domain",
    out: Path | None = None,
    figures: Path | None = None,
) -> None:
    """Make the paper's tables of your runs, its published numbers beside them, and say what is missing.

    Args:
        runs: folders with runs in them, at any depth (none: the paper's own tables).
        format: how to write it; html is one page with tables to sort, and figures.
        selection: what chooses between hyperparameters, and between steps of a training.
        out: the file to write (html: report.html if not given; the others: printed).
        figures: a folder to write each figure to, as SVG and PDF.
    """
    from rich.console import Console

    from agfa.benchmark import render
    from agfa.benchmark.page import write_page
    from agfa.benchmark.report import build, write_figures

    if out is not None and out.is_dir():
        raise UsageError(f"{out} is a folder; --out is the file to write, such as {out / 'report'}")
    found = build(runs or [], selection)
    if figures is not None:
        for path in write_figures(found.figures, figures):
            print(f"figure: {path}", file=sys.stderr)
    if format == "html":
        print(f"report: {write_page(out or Path('report.html'), found).resolve()}")
        return
    if format == "terminal":
        page = None if out is None else io.StringIO()
        render.terminal(found.tables, found.missing, console() if page is None else Console(file=page, width=400))
        text = "" if page is None else page.getvalue()
    elif format == "markdown":
        text = render.markdown(found.tables, found.missing)
    else:
        text = render.latex(found.tables) if format == "latex" else render.comma_separated(found.tables)
        for sentence in found.missing:  # a program reads the tables
            print(sentence, file=sys.stderr)
    if out is None:
        print(text, end="")
    else:
        put(out, text.encode())
