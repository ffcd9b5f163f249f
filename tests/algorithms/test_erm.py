"""ERM against a manual step of Adam on the mean cross-entropy."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from agfa.algorithms import get
from agfa.algorithms.base import Problem, plain_backward
from agfa.algorithms.erm import ERM
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone, ConvNet
from support_methods import build as build_tiny
from support_methods import slopes


def build(lr: float = 1e-2) -> ERM:
    torch.manual_seed(0)
    backbone = Backbone(ConvNet(1, widths=(8, 32)), 32, (0.5,), (0.5,), "tiny")
    return ERM(backbone, Problem(3, 2, 40, (1, 8, 8)), get("erm").hparams({"lr": lr})).double()


def batch(n: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(n, 1, 8, 8, dtype=torch.float64, generator=generator)
    return Batch(images, torch.arange(n) % 3, torch.arange(n) * 2 // n, (n // 2, n - n // 2))


def test_head_has_a_bias_and_passes_are_one():
    assert build().network.head.bias is not None
    assert ERM.passes(get("erm").hparams({})) == 1


@pytest.mark.parametrize("n", [1, 5, 6])
def test_steps_are_those_of_adam_on_the_mean_cross_entropy(n):
    algorithm, data = build(), batch(n)
    manual = copy.deepcopy(algorithm.network)
    adam = torch.optim.Adam(manual.parameters(), lr=1e-2)
    for _ in range(3):
        shown = algorithm.update(data, plain_backward)
        loss = F.cross_entropy(manual(data.images), data.labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        torch.testing.assert_close(shown["nll"], loss.detach())
        assert not shown["nll"].requires_grad
    for mine, theirs in zip(algorithm.network.parameters(), manual.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_gradient_agrees_with_finite_differences():
    by_gradient, by_differences = slopes(build_tiny("erm", 2), batch())
    assert by_gradient == pytest.approx(by_differences, rel=1e-5)


def test_every_parameter_of_the_network_is_optimised_once_without_weight_decay():
    algorithm = build()
    groups = algorithm.optimizers["model"].param_groups
    assert [id(p) for g in groups for p in g["params"]] == [id(p) for p in algorithm.network.parameters()]
    assert all(g["weight_decay"] == 0 and g["betas"] == (0.9, 0.999) for g in groups)


def test_autocast_leaves_the_loss_in_float32():
    algorithm, data = build().float(), batch()
    with torch.autocast("cpu", torch.bfloat16):
        shown = algorithm.update(Batch(data.images.float(), data.labels, data.domains, data.sizes), plain_backward)
    assert shown["nll"].dtype == torch.float32
    assert shown["nll"].isfinite()


def test_a_second_pass_under_autocast_uses_the_weights_that_the_first_step_left():
    """Autocast keeps casts of weights for as long as it lasts, steps of the optimiser or not."""
    algorithm, data = build(lr=0.1).float(), batch()
    x = data.images.float()
    with torch.autocast("cpu", torch.bfloat16):
        algorithm.update(Batch(x, data.labels, data.domains, data.sizes), plain_backward)
        within = algorithm.network(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(within, algorithm.network(x))
