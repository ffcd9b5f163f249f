"""A run's folder: config.yaml, environment.json, metrics.jsonl, checkpoint/, models/, model.*, players.*, done."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from agfa.errors import UsageError
from agfa.files import replace, writing
from agfa.training import config
from agfa.training.config import CompleteConfig

PACKAGES = ("agfa", "torch", "torchvision", "timm", "lightning-fabric", "numpy", "pillow")


class RunFolder:
    """The folder of one run, made or found again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoint = path / "checkpoint" / "latest.pt"
        self.metrics = path / "metrics.jsonl"
        self.players = path / "players.safetensors"  # networks that only training needs: a generator, say
        self.done = path / "done"

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
        elif self.path.exists() and (not self.path.is_dir() or any(_visible(self.path))):
            raise UsageError(f"{self.path} exists and is not a run; choose another folder with --out")
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


def _visible(folder: Path) -> list[Path]:
    """What is in a folder; a killed process may have left a hidden draft there."""
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


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
