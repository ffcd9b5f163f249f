"""How commands print."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def table(header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> None:
    """Print a table; where the output is not a terminal, at full width."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))
    console().print(table)


def console() -> Console:
    """Standard output; at full width where it is not a terminal."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=400)
