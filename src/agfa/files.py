"""Writing files that are whole or not there."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from agfa.errors import AgfaError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write to `path` into one line: a full disk, a missing permission."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = "no space left on the disk; free some and run the same command again"
        else:
            what = error.strerror or str(error)
        raise AgfaError(f"cannot write {path}: {what}") from error


def replace(path: Path, write: Callable[[IO[bytes]], object], kept: Path | None = None) -> None:
    """Make `path` hold what `write` writes. Whoever reads it sees the old content or the new, never a part.

    The old content goes to `kept`, if that is given: a process that dies in between leaves it there, and no `path`.
    """
    draft = path.with_name(f".{path.name}.draft")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            if kept is not None and path.exists():
                path.replace(kept)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
