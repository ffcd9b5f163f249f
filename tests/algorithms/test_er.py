"""ER against its equation in numpy, image by image, and the turns of its players."""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agfa.algorithms import get
from agfa.algorithms.base import plain_backward
from agfa.algorithms.er import ER, balanced
from support_methods import SIZES, batch, build, erm_gradients, in_bfloat16, resumed, update

WEIGHTS = {"adversary": 0.3, "agreement": 0.7, "entropy": 0.4}


class Turn(NamedTuple):
    """What a player went down, all gradients that it left, and the algorithm just before its step."""

    loss: float
    gradients: dict[str, Tensor]
    algorithm: ER


def turns(algorithm, data, seed: int = 3) -> list[Turn]:
    """The two turns of a step, without dropout; the algorithm stays as it is."""
    algorithm, found = copy.deepcopy(algorithm).eval(), []

    def backward(loss, parameters):
        before = copy.deepcopy(algorithm)
        plain_backward(loss, parameters)
        gradients = {key: p.grad.clone() for key, p in algorithm.named_parameters() if p.grad is not None}
        found.append(Turn(loss.item(), gradients, before))

    torch.manual_seed(seed)
    algorithm.update(data, backward)
    return found


def weighted(network: nn.Module, z: np.ndarray, targets: list[int]) -> float:
    """Every target that there is counts the same."""
    with torch.no_grad():
        f = network(torch.from_numpy(z)).numpy()
    losses = [math.log(np.exp(row).sum()) - row[t] for row, t in zip(f, targets, strict=True)]
    return sum(loss / targets.count(t) for loss, t in zip(losses, targets, strict=True)) / len(set(targets))


def transcribed(algorithm, data) -> dict[str, float]:
    """Every loss of the equation, at the algorithm as it is."""
    with torch.no_grad():
        z = algorithm.network.features(data.images).numpy()
        f = algorithm.network(data.images).numpy()
    labels, domains = data.labels.tolist(), data.domains.tolist()
    sources = range(len(data.sizes))

    def mean(networks, shown) -> float:
        places = [[i for i, d in enumerate(domains) if shown(d, of)] for of in sources]
        each = [weighted(networks[of], z[k], [labels[i] for i in k]) for of, k in zip(sources, places, strict=True)]
        return sum(each) / len(each)

    return {
        "nll": sum(math.log(np.exp(row).sum()) - row[y] for row, y in zip(f, labels, strict=True)) / len(f),
        "discriminator": weighted(algorithm.discriminator, z, domains),
        "own": mean(algorithm.classifiers, lambda d, of: d == of),
        "agreement": mean(algorithm.classifiers, lambda d, of: d != of),
        "entropy": mean(algorithm.adversaries, lambda d, of: d == of),
    }


@pytest.mark.parametrize("lacking", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_losses_of_both_turns_are_those_of_the_equation(sizes, lacking):
    algorithm, data = build("er", len(sizes), **WEIGHTS), batch(sizes)
    if lacking:  # a class is absent from the batch
        data = data._replace(labels=data.labels.clamp(min=1))
    first, second = turns(algorithm, data)
    assert first.loss == pytest.approx(transcribed(first.algorithm, data)["own"], rel=1e-9)
    wanted = transcribed(second.algorithm, data)
    descended = wanted["nll"] + wanted["discriminator"] + 0.7 * wanted["agreement"] + wanted["entropy"]
    assert second.loss == pytest.approx(descended, rel=1e-9)
    shown = update(copy.deepcopy(algorithm).eval(), data)
    wanted["own"] = first.loss
    assert {key: value.item() for key, value in shown.items()} == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_of_all_players_agree_with_finite_differences(sizes):
    """Each along a random direction of its own parameters, of what the equation has it go down."""
    data = batch(sizes)
    first, second = turns(build("er", len(sizes), **WEIGHTS), data)
    players = {
        "network": lambda p: p["nll"] - 0.3 * p["discriminator"] + 0.7 * p["agreement"] - 0.4 * p["entropy"],
        "discriminator": lambda p: p["discriminator"],
        "adversaries": lambda p: p["entropy"],
        "classifiers": lambda p: p["own"],
    }
    for player, loss in players.items():
        turn = first if player == "classifiers" else second
        torch.manual_seed(8)
        ends = []
        direction = {key: torch.randn_like(p) for key, p in getattr(turn.algorithm, player).named_parameters()}
        for h in (1e-8, -1e-8):
            moved = copy.deepcopy(turn.algorithm)
            with torch.no_grad():
                for key, p in getattr(moved, player).named_parameters():
                    p += h * direction[key]
            ends.append(loss(transcribed(moved, data)))
        slope = sum((turn.gradients[f"{player}.{key}"] * d).sum().item() for key, d in direction.items())
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-8, rel=1e-4), player


def test_the_classifiers_of_each_source_move_first_and_alone():
    algorithm, data = build("er"), batch()
    before, (first, second) = algorithm.state_dict(), turns(algorithm, data)
    assert all(torch.equal(value, before[key]) for key, value in first.algorithm.state_dict().items())
    moved = {key for key, value in second.algorithm.state_dict().items() if not torch.equal(value, before[key])}
    assert {key.split(".")[0] for key in moved} == {"classifiers"}
    assert {key.split(".")[0] for key in first.gradients} == {"classifiers"}
    after = copy.deepcopy(algorithm).eval()
    update(after, data)
    for key, value in second.algorithm.classifiers.state_dict().items():
        assert torch.equal(value, after.classifiers.state_dict()[key])
    for player in ("network", "discriminator", "adversaries"):
        for key, value in getattr(after, player).state_dict().items():
            assert torch.equal(value, before[f"{player}.{key}"]) == (key in ("backbone.mean", "backbone.std")), key


@pytest.mark.parametrize("sizes", SIZES)
def test_weights_of_zero_have_erms_gradient(sizes):
    data = batch(sizes)
    algorithm = build("er", len(sizes), **dict.fromkeys(WEIGHTS, 0))
    _, second = turns(algorithm, data)
    names = [f"network.{key}" for key, _ in algorithm.network.named_parameters()]
    for name, wanted in zip(names, erm_gradients(algorithm, data), strict=True):
        assert torch.equal(second.gradients[name], wanted)
    for weight in WEIGHTS:
        _, second = turns(build("er", len(sizes), **{**dict.fromkeys(WEIGHTS, 0), weight: 1}), data)
        wanted = erm_gradients(algorithm, data)
        assert not all(torch.equal(second.gradients[n], w) for n, w in zip(names, wanted, strict=True)), weight


def test_balanced_is_the_mean_where_all_count_the_same_and_else_of_the_targets_means():
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    losses = nn.functional.cross_entropy(logits, even := torch.tensor([0, 1, 3, 1, 0, 3]), reduction="none")
    torch.testing.assert_close(balanced(logits, even), losses.mean())
    uneven = torch.tensor([2, 2, 2, 2, 2, 0])
    losses = nn.functional.cross_entropy(logits, uneven, reduction="none")
    torch.testing.assert_close(balanced(logits, uneven), (losses[:5].mean() + losses[5]) / 2)


def test_players_have_their_own_rate():
    optimizers = build("er", lr=1e-3, players_lr=1e-4, weight_decay=0.1).optimizers
    rates = {key: (o.param_groups[0]["lr"], o.param_groups[0]["weight_decay"]) for key, o in optimizers.items()}
    assert rates == {"model": (1e-3, 0.1), "classifiers": (1e-4, 0), "adversaries": (1e-4, 0)}
    assert build("er", lr=1e-3).optimizers["adversaries"].param_groups[0]["lr"] == 1e-3
    algorithm = build("er")
    held = [p for o in algorithm.optimizers.values() for group in o.param_groups for p in group["params"]]
    assert len(held) == len(set(held)) == len(list(algorithm.parameters()))


def test_resumes_with_dropout():
    assert resumed("er", batch(), steps=3, at=1)


def test_autocast_changes_little():
    plain, cast = in_bfloat16(build("er", lr=1e-4).eval(), batch())
    for key in plain:
        assert cast[key].dtype == torch.float32
        assert cast[key].item() == pytest.approx(plain[key].item(), rel=0.05)


def test_defaults_are_those_of_the_authors_code():
    h = get("er").hparams({})
    assert (h.adversary, h.agreement, h.entropy) == (0.1, 0.05, 0.001)
    sizes = [tuple(layer.weight.shape) for layer in build("er", 4).discriminator if isinstance(layer, nn.Linear)]
    assert sizes == [(1024, 32), (256, 1024), (4, 256)]
