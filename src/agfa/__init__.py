"""Domain generalisation: train on a few known sources, hold on one never seen.

from agfa import train, load
run = train(data="digits", target="mnist_m")
print(run.accuracy, load(run.folder).predict(["photo.jpg"]))
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agfa.inference.predictor import load
    from agfa.training.trainer import Run

if os.path.exists("/sys/kernel/mm/transparent_hugepage"):  # noqa: PTH110  # pathlib takes longer than all else here
    # torch reads it at its first tensor: large pages for large tensors, which on a CPU is a tenth of a step
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

__version__ = "0.1.0"
__all__ = ["load", "train"]


def train(*, quiet: bool = True, **settings: Any) -> Run:
    """Train with the settings of `agfa.training.config.TrainConfig`, by name.

    Raises:
        agfa.errors.UsageError: a setting or the data does not allow it.
    """
    from agfa.training.config import TrainConfig, parse
    from agfa.training.progress import Display
    from agfa.training.trainer import train as run

    for key in ("target", "source"):
        if isinstance(settings.get(key), str):
            settings[key] = (settings[key],)
    return run(parse(settings, TrainConfig), Display(quiet))


def __getattr__(name: str) -> Any:
    if name == "load":  # importing agfa does not import torch
        from agfa.inference.predictor import load

        return load
    raise AttributeError(f"module 'agfa' has no attribute {name!r}")
