"""`agfa evaluate`, `predict`: what a trained model says."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agfa.cli.app import app
from agfa.cli.show import table
from agfa.errors import UsageError

if TYPE_CHECKING:
    from agfa.inference.evaluation import Evaluation

CURVES = ("coverage", "reliability")


@app.command
def evaluate(model: Path, /, *, data: str, format: Literal["table", "json"] = "table", device: str = "cpu") -> None:
    """Measure a model on every image of every domain of a dataset: accuracy, and how far it can be believed.

    Args:
        model: a run's folder, or a .safetensors file in it.
        data: a folder domain/class/image, a table (CSV, Parquet), hf:OWNER/NAME, or a known dataset's name.
        format: how to print: tables, or a JSON object.
        device: cpu, cuda or mps.
    """
    from agfa.inference.evaluation import SHARES, run_of
    from agfa.inference.evaluation import evaluate as measure
    from agfa.inference.predictor import load
    from agfa.training.progress import Display

    predictor = load(model, device)
    card = predictor.card
    with Display(quiet=format == "json").images() as seen:
        found = measure(predictor, data, run_of(model), seen)
    if format == "json":
        print(json.dumps(_plain(card.model, card.sources, card.temperature, found), indent=2, allow_nan=False))
        return

    def shown(value: float) -> str:
        return "" if isnan(value) else f"{value:.3f}"

    table(
        ("domain", "", "images", "accuracy", "loss", "ECE", "Brier", "AUROC", "AUROC, disagreement"),
        [
            (
                name,
                "trained on" if name in card.sources else "unseen",
                f.images,
                f"{f.accuracy:.1%}",
                f"{found.losses[name]:.3f}",
                *map(shown, (f.ece, f.brier, f.auroc, f.auroc_disagreement)),
            )
            for name, f in found.domains.items()
        ],
    )
    table(
        ("accuracy of the surest", *(f"{share:.0%}" for share in SHARES)),
        [(name, *(f"{f.coverage.accuracy_at(s):.1%}" for s in SHARES)) for name, f in found.domains.items()],
    )
    print(
        f"trained on {', '.join(card.sources)}; temperature {card.temperature:g}, fitted on their validation images"
    )
    if found.seen is not None:
        print(f"AUROC: how well an unseen domain is told from {found.seen}; 0.5 is not at all")


def _plain(model: str, sources: tuple[str, ...], temperature: float, found: Evaluation) -> dict[str, object]:
    """An evaluation as JSON has it."""
    domains = {}
    for name, figures in found.domains.items():
        values = {key: None if isnan(v) else v for key, v in figures._asdict().items() if isinstance(v, (int, float))}
        domains[name] = {
            "trained_on": name in sources,
            **values,
            "loss": found.losses[name],
            **{curve: {k: v.tolist() for k, v in getattr(figures, curve)._asdict().items()} for curve in CURVES},
        }
    about = {"model": model, "sources": list(sources), "temperature": temperature, "auroc_against": found.seen}
    return {**about, "domains": domains}


@app.command
def predict(
    model: Path,
    images: list[Path],
    /,
    *,
    format: Literal["table", "csv", "jsonl"] = "table",
    device: str = "cpu",
) -> None:
    """Name the class of images, with its probability and the posterior's disagreement.

    Args:
        model: a run's folder, or a .safetensors file in it.
        images: image files, or folders of them.
        format: how to print: a table, CSV, or a JSON object a line.
        device: cpu, cuda or mps.
    """
    from agfa.data.domains import image_files, image_suffixes
    from agfa.inference.predictor import load

    files = [f for path in images for f in (image_files(path, image_suffixes()) if path.is_dir() else [path])]
    missing = [path for path in files if not path.exists()]
    if missing or not files:
        raise UsageError(f"no image {missing[0]}" if missing else f"no images in {images[0]}")
    answers = zip(files, load(model, device).stream(files), strict=True)
    if format == "jsonl":
        for file, answer in answers:
            print(json.dumps({"image": str(file), **asdict(answer)}), flush=True)
        return
    header = ("image", "class", "probability", "disagreement")
    rows = (
        (str(file), a.label, f"{a.probability:.4f}", "" if a.disagreement is None else f"{a.disagreement:.4f}")
        for file, a in answers
    )
    if format == "csv":
        csv.writer(sys.stdout).writerows([header])
        for row in rows:
            csv.writer(sys.stdout).writerow(row)
    else:
        table(header, list(rows))
