"""From run folders to a report: its tables, its figures, and what is missing. `page.py` and `render.py` write it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
from matplotlib.figure import Figure

from agfa.benchmark.amplitude import example_views
from agfa.benchmark.charts import ablation_figure, cost_figure, sensitivity_figure
from agfa.benchmark.chosen import cost_table, costs, selected_table
from agfa.benchmark.figures import learning_curves, to_pdf, to_svg
from agfa.benchmark.missing import count, few, what_is_missing
from agfa.benchmark.paired import differences, differences_table
from agfa.benchmark.records import read_config, read_runs
from agfa.benchmark.rows import title as name_of
from agfa.benchmark.selection import SINGLE_SOURCE, Selection, select
from agfa.benchmark.sensitivity import curve_table, curves
from agfa.benchmark.spectra import amplitude_figure
from agfa.benchmark.tables import (
    Cell,
    Table,
    accuracies,
    columns_of,
    dataset_table,
    groups_of,
    measured_tables,
    part,
    published_tables,
)
from agfa.benchmark.uncertainty import Believed, believed, calibration_figure, calibration_table
from agfa.errors import AgfaError, UsageError
from agfa.files import put
from agfa.training.config import INCIDENTAL

_CHOSEN_BY = {
    "training-domain": "by the validation images of the source domains",
    "leave-one-domain-out": "by the accuracy on source domains that were held out in turn",
    "oracle": "by 20% of the target's images, which nobody has in practice",
}


@dataclass(frozen=True)
class ReportFigure:
    """A figure, what to call its files, what it shows in words, and its caption."""

    figure: Figure
    name: str
    label: str
    caption: str


@dataclass(frozen=True)
class Report:
    """All that a report says, in whatever form."""

    title: str
    statement: str
    tables: tuple[Table, ...]
    figures: tuple[ReportFigure, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    settings: dict[str, object] = field(default_factory=dict)
    runs: tuple[Path, ...] = ()


def build(roots: Sequence[Path], how: Selection, title: str = "agfa report", notes: Sequence[str] = ()) -> Report:
    """The report on all runs at or below `roots`; with no roots, the paper's own tables.

    Raises:
        UsageError: there is no run.
        AgfaError: a record that cannot be read.
    """
    if not roots:
        statement = "The results tables of the paper, as it prints them. Nothing here was measured by agfa."
        return Report("The paper's results", statement, tuple(published_tables()), notes=tuple(notes))
    frame = read_runs(roots)
    if frame.is_empty():
        raise UsageError(f"no runs in {few(roots)}: a run is a folder with config.yaml and metrics.jsonl")
    chosen = select(frame, how)
    groups = groups_of(chosen)
    found = curves(frame, how)
    tables = [*measured_tables(chosen), *map(curve_table, found)]
    tables += [table for group in groups if (table := _comparison(chosen, group)) is not None]
    told = {group: rows for group in groups if (rows := believed(chosen, frame, group))}
    tables += [calibration_table(rows, chosen, group) for group, rows in told.items()]
    tables += [cost_table(chosen, *group) for group in groups]
    figures = [
        *_learning(frame),
        *(
            ReportFigure(
                sensitivity_figure(curve),
                f"{curve.dataset}-{curve.row}-{curve.hparam}",
                f"Average accuracy of {name_of(curve.row)} on {curve.dataset} against {curve.hparam}",
                f"{name_of(curve.row)} on {curve.dataset} ({curve.backbone}), {curve.hparam} alone varied: mean over "
                "targets ± standard error over seeds.",
            )
            for curve in found
        ),
        *(figure for group in groups for figure in _of_table(chosen, group)),
        *(_calibration(rows, group) for group, rows in told.items()),
    ]
    missing = [*what_is_missing(frame, chosen, how)]
    for amplitude in _amplitudes(frame):
        figures += [amplitude] if isinstance(amplitude, ReportFigure) else []
        missing += [amplitude] if isinstance(amplitude, str) else []
    return Report(
        title=title,
        statement=_statement(frame, how),
        tables=(*tables, *([selected_table(chosen, how)] if groups else [])),
        figures=tuple(figures),
        missing=tuple(missing),
        notes=tuple(notes),
        settings=_common_settings(frame),
        runs=tuple(map(Path, frame["run"].unique(maintain_order=True))),
    )


def write_figures(figures: Sequence[ReportFigure], folder: Path) -> list[Path]:
    """Every figure as SVG and as PDF."""
    written = []
    for figure in figures:
        name = "".join(c if c.isalnum() or c in "-+." else "_" for c in figure.name)
        for path, content in (
            (folder / f"{name}.svg", to_svg(figure.figure).encode()),
            (folder / f"{name}.pdf", to_pdf(figure.figure)),
        ):
            put(path, content)
            written.append(path)
    return written


def _comparison(chosen: pl.DataFrame, group: tuple[str, str, str]) -> Table | None:
    """The paired differences of one table."""
    rows = part(chosen, *group)
    found = differences(accuracies(rows), columns_of(rows, group[0], with_all=False))
    return differences_table(f"{_named(group)}: differences", found) if found else None


def _learning(frame: pl.DataFrame) -> Iterator[ReportFigure]:
    """The learning curves of each dataset and backbone."""
    evals = frame.filter(pl.col("kind") == "eval")
    for (dataset, backbone), runs in evals.group_by("dataset", "backbone", maintain_order=True):
        yield ReportFigure(
            learning_curves(runs),
            f"{dataset}-{backbone}-learning",
            f"{dataset}, {backbone}: accuracy against training step, on source validation images and unseen domains",
            f"{dataset}, {backbone}: accuracy along the training, before averaging. Unseen domains are only watched "
            "here: no choice of model, step or setting is made by them.",
        )


def _of_table(chosen: pl.DataFrame, group: tuple[str, str, str]) -> Iterator[ReportFigure]:
    """The ablation of AGFA, and accuracy against cost."""
    table = dataset_table(part(chosen, *group), *group)
    measured = [line for line in table.lines if line.origin == "measured" and isinstance(line.cells[-1], Cell)]
    variants = {name_of(row) for row in chosen["row"].unique() if row.startswith("agfa") or row in ("erm", "swad")}
    lines = [line for line in measured if line.label in variants]
    if sum(line.label not in ("ERM", "SWAD") for line in lines) > 1:
        yield ReportFigure(
            ablation_figure(lines),
            f"{group[0]}-{group[1]}-{group[2]}-ablation",
            f"{_named(group)}: average accuracy of AGFA and of what is left when a part of it is taken away",
            f"{_named(group)}: what each part of AGFA does; mean over columns ± standard error over seeds.",
        )
    points = costs(chosen, *group)
    if len(points) > 1:
        yield ReportFigure(
            cost_figure(points),
            f"{group[0]}-{group[1]}-{group[2]}-cost",
            f"{_named(group)}: average accuracy against the seconds of a training",
            f"{_named(group)}: what accuracy costs. An average of models costs the training that it is of.",
        )


def _calibration(rows: dict[str, Believed], group: tuple[str, str, str]) -> ReportFigure:
    """What is gained by abstaining, and how far confidence can be believed."""
    return ReportFigure(
        calibration_figure(rows),
        f"{group[0]}-{group[1]}-{group[2]}-calibration",
        f"{_named(group)}: accuracy against the share of images answered, and against confidence, on unseen domains",
        f"{_named(group)}, unseen domains. Left: accuracy on the surest share of the images, mean over columns "
        "and seeds. Right: accuracy of the answers of each confidence; on the diagonal it can be believed.",
    )


def _amplitudes(frame: pl.DataFrame) -> Iterator[ReportFigure | str]:
    """What the first finished generator of each dataset does, or why that cannot be shown."""
    agfa = frame.filter("done", pl.col("row").is_in(["agfa", "agfa-no-swad"]))
    for (dataset,), runs in agfa.group_by("dataset", maintain_order=True):
        try:
            views = example_views(Path(runs["run"][0]))
        except AgfaError as error:
            yield f"The amplitude figure of {dataset} is not here: {error}."
            continue
        yield ReportFigure(
            amplitude_figure(views),
            f"{dataset}-amplitude",
            "Images, their phase and amplitude spectra, generated amplitudes, and the images made from them",
            f"{dataset}: what AGFA's generator ends with, on one image of each source domain. An image's phase is "
            "kept and its amplitude replaced by a generated one, or mixed half and half with it.",
        )


def _statement(frame: pl.DataFrame, how: Selection) -> str:
    runs = frame.unique("run", maintain_order=True)
    rows = frame.drop_nulls("row").filter(pl.col("kind").is_not_null())["row"].n_unique()
    what = f"{count(runs.height, 'training')} of {count(rows, 'method')} on {few(runs['dataset'])}. "
    return what + (
        "Each model learnt from its source domains alone and was then measured on domains from which it had learnt "
        "nothing: accuracy is the share of a target's test images (80% of the domain) that got the right class. "
        f"Which model of which setting stands in a table was chosen {_CHOSEN_BY[how]}."
    )


def _common_settings(frame: pl.DataFrame) -> dict[str, object]:
    """What the runs were set to: a value where all agree, else the several values."""
    examples = frame.unique(["algorithm", "settings", "dataset"], maintain_order=True)["run"].unique(
        maintain_order=True
    )
    values: dict[str, list[Any]] = {}
    for run in examples:
        for key, value in read_config(Path(run)).items():
            if key not in {*INCIDENTAL, "hparams", "target", "source", "seed"}:
                values.setdefault(key, []).append(value)
    return {key: few(found) for key, found in values.items()}


def _named(group: tuple[str, str, str]) -> str:
    dataset, backbone, protocol = group
    return f"{dataset}, {backbone}" + (", single source" if protocol == SINGLE_SOURCE else "")
