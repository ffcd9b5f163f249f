"""Fully connected networks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agfa.nn.mlp import mlp


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_so_many_linear_layers_with_relus_between(depth):
    network = mlp(5, 2, width=7, depth=depth).double()
    layers = [layer for layer in network if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == list(
        zip([5] + [7] * (depth - 1), [7] * (depth - 1) + [2], strict=True)
    )
    x = y = torch.randn(3, 5, dtype=torch.float64)
    for layer in layers[:-1]:
        y = (y @ layer.weight.T + layer.bias).clamp(min=0)
    torch.testing.assert_close(network(x), y @ layers[-1].weight.T + layers[-1].bias)


def test_dropout_is_in_training_alone():
    network = mlp(5, 2, width=64, depth=3, dropout=0.5)
    x = torch.randn(3, 5)
    assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))
