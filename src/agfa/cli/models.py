"""`agfa evaluate`, `push`, `pull`: how good a model is, and where it is."""

from __future__ import annotations

from pathlib import Path

from agfa.cli.app import app
from agfa.cli.show import table


@app.command
def evaluate(model: str, /, *, data: str, device: str = "cpu") -> None:
    """Measure a model on every image of every domain of a dataset.

    Args:
        model: a run's folder, a .safetensors file in it, hf:OWNER/NAME, or an address that fsspec reaches.
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
def push(model: str, place: str, /) -> None:
    """Put a model on the hub, into a bucket or a folder, with a README.md and checksums.

    Args:
        model: a run's folder, a .safetensors file in it, hf:OWNER/NAME, or an address that fsspec reaches.
        place: hf:OWNER/NAME[@BRANCH] (a new repository is private; log in with hf auth login), s3://..., a folder.
    """
    from agfa.inference import places
    from agfa.training.progress import Display

    with Display().download("pushing") as seen:
        places.push(model, place, seen)
    print(f"{model} is at {place}")


@app.command
def pull(model: str, folder: Path, /) -> None:
    """Bring a model into a folder, its checksums verified.

    Args:
        model: hf:OWNER/NAME[@REVISION], or an address that fsspec reaches.
        folder: what to make; it must not exist.
    """
    from agfa.inference import places
    from agfa.training.progress import Display

    with Display().download("pulling") as seen:
        places.pull(model, folder, seen)
    print(f"model: {folder / places.WEIGHTS}")
