"""`agfa evaluate`, `predict`: what a trained model says."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from agfa.cli.app import app
from agfa.cli.show import table
from agfa.errors import UsageError


@app.command
def evaluate(model: Path, /, *, data: str, device: str = "cpu") -> None:
    """Measure a model on every image of every domain of a dataset.

    Args:
        model: a run's folder, or a .safetensors file in it.
        data: a folder domain/class/image, a table (CSV, Parquet), hf:OWNER/NAME, or a known dataset's name.
        device: cpu, cuda or mps.
    """
    from agfa.inference.predictor import load
    from agfa.training.progress import Display

    predictor = load(model, device)
    with Display().images() as seen:
        scores = predictor.evaluate(data, seen)
    rows = [
        (
            name,
            "trained on" if name in predictor.card.sources else "unseen",
            s.n,
            f"{s.accuracy:.1%}",
            f"{s.loss:.3f}",
        )
        for name, s in scores.items()
    ]
    table(("domain", "", "images", "accuracy", "loss"), rows)


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
