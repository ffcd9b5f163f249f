"""The demo: ERM, SWAD and AGFA on embedded digits, measured on a domain that none of them has seen."""

from __future__ import annotations

import time
from pathlib import Path

from agfa.benchmark.page import write_page
from agfa.benchmark.report import Report, build
from agfa.training.config import TrainConfig
from agfa.training.progress import Display
from agfa.training.trainer import Run, train

TARGET = "mnist_m"
TRAININGS = ("erm", "agfa")  # each gives its averaged model and the one that it is the average of
SECONDS = 200  # no further seed is begun that would not end by then


def run_demo(folder: Path, seeds: int, display: Display) -> tuple[Report, Path]:
    """Train, measure, and write `folder`/report.html; gives the report and the page's path."""
    runs = _train(folder, seeds, display)
    report = build(
        [run.folder for run in runs],
        "training-domain",
        title="agfa demo: digits, and a domain never seen",
        notes=[
            f"The unseen domain is {TARGET}: real digits blended into photographs. The sources are "
            f"{', '.join(runs[0].config.source)}.",
            "ERM is the model with the best source validation along its training; SWAD is the dense average of the "
            "same training; AGFA is averaged likewise.",
            "Each method passes the same number of images through the network: half of AGFA's are generated.",
            "Small images, a small network, few seeds: this shows that everything works, not which method is better.",
        ],
    )
    return report, write_page(folder / "report.html", report)


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
