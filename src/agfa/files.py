"""Writing files that are whole or not there, one process at a time."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from agfa.errors import AgfaError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]  # asked for before it is used


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


def put(path: Path, content: bytes) -> None:
    """Make `path` hold `content`, whole or not at all."""
    replace(path, lambda file: file.write(content))


def settle(draft: Path, folder: Path) -> None:
    """Move a folder that is whole to its place, unless another process was first."""
    with writing(folder):
        try:
            draft.rename(folder)
        except OSError:
            if not folder.exists():
                raise


@contextmanager
def alone(lock: Path, waiting: Callable[[], object]) -> Iterator[None]:
    """Let one process at a time through, and call `waiting` before having to wait.

    The system frees the lock of a process that dies; the empty file stays. Where there are no locks all go through.
    """
    if fcntl is None:
        yield
        return
    with writing(lock):
        file = lock.open("ab")
    with file:
        with writing(lock):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP):  # a file system without locks
                    raise
        yield


def held(lock: Path) -> bool:
    """Whether a process is through there, `alone`."""
    if fcntl is None or not lock.exists():
        return False
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # a file system without locks
            return False
    return False
