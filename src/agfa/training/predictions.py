"""A run's `predictions.parquet`: what each model that it kept says of every image held out, one row for each.

| column | |
|---|---|
| `model` | last, best, swad, ...: which of the run's models |
| `domain`, `role`, `split` | as in `metrics.jsonl`: a source's `val`; a target's `test` and `oracle` |
| `index`, `key` | the image's number in its domain, and its name there |
| `label`, `predicted` | numbers of classes, in the card's order: the right one; the one at the posterior means |
| `probabilities` | of each class: E[softmax] at the model's temperature |
| `temperature` | that one: fitted on the sources' `val` |
| `disagreement` | of two classifiers drawn from the posterior; null where there is one alone |

All that is said of calibration, in a report, an audit or an evaluation, is computed from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import polars as pl
import torch

from agfa.data.batches import Part
from agfa.data.domains import DomainDataset
from agfa.errors import AgfaError
from agfa.files import replace
from agfa.nn.predictive import predictive
from agfa.training import calibration
from agfa.training.evaluate import Answers, Place
from agfa.training.setup import Splits

FILE = "predictions.parquet"
NUMBERS = 2**16  # probabilities that are worked out at once


def frames(
    model: str, dataset: DomainDataset, splits: Splits, said: Mapping[Place, Answers], temperature: float
) -> list[pl.DataFrame]:
    """The rows of one model, a frame for each part."""
    found = []
    for place, part in splits.evaluated(targets=True):
        role, domain, split = place
        keys = [dataset[domain].keys[i] for i in part.indices]
        rows = frame(keys, part, said[place], temperature)
        whose = {"model": model, "domain": domain, "role": role, "split": split}
        found.append(rows.select(*(pl.lit(value).alias(key) for key, value in whose.items()), pl.all()))
    return found


def frame(keys: Sequence[str], part: Part, said: Answers, temperature: float) -> pl.DataFrame:
    """What is said of the images of a part, which have these keys."""
    mu, sigma = said.mu.cpu(), None if said.sigma is None else said.sigma.cpu()
    n = max(1, NUMBERS // mu.shape[-1])
    each = [
        predictive(mu[i : i + n], None if sigma is None else sigma[i : i + n], temperature)
        for i in range(0, len(mu), n)
    ]
    probabilities = torch.cat([of.probabilities for of in each]).float().numpy()
    differ = [of.disagreement for of in each if of.disagreement is not None]
    return pl.DataFrame(
        {
            "index": pl.Series(part.indices, dtype=pl.Int64),
            "key": pl.Series(keys, dtype=pl.String),
            "label": pl.Series(said.labels.cpu().numpy(), dtype=pl.Int64),
            "predicted": pl.Series(mu.argmax(-1).numpy(), dtype=pl.Int64),
            "probabilities": pl.Series(probabilities, dtype=pl.Array(pl.Float32, mu.shape[-1])),
            "temperature": pl.Series([temperature] * len(mu), dtype=pl.Float64),
            "disagreement": pl.Series(torch.cat(differ).numpy() if differ else [None] * len(mu), dtype=pl.Float32),
        }
    )


def write(run: Path, frames: Sequence[pl.DataFrame]) -> None:
    """Write the run's file."""
    whole = pl.concat(frames)
    replace(run / FILE, lambda file: whole.write_parquet(file))  # type: ignore[arg-type]  # any binary file will do


def read(run: Path) -> pl.DataFrame | None:
    """The run's predictions, with the `confidence` in each and whether it is `right`; None of an older run.

    Raises:
        AgfaError: the file is damaged.
    """
    if not (run / FILE).exists():
        return None
    try:
        return judged(pl.read_parquet(run / FILE))
    except (OSError, pl.exceptions.PolarsError) as error:
        raise AgfaError(f"{run / FILE} cannot be read: {str(error).splitlines()[0]}") from error


def judged(found: pl.DataFrame) -> pl.DataFrame:
    """With the `confidence` in each answer (the probability of the class predicted) and whether it is `right`."""
    confidence = pl.col("probabilities").arr.get(pl.col("predicted"))
    return found.with_columns(confidence=confidence, right=pl.col("predicted") == pl.col("label"))


class Figures(NamedTuple):
    """What images of one kind say of a model; `auroc...`: how well they are told from images of its sources."""

    images: int
    accuracy: float
    ece: float
    brier: float
    nll: float
    auroc: float  # by 1 - confidence
    auroc_disagreement: float  # nan where there is none
    coverage: calibration.Coverage
    reliability: calibration.Reliability


def figures(images: pl.DataFrame, seen: pl.DataFrame | None = None) -> Figures:
    """The figures of the rows in `images`, against those in `seen`, of the same model on its sources."""
    probabilities, labels = images["probabilities"].to_numpy(), images["label"].to_numpy()
    confidence, right = images["confidence"].to_numpy(), images["right"].to_numpy()
    auroc = auroc_disagreement = float("nan")
    if seen is not None:
        auroc = calibration.auroc(1 - confidence, 1 - seen["confidence"].to_numpy())
        if not images["disagreement"].has_nulls():
            auroc_disagreement = calibration.auroc(images["disagreement"].to_numpy(), seen["disagreement"].to_numpy())
    return Figures(
        len(images),
        float(right.mean()) if len(right) else float("nan"),
        calibration.ece(confidence, right),
        calibration.brier(probabilities, labels),
        calibration.nll(probabilities, labels),
        auroc,
        auroc_disagreement,
        calibration.coverage(confidence, right),
        calibration.reliability(confidence, right),
    )
