"""MCD against its three steps in numpy, each at the parameters that the one before left."""

from __future__ import annotations

import copy
import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from agfa.algorithms import get
from agfa.algorithms.base import plain_backward
from agfa.algorithms.mcd import MCD
from support_methods import SIZES, batch, build, in_bfloat16, resumed, update


class Move(NamedTuple):
    """What a step went down, the gradients of those that it moves, and the algorithm just before it."""

    loss: float
    gradients: dict[str, Tensor]
    algorithm: MCD


def moves(algorithm, data, step: int = 0) -> list[Move]:
    """A, B, and C as often as it is taken; the algorithm stays as it is."""
    algorithm, found = copy.deepcopy(algorithm), []

    def backward(loss, parameters):
        before, parameters = copy.deepcopy(algorithm), list(parameters)
        plain_backward(loss, parameters)
        names = {p: key for key, p in algorithm.network.named_parameters()}
        found.append(Move(loss.item(), {names[p]: p.grad.clone() for p in parameters}, before))

    algorithm.step = step
    algorithm.update(data, backward)
    return found


def transcribed(network, data, target: int) -> tuple[float, float]:
    """L(h; S) + L(h'; S), and d(T)."""
    with torch.no_grad():
        z = network.backbone(data.images).numpy()
    nll = discrepancy = 0.0
    n_target = data.sizes[target]
    for features, label, domain in zip(z, data.labels.tolist(), data.domains.tolist(), strict=True):
        each = []
        for head in (network.head.one, network.head.other):
            f = head.weight.detach().numpy() @ features + head.bias.detach().numpy()
            each.append(np.exp(f) / np.exp(f).sum())
        if domain == target:
            discrepancy += sum(abs(a - b) for a, b in zip(*each, strict=True)) / len(each[0]) / n_target
        else:
            nll -= sum(math.log(p[label]) for p in each) / (len(z) - n_target)
    return nll, discrepancy


@pytest.mark.parametrize("step", [0, 1, 5])
@pytest.mark.parametrize("sizes", SIZES)
def test_losses_of_all_steps_are_those_of_the_equations(sizes, step):
    algorithm, data, target = build("mcd", len(sizes), inner_steps=3), batch(sizes), step % len(sizes)
    found = moves(algorithm, data, step)
    assert len(found) == 5
    each = [transcribed(move.algorithm.network, data, target) for move in found]
    wanted = [each[0][0], each[1][0] - each[1][1], *(discrepancy for _, discrepancy in each[2:])]
    assert [move.loss for move in found] == pytest.approx(wanted, rel=1e-9)
    shown = update(algorithm, data, step)
    assert (shown["nll"].item(), shown["discrepancy"].item()) == pytest.approx((wanted[0] / 2, wanted[-1]), rel=1e-9)


@pytest.mark.parametrize("which", [0, 1, 2, 4])
@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_of_all_steps_agree_with_finite_differences(sizes, which):
    data = batch(sizes)
    move = moves(build("mcd", len(sizes), inner_steps=3), data)[which]
    torch.manual_seed(8)
    parameters = dict(move.algorithm.network.named_parameters())
    direction = {key: torch.randn_like(parameters[key]) for key in move.gradients}
    ends = []
    for h in (1e-8, -1e-8):
        moved = copy.deepcopy(move.algorithm.network)
        with torch.no_grad():
            for key, p in moved.named_parameters():
                p += h * direction.get(key, 0)
        nll, discrepancy = transcribed(moved, data, target=0)
        ends.append({0: nll, 1: nll - discrepancy}.get(which, discrepancy))
    slope = sum((move.gradients[key] * d).sum().item() for key, d in direction.items())
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-8, rel=1e-4)


def test_each_step_moves_its_own_players():
    found = moves(build("mcd", inner_steps=2), batch())
    players = [{key.split(".")[0] for key in move.gradients} for move in found]
    assert players == [{"backbone", "head"}, {"head"}, {"backbone"}, {"backbone"}]
    states = [move.algorithm.network.state_dict() for move in found]
    for k, (before, after) in enumerate(itertools.pairwise(states)):
        moved = {key.split(".")[0] for key, value in after.items() if not torch.equal(value, before[key])}
        assert moved == players[k]


def test_steps_go_down_what_they_should():
    """With plain gradient descent; Adam's moments carry step A's direction on into the first ones of C."""
    algorithm, data = build("mcd"), batch()
    algorithm.optimizers = {key: SGD(o.param_groups[0]["params"], 1e-4) for key, o in algorithm.optimizers.items()}
    before_a, before_b, *rest = [
        transcribed(move.algorithm.network, data, target=0) for move in moves(algorithm, data)
    ]
    assert before_b[0] < before_a[0]
    assert rest[0][0] - rest[0][1] < before_b[0] - before_b[1]
    discrepancies = [discrepancy for _, discrepancy in rest]
    assert discrepancies == sorted(discrepancies, reverse=True)


@pytest.mark.parametrize("domains", [2, 3])
def test_sources_take_turns_as_the_target_whose_labels_are_not_used(domains):
    data = batch((4,) * domains)
    for step in range(2 * domains):
        algorithm = build("mcd", domains)
        other = copy.deepcopy(algorithm)
        hidden = torch.where(data.domains == step % domains, 2 - data.labels, data.labels)
        assert not torch.equal(hidden, data.labels)
        update(algorithm, data, step)
        update(other, data._replace(labels=hidden), step)
        for key, value in algorithm.state_dict().items():
            assert torch.equal(value, other.state_dict()[key])
        update(other := build("mcd", domains), data._replace(labels=data.labels.flip(0)), step)
        assert any(not torch.equal(v, other.state_dict()[k]) for k, v in algorithm.state_dict().items())


def test_predicts_by_the_mean_of_both():
    network, data = build("mcd").network, batch()
    z = network.backbone(data.images)
    torch.testing.assert_close(network(data.images), (network.head.one(z) + network.head.other(z)) / 2)
    assert not torch.allclose(network.head.one(z), network.head.other(z))


def test_a_class_absent_from_the_sources_leaves_the_losses_finite():
    data = batch((3, 3, 3))
    shown = update(build("mcd"), data._replace(labels=torch.where(data.domains == 0, 2, 1)))
    assert all(value.isfinite() for value in shown.values())


def test_resumes_within_a_round():
    assert resumed("mcd", batch(), steps=4, at=2)


@pytest.mark.parametrize("step", [0, 1])
def test_autocast_changes_little(step):
    plain, cast = in_bfloat16(build("mcd", lr=1e-4), batch((16, 16, 16)), step)
    assert {value.dtype for value in cast.values()} == {torch.float32}
    torch.testing.assert_close(cast["nll"], plain["nll"], rtol=0.02, atol=0)
    torch.testing.assert_close(cast["discrepancy"], plain["discrepancy"], rtol=0.1, atol=0)


def test_defaults_are_those_of_the_authors_code():
    assert get("mcd").hparams({}).inner_steps == 4
    assert get("mcd").method.min_domains == 2
