"""What a report must not leave out: runs that failed, seeds that lack, settings unlike the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import polars as pl

from agfa import algorithms
from agfa.benchmark import published
from agfa.benchmark.records import read_config
from agfa.benchmark.rows import AVERAGES, title
from agfa.benchmark.selection import LEAVE_ONE_OUT, Selection, domains_of
from agfa.benchmark.tables import accuracies, backbone_name, columns_of, groups_of, heading, in_order, part
from agfa.data.catalog import CATALOG
from agfa.errors import UsageError

FEW = 8  # names that are said before the rest are counted

# What decides the outcome beside the hyperparameters, and what the paper has it at; the dataset's own come first.
_PAPER = {
    "weights": "pretrained",
    "freeze_batchnorm": True,
    "swad_patience": 3,
    "swad_tolerance": 6,
    "val_fraction": 0.2,
}
_OF_DATASET = ("image_size", "channels", "augment", "steps", "evaluate_every", "batch_size", "swad_ratio")
_OF_SWAD = {"swad_patience", "swad_tolerance", "swad_ratio"}


def what_is_missing(frame: pl.DataFrame, chosen: pl.DataFrame, how: Selection) -> list[str]:
    """All of it, a sentence each."""
    return [
        *_unfinished(frame),
        *_in_no_table(frame, how),
        *_without_candidates(frame, chosen, how),
        *_lacking(chosen),
        *_unlike_the_paper(chosen),
    ]


def few(names: Iterable[object]) -> str:
    """The first names, and how many more there are."""
    found = list(dict.fromkeys(map(str, names)))
    more = len(found) - FEW
    return ", ".join(found[:FEW]) + (f" and {more} more" if more > 0 else "")


def count(n: int, what: str) -> str:
    """So many of something."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _unfinished(frame: pl.DataFrame) -> Iterator[str]:
    runs = frame.unique("run", maintain_order=True).filter(~pl.col("done"))
    for (reason,), failed in runs.drop_nulls("failed").group_by("failed", maintain_order=True):
        yield f"{count(failed.height, 'run')} failed ({reason}): {few(failed['run'])}."
    begun = runs.filter(pl.col("failed").is_null())
    if begun.height:
        yield f"{count(begun.height, 'run')} not finished, and in no table: {few(begun['run'])}."


def _in_no_table(frame: pl.DataFrame, how: Selection) -> Iterator[str]:
    """Finished runs that belong to no protocol."""
    runs = frame.filter("done").unique("run", maintain_order=True).join(domains_of(frame), on="dataset")
    n_sources, n_targets = pl.col("sources").list.len(), pl.col("targets").list.len()
    all_used = n_sources + n_targets == pl.col("domains").list.len()
    nothing_held_out = runs.filter(n_targets == 0)
    if nothing_held_out.height:
        yield f"{count(nothing_held_out.height, 'run')} held no domain out, so nothing unseen was measured."
    partial = runs.filter(n_targets > 0, ~all_used)
    if partial.height:
        yield (
            f"{count(partial.height, 'run')} left domains out that others of the dataset use, so in no table: "
            f"{few(partial['run'])}."
        )
    several = runs.filter(all_used, n_targets > 1, n_sources > 1)
    if several.height and how != "leave-one-domain-out":
        yield f"{count(several.height, 'run')} held several domains out, for leave-one-domain-out selection."


def _without_candidates(frame: pl.DataFrame, chosen: pl.DataFrame, how: Selection) -> Iterator[str]:
    """Rows that were trained, and of which this selection can choose nothing."""
    averaged = pl.col("model").is_in(AVERAGES).fill_null(False)
    trained = frame.filter(pl.col("done"), (pl.col("kind") == "eval") | averaged, pl.col("targets").list.len() > 0)
    for dataset, row in trained.select("dataset", "row").unique(maintain_order=True).rows():
        if chosen.filter(pl.col("dataset") == dataset, pl.col("row") == row).is_empty():
            why = " (it takes runs with a second domain held out)" if how == "leave-one-domain-out" else ""
            yield f"{dataset}: {title(row)} has no model that {how} selection could choose{why}."


def _lacking(chosen: pl.DataFrame) -> Iterator[str]:
    """Columns and seeds that a row of a table has not, and others have."""
    for group in groups_of(chosen):
        rows = part(chosen, *group)
        dataset, backbone, protocol = group
        seeds = set(rows["seed"])
        columns = columns_of(rows, dataset, with_all=protocol == LEAVE_ONE_OUT and _is_published(dataset))
        for row, found in accuracies(rows).items():
            nowhere = [heading(dataset, column) for column in columns if column not in found]
            if nowhere:
                yield f"{dataset}, {backbone}: {title(row)} was not measured on {', '.join(nowhere)}."
            some = [(c, sorted(seeds - found[c].keys())) for c in columns if c in found]
            lacking = [
                f"{heading(dataset, c)} (seed {', '.join(map(str, without))})" for c, without in some if without
            ]
            if lacking:
                yield f"{dataset}, {backbone}: {title(row)} lacks {'; '.join(lacking)}: left out of its average."
        if len(seeds) == 1:
            yield f"{dataset}, {backbone}: one seed gives no standard error; what is chance is not known."


def _unlike_the_paper(chosen: pl.DataFrame) -> Iterator[str]:
    """How the settings of what was chosen differ from the paper's, rows that differ alike together."""
    for group in groups_of(chosen):
        dataset, backbone, protocol = group
        if not _is_published(dataset):
            continue
        alike: dict[str, list[str]] = {}
        rows = part(chosen, *group)
        for row in in_order(rows["row"].unique()):
            of_row = rows.filter(pl.col("row") == row)
            runs = of_row.unique("settings", maintain_order=True)["run"]
            configs = [read_config(Path(run)) for run in runs]
            said = _differences(row, dataset, protocol, configs, averaged=of_row["step"].max() == 0)
            if said:
                alike.setdefault(said, []).append(title(row))
        for said, names in alike.items():
            yield f"{dataset}, {backbone}: settings that differ from the paper's: {said} ({', '.join(names)})."


def _differences(row: str, dataset: str, protocol: str, configs: list[dict[str, Any]], averaged: bool) -> str:
    wanted = {**_PAPER, **_hparams(row, configs[0]["algorithm"], dataset)}
    wanted |= {key: getattr(CATALOG[dataset.lower()].settings, key) for key in _OF_DATASET}
    values: dict[str, list[Any]] = {}
    for config in configs:
        given = {**config, **config.get("hparams", {})}  # no hyperparameter is called as a setting is
        for key, theirs in wanted.items():
            if key in given and given[key] != theirs and (averaged or key not in _OF_SWAD):
                values.setdefault(key, []).append(given[key])
    printed = published.read().filter(pl.col("dataset") == dataset, pl.col("protocol") == protocol)
    backbones = printed["backbone"].unique(maintain_order=True).to_list()
    backbone = str(configs[0]["backbone"])
    parts = [] if backbone_name(backbone) in backbones else [f"backbone {backbone} ({' or '.join(backbones)})"]
    return "; ".join([*parts, *(f"{key} {_range(found)} ({wanted[key]})" for key, found in values.items())])


def _hparams(row: str, algorithm: str, dataset: str) -> dict[str, Any]:
    """The hyperparameters that a row has by default; none are known of a method that is not here."""
    for name in (row, algorithm):
        try:
            recipe = algorithms.get(name)
        except UsageError:
            continue
        known = recipe.method.hparams_type.model_fields
        of_dataset = {k: v for k, v in CATALOG[dataset.lower()].settings.hparams.items() if k in known}
        return recipe.hparams(of_dataset).model_dump(mode="json")
    return {}


def _range(values: list[Any]) -> str:
    distinct = list(dict.fromkeys(map(str, values)))
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(distinct) > 2 and len(numbers) == len(values):
        return f"{min(numbers):.3g} to {max(numbers):.3g}"
    return " and ".join(distinct)


def _is_published(dataset: str) -> bool:
    return dataset in set(published.read()["dataset"])
