"""Models without a training: what loading, moving and predicting needs of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agfa.training import model_file
from agfa.training.model_file import Audit, ModelCard
from support import CLASSES

AUDIT = Audit(
    expected=0.71,
    low=0.62,
    high=0.8,
    domains={"ink": 0.64, "paper": 0.78},
    target_images={"ink": 24, "paper": 24},
    temperature=1.3,
    coverage=((0.9, 0.2, 1.0), (0.5, 0.6, 0.96), (0.36, 0.8, 0.9), (0.0, 1.0, 0.71)),
)


def make_card(**changes: Any) -> ModelCard:
    values = {
        "classes": CLASSES,
        "backbone": "convnet",
        "initial_weights": "0" * 16,
        "image_size": 8,
        "channels": 3,
        "mean": (0.5,) * 3,
        "std": (0.5,) * 3,
        "algorithm": "agfa",
        "hparams": {},
        "sources": ("ink", "paper"),
        "targets": ("sky",),
        "model": "last",
        "step": 7,
    }
    return ModelCard.model_validate({**values, **changes})


def make_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A folder with a model of random weights, which gives different images different answers."""
    card = make_card(**changes)
    torch.manual_seed(seed)
    state = model_file._build(card).state_dict()
    for key, value in state.items():
        if value.dtype.is_floating_point and "log_variance" not in key and ("body" in key or "head" in key):
            state[key] = value + torch.randn_like(value) * 0.3
    model_file.save(folder / "model", state, card)
    return folder
