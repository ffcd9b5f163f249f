"""How commands print."""

from __future__ import annotations

from collections.abc import Iterable


def percent(share: float | None) -> str:
    """A share in percent, without the sign."""
    return "not measured" if share is None else f"{100 * share:.1f}"


def table(header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> None:
    """Print a table; where the output is not a terminal, at full width."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))
    console = Console()
    console.print(table) if console.is_terminal else Console(width=400).print(table)
