"""Unpack a Parquet file of images, as datasets on the Hugging Face hub are kept, into a folder domain/class/image."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from agfa.data.unpack import UnusableError, plain_parts
from agfa.files import writing

ROWS = 200  # in memory at a time
COLUMNS = ("image", "domain", "label")


def unpack_parquet(table: Path, folder: Path, *, max_bytes: int) -> None:
    """Write each row's image, byte for byte, to `folder`/domain/label/name.

    Domains and labels are names, or numbers whose names are in the file's metadata. An image keeps the name that it
    had; one that had none is called by its row.

    Raises:
        UnusableError: it is damaged, or another kind of table.
        AgfaError: it cannot be written.
    """
    import polars as pl

    try:
        names = _class_names(pl.read_parquet_metadata(table))
        frame = pl.scan_parquet(table)
        kinds = frame.collect_schema()
        rows = int(frame.select(pl.len()).collect().item())
    except (OSError, ValueError, pl.exceptions.PolarsError) as error:
        raise UnusableError(f"it is damaged, or no Parquet file ({_first_line(error)})") from error
    if lacking := [column for column in COLUMNS if column not in kinds]:
        raise UnusableError(f"it has no column {lacking[0]!r}")
    written = 0
    for start in range(0, rows, ROWS):
        try:
            part = frame.select(COLUMNS).slice(start, ROWS).collect().rows()
        except (OSError, pl.exceptions.PolarsError) as error:
            raise UnusableError(f"it is damaged ({_first_line(error)})") from error
        for row, (image, domain, label) in enumerate(part, start=start):
            content, name = _content(image, row)
            path = folder.joinpath(
                *_parts(_named(domain, names.get("domain")), _named(label, names.get("label")), name)
            )
            if path.exists():
                path = path.with_name(f"{table.stem}-{row:07d}-{name}")
            written += len(content)
            if written > max_bytes:
                raise UnusableError(f"its row {row} goes beyond the {max_bytes} bytes expected")
            with writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)


def _class_names(metadata: dict[str, Any]) -> dict[str, list[str]]:
    """The names of the numbers in a column, where the hub's metadata has some."""
    features = json.loads(metadata.get("huggingface", "{}")).get("info", {}).get("features", {})
    return {column: kind["names"] for column, kind in features.items() if isinstance(kind.get("names"), list)}


def _named(value: object, names: list[str] | None) -> str:
    if isinstance(value, int) and names is not None:
        if not 0 <= value < len(names):
            raise UnusableError(f"it has a number {value} where only {len(names)} names are known")
        return names[value]
    return str(value)


def _content(image: object, row: int) -> tuple[bytes, str]:
    """The bytes of an image, and what to call its file."""
    content, path = (image.get("bytes"), image.get("path")) if isinstance(image, dict) else (image, None)
    if not isinstance(content, bytes):
        raise UnusableError(f"its row {row} has no image")
    suffix = ".png" if content.startswith(b"\x89PNG") else ".jpg"  # readers go by the content
    return content, os.path.basename(path or "") or f"{row:07d}{suffix}"  # noqa: PTH119


def _parts(*parts: str) -> tuple[str, ...]:
    """A domain, a class and a name that lead nowhere else."""
    plain = plain_parts("/".join(parts))
    if len(plain) != 3:
        raise UnusableError(f"its image {'/'.join(parts)!r} has no plain name")
    return plain


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
