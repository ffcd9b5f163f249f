"""The numbers that the paper prints, as `published.csv` has them: each cell of each results table.

The file differs from the print only in names. Domains are called as the catalog calls them: OfficeHome's columns are
printed under VLCS's headings (C, L, S, V), and PACS' Photo in two tables as Painting. Methods are called as
`agfa.benchmark.rows` calls them; the MNIST tables' "Mixup" is DomainBed's, the one between domains. `excerpted` are
the numbers that the paper took from other papers, by its daggers or its captions (the DomainNet table forgets
I-Mixup's dagger). Averages are kept as printed; `misprints` tells which of them cannot be right.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import NamedTuple

import polars as pl

AVERAGE = "Average"
# One printed row: its table is one dataset's, one backbone's; FACT is there twice, excerpted and run by the authors.
PRINTED_ROW = ["table", "dataset", "backbone", "protocol", "row", "setting", "excerpted"]
SENSITIVITY = ("abl_eta", "abl_alpha")


class Misprint(NamedTuple):
    """A printed average that is not the mean of its row, however the row was rounded."""

    table: str
    dataset: str
    backbone: str
    row: str
    printed: float
    mean: float


@cache
def read() -> pl.DataFrame:
    """A row per printed cell; `mean` and `error` are fractions, `decimals` those of the print in percent."""
    text = (files("agfa.benchmark") / "published.csv").read_bytes()
    printed = pl.read_csv(text, infer_schema=False).with_columns(pl.col("dataset", "setting").fill_null(""))
    decimals = pl.col("mean").str.split(".").list.last().str.len_chars().cast(pl.Int64)
    fraction = pl.col("mean", "error").cast(pl.Float64) / 100
    return printed.with_columns(fraction, decimals=decimals, excerpted=pl.col("excerpted") == "1")


@cache
def misprints() -> tuple[Misprint, ...]:
    """Averages that differ from the mean of their columns by more than rounding both can explain."""
    found = []
    for _, row in read().group_by(PRINTED_ROW, maintain_order=True):
        columns = row.filter(pl.col("column") != AVERAGE)["mean"].to_list()
        average = row.filter(pl.col("column") == AVERAGE)
        if average.is_empty():
            continue
        printed, mean = average["mean"].item(), sum(columns) / len(columns)
        unit = 10.0 ** (-2 - average["decimals"].item())
        if abs(printed - mean) > unit * (1 + 1e-9):  # half a unit of the average, half a unit of the columns
            first = average.row(0, named=True)
            found.append(Misprint(first["table"], first["dataset"], first["backbone"], first["row"], printed, mean))
    return tuple(found)


@cache
def order() -> tuple[str, ...]:
    """The rows in the paper's order: AGFA and its variants last."""
    return tuple(sorted(read()["row"].unique(maintain_order=True), key=lambda row: row.startswith("agfa")))
