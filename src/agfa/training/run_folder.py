"""A run's folder: config.yaml, environment.json, metrics.jsonl, checkpoint/, models/, model.*, README.md, done"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import torch

from agfa.errors import UsageError
from agfa.files import replace, writing
from agfa.training import config
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
            replace(file, lambda f: f.write(config.dump(wanted).encode()))
            replace(self.path / "environment.json", lambda f: f.write(_json(environment())))

    def batch_size(self) -> int:
        """That of the run that is in the folder."""
        file = self.path / "config.yaml"
        return config.parse(config.read(file), CompleteConfig, str(file)).batch_size

    def rewind(self, size: int) -> None:
        """Forget the records made after the checkpoint that is resumed from."""
        with writing(self.metrics), self.metrics.open("ab") as file:
            file.truncate(size)

    def record(self, **values: Any) -> None:
        """Add one line to metrics.jsonl."""
        with writing(self.metrics), self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]

    def finish(self) -> None:
        """Mark the run as complete; what was needed to resume it goes."""
        replace(self.done, lambda f: f.write(b""))
        self.checkpoint.unlink(missing_ok=True)


def holder(run: Path) -> str | None:
    """The process that works on the run in this folder: "process 12 on laptop"."""
    try:
        with (run / ".lock").open(encoding="utf-8") as file:
            return None if locked(file, exclusively=False) else file.read() or "another process"
    except OSError:
        return None


def locked(file: TextIO, exclusively: bool) -> bool:
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
