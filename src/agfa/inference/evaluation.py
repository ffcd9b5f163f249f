"""How far a model can be believed, domain by domain: accuracy, calibration, and whether it notices what is new."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import polars as pl

from agfa.data.store import Progress
from agfa.inference.predictor import Predictor
from agfa.training import predictions
from agfa.training.predictions import Figures

SHARES = (1.0, 0.9, 0.8, 0.7, 0.5)


class Evaluation(NamedTuple):
    """Figures by domain, and what `seen` images the AUROC of the others is against (None: none were to be had)."""

    domains: dict[str, Figures]
    losses: dict[str, float]  # mean cross-entropy at the posterior means, as in a run's records
    seen: str | None


def evaluate(
    predictor: Predictor, data: str, run: Path | None = None, progress: Progress | None = None
) -> Evaluation:
    """Measure a model on every image of every domain of a dataset.

    Unseen domains are told from the sources' validation images, which the model's run kept its answers to; where they
    are not at hand, from the images of the sources that are in the dataset, most of which it was trained on.
    """
    card = predictor.card
    rows, losses = {}, {}
    for domain, part, said in predictor.ask(data, progress):
        rows[domain.name] = predictions.judged(predictions.frame(domain.keys, part, said, card.temperature))
        losses[domain.name] = said.score().loss
    seen, what = _validation(run, card.model), "the sources' validation images"
    if seen is None and (known := [rows[name] for name in rows if name in card.sources]):
        seen, what = pl.concat(known), "the images here of domains that it was trained on, mostly training images"
    found = {name: predictions.figures(of, None if name in card.sources else seen) for name, of in rows.items()}
    return Evaluation(found, losses, None if seen is None else what)


def run_of(model: Path) -> Path | None:
    """The run that a model's file or folder belongs to, if it lies in one."""
    folders = (model, model.parent, model.parent.parent)
    return next((folder for folder in folders if (folder / predictions.FILE).is_file()), None)


def _validation(run: Path | None, model: str) -> pl.DataFrame | None:
    """What the model said of its sources' validation images."""
    told = None if run is None else predictions.read(run)
    if told is None:
        return None
    rows = told.filter(pl.col("model") == model, pl.col("role") == "source", pl.col("split") == "val")
    return None if rows.is_empty() else rows
