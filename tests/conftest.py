"""What all tests share: a cache of their own, a tiny dataset, and the command line in this process."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from agfa import cli

# One thread, here and in the processes that tests start: on tiny images more of them only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

DOMAINS = ("ink", "paper", "sky")
CLASSES = ("cross", "left", "top")
# Seconds rather than minutes: what `agfa train` is given wherever the model need not be good.
QUICK = {
    "backbone": "convnet",
    "weights": "none",
    "image_size": 8,
    "augment": False,
    "steps": 6,
    "evaluate_every": 2,
    "batch_size": 4,
    "hparams": {"lr": 1e-3},
}


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from or written to where the person who runs the tests works."""
    monkeypatch.setenv("AGFA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def make_images(root: Path, per_class: int = 10) -> Path:
    """`root`/domain/class/image: the class is where it is bright, the domain a tint; PNG and JPEG of 20 x 24."""
    rng = np.random.default_rng(0)
    tints = {"ink": (90, 60, 160), "paper": (200, 190, 120), "sky": (90, 170, 220)}
    for domain in DOMAINS:
        for name in CLASSES:
            folder = root / domain / name
            folder.mkdir(parents=True)
            for i in range(per_class):
                bright = np.full((20, 24, 1), 0.3)
                if name == "top":
                    bright[:10] = 1
                elif name == "left":
                    bright[:, :12] = 1
                else:
                    bright[8:13], bright[:, 10:15] = 1, 1
                pixels = bright * tints[domain] + rng.normal(0, 12, (20, 24, 3))
                image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
                image.save(folder / (f"{i:02}.png" if i % 2 else f"{i:02}.jpg"))
    return root


@pytest.fixture(scope="session")
def images_made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("shared") / "tiny")


@pytest.fixture
def tiny(images_made_once: Path, tmp_path: Path) -> Path:
    """A folder of 3 domains, 3 classes and 10 images each, that the test may change."""
    return Path(shutil.copytree(images_made_once, tmp_path / "tiny"))


@pytest.fixture
def quick() -> dict[str, Any]:
    """Settings for agfa.train that take a second."""
    return json.loads(json.dumps(QUICK))


def flags(**settings: Any) -> list[str]:
    """The settings as flags of the command line."""
    found = []
    for key, value in settings.items():
        flag = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            found.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, dict):
            found += [part for k, v in value.items() for part in (f"{flag}.{k.replace('_', '-')}", str(v))]
        elif isinstance(value, (list, tuple)):
            found += [part for v in value for part in (flag, str(v))]
        else:
            found += [flag, str(value)]
    return found


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on standard error."""
        lines = self.err.splitlines()
        assert len(lines) == 1, f"one line expected on standard error, not:\n{self.err}"
        assert "Traceback" not in self.err
        return lines[0]


Agfa = Callable[..., Ended]


@pytest.fixture
def agfa(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Agfa:
    """Run `agfa ARGUMENTS...` in this process; keywords become flags."""

    def run(*arguments: object, **settings: Any) -> Ended:
        monkeypatch.setattr(sys, "argv", ["agfa", *map(str, arguments), *flags(**settings)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        status = ended.value.code
        assert isinstance(status, int)
        return Ended(status, *capfd.readouterr())

    return run


@pytest.fixture
def train(agfa: Agfa, tiny: Path) -> Agfa:
    """Run `agfa train` quickly on the tiny dataset; keywords change the settings."""

    def run(*arguments: object, **settings: Any) -> Ended:
        merged = {"data": tiny, **QUICK, **settings}
        return agfa("train", *arguments, **{k: v for k, v in merged.items() if v is not None})

    return run


def records(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """The lines of a run's log without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for timing in ("seconds", "images_per_second"):
            line.pop(timing, None)
    return [line for line in lines if not kinds or line["kind"] in kinds]


def weights(run: Path) -> dict[str, bytes]:
    """The bytes of all the models of a run."""
    found = {path.relative_to(run).as_posix(): path.read_bytes() for path in run.rglob("*.safetensors")}
    assert "model.safetensors" in found
    return found
