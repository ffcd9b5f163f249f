"""What tests share: a tiny dataset, settings that take a second, and how to read a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from agfa.data.domains import DomainDataset

DOMAINS = ("ink", "paper", "sky")
CLASSES = ("cross", "left", "top")
# Seconds rather than minutes: what `agfa train` is given wherever the model need not be good.
QUICK = {
    "backbone": "convnet",
    "weights": "none",
    "image_size": 8,
    "augment": False,
    "track_target": True,
    "steps": 6,
    "evaluate_every": 2,
    "batch_size": 4,
    "hparams": {"lr": 1e-3},
}


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


def same(one: Path, other: Path) -> None:
    """The two runs hold the same models and the same records."""
    assert weights(one) == weights(other)
    assert records(one) == records(other)
    cards = [
        {p.name: p.read_text() for p in run.rglob("*.json") if p.name != "environment.json"} for run in (one, other)
    ]
    assert cards[0] == cards[1]


def fenced(text: str, language: str) -> list[str]:
    """The fenced blocks of one language in a page of Markdown."""
    return [block for found, block in re.findall(r"^```(\S*)\n(.*?)^```$", text, re.M | re.S) if found == language]


def listing(dataset: DomainDataset) -> str:
    """The classes, the domains, and the name and class of every image."""
    return repr((dataset.classes, [(d.name, d.keys, d.labels.tolist()) for d in dataset.domains]))


def fill(disk: Path, leaving: int = 0) -> None:
    """Leave no more than so many bytes."""
    with (disk / "ballast").open("ab", buffering=0) as file:
        for chunk in (1 << 20, 4096):
            try:
                while True:
                    file.write(bytes(chunk))
            except OSError:
                pass
        file.truncate(max(0, file.tell() - leaving))
