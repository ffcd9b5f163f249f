"""How commands print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from agfa.benchmark.tables import Table


def table(header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> None:
    """Print a table; where the output is not a terminal, at full width."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))
    _console().print(table)


def tables(found: Sequence[Table]) -> None:
    """Print tables of results, likewise."""
    from agfa.benchmark.render import terminal

    terminal(found, _console())


def _console() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=400)
