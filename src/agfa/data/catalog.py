"""The known datasets, one record each: where they come from and the settings they are trained with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agfa.data.digits import digits
from agfa.data.domains import DomainDataset, from_folder
from agfa.errors import UsageError, unknown


@dataclass(frozen=True)
class Settings:
    """What to train with when nothing else is said; the defaults are the paper's for PACS-like photographs."""

    image_size: int = 224
    channels: int = 3
    augment: bool = True
    backbone: str = "resnet50"
    steps: int = 5000
    evaluate_every: int = 100
    batch_size: int = 32
    swad_ratio: float = 1.3
    hparams: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Benchmark:
    """A dataset known by name."""

    load: Callable[[], DomainDataset]
    settings: Settings


CATALOG = {
    "digits": Benchmark(
        digits,
        Settings(
            image_size=16,  # a ConvNet learns digits three times as fast as at 32, and as well
            augment=False,
            backbone="convnet",
            steps=900,
            evaluate_every=50,
            batch_size=16,
            hparams={"lr": 1e-3},
        ),
    ),
}


def load(data: str) -> tuple[DomainDataset, Settings]:
    """The dataset called `data`, or in the folder `data`, and its settings."""
    if data.lower() in CATALOG:
        benchmark = CATALOG[data.lower()]
        return benchmark.load(), benchmark.settings
    path = Path(data).expanduser()
    if not path.exists() and path.parent == Path():  # a bare word: more likely a name than a path
        raise UsageError(f"no folder here and {unknown('dataset', data, CATALOG)}")
    return from_folder(path), Settings()
