"""`agfa evaluate`, `push`, `pull`: how good a model is, and where it is."""

from __future__ import annotations

import json
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agfa.cli.app import app
from agfa.cli.show import table

if TYPE_CHECKING:
    from agfa.inference.evaluation import Evaluation

CURVES = ("coverage", "reliability")


@app.command
def evaluate(model: str, /, *, data: str, format: Literal["table", "json"] = "table", device: str = "cpu") -> None:
    """Measure a model on every image of every domain of a dataset: accuracy, and how far it can be believed.

    Args:
        model: a run's folder, a .safetensors file in it, hf:OWNER/NAME, or an address that fsspec reaches.
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
        found = measure(predictor, data, run_of(Path(model)), seen)
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
