"""What a run needs to go on from: `latest.pt`, and `previous.pt` should that one be damaged.

Each is replaced whole or not at all, and ends with a digest of all before it: torch itself overlooks a flipped bit.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from agfa.errors import AgfaError
from agfa.files import replace

DIGEST = hashlib.sha256().digest_size


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint; the one that was there is kept as the previous one."""

    def write(file: IO[bytes]) -> None:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch hides a failed write behind its own error
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None
        file.flush()
        with Path(file.name).open("rb") as written:
            file.write(hashlib.file_digest(written, "sha256").digest())

    replace(path, write, kept=_previous(path))


def load(path: Path, say: Callable[[str], None] = lambda text: None) -> dict[str, Any] | None:
    """The newest checkpoint that is whole; None where there is none. Nothing in it is executed.

    Raises:
        AgfaError: there are checkpoints, and none is whole.
    """
    there = [file for file in (path, _previous(path)) if file.exists()]
    for file in there:
        state = _read(file)
        if state is not None:
            return state
        say(f"{file} is damaged")
    if there:
        damaged = " and ".join(map(str, there))
        what = (
            "is damaged and cannot be resumed from" if len(there) == 1 else "are damaged, neither can be resumed from"
        )
        raise AgfaError(f"{damaged} {what}; delete {path.parent} to start the run again")
    return None


def remove(path: Path) -> None:
    """Leave no checkpoint."""
    for file in (path, _previous(path)):
        file.unlink(missing_ok=True)


def _previous(path: Path) -> Path:
    return path.with_name(f"previous{path.suffix}")


def _read(path: Path) -> dict[str, Any] | None:
    """The checkpoint in a file; None where the file is not what was written."""
    try:
        with path.open("rb") as file:
            if not _whole(file):
                return None
            file.seek(0)
            state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise AgfaError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # whole, and yet no checkpoint of ours
        why = str(error).splitlines()[0]
        raise AgfaError(f"{path} cannot be resumed from ({why}); delete it to start the run again") from error
    return state


def _whole(file: IO[bytes]) -> bool:
    """Whether a file ends with the digest of all before."""
    left = file.seek(0, os.SEEK_END) - DIGEST
    if left < 0:
        return False
    file.seek(0)
    digest = hashlib.sha256()
    while left:
        piece = file.read(min(left, 1 << 20))
        if not piece:
            return False
        digest.update(piece)
        left -= len(piece)
    return file.read() == digest.digest()
