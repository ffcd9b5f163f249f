"""A run's folder: config.yaml, environment.json, metrics.jsonl, checkpoint/, models/, model.*, README.md, done"""

from __future__ import annotations

import filecmp
import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch

from agfa.errors import AgfaError, UsageError
from agfa.files import put, writing
from agfa.training import checkpoint, config
from agfa.training.config import CompleteConfig

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]  # asked for before it is used

PACKAGES = ("agfa", "torch", "torchvision", "timm", "lightning-fabric", "numpy", "pillow")


class HeldError(UsageError):
    """Another process works on this run."""


class RunFolder:
    """The folder of one run, made or found again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint" / "latest.pt"
        self.metrics = path / "metrics.jsonl"
        self.players = path / "players.safetensors"  # networks that only training needs: a generator, say
        self.done = path / "done"
        self.lock = path / ".lock"
        self.failed = path / "failed.json"  # a sweep gave it up, and says why

    @contextmanager
    def held(self) -> Iterator[None]:
        """Nobody else works on this run meanwhile. A process that dies lets go of it, however it dies.

        Raises:
            HeldError: another process works on it.
            UsageError: it holds something that is no run.
        """
        is_run = (self.path / "config.yaml").exists()
        if self.path.exists() and not is_run and (not self.path.is_dir() or any(_visible(self.path))):
            raise UsageError(f"{self.path} exists and is not a run; choose another folder with --out")
        with writing(self.lock):
            self.path.mkdir(parents=True, exist_ok=True)
            file = self.lock.open("a+", encoding="utf-8")
        with file:
            if not locked(file, exclusively=True):
                raise HeldError(f"{self.path} is being trained by {holder(self.path)}; wait for it, or stop it first")
            with writing(self.lock):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {platform.node()}")
                file.flush()
            try:
                yield
            finally:
                with suppress(OSError):  # the folder may be gone; that is no news
                    file.truncate(0)

    def claim(self, wanted: CompleteConfig) -> None:
        """Make the folder this configuration's, or see that it is already.

        Raises:
            UsageError: it holds something else.
        """
        file = self.path / "config.yaml"
        if file.exists():
            there = config.parse(config.read(file), CompleteConfig, str(file))
            different = config.differences(there, wanted)
            if different and self.metrics.exists():
                raise UsageError(
                    f"{self.path} is a run of another configuration ({'; '.join(different)}); "
                    "choose another folder with --out, or delete it"
                )
        if not self.metrics.exists():  # nothing is computed yet: the settings may still change
            put(file, config.dump(wanted).encode())
            put(self.path / "environment.json", _json(environment()))

    def batch_size(self) -> int:
        """That of the run that is in the folder."""
        file = self.path / "config.yaml"
        return config.parse(config.read(file), CompleteConfig, str(file)).batch_size

    def rewind(self, size: int) -> None:
        """Forget the records made after the checkpoint that is resumed from.

        Raises:
            AgfaError: there are fewer than there were then.
        """
        with writing(self.metrics), self.metrics.open("ab") as file:
            if file.tell() < size:
                raise AgfaError(
                    f"{self.metrics} has lost records since the checkpoint; delete {self.path} to train anew"
                )
            file.truncate(size)

    def log_size(self) -> int:
        """The length of metrics.jsonl, all of which is on the disk now: a checkpoint may rely on it."""
        with writing(self.metrics), self.metrics.open("r+b") as file:
            os.fsync(file.fileno())
            return file.seek(0, os.SEEK_END)

    def record(self, **values: Any) -> None:
        """Add one line to metrics.jsonl, which is not made here: a folder without it is another than it was."""
        with writing(self.metrics), self.metrics.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(json.dumps(values).encode() + b"\n")

    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        try:
            return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise AgfaError(f"{self.metrics} is damaged ({error}); delete {self.path} to train anew") from error

    def finish(self) -> None:
        """Mark the run as complete; what was needed to resume it goes."""
        put(self.done, b"")
        checkpoint.remove(self.checkpoint)


def holder(run: Path) -> str | None:
    """The process that works on the run in this folder: "process 12 on laptop"."""
    try:
        with (run / ".lock").open(encoding="utf-8") as file:
            return None if locked(file, exclusively=False) else file.read() or "another process"
    except OSError:
        return None


def locked(file: IO[Any], exclusively: bool) -> bool:
    """Whether the file could be locked, until it is closed. Where a system has no locks, it always is."""
    if fcntl is None:
        return True
    how = fcntl.LOCK_NB | (fcntl.LOCK_EX if exclusively else fcntl.LOCK_SH)
    for wait in (0.05, 0.05, 0) if exclusively else (0,):  # whoever only looks lets go at once
        try:
            fcntl.flock(file, how)
        except BlockingIOError:
            time.sleep(wait)
        except OSError:  # a file system without locks
            return True
        else:
            return True
    return False


def _visible(folder: Path) -> list[Path]:
    """What is in a folder but a killed process's hidden draft, or a sweep's word that nothing came of it."""
    return [path for path in folder.iterdir() if not path.name.startswith(".") and path.name != "failed.json"]


def environment() -> dict[str, Any]:
    """Versions, commit and hardware: what else a number depends on."""
    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": cuda,
    }


def other_environment(run: Path) -> list[str]:
    """How what the run was trained with differs from what there is now, key by key."""
    file = run / "environment.json"
    try:
        then = _flat(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, AttributeError) as error:
        return [f"nobody knows what it was trained with ({file}: {error})"]
    now = _flat(environment())
    return [f"{key} is {then.get(key)} there, {now.get(key)} here" for key in now if then.get(key) != now.get(key)]


def _flat(environment: dict[str, Any]) -> dict[str, Any]:
    return {**environment.pop("versions"), **environment}


def compared(one: Path, other: Path) -> str:
    """Whether two runs ended with the same models, in a line."""
    names = sorted(path.relative_to(other) for path in other.rglob("*.safetensors"))
    changed = [str(name) for name in names if not _same(one / name, other / name)]
    if not names:
        return f"{other} has no models to compare with: it has not finished"
    if changed:
        return f"not the same bits as in {other}: {', '.join(changed)}"
    return f"the same bits as in {other}, in all {len(names)} files of weights"


def _same(one: Path, other: Path) -> bool:
    return one.exists() and filecmp.cmp(one, other, shallow=False)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of agfa's own checkout, if it runs from one."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
