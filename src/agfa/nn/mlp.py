"""Fully connected networks: the discriminators of adversarial methods, and the like."""

from __future__ import annotations

from torch import nn


def mlp(n_in: int, n_out: int, width: int, depth: int, dropout: float = 0.0) -> nn.Sequential:
    """`depth` linear layers, all but the last of `width` units, with dropout and a ReLU between them."""
    layers: list[nn.Module] = []
    for _ in range(depth - 1):
        layers += [nn.Linear(n_in, width), nn.Dropout(dropout), nn.ReLU()]
        n_in = width
    return nn.Sequential(*layers, nn.Linear(n_in, n_out))
