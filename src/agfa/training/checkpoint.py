"""What a run needs to go on from: one file, replaced whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import torch

from agfa.errors import AgfaError
from agfa.files import replace


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint."""

    def write(file: IO[bytes]) -> None:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # torch hides a failed write behind its own error
            raise error.__context__ if isinstance(error.__context__, OSError) else error from None

    replace(path, write)


def load(path: Path) -> dict[str, Any] | None:
    """The checkpoint at `path`; None where there is none. Nothing in it is executed."""
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise AgfaError(f"{path} is damaged and cannot be resumed from; delete it to start the run again") from error
    return state
