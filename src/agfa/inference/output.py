"""Predictions into a file, however many: in bounded memory, and a stopped command goes on where it was.

What is there so far is in a hidden part beside the file, a JSON line for each image, with a note of what it is of.
When all is done it becomes the file. Batches are the same after a restart, so the figures are, to the bit.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

from agfa.data.sources import printable
from agfa.errors import UsageError
from agfa.files import put, writing
from agfa.inference.predictor import Prediction
from agfa.training.run_folder import locked

DIGITS = 6  # behind the point, of probabilities
ENDINGS = {".csv": "csv", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}

Row = dict[str, Any]
Attempts = Callable[[Iterator[str]], Iterable[Prediction | UsageError]]
Done = Callable[[int], None]


@dataclass
class Tally:
    """How many images are in the output, how many of those an earlier process did, and how many are only an error."""

    images: int = 0
    before: int = 0
    bad: int = 0
    first_bad: str = ""

    def count(self, row: Row) -> None:
        """One more."""
        self.images += 1
        if row["error"]:
            self.bad += 1
            self.first_bad = self.first_bad or row["error"]


def row_of(image: str, said: Prediction | UsageError) -> Row:
    """What is written of an image, in every format; only an error where it could not be read."""
    row: Row = {"image": printable(image), "label": None, "probability": None, "disagreement": None, "abstain": None}
    if isinstance(said, UsageError):
        return {**row, "error": printable(str(said)), "probabilities": None}
    disagreement = None if said.disagreement is None else round(said.disagreement, DIGITS)
    return {
        **row,
        "label": said.label,
        "probability": round(said.probability, DIGITS),
        "disagreement": disagreement,
        "abstain": said.abstain,
        "error": None,
        "probabilities": {name: round(p, DIGITS) for name, p in said.probabilities.items()},
    }


def rows(images: Iterable[str], attempts: Attempts, on_error: str) -> Iterator[Row]:
    """The row of each image as it is predicted; its names are taken no faster than the model asks for them.

    Raises:
        UsageError: an image cannot be read, and `on_error` is "stop".
    """
    names: deque[str] = deque()

    def noted() -> Iterator[str]:
        for image in images:
            names.append(image)
            yield image

    for said in attempts(noted()):
        if isinstance(said, UsageError) and on_error == "stop":
            raise said
        yield row_of(names.popleft(), said)


def write(
    out: Path,
    kind: str,
    of: Row,
    images: Iterator[str],
    attempts: Attempts,
    *,
    batch_size: int,
    classes: tuple[str, ...],
    on_error: str,
    done: Done,
) -> Tally:
    """Make `out` the predictions of `images`, going on from what an earlier call left of the same.

    Args:
        kind: csv, jsonl or parquet.
        of: whatever decides the rows; what is there must be of the same.
        images: always in one order.
        attempts: predicts images, `batch_size` at a time.
        done: told how many images are there after each batch.

    Raises:
        UsageError: `out` is there, something else was begun there, or an image cannot be read.
    """
    part = out.with_name(f".{out.name}.part")
    note = part.with_name(f"{part.name}.json")
    if out.exists() and not part.exists():
        raise UsageError(f"{out} exists; delete it, or choose another file with --out")
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        file = part.open("a+b")
    with file:
        if not locked(file, exclusively=True):
            raise UsageError(f"{out} is being written by another process; wait for it, or stop it first")
        _claim(note, of, out, anew=part.stat().st_size == 0)
        tally = _there(file, images, batch_size, out)
        done(tally.images)
        for count, row in enumerate(rows(images, attempts, on_error), 1):
            with writing(part):
                file.write(json.dumps(row).encode() + b"\n")
                if count % batch_size == 0:
                    file.flush()
            tally.count(row)
            if count % batch_size == 0:
                done(tally.images)
        with writing(part):
            file.flush()
            os.fsync(file.fileno())
        done(tally.images)
        _finish(part, out, kind, classes)
    part.unlink(missing_ok=True)
    note.unlink(missing_ok=True)
    return tally


def _claim(note: Path, of: Row, out: Path, anew: bool) -> None:
    """See that what is there was begun by the same command."""
    if anew:
        put(note, json.dumps(of).encode())
    try:
        there = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        there = {}
    different = [key for key in of if there.get(key) != of[key]]
    if different:
        raise UsageError(
            f"{out} was begun with another {' and '.join(different)}; choose another file with --out, or delete "
            f"{note.with_suffix('')} to begin anew"
        )


def _there(file: IO[bytes], images: Iterator[str], batch_size: int, out: Path) -> Tally:
    """Count the whole batches that are there, forget what comes after them, and pass over their images."""
    tally, whole, end = Tally(), Tally(), 0
    file.seek(0)
    lines = iter(file)
    while True:
        batch = list(islice(lines, batch_size))
        try:
            read = [json.loads(line) for line in batch if line.endswith(b"\n")]
        except ValueError:  # torn by a machine that went down
            read = []
        if len(read) < batch_size:
            break
        for row in read:
            image = printable(next(images, "nothing"))
            if row["image"] != image:
                raise UsageError(
                    f"the images are not those that {out} was begun with: {image} has come in place of "
                    f"{row['image']}; choose another file with --out"
                )
            tally.count(row)
        end += sum(map(len, batch))
        whole = Tally(tally.images, tally.images, tally.bad, tally.first_bad)
    with writing(out):
        file.truncate(end)
        file.seek(end)
    return whole


def _finish(part: Path, out: Path, kind: str, classes: tuple[str, ...]) -> None:
    """The file that was asked for, from the JSON lines, without ever holding all of them."""
    if kind == "jsonl":
        with writing(out):
            part.replace(out)
        return
    import polars as pl

    numbers = dict.fromkeys(("probability", "disagreement"), pl.Float64)
    schema = {"image": pl.String, "label": pl.String, **numbers, "abstain": pl.Boolean, "error": pl.String}
    each = pl.Struct(dict.fromkeys(classes, pl.Float64))
    table = pl.scan_ndjson(part, schema={**schema, "probabilities": each})
    draft = out.with_name(f".{out.name}.draft")
    try:
        with writing(out):
            if kind == "csv":
                table.drop("probabilities").sink_csv(draft)
            else:
                table.sink_parquet(draft)
            draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)
