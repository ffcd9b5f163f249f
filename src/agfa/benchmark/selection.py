"""Which model stands for a row of a table: chosen by what was measured away from where it is reported.

A row's candidates for one target and one seed are the models of all its trainings there: several hyperparameters
(`settings`), and, where models are not averaged, every step that was measured. As DomainBed defines them:

- training-domain: the best mean accuracy on the sources' validation images, over settings and steps;
- leave-one-domain-out: the best mean accuracy on a source that was held out as well, over settings and steps, the
  mean over all sources; it takes the trainings with two domains held out;
- oracle: the best accuracy at the last step on 20% of the target, over settings. Nobody has that in practice.

What is reported is always the accuracy on the other 80% of the target, which chose nothing. Ties go to the earliest
step, then to the last digest of settings.
"""

from __future__ import annotations

from typing import Literal, get_args

import polars as pl

from agfa.benchmark.rows import AVERAGES

Selection = Literal["training-domain", "leave-one-domain-out", "oracle"]
SELECTIONS: tuple[Selection, ...] = get_args(Selection)

LEAVE_ONE_OUT, SINGLE_SOURCE = "leave_one_out", "single_source"

_CONTEST = ["dataset", "backbone", "row", "seed"]  # models of different ones do not compete
_TRAINING = [*_CONTEST, "settings", "sources", "targets"]
CELL = ["dataset", "backbone", "protocol", "row", "column"]


def select(frame: pl.DataFrame, how: Selection) -> pl.DataFrame:
    """The models that stand for each row, one for every seed of every column of a table.

    Columns are the held-out domain (protocol leave_one_out) or the one source (single_source; the accuracy is then
    the mean over the held-out domains). `frame` is what `read_runs` gives; only finished runs have candidates.
    Beside the `accuracy` there are the `score` that chose it, how many settings were `tried`, the source-validation
    accuracy `val`, `step` (0: an average), `settings`, `run` and `seconds` of the one chosen.
    """
    measured = _measured(frame)
    models = _models(measured)
    if how == "training-domain":
        models = models.with_columns(score="val")
    elif how == "oracle":
        models = models.filter(pl.col("step") == pl.col("step").max().over("run", "row")).with_columns(score="oracle")
    else:
        held_out = _held_out_accuracy(measured)
        models = models.join(held_out, on=[*_CONTEST, "settings", "targets", "step"])
        models = models.filter(pl.col("held_out") == pl.col("sources").list.len())
    cell = [*CELL, "seed"]
    return (
        _columns(models, domains_of(frame))
        .filter(pl.col("score").is_not_nan())
        .with_columns(tried=pl.col("settings").n_unique().over(cell))
        .sort([*cell, "score", "step", "settings"], descending=[False] * len(cell) + [True, False, True])
        # within a training the earliest of its best steps; between trainings the last digest
        .unique(subset=[*cell, "settings"], keep="first", maintain_order=True)
        .sort([*cell, "score", "settings"], descending=[False] * len(cell) + [True, True])
        .unique(subset=cell, keep="first", maintain_order=True)
        .select(*cell, "accuracy", "score", "val", "tried", "step", "settings", "run", "seconds")
    )


def over_seeds(accuracies: list[float]) -> tuple[float, float | None]:
    """The mean and its standard error as DomainBed has it: population deviation / √n; None for a single seed."""
    values = pl.Series(accuracies, dtype=pl.Float64)
    mean, deviation = values.mean(), values.std(ddof=0)
    assert isinstance(mean, float)
    assert isinstance(deviation, float)
    return mean, deviation / len(values) ** 0.5 if len(values) > 1 else None


def domains_of(frame: pl.DataFrame) -> pl.DataFrame:
    """All the `domains` of each `dataset` that its runs know of."""
    named = frame.select("dataset", domains=pl.concat_list("sources", "targets")).unique(maintain_order=True)
    return named.explode("domains").group_by("dataset", maintain_order=True).agg(pl.col("domains").unique())


def _measured(frame: pl.DataFrame) -> pl.DataFrame:
    """One accuracy for each model, domain and purpose: val (sources), test and oracle (targets).

    The models that a run keeps under a name (last, best, oracle) are its models at some step, which may have been
    measured twice: along the way (in the training's precision) and at the end. What was seen along the way decides,
    as it did there; what was measured at the end is reported.
    """
    averaged = pl.col("model").is_in(AVERAGES).fill_null(False)
    finished = frame.filter(
        pl.col("done"), pl.col("kind").is_in(["eval", "final"]), pl.col("accuracy").is_not_null()
    ).with_columns(step=pl.when(averaged).then(0).otherwise("step"))
    purpose = pl.when(pl.col("split") == "val").then(pl.lit("val")).otherwise("split")
    return (
        finished.with_columns(purpose=purpose)
        .sort("kind", maintain_order=True)  # eval, final
        .group_by(*_TRAINING, "step", "purpose", "domain", "run", maintain_order=True)
        .agg(first=pl.col("accuracy").first(), last=pl.col("accuracy").last(), seconds=pl.col("seconds").first())
        .with_columns(accuracy=pl.when(pl.col("purpose") == "val").then("first").otherwise("last"))
        # the same training twice (with an average and without, say) is one
        .sort("run", maintain_order=True)
        .unique(subset=[*_TRAINING, "step", "purpose", "domain"], keep="first", maintain_order=True)
    )


def _models(measured: pl.DataFrame) -> pl.DataFrame:
    """One row per model: means over domains of `val`, `accuracy` (test) and `oracle`; those measured on a target."""

    def mean(purpose: str) -> pl.Expr:
        return pl.col("accuracy").filter(pl.col("purpose") == purpose).mean()

    return (
        measured.group_by(*_TRAINING, "step", "run", maintain_order=True)
        .agg(pl.col("seconds").first(), val=mean("val"), oracle=mean("oracle"), accuracy=mean("test"))
        .filter(pl.col("accuracy").is_not_null())
    )


def _held_out_accuracy(measured: pl.DataFrame) -> pl.DataFrame:
    """For each target: the mean accuracy on a second domain held out with it, and on how many such that is."""
    pairs = measured.filter(pl.col("targets").list.len() == 2, pl.col("purpose") == "test")
    first, second = pl.col("targets").list.first(), pl.col("targets").list.last()
    target = pl.when(pl.col("domain") == first).then(second).otherwise(first)
    return (
        pairs.with_columns(targets=pl.concat_list(target))
        .group_by(*_CONTEST, "settings", "targets", "step", maintain_order=True)
        .agg(score=pl.col("accuracy").mean(), held_out=pl.col("domain").n_unique())
    )


def _columns(models: pl.DataFrame, domains: pl.DataFrame) -> pl.DataFrame:
    """The models of whole protocols, each with its `protocol` and its `column`."""
    n_sources, n_targets = pl.col("sources").list.len(), pl.col("targets").list.len()
    whole = models.join(domains, on="dataset").filter(n_sources + n_targets == pl.col("domains").list.len())
    left_out = whole.filter(n_targets == 1).with_columns(
        protocol=pl.lit(LEAVE_ONE_OUT), column=pl.col("targets").list.first()
    )
    single = whole.filter(n_sources == 1).with_columns(
        protocol=pl.lit(SINGLE_SOURCE), column=pl.col("sources").list.first()
    )
    return pl.concat([left_out, single])
