"""Tables like the paper's, its numbers beside ours: a column for each target, dataset or source, and the average.

A seed counts in an average if it has every column: the mean of other columns would be a mean of something else.
(There alone DomainBed differs, which takes what a seed has.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import polars as pl

from agfa.benchmark import published
from agfa.benchmark.published import AVERAGE, SENSITIVITY
from agfa.benchmark.rows import title
from agfa.benchmark.selection import SINGLE_SOURCE, over_seeds
from agfa.data.catalog import BENCHMARKS, CATALOG

Origin = Literal["measured", "published", "excerpted"]
Accuracies = dict[str, dict[int, float]]  # of one row: column, seed

_OF = {"abl_study": ", ablation", "abl_eta": ", eta varied", "abl_alpha": ", alpha varied"}
MISPRINT = "the mean of its columns is"


@dataclass(frozen=True)
class Cell:
    """A mean (a fraction) with its standard error over seeds; `decimals` of the percentage."""

    mean: float
    error: float | None = None
    seeds: int | None = None  # of published numbers nobody says how many
    decimals: int = 1

    @property
    def shown(self) -> str:
        """The mean in percent."""
        return f"{100 * self.mean:.{self.decimals}f}"


@dataclass(frozen=True)
class Line:
    """One row of a table. A cell may be words; None is what was not measured."""

    label: str
    cells: tuple[Cell | str | None, ...]
    origin: Origin = "measured"


@dataclass(frozen=True)
class Table:
    """A table for people, in whatever form it is written; `compared` columns have their best in bold."""

    title: str
    header: tuple[str, ...]  # the heading of the labels first
    lines: tuple[Line, ...]
    notes: tuple[str, ...] = ()
    compared: bool = True

    def best(self, line: Line, column: int) -> bool:
        """Whether no other line of the same origin shows more in this column (the paper's numbers do not compete)."""
        mine = line.cells[column]
        if not (self.compared and isinstance(mine, Cell)):
            return False
        others = (o.cells[column] for o in self.lines if (o.origin == "measured") == (line.origin == "measured"))
        return all(float(mine.shown) >= float(other.shown) for other in others if isinstance(other, Cell))


def accuracies(chosen: pl.DataFrame) -> dict[str, Accuracies]:
    """What `select` chose, of one dataset, backbone and protocol: by row, column and seed."""
    found: dict[str, Accuracies] = {}
    for row, column, seed, accuracy in chosen.select("row", "column", "seed", "accuracy").rows():
        found.setdefault(row, {}).setdefault(column, {})[seed] = accuracy
    return found


def seed_means(row: Accuracies, columns: Sequence[str]) -> dict[int, float]:
    """The mean over columns of every seed that has them all."""
    complete = set.intersection(*(set(row.get(column, ())) for column in columns)) if columns else set[int]()
    return {seed: sum(row[column][seed] for column in columns) / len(columns) for seed in sorted(complete)}


def cell(by_seed: dict[int, float]) -> Cell | None:
    """The mean and standard error over seeds; None without any."""
    if not by_seed:
        return None
    mean, error = over_seeds(list(by_seed.values()))
    return Cell(mean, error, len(by_seed))


def measured_tables(chosen: pl.DataFrame) -> list[Table]:
    """The main table of each backbone that has several datasets, and a table of each dataset."""
    groups = groups_of(chosen)
    tables = [
        main_table(chosen.filter(pl.col("backbone") == backbone))
        for backbone in dict.fromkeys(backbone for _, backbone, _ in groups)
        if len({dataset for dataset, b, protocol in groups if b == backbone and protocol != SINGLE_SOURCE}) > 1
    ]
    return tables + [dataset_table(part(chosen, *group), *group) for group in groups]


def groups_of(chosen: pl.DataFrame) -> list[tuple[str, str, str]]:
    """(dataset, backbone, protocol) of the tables, in the catalog's order."""
    known = [benchmark.name for benchmark in BENCHMARKS]
    found = chosen.select("dataset", "backbone", "protocol").unique(maintain_order=True).rows()
    return sorted(found, key=lambda g: (known.index(g[0]) if g[0] in known else len(known), *g))


def part(chosen: pl.DataFrame, dataset: str, backbone: str, protocol: str) -> pl.DataFrame:
    """What belongs in the table of one dataset, backbone and protocol."""
    return chosen.filter(pl.col("dataset") == dataset, pl.col("backbone") == backbone, pl.col("protocol") == protocol)


def columns_of(chosen: pl.DataFrame, dataset: str, with_all: bool) -> list[str]:
    """The domains that have a column, in the catalog's order: `with_all` of them, or those that were measured."""
    found = chosen["column"].unique().sort().to_list()
    places = [place.name for place in CATALOG[dataset.lower()].places] if dataset.lower() in CATALOG else found
    return [name for name in places if with_all or name in found]


def heading(dataset: str, domain: str) -> str:
    """A domain's name in the paper's tables."""
    places = CATALOG[dataset.lower()].places if dataset.lower() in CATALOG else ()
    return next((place.title for place in places if place.name == domain), domain)


def dataset_table(chosen: pl.DataFrame, dataset: str, backbone: str, protocol: str) -> Table:
    """A column for each target (or single source), and the average."""
    printed = _printed(dataset, backbone, protocol)
    columns = columns_of(chosen, dataset, with_all=not printed.is_empty())
    average = [AVERAGE] if len(columns) > 1 else []
    headings = [*(heading(dataset, column) for column in columns), *average]
    lines = {}
    for row, of_row in accuracies(chosen).items():
        cells = [cell(of_row.get(column, {})) for column in columns]
        lines[row] = Line(title(row), (*cells, *(cell(seed_means(of_row, columns)) for _ in average)))
    what = "source" if protocol == SINGLE_SOURCE else "target"
    merged, notes = _beside(lines, printed, headings)
    each = "mean over the domains not learnt from" if protocol == SINGLE_SOURCE else "on the domain held out"
    theirs = printed["backbone"].unique().to_list()
    if theirs and theirs != [backbone_name(backbone)]:
        notes = (*notes, f"The paper's numbers are those of {theirs[0]}.")
    name = f"{dataset}, {backbone}: accuracy by {what}"
    return Table(name, ("Method", *headings), merged, (f"Each column: {each}.", *notes))


def main_table(chosen: pl.DataFrame) -> Table:
    """A column for each dataset, and the average; `chosen` is of one backbone."""
    groups = [group for group in groups_of(chosen) if group[2] != SINGLE_SOURCE]
    datasets = [dataset for dataset, _, _ in groups]
    backbone = groups[0][1]
    cells: dict[str, dict[str, Cell | None]] = {}
    for group in groups:
        of_group = part(chosen, *group)
        columns = columns_of(of_group, group[0], with_all=not _printed(*group).is_empty())
        for row, of_row in accuracies(of_group).items():
            cells.setdefault(row, {})[group[0]] = cell(seed_means(of_row, columns))
    lines = {}
    for row, by_dataset in cells.items():
        found = [by_dataset.get(dataset) for dataset in datasets]
        have = [c.mean for c in found if c is not None]
        average = Cell(sum(have) / len(have)) if len(have) == len(datasets) else None
        lines[row] = Line(title(row), (*found, average))
    whole = published.read().filter(pl.col("table") == "main")
    printed = whole.filter(pl.col("column").is_in([*datasets, AVERAGE]))
    if set(datasets) != set(whole["column"]) - {AVERAGE}:
        printed = printed.filter(pl.col("column") != AVERAGE)  # it would be of other datasets
    merged, notes = _beside(lines, printed, [*datasets, AVERAGE])
    if not printed.is_empty() and backbone_name(backbone) != "resnet50":
        notes = (*notes, "The paper's numbers are those of resnet50.")
    return Table(f"All datasets, {backbone}: mean over targets", ("Method", *datasets, AVERAGE), merged, notes)


def published_tables() -> list[Table]:
    """Every results table of the paper."""
    tables = []
    for (table, dataset, backbone, protocol), rows in published.read().group_by(
        "table", "dataset", "backbone", "protocol", maintain_order=True
    ):
        columns = rows["column"].unique(maintain_order=True).to_list()
        what = "by source" if protocol == SINGLE_SOURCE else "by target"
        name = (
            f"{dataset}, {backbone}: accuracy {what}{_OF.get(table, '')}" if dataset else f"All datasets, {backbone}"
        )
        lines, notes = _beside({}, rows, columns)
        first = "Setting" if table in SENSITIVITY else "Method"
        tables.append(Table(f"{name} (the paper's)", (first, *columns), lines, notes))
    return tables


def in_order(rows: Iterable[str]) -> list[str]:
    """Rows as the paper has them, those that it has not at the end."""
    known = published.order()
    return sorted(rows, key=lambda row: (known.index(row) if row in known else len(known), row))


def backbone_name(tag: str) -> str:
    """An architecture without the name of its weights."""
    return tag.partition(".")[0]


def _printed(dataset: str, backbone: str, protocol: str) -> pl.DataFrame:
    """The paper's numbers for a dataset and protocol: for this backbone, else for the one it mostly uses."""
    rows = published.read().filter(
        pl.col("dataset") == dataset, pl.col("protocol") == protocol, pl.col("setting") == ""
    )
    ours = rows.filter(pl.col("backbone") == backbone_name(backbone))
    rows = rows.filter(pl.col("backbone") == "resnet50") if ours.is_empty() else ours
    # AGFA is printed again in the ablation, with more digits: its own table's come first
    rows = rows.sort(pl.col("table") == "abl_study", maintain_order=True)
    return rows.unique(["row", "excerpted", "column"], keep="first", maintain_order=True)


def _beside(
    lines: dict[str, Line], printed: pl.DataFrame, columns: Sequence[str]
) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """Our lines in the paper's order, each above what the paper prints for it; and what is to be said of that."""
    theirs: dict[str, list[Line]] = {}
    notes = []
    for (table, row, setting, excerpted), cells in printed.group_by(
        "table", "row", "setting", "excerpted", maintain_order=True
    ):
        by_column = {c["column"]: Cell(c["mean"], c["error"], None, c["decimals"]) for c in cells.rows(named=True)}
        origin: Origin = "excerpted" if excerpted else "published"
        mark = ", published†" if excerpted else ", published"
        name = setting or title(row)
        theirs.setdefault(row, []).append(Line(name + mark, tuple(map(by_column.get, columns)), origin))
        notes += [_misprint(m) for m in published.misprints() if (m.table, m.row) == (table, row) and not setting]
    if any(line.origin == "excerpted" for found in theirs.values() for line in found):
        notes.append("† taken by the paper from other papers.")
    merged = [
        line
        for row in in_order({*lines, *theirs})
        for line in ([lines[row]] if row in lines else []) + theirs.get(row, [])
    ]
    return tuple(merged), tuple(notes)


def _misprint(m: published.Misprint) -> str:
    printed, mean = f"{100 * m.printed:.1f}", f"{100 * m.mean:.2f}"
    return (
        f"{title(m.row)}'s published average is a misprint, or a column is: {printed} is printed, {MISPRINT} {mean}."
    )


def seeds_said(lines: Iterable[Line]) -> str | None:
    """Over how many seeds the means of measured lines are; None where nothing was measured."""
    counts = {c.seeds for line in lines for c in line.cells if isinstance(c, Cell) and c.seeds}
    if not counts:
        return None
    least, most = min(counts), max(counts)
    return f"{least} seed{'' if most == 1 else 's'}" if least == most else f"{least} to {most} seeds"
