"""The images in a folder however many there are: one after another, sorted, in bounded memory."""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from pathlib import Path

from agfa.data.domains import image_suffixes, is_image
from agfa.errors import UsageError

NAMES = 2**16  # of one folder in memory at a time; a larger folder is read again for each so many


def image_files(folder: Path) -> Iterator[Path]:
    """Every image file under `folder`, at any depth, sorted, hidden ones left out.

    The order is the same at every call, which is what lets a stopped prediction go on.

    Raises:
        UsageError: a folder cannot be read.
    """
    for path in _sorted(str(folder), image_suffixes()):
        yield Path(path)


def count(folder: Path) -> int:
    """How many `image_files` there are. They are not sorted for it."""
    return _count(str(folder), image_suffixes())


def _sorted(folder: str, suffixes: frozenset[str]) -> Iterator[str]:
    last = ""
    while True:
        names = heapq.nsmallest(NAMES, (found for found in _entries(folder, suffixes) if found[0] > last))
        for name, is_folder in names:
            path = os.path.join(folder, name)  # noqa: PTH118  # as a Path, a million take seconds
            if is_folder:
                yield from _sorted(path, suffixes)
            else:
                yield path
        if len(names) < NAMES:
            return
        last = names[-1][0]


def _count(folder: str, suffixes: frozenset[str]) -> int:
    return sum(
        _count(os.path.join(folder, name), suffixes) if is_folder else 1  # noqa: PTH118
        for name, is_folder in _entries(folder, suffixes)
    )


def _entries(folder: str, suffixes: frozenset[str]) -> Iterator[tuple[str, bool]]:
    """Name, and whether it is a folder, of what is directly in a folder. Links to folders are not followed."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    if not entry.is_symlink():
                        yield entry.name, True
                elif is_image(entry.name, suffixes):
                    yield entry.name, False
    except OSError as error:
        raise UsageError(f"cannot read the folder {folder}: {error.strerror or error}") from error
