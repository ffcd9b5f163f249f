"""The demo: ERM, SWAD and AGFA on embedded digits, measured on a domain that none of them has seen."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import polars as pl
import torch

from agfa.benchmark.amplitude import amplitude_views, load_generator
from agfa.benchmark.figures import AmplitudeViews, amplitude_figure, learning_curves
from agfa.benchmark.records import read_runs, summarise
from agfa.benchmark.report import ReportFigure, Row, write_report
from agfa.data import catalog
from agfa.data.augment import crop_resize, whole_boxes
from agfa.data.batches import to_unit
from agfa.data.store import open_images
from agfa.training.config import TrainConfig
from agfa.training.progress import Display
from agfa.training.trainer import Run, train

TARGET = "mnist_m"
TRAININGS = ("erm", "agfa")
# One training gives its unaveraged and its averaged model, so three methods come from two trainings.
METHODS = {"ERM": ("erm", "best"), "SWAD": ("erm", "swad"), "AGFA": ("agfa", "swad")}
SECONDS = 200  # no further seed is begun that would not end by then


def run_demo(folder: Path, seeds: int, display: Display) -> tuple[list[Row], Path]:
    """Train, measure, and write `folder`/report.html; gives the table's rows and the report's path."""
    runs = _train(folder, seeds, display)
    frame = read_runs(run.folder for run in runs)
    rows = [_row(name, frame, runs) for name in METHODS]
    first_agfa = next(run for run in runs if run.config.algorithm == "agfa")
    curves = learning_curves(frame.filter(pl.col("kind") == "eval"), by=("algorithm",))
    report = write_report(
        folder / "report.html",
        title="agfa demo: digits, and a domain never seen",
        runs=[run.folder for run in runs],
        rows=rows,
        settings=_settings(first_agfa, len(runs) // len(TRAININGS)),
        figures=[
            ReportFigure(
                curves,
                "Accuracy against training step on source validation images and on the unseen domain",
                "Accuracy along the training, before averaging. The unseen domain is only watched here: no choice "
                "of model, step or setting is made by it.",
            ),
            ReportFigure(
                amplitude_figure(_views(first_agfa)),
                "Digits, their phase and amplitude spectra, generated amplitudes, and the images made from them",
                "What AGFA's generator ends with, on one image of each source domain. An image's phase is kept "
                "and its amplitude replaced by a generated one, or mixed half and half with it.",
            ),
        ],
        notes=[
            f"The unseen domain is {TARGET}: real digits blended into photographs. The sources are "
            f"{', '.join(first_agfa.config.source)}.",
            "ERM is the model with the best source validation along its training; SWAD is the dense average of the "
            "same training; AGFA is averaged likewise.",
            "Each method passes the same number of images through the network: half of AGFA's are generated.",
            "Small images, a small network, few seeds: this shows that everything works, not which method is better.",
        ],
    )
    return rows, report


def _train(folder: Path, seeds: int, display: Display) -> list[Run]:
    """Both trainings for each seed, as many seeds as the time allows, one at least."""
    began, runs = time.monotonic(), list[Run]()
    for seed in range(seeds):
        spent = time.monotonic() - began
        if seed and spent * (seed + 1) / seed > SECONDS:
            display.say(f"{seed} of {seeds} seeds done in {spent:.0f} s; another would take too long for a demo")
            break
        for algorithm in TRAININGS:
            display.say(f"== {algorithm}, seed {seed}: learning from three domains, {TARGET} held out")
            settings = TrainConfig(
                data="digits",
                target=(TARGET,),
                algorithm=algorithm,
                averaging="swad",
                track_target=True,
                seed=seed,
                precision="bf16-mixed",
                out=folder / "runs" / f"{algorithm}-seed{seed}",
            )
            runs.append(train(settings, display))
    return runs


def _row(name: str, frame: pl.DataFrame, runs: list[Run]) -> Row:
    algorithm, model = METHODS[name]
    finals = frame.filter(pl.col("kind") == "final", pl.col("algorithm") == algorithm, pl.col("model") == model)
    found = summarise(finals, by=["algorithm"]).row(0, named=True)
    source = finals.filter(pl.col("split") == "val")["accuracy"].mean()
    return Row(
        method=name,
        mean=found["mean"],
        standard_error=found["standard_error"],
        seeds=found["seeds"],
        source_accuracy=source if isinstance(source, float) else None,
        seconds=float(np.mean([run.seconds for run in runs if run.config.algorithm == algorithm])),
    )


def _settings(run: Run, seeds: int) -> dict[str, object]:
    keys = ("backbone", "image_size", "steps", "evaluate_every", "batch_size", "precision", "averaging", "swad_ratio")
    chosen = run.config.model_dump(mode="json")
    return {key: chosen[key] for key in keys} | {"seeds": seeds, "AGFA": chosen["hparams"]}


def _views(run: Run) -> AmplitudeViews:
    """The views of one image of each source domain."""
    size = run.config.image_size
    dataset, _ = catalog.load("digits")
    images = open_images(dataset, size)
    shown = [images[name][i] for i, name in enumerate(run.config.source)]
    boxes = whole_boxes(torch.tensor([image.shape[1:] for image in shown]))
    return amplitude_views(to_unit(crop_resize(shown, boxes, size), torch.device("cpu")), load_generator(run.folder))
