"""Make room: remove the stores of decoded images, which are built again when they are needed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from agfa.data.store import cache_folder, lock_of
from agfa.files import held, writing


def clean() -> Iterator[tuple[str, int]]:
    """Remove every store but those that are being built now: the name of each, and the bytes it had.

    A run that is reading one goes on: the system keeps what is open.
    """
    stores = cache_folder() / "store"
    for folder in sorted(p for p in stores.iterdir() if p.is_dir()) if stores.is_dir() else []:
        if held(lock_of(_built(folder))):
            continue
        size = sum(file.stat().st_size for file in folder.iterdir())
        with writing(folder):
            shutil.rmtree(folder)
        yield _built(folder).name, size
    for lock in stores.glob(".*.lock"):  # of processes that were killed
        if not held(lock):
            lock.unlink(missing_ok=True)


def _built(folder: Path) -> Path:
    """What a draft is a draft of; a store itself."""
    draft = re.match(r"\.(.+-[0-9a-f]{16})\.", folder.name)
    return folder.with_name(draft[1]) if draft else folder
