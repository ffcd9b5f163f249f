"""Own data in any of its forms: a folder domain/class/image, a table, WILDS' metadata, a Hugging Face dataset."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import parse_qsl

from agfa.data.domains import DomainDataset, from_folder
from agfa.errors import AgfaError, UsageError, unknown

HUB = "hf:"
ASKED = ("path", "label", "domain", "weight")  # columns that can be named
FORMS = "a folder domain/class/image, a .csv or .parquet table, or hf:OWNER/NAME"


def read_own(data: str) -> DomainDataset:
    """The dataset in one of FORMS; ?path=COLUMN&label=COLUMN&domain=COLUMN behind it name the columns of a table, and
    &weight=COLUMN one of how often each image is drawn in training, relative to others of its domain.

    Raises:
        UsageError: there is nothing to read, or it is none of these.
    """
    place, asked = split(data)
    if place.startswith(HUB):
        return _from_hub(place.removeprefix(HUB), asked)
    path = Path(place).expanduser()
    if path.is_file() or is_table(place):
        return _from_file(path, asked)
    dataset = _from_tables(path, asked) if path.is_dir() else None
    if dataset is None and asked:
        raise UsageError(f"no table in {path}; {', '.join(asked)} can be said of tables only")
    return dataset or from_folder(path)


def is_table(data: str) -> bool:
    """Whether it is named like a table, with columns behind it or without."""
    return os.path.splitext(split(data)[0])[1].lower() in (".csv", ".parquet")  # noqa: PTH122


def split(data: str) -> tuple[str, dict[str, str]]:
    """What stands before the last question mark, and the columns behind it."""
    place, mark, columns = data.rpartition("?")
    if not mark or Path(data).exists():
        return data, {}
    asked = dict(parse_qsl(columns, keep_blank_values=True))
    for key in asked:
        if key not in ASKED:
            raise unknown(f"part of {data!r}", key, ASKED)
    return place, asked


def _from_file(file: Path, asked: dict[str, str]) -> DomainDataset:
    from agfa.data.manifest import read_tables

    if not file.is_file():
        raise UsageError(f"no file {file}")
    return read_tables(file.stem, file.parent, [file], asked)


def _from_tables(folder: Path, asked: dict[str, str]) -> DomainDataset | None:
    """The dataset in the tables of a folder; None when there are none, and it is domain/class/image."""
    from agfa.data.manifest import find_columns, read_tables, scan
    from agfa.data.wilds import find_layout, read_wilds

    if known := find_layout(folder):
        return read_wilds(folder, *known, asked)
    name, metadata = folder.resolve().name, folder / "metadata.csv"
    if metadata.is_file():
        try:
            find_columns(metadata, scan(metadata).collect_schema(), asked)
            return read_tables(name, folder, [metadata], asked)
        except UsageError:
            if not any(folder.glob("*/*/")) or asked:
                raise
    shards = sorted([*folder.glob("*.parquet"), *folder.glob("*/*.parquet")])
    return read_tables(name, folder, shards, asked) if shards else None


def _from_hub(repository: str, asked: dict[str, str]) -> DomainDataset:
    """The dataset of the hub in its Parquet files, or in those that the hub itself makes of it; kept in its cache."""
    from huggingface_hub import snapshot_download

    from agfa.data.manifest import read_tables

    for revision in ("main", "refs/convert/parquet"):
        try:
            there = snapshot_download(
                repository, repo_type="dataset", revision=revision, allow_patterns=["*.parquet"]
            )
        except Exception as error:  # the hub's own, httpx's and the disk's
            raise AgfaError(f"{HUB}{repository} cannot be had from the hub: {str(error).splitlines()[0]}") from error
        shards = sorted(Path(there).rglob("*.parquet"))
        if shards:
            return read_tables(repository.rpartition("/")[2], Path(there), shards, asked)
    raise UsageError(f"{HUB}{repository} has no Parquet files, so it cannot be read; download it as a folder")
