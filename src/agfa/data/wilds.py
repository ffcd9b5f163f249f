"""Datasets of WILDS as their archives unpack: metadata in CSV, and images whose paths follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import polars as pl

from agfa.data.domains import DomainDataset
from agfa.data.manifest import NO_WEIGHT, Columns, read_rows, scan
from agfa.errors import UsageError, unknown

col = pl.col


class Layout(NamedTuple):
    """How a dataset of WILDS is read: its metadata, the path of an image, its label, its domain."""

    name: str
    file: str
    path: pl.Expr
    label: pl.Expr
    domain: pl.Expr
    rows: pl.Expr = pl.lit(True)  # which rows have an image

    def needs(self) -> set[str]:
        """The columns that it reads: by them it is known."""
        parts = (self.path, self.label, self.domain, self.rows)
        return {name for part in parts for name in part.meta.root_names()}


_patient = pl.format("patient_{}_node_{}", "patient", "node")
LAYOUTS = (
    Layout(
        "Camelyon17",
        "metadata.csv",
        path=pl.format("patches/{}/patch_{}_x_{}_y_{}.png", _patient, _patient, "x_coord", "y_coord"),
        label=col("tumor"),
        domain=col("center"),
    ),
    Layout(
        "iWildCam",
        "metadata.csv",
        path=pl.format("train/{}", "filename"),
        label=col("y"),
        domain=col("location_remapped"),
    ),
    Layout(
        "RxRx1",
        "metadata.csv",
        path=pl.format("images/{}/Plate{}/{}_s{}.png", "experiment", "plate", "well", "site"),
        label=col("sirna_id"),
        domain=col("experiment"),
    ),
    Layout(
        "FMoW",
        "rgb_metadata.csv",
        path=pl.format("images/rgb_img_{}.png", col("row") - 2),  # numbered like the rows below the header
        label=col("category"),
        domain=col("timestamp").str.slice(0, 4),  # the year
        rows=col("split") != "seq",  # these images were never published
    ),
)


def find_layout(folder: Path) -> tuple[Layout, pl.LazyFrame] | None:
    """The layout whose metadata, with all the columns that it needs, is in the folder; and that metadata."""
    for layout in LAYOUTS:
        file = folder / layout.file
        if file.is_file():
            table = scan(file)
            if layout.needs() - {"row"} <= set(table.collect_schema()):
                return layout, table
    return None


def read_wilds(folder: Path, layout: Layout, table: pl.LazyFrame, asked: Mapping[str, str]) -> DomainDataset:
    """The dataset in the folder; `asked` may name other columns for label and domain, and weights.

    Raises:
        UsageError: there is no such column, or a row lacks something.
    """
    if "path" in asked:
        raise UsageError(f"the paths of {layout.name} follow from {layout.file}; leave out path={asked['path']}")
    there = list(table.collect_schema())
    for name in asked.values():
        if name not in there:
            raise unknown(f"column of {folder / layout.file}", name, there)
    called = {"path": "path", "label": "label", "domain": "domain", **asked}
    chosen = {"label": layout.label, "domain": layout.domain, **{kind: col(name) for kind, name in asked.items()}}
    weight = chosen.get("weight", NO_WEIGHT)
    columns = Columns(layout.path, chosen["label"], chosen["domain"], called, weight=weight, rows=layout.rows)
    return read_rows(layout.name, folder, [folder / layout.file], [table], [columns])
