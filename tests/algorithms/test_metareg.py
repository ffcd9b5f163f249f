"""MetaReg against its equations: gradients of the inner steps in closed form, that of φ by finite differences."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

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

SECOND = 5  # the first step of phase 2: `build` has 10 steps


def ready(domains: int = 3, **given):
    """With a regulariser that has learnt something."""
    algorithm = build("metareg", domains, **given)
    torch.manual_seed(7)
    with torch.no_grad():
        algorithm.weights.normal_(std=0.1)
    return algorithm


def with_one(phi):
    return torch.cat([phi, torch.ones(len(phi), 1, dtype=phi.dtype)], dim=1)


def residuals(theta, phi, labels):
    """softmax - one hot, of the images."""
    return (with_one(phi) @ theta.T).softmax(1) - F.one_hot(labels, len(theta))


def nll(theta, phi, labels):
    logits = with_one(phi) @ theta.T
    return (logits.exp().sum(1).log() - logits[torch.arange(len(labels)), labels]).mean()


def inner(theta, weights, phi, labels, h):
    """β_l, by the gradient of the cross-entropy in closed form."""
    for _ in range(h.inner_steps):
        gradient = residuals(theta, phi, labels).T @ with_one(phi) / len(labels) + weights * theta.sign()
        theta = theta - h.inner_lr * gradient
    return theta


def parts(algorithm, data):
    """Features and labels of each source."""
    with torch.no_grad():
        phi = algorithm.network.backbone(data.images)
    return list(zip(phi.split_with_sizes(data.sizes), data.labels.split_with_sizes(data.sizes), strict=True))


def classifier(network):
    return torch.cat([network.head.weight, network.head.bias[:, None]], 1)


@pytest.mark.parametrize("sizes", [*SIZES, (2, 3, 4, 1, 5)])
@pytest.mark.parametrize("given", [{}, {"strength": 0.3, "inner_steps": 2, "inner_lr": 0.5}])
def test_losses_of_phase_1_are_those_of_the_equations(sizes, given):
    algorithm, data = ready(len(sizes), **given), batch(sizes)
    h, each = algorithm.hparams, parts(algorithm, data)
    with torch.no_grad():
        theta = classifier(algorithm.network)
        f = nll(theta, torch.cat([phi for phi, _ in each]), data.labels)
        penalty = (algorithm.weights * theta.abs()).sum()
        heads = sum(nll(t, *of) for t, of in zip(algorithm.heads, each, strict=True)) / len(each)
    torch.manual_seed(3)
    a, b = torch.randperm(len(sizes))[:2].tolist()
    first, _ = descents(algorithm, data)
    assert first.loss == pytest.approx((f + h.strength * penalty + heads).item(), rel=1e-10)

    stepped = copy.deepcopy(algorithm)
    shown = update(stepped, data)
    with torch.no_grad():
        beta = inner(stepped.heads[a], algorithm.weights, *each[a], h)  # θ_a after its step
        meta = nll(beta, *each[b])
    assert shown["meta_test"].item() == pytest.approx(meta.item(), rel=1e-10)
    found = [shown[key].item() for key in ("nll", "penalty", "heads")]
    assert found == pytest.approx([f.item(), penalty.item(), heads.item()], rel=1e-10)


def test_features_learn_from_the_heads_and_the_classifier_from_its_own_loss_in_phase_1():
    algorithm, data = ready(strength=0.3), batch((5, 3, 2))
    network = copy.deepcopy(algorithm.network)
    phi = network.backbone(data.images)
    each = zip(algorithm.heads.detach(), phi.split(data.sizes), data.labels.split(data.sizes), strict=True)
    of_backbone = torch.autograd.grad(sum(nll(*of) for of in each) / 3, list(network.backbone.parameters()))
    own = nll(classifier(network), phi.detach(), data.labels)
    own = own + 0.3 * (algorithm.weights.detach() * classifier(network).abs()).sum()
    of_head = torch.autograd.grad(own, list(network.head.parameters()))
    first, _ = descents(algorithm, data)
    for mine, wanted in zip(first.gradients, [*of_backbone, *of_head], strict=True):
        torch.testing.assert_close(mine, wanted)


@pytest.mark.parametrize("steps", [1, 4])
def test_gradient_of_the_regulariser_agrees_with_finite_differences_through_the_inner_steps(steps):
    algorithm, data, step = ready(inner_steps=steps, inner_lr=0.5), batch((5, 3, 2)), 1e-6
    h, each, before = algorithm.hparams, parts(algorithm, data), algorithm.weights.detach().clone()
    torch.manual_seed(3)
    a, b = torch.randperm(3)[:2].tolist()
    update(algorithm, data)
    direction = torch.randn_like(before, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ends = [
            nll(inner(algorithm.heads[a], before + sign * step * direction, *each[a], h), *each[b])
            for sign in (1, -1)
        ]
    wanted = ((ends[0] - ends[1]) / (2 * step)).item()
    assert (algorithm.weights.grad * direction).sum().item() == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("sizes", SIZES)
def test_phase_2_is_the_regularised_cross_entropy(sizes):
    algorithm, data = ready(len(sizes), strength=0.3), batch(sizes)
    weights, heads = algorithm.weights.detach().clone(), algorithm.heads.detach().clone()
    with torch.no_grad():
        f = nll(classifier(algorithm.network), algorithm.network.backbone(data.images), data.labels)
        wanted = f + 0.3 * (algorithm.weights * classifier(algorithm.network).abs()).sum()
    (descent,) = descents(algorithm, data, SECOND)
    assert descent.loss == pytest.approx(wanted.item(), rel=1e-10)
    by_gradient, by_differences = slopes(algorithm, data, SECOND)
    assert by_gradient == pytest.approx(by_differences, rel=1e-4)
    update(algorithm, data, SECOND)
    assert torch.equal(algorithm.weights, weights)
    assert torch.equal(algorithm.heads, heads)


@pytest.mark.parametrize("step", [0, SECOND])
def test_strength_zero_has_erms_gradient(step):
    algorithm, data = ready(strength=0), batch((5, 3, 2))
    (descent,) = descents(algorithm, data, step)
    for mine, wanted in zip(descent.gradients, erm_gradients(algorithm, data), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize(("learning", "steps"), [(0.0, 0), (0.25, 3), (0.5, 5), (1.0, 10)])
def test_the_regulariser_is_learnt_in_the_first_share_of_the_steps(learning, steps):
    algorithm = build("metareg", learning=learning)
    assert [len(descents(algorithm, batch(), step)) for step in range(10)] == [2] * steps + [1] * (10 - steps)


def test_sources_have_heads_of_their_own_and_learning_rates_are_separate():
    algorithm = build("metareg", lr=1e-3, meta_lr=1e-2, weight_decay=0.1)
    assert not torch.equal(algorithm.heads[0], algorithm.heads[1])
    (group,) = algorithm.optimizers["regulariser"].param_groups
    assert (group["lr"], group["weight_decay"]) == (1e-2, 0)
    assert build("metareg", lr=1e-3).optimizers["regulariser"].param_groups[0]["lr"] == pytest.approx(1e-4)
    assert algorithm.optimizers["heads"].param_groups[0]["weight_decay"] == 0.1
    assert algorithm.min_domains == 2


def test_resumes_between_the_phases():
    assert resumed("metareg", batch(), steps=7, at=4)
    assert resumed("metareg", batch(), steps=7, at=6)


def test_autocast_changes_little():
    for step in (0, SECOND):
        plain, cast = in_bfloat16(ready(lr=1e-3), batch(), step)
        for key in plain:
            assert cast[key].dtype == torch.float32
            assert cast[key].item() == pytest.approx(plain[key].item(), rel=0.05)
