"""IRM, V-REx, CORAL and MMD: ERM's risk and a penalty, against their equations in plain loops of float64."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agfa.algorithms import get
from agfa.algorithms.coral import distance
from agfa.algorithms.irm import scale_derivative, squared_mean
from agfa.algorithms.mmd import discrepancy, gaussian
from agfa.data.batches import Batch
from support_methods import (
    SIZES,
    batch,
    build,
    descents,
    erm_gradients,
    in_bfloat16,
    resumed,
    slopes,
    update,
)

METHODS = ["irm", "vrex", "coral", "mmd"]
WARMED_UP = ["irm", "vrex"]


def settings(name: str, weight: float) -> dict[str, float]:
    return {"penalty_weight": weight, **({"warmup_steps": 0} if name in WARMED_UP else {})}


# The equations ------------------------------------------------------------------------------------------------------


def nll_of(f: list[float], y: int, w: float = 1.0) -> float:
    return math.log(sum(math.exp(w * value) for value in f)) - w * f[y]


def irm_penalty(logits: list, labels: list, phi: list) -> float:
    """(∂/∂w R(w·f) at 1)², its two factors by central differences from the even and from the odd images."""
    total = 0.0
    for f, y in zip(logits, labels, strict=True):
        halves = [range(0, len(y), 2), range(1, len(y), 2) if len(y) > 1 else range(1)]
        factors = []
        for half in halves:
            ends = [sum(nll_of(f[i], y[i], w) for i in half) / len(half) for w in (1 + 1e-5, 1 - 1e-5)]
            factors.append((ends[0] - ends[1]) / 2e-5)
        total += factors[0] * factors[1]
    return total / len(labels)


def vrex_penalty(logits: list, labels: list, phi: list) -> float:
    risks = [sum(map(nll_of, f, y)) / len(y) for f, y in zip(logits, labels, strict=True)]
    mean = sum(risks) / len(risks)
    return sum((risk - mean) ** 2 for risk in risks) / len(risks)


def coral_penalty(logits: list, labels: list, phi: list) -> float:
    k = len(phi[0][0])
    means = [[sum(row[a] for row in rows) / len(rows) for a in range(k)] for rows in phi]
    covariances = [
        [
            [sum((row[a] - m[a]) * (row[b] - m[b]) for row in rows) / max(len(rows) - 1, 1) for b in range(k)]
            for a in range(k)
        ]
        for rows, m in zip(phi, means, strict=True)
    ]
    found = []
    for d, e in itertools.combinations(range(len(phi)), 2):
        mean = sum((means[d][a] - means[e][a]) ** 2 for a in range(k)) / k
        cells = itertools.product(range(k), repeat=2)
        found.append(mean + sum((covariances[d][a][b] - covariances[e][a][b]) ** 2 for a, b in cells) / k**2)
    return sum(found) / len(found)


def mmd_penalty(logits: list, labels: list, phi: list) -> float:
    def kernel(one: list, other: list) -> float:
        total = 0.0
        for u, v in itertools.product(one, other):
            squared = sum((a - b) ** 2 for a, b in zip(u, v, strict=True))
            total += sum(math.exp(-(10**g) * squared) for g in range(-3, 4))
        return total / (len(one) * len(other))

    pairs = list(itertools.combinations(phi, 2))
    return sum(kernel(d, d) + kernel(e, e) - 2 * kernel(d, e) for d, e in pairs) / len(pairs)


PENALTIES = {"irm": irm_penalty, "vrex": vrex_penalty, "coral": coral_penalty, "mmd": mmd_penalty}


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_loss_is_the_mean_cross_entropy_and_the_weighted_penalty(name, sizes):
    algorithm, data = build(name, len(sizes), **settings(name, 7.0)), batch(sizes)
    with torch.no_grad():
        features = algorithm.network.features(data.images)
        logits = algorithm.network.head(features)
    by_domain = [[part.tolist() for part in whole.split(sizes)] for whole in (logits, data.labels, features)]
    nll = sum(map(nll_of, logits.tolist(), data.labels.tolist())) / sum(sizes)
    penalty = PENALTIES[name](*by_domain)
    assert abs(penalty) > 1e-8
    (taken,) = descents(algorithm, data)
    assert taken.loss == pytest.approx(nll + 7 * penalty, rel=1e-8)
    shown = update(algorithm, data)
    assert shown["nll"].item() == pytest.approx(nll, rel=1e-12)
    assert shown["penalty"].item() == pytest.approx(penalty, rel=1e-7)
    assert not any(value.requires_grad for value in shown.values())


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_gradient_agrees_with_finite_differences(name, sizes):
    slope, wanted = slopes(build(name, len(sizes), **settings(name, 7.0)), batch(sizes))
    assert slope == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_without_weight_the_gradient_is_that_of_erm_to_the_bit(name, sizes):
    data = batch(sizes)
    for warmup in [{"warmup_steps": 0}, {"warmup_steps": 5}] if name in WARMED_UP else [{}]:
        algorithm = build(name, len(sizes), penalty_weight=0, **warmup)
        wanted = erm_gradients(algorithm, data)
        assert all(map(torch.equal, descents(algorithm, data)[0].gradients, wanted))
    weighted = build(name, len(sizes), **settings(name, 1.0))
    assert not torch.allclose(descents(weighted, data)[0].gradients[0], wanted[0])


@pytest.mark.parametrize("name", METHODS)
def test_autocast_leaves_losses_in_float32_and_nearly_as_they_were(name):
    plain, shown = in_bfloat16(build(name, **settings(name, 7.0)), batch((16, 16, 16)))
    for key, value in shown.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, plain[key], rtol=0.1, atol=2e-3)


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_ends_with_the_same_bits(name, at):
    warmup = {"warmup_steps": 2} if name in WARMED_UP else {}
    assert resumed(name, batch(), 4, at, **warmup)


def test_only_irm_has_something_to_do_with_a_single_domain():
    assert {name for name in METHODS if get(name).method.min_domains == 1} == {"irm"}
    data, algorithm = batch((6,)), build("irm", 1, **settings("irm", 7.0))
    assert update(algorithm, data)["penalty"] != 0


@pytest.mark.parametrize("penalty", [distance, discrepancy], ids=["coral", "mmd"])
def test_statistics_are_taken_in_float32_under_autocast(penalty):
    features = torch.rand(12, 32, generator=torch.Generator().manual_seed(0))
    wanted = penalty(features, (5, 4, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(penalty(features, (5, 4, 3)), wanted)


# Warm-up ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "step", "used"), [(50, 0, 1), (50, 2, 1), (50, 3, 50), (50, 9, 50), (0.5, 0, 0.5), (0.5, 3, 0.5)]
)
@pytest.mark.parametrize("name", WARMED_UP)
def test_weight_is_no_more_than_one_until_the_warmup_is_over(name, weight, step, used):
    algorithm, data = build(name, penalty_weight=weight, warmup_steps=3), batch()
    (taken,) = descents(algorithm, data, step)
    shown = update(algorithm, data, step)
    assert taken.loss == pytest.approx((shown["nll"] + used * shown["penalty"]).item(), rel=1e-12)


@pytest.mark.parametrize("name", WARMED_UP)
def test_adam_starts_anew_after_the_warmup_and_only_then(name):
    algorithm, data = build(name, warmup_steps=2), batch()
    manual = copy.deepcopy(algorithm)
    adam = torch.optim.Adam(manual.network.parameters(), lr=1e-2)
    for step in range(4):
        if step == 2:
            adam = torch.optim.Adam(manual.network.parameters(), lr=1e-2)
        (taken,) = descents(manual, data, step)
        for p, gradient in zip(manual.network.parameters(), taken.gradients, strict=True):
            p.grad = gradient
        adam.step()
        update(algorithm, data, step)
        for mine, theirs in zip(algorithm.network.parameters(), manual.network.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


# What the penalties are for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vrex", "coral", "mmd"])
def test_domains_with_the_same_images_cost_nothing(name):
    one = batch((4,))
    images, labels = one.images.repeat(3, 1, 1, 1), one.labels.repeat(3)
    shown = update(build(name), Batch(images, labels, torch.arange(3).repeat_interleave(4), (4, 4, 4)))
    assert shown["penalty"].item() == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("name", ["vrex", "coral", "mmd"])
def test_the_order_of_domains_does_not_matter(name):
    data = batch((5, 3, 2))
    order = torch.cat([torch.arange(8, 10), torch.arange(5), torch.arange(5, 8)])
    turned = Batch(data.images[order], data.labels[order], torch.empty(0), (2, 5, 3))
    penalties = [update(build(name), given)["penalty"] for given in (data, turned)]
    torch.testing.assert_close(*penalties)


def test_irm_takes_the_derivative_at_the_scale_one():
    torch.manual_seed(0)
    logits, labels = 3 * torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 3, 1, 1, 2])
    w = torch.ones(5, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(F.cross_entropy(w[:, None] * logits, labels, reduction="sum"), w)
    torch.testing.assert_close(scale_derivative(logits, labels), wanted)


def test_irm_estimates_the_square_without_bias():
    """Its mean over all samples of three numbers is the square of their mean; that of the plain square is more."""
    numbers = torch.tensor([0.3, -1.0, 2.0], dtype=torch.float64)
    samples: list[Tensor] = [torch.stack(drawn) for drawn in itertools.product(numbers, repeat=4)]
    estimate = torch.stack([squared_mean(sample) for sample in samples]).mean()
    naive = torch.stack([sample.mean() ** 2 for sample in samples]).mean()
    torch.testing.assert_close(estimate, numbers.mean() ** 2)
    assert naive > 1.5 * numbers.mean() ** 2


def test_mmd_keeps_its_narrowest_kernel_in_float32():
    """Features far from 0: with |a|² + |b|² - 2ab the distances of images to themselves come out wrong."""
    features = 100 + torch.rand(6, 512, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gaussian(features).diagonal(), torch.full((6,), 7.0))
    torch.testing.assert_close(gaussian(features).double(), gaussian(features.double()), rtol=1e-5, atol=1e-6)


def test_mmd_between_equal_images_has_a_finite_gradient():
    data = batch()
    shown = update(build("mmd"), data._replace(images=torch.zeros_like(data.images)))
    assert shown["penalty"] == 0
    algorithm = build("mmd")
    update(algorithm, data._replace(images=torch.zeros_like(data.images)))
    assert all(p.isfinite().all() for p in algorithm.network.parameters())


def test_searches_are_those_of_domainbed():
    for name, default, warmup in [("irm", 100, 500), ("vrex", 10, 500), ("coral", 1, None), ("mmd", 1, None)]:
        given = get(name).hparams({})
        assert given.penalty_weight == default
        assert getattr(given, "warmup_steps", None) == warmup
