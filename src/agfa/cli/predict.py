"""`agfa predict`: what a trained model says of images."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agfa.cli.app import app
from agfa.cli.show import table
from agfa.errors import AgfaError, UsageError

if TYPE_CHECKING:
    from agfa.inference.output import Tally
    from agfa.inference.predictor import Predictor


@app.command
def predict(
    model: str,
    images: list[str],
    /,
    *,
    out: Path | None = None,
    format: Literal["table", "csv", "jsonl", "parquet"] | None = None,
    accuracy: float | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    batch_size: int = 64,
    device: str = "cpu",
) -> None:
    """Name the class of images, with its probability and the posterior's disagreement.

    With --out, the same command goes on where it was stopped, however many images there are.

    Args:
        model: a run's folder, a .safetensors file in it, hf:OWNER/NAME, or an address that fsspec reaches.
        images: image files or their addresses, or folders of them.
        out: the file to write, whole or not at all; it must not exist.
        format: a table, CSV, a JSON object a line, or Parquet; by default what --out ends like, or a table.
        accuracy: abstain from images of which the model is too unsure to be right this often (0.95) on domains
            that were held out from models like it; needs a model that was trained with --audit.
        on_error: stop at an image that cannot be read, or skip it: it gets a row with the error, and in the end the
            exit status is 1.
        batch_size: images that the model works on together.
        device: cpu, cuda or mps.
    """
    from agfa.inference.output import ENDINGS, Tally, rows, write
    from agfa.inference.predictor import AHEAD, load
    from agfa.training.progress import Display

    kind = format or ("table" if out is None else ENDINGS.get(out.suffix.lower(), ""))
    if out is not None and kind not in ENDINGS.values():
        raise UsageError(f"{out}: which format is that? Give --format csv, jsonl or parquet")
    if out is None and kind == "parquet":
        raise UsageError("parquet is no text to print; say where to write it with --out FILE")
    if batch_size < 1:
        raise UsageError(f"batch_size is {batch_size}; it must be 1 or more")
    names = _found(images)
    predictor = load(model, device, accuracy)

    def attempts(some: Iterator[str]) -> Iterable[Any]:
        return predictor.attempts(some, batch_size, AHEAD)

    if out is None:
        tally = Tally()
        _print(kind, _counted(rows(names, attempts, on_error), tally), accuracy is not None)
    else:
        display = Display()
        total = _count(images) if display.console.is_terminal else 0
        of = {**_identity(predictor), "images": images, "batch size": batch_size, "accuracy": accuracy}
        with display.images("predicting") as seen:
            tally = write(
                out,
                kind,
                {**of, "device": device},
                names,
                attempts,
                batch_size=batch_size,
                classes=predictor.classes,
                on_error=on_error,
                done=lambda images: seen(images, total),
            )
        print(f"{out}: {tally.images} images" + (f", {tally.before} of them before" if tally.before else ""))
    if tally.bad:
        raise AgfaError(f"{tally.bad} of {tally.images} images cannot be read, the first is {tally.first_bad}")


def _found(images: list[str]) -> Iterator[str]:
    """The names of all image files, in an order that is always the same, folders read as they are needed.

    Raises:
        UsageError: there is none.
    """
    from agfa.data.walk import image_files

    missing = [name for name in images if "://" not in name and not Path(name).exists()]
    if missing:
        raise UsageError(f"no image {missing[0]}")

    def under(name: str) -> Iterable[str]:
        path = Path(name)
        return map(str, image_files(path)) if path.is_dir() else (name,)

    names = chain.from_iterable(map(under, images))
    first = next(names, None)
    if first is None:
        raise UsageError(f"no images in {images[0]}")
    return chain((first,), names)


def _count(images: list[str]) -> int:
    from agfa.data.walk import count

    return sum(count(Path(name)) if Path(name).is_dir() else 1 for name in images)


def _identity(predictor: Predictor) -> dict[str, str]:
    """What tells one model from another."""
    import hashlib

    from agfa.nn.backbones import weights_hash

    card = predictor.card.model_dump_json()
    return {"model": hashlib.sha256(f"{weights_hash(predictor.network)} {card}".encode()).hexdigest()}


def _counted(rows: Iterable[dict[str, Any]], tally: Tally) -> Iterator[dict[str, Any]]:
    for row in rows:
        tally.count(row)
        yield row


def _print(kind: str, rows: Iterator[dict[str, Any]], abstains: bool) -> None:
    """A line at a time, but for a table."""
    if kind == "jsonl":
        for row in rows:
            print(json.dumps(row), flush=True)
    elif kind == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        for number, row in enumerate(rows):
            del row["probabilities"]
            if number == 0:
                writer.writerow(row)
            writer.writerow(str(v).lower() if isinstance(v, bool) else v for v in row.values())
    else:
        shown = list(rows)
        columns = ["image", "label", "probability", "disagreement"]
        columns += ["abstain"] if abstains else []
        columns += ["error"] if any(row["error"] for row in shown) else []
        table(tuple(columns), (tuple(_cell(row[c]) for c in columns) for row in shown))


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else ""
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
