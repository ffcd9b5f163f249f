"""Own data as tables: CSV or Parquet files that say of every image where it is, its label and its domain."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from agfa.data.domains import Domain, DomainDataset
from agfa.data.sources import Files, Rows, Shard
from agfa.errors import UsageError

SUFFIXES = frozenset({".csv", ".parquet"})
KINDS = {  # what columns are called, if nothing else is said, in any case of letters
    "path": ("path", "file", "filename", "file_name", "filepath", "image_path", "image", "img"),
    "label": ("label", "class", "category", "y"),
    "domain": ("domain", "environment", "env"),
}

NO_WEIGHT = pl.lit(None)


class Columns(NamedTuple):
    """What a table is read as: text for each row, under the names of KINDS, from columns of the names in `called`.

    `path` is None where the images are in the table themselves.
    """

    path: pl.Expr | None
    label: pl.Expr
    domain: pl.Expr
    called: Mapping[str, str]
    classes: tuple[str, ...] = ()  # in their order, where the file says so
    weight: pl.Expr = NO_WEIGHT
    rows: pl.Expr = pl.lit(True)  # which rows count


def read_tables(name: str, root: Path, files: Sequence[Path], asked: Mapping[str, str]) -> DomainDataset:
    """The dataset in CSV or Parquet files with a row for each image.

    `asked` gives the names of the columns path, label and domain; KINDS has the usual ones. A column of weights is
    used where it is asked for, whatever it is called. The images are files,
    their paths relative to `root`, or (Parquet only) the column called path holds them: binary, or Hugging Face's
    struct. Labels and domains are kept as text, ordered as numbers where all are whole numbers; Hugging Face's
    classes have the names and the order that the file gives them. The order of rows changes nothing.

    Raises:
        UsageError: a file cannot be read, lacks a column, or has a row that is wrong: the first is named, by its
            number, as a spreadsheet counts in CSV (the header is row 1) and from 0 in Parquet.
    """
    tables = [scan(file) for file in files]
    columns = [find_columns(file, table.collect_schema(), asked) for file, table in zip(files, tables, strict=True)]
    return read_rows(name, root, files, tables, columns)


def read_rows(
    name: str, root: Path, files: Sequence[Path], tables: Sequence[pl.LazyFrame], columns: Sequence[Columns]
) -> DomainDataset:
    """The dataset in tables of which it is known what their columns mean."""
    if len({c.path is None for c in columns}) > 1:
        raise UsageError(f"some tables of {name} hold images and others paths; give one of them")
    within = columns[0].path is None
    rows = pl.concat(
        _rows(shard, file, file.relative_to(root).as_posix(), table, c)
        for shard, (file, table, c) in enumerate(zip(files, tables, columns, strict=True))
    )
    if rows.is_empty():
        raise UsageError(f"{files[0]} has no rows; it needs one for each image")
    _refuse_wrong_rows(files, rows, columns[0].called)
    shards = tuple(Shard(file, c.called["path"]) for file, c in zip(files, columns, strict=True))
    said = {c.classes for c in columns}
    classes = (said.pop() if len(said) == 1 else ()) or _in_order(rows["label"])
    rows = rows.with_columns(pl.col("label").cast(pl.Enum(classes)).to_physical().cast(pl.Int64))
    domains = []
    for domain in _in_order(rows["domain"]):
        part = rows.filter(pl.col("domain") == domain)  # sorted one by one, as copies of millions of rows add up
        part = part.sort("shard", "row") if within else part.sort("label", "path")
        keys = tuple(part["path"].to_list())
        at = (part[column].cast(pl.Int64).to_numpy() for column in ("shard", "row"))
        labels = part["label"].to_numpy().copy()  # polars' own cannot be written to
        weights = part["weight"].to_numpy().copy() if "weight" in columns[0].called else None
        domains.append(Domain(domain, keys, labels, Rows(shards, *at) if within else Files(root, keys), weights))
    return DomainDataset(name, classes, tuple(domains))


def scan(file: Path) -> pl.LazyFrame:
    """The table in a file, none of it read but its header. All of a CSV is text: a label 007 or 1.0 stays that."""
    if file.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{file} is no table; it should be a .csv or .parquet file with a row for each image")
    try:
        in_csv = file.suffix.lower() == ".csv"
        table = pl.scan_csv(file, infer_schema=False, glob=False) if in_csv else pl.scan_parquet(file, glob=False)
        table.collect_schema()
        return table
    except pl.exceptions.NoDataError:
        raise UsageError(f"{file} is empty; it needs a header and a row for each image") from None
    except (pl.exceptions.PolarsError, OSError, UnicodeError) as error:
        raise unreadable(file, error) from error


def unreadable(file: Path, error: Exception) -> UsageError:
    """The error for a table that is damaged."""
    return UsageError(f"{file} cannot be read: {str(error).strip().splitlines()[0]}")


def find_columns(file: Path, there: Mapping[str, pl.DataType], asked: Mapping[str, str]) -> Columns:
    """The columns that are asked for, or have a usual name, of a table with the columns that are `there`.

    Raises:
        UsageError: one of them is missing, or two could be meant.
    """
    called = {}
    for kind, usual in KINDS.items():
        if kind in asked:
            if asked[kind] not in there:
                raise _missing(file, kind, asked[kind], list(there))
            called[kind] = asked[kind]
            continue
        found = [name for name in there if name.strip().casefold() in usual]
        exact = [name for name in found if name == kind] or found
        if not exact:
            raise _missing(file, kind, kind, list(there))
        if len(exact) > 1:
            two = " and ".join(map(repr, exact))
            raise UsageError(f"{file}: {two} could both be the {kind}; say which: {file}?{kind}={exact[0]}")
        called[kind] = exact[0]
    if "weight" in asked:
        if asked["weight"] not in there:
            raise _missing(file, "weight", asked["weight"], list(there))
        called["weight"] = asked["weight"]
    within = isinstance(there[called["path"]], pl.Struct | pl.Binary)
    path = None if within else pl.col(called["path"]).cast(pl.String)
    labels, domains = (_names_of(file, called[kind], there) for kind in ("label", "domain"))
    weight = pl.col(called["weight"]) if "weight" in called else NO_WEIGHT
    return Columns(path, _text(called["label"], labels), _text(called["domain"], domains), called, labels, weight)


def _text(column: str, names: tuple[str, ...]) -> pl.Expr:
    """A column as text: the names of its numbers, if they have any."""
    if names:
        return pl.col(column).replace_strict(dict(enumerate(names)), default=None, return_dtype=pl.String)
    return pl.col(column).cast(pl.String)


def _names_of(file: Path, column: str, there: Mapping[str, pl.DataType]) -> tuple[str, ...]:
    """The names that Hugging Face's `datasets` wrote into a Parquet file for the numbers in a column, if it did."""
    if not there[column].is_integer():
        return ()
    try:
        notes: Any = json.loads(pl.read_parquet_metadata(file).get("huggingface", "{}"))
        return tuple(str(name) for name in notes["info"]["features"][column]["names"])
    except (KeyError, TypeError, ValueError):
        return ()


def _missing(file: Path, kind: str, name: str, there: list[str]) -> UsageError:
    folded = {column.strip().casefold(): column for column in there}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.5)
    hint = f" (is it {folded[near[0]]!r}?)" if near else ""
    few = ", ".join(there[:20]) + (f" and {len(there) - 20} more" if len(there) > 20 else "")
    say = f"say which column holds the {kind}: {file}?{kind}=COLUMN"
    return UsageError(f"{file} has no column {name!r}{hint}; there are: {few}; {say}")


def _rows(shard: int, file: Path, name: str, table: pl.LazyFrame, columns: Columns) -> pl.DataFrame:
    """Shard, row, path, label and domain of each image of a table."""
    path = columns.path if columns.path is not None else pl.format("{}:{}", pl.lit(name), pl.col("row"))
    chosen = table.with_row_index("row", offset=2 if file.suffix.lower() == ".csv" else 0).filter(columns.rows)
    try:
        return chosen.select(
            pl.lit(shard).alias("shard"),
            "row",
            path.alias("path"),
            columns.label.alias("label"),
            columns.domain.alias("domain"),
            columns.weight.cast(pl.Float64, strict=False).alias("weight"),  # null where it is no number
        ).collect()
    except (pl.exceptions.PolarsError, OSError, UnicodeError) as error:
        raise unreadable(file, error) from error


def _refuse_wrong_rows(files: Sequence[Path], rows: pl.DataFrame, called: Mapping[str, str]) -> None:
    """Raise an error that tells the first row that is wrong, and counts the others."""
    blank = [pl.col(kind).is_null() | (pl.col(kind).str.strip_chars() == "") for kind in KINDS]
    again = ~pl.col("path").is_first_distinct().over("domain")
    weightless = ~_is_weight(pl.col("weight")) if "weight" in called else pl.lit(False)
    wrong = rows.filter(pl.any_horizontal(*blank, again, weightless))
    if wrong.is_empty():
        return
    first = wrong.row(0, named=True)
    more = [str(row) for row in wrong["row"][1:11]]
    rest = f" and {len(wrong) - 11} more" if len(wrong) > 11 else ""
    others = f"; so are rows {', '.join(more)}{rest}" if more else ""
    what = next(_wrong(rows, first, called))
    raise UsageError(f"{files[first['shard']]}: row {first['row']} is wrong, it {what}{others}; mend or remove them")


def _is_weight(column: pl.Expr) -> pl.Expr:
    return (column.is_finite() & (column >= 0)).fill_null(False)


def _wrong(rows: pl.DataFrame, row: dict[str, Any], called: Mapping[str, str]) -> Iterator[str]:
    yield from (f"has no {called[kind]}" for kind in KINDS if not (row[kind] or "").strip())
    if "weight" in called and not (row["weight"] is not None and 0 <= row["weight"] < math.inf):
        yield f"has a {called['weight']} that is no number from 0 up"
    same = (pl.col("path") == row["path"]) & (pl.col("domain") == row["domain"])
    before = rows.filter(same).row(0, named=True)
    if before["label"] == row["label"]:
        yield f"repeats row {before['row']}, {row['path']}"
    yield f"calls {row['path']} {row['label']!r}, row {before['row']} calls it {before['label']!r}"


def _in_order(names: pl.Series) -> tuple[str, ...]:
    """Each once, sorted: as numbers if all are whole numbers, else as text."""
    found: list[str] = names.unique().to_list()
    if all(re.fullmatch(r"[+-]?\d+", name) for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))
