"""MASF against its equations, pair by pair and triplet by triplet, with a real step on a real copy."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from agfa.algorithms.masf import semi_hard_triplets
from support_methods import SIZES, batch, build, descents, in_bfloat16, resumed, update


def split(n: int, meta_test: int, seed: int) -> tuple[list[int], list[int]]:
    """Which sources train and which play the unseen ones at this seed."""
    torch.manual_seed(seed)
    order = torch.randperm(n).tolist()
    n_train = max(1, n - meta_test)
    return order[:n_train], order[n_train:]


def task(network, sources, train):
    """F: the mean over images of the meta-train sources."""
    images, labels = (torch.cat([sources[i][k] for i in train]) for k in (0, 1))
    return F.cross_entropy(network(images), labels)


def stepped(network, loss, rate):
    """A copy of the network after a plain step down, each tensor's gradient at most 2 long."""
    grads = torch.autograd.grad(loss, list(network.parameters()))
    inner = copy.deepcopy(network)
    with torch.no_grad():
        for p, g in zip(inner.parameters(), grads, strict=True):
            length = math.sqrt(g.square().sum())
            p -= rate * g * (2 / length if length > 2 else 1)
    return inner, grads


def confusion(network, images, labels, c, tau):
    return (network(images)[labels == c].mean(0) / tau).softmax(0)


def triplets(e, labels, margin):
    """Image by image: anchors, positives, and the one negative of each pair."""
    total, n_pairs = 0.0, 0
    n = len(labels)
    distance = [[((e[i] - e[j]) ** 2).sum() for j in range(n)] for i in range(n)]
    for a in range(n):
        negatives = [distance[a][k] for k in range(n) if labels[k] != labels[a]]
        for p in range(n):
            if p == a or labels[p] != labels[a] or not negatives:
                continue
            farther = [d for d in negatives if d > distance[a][p]]
            hinge = distance[a][p] - (min(farther) if farther else max(negatives)) + margin
            total = total + max(hinge, 0 * hinge)
            n_pairs += 1
    return total / max(n_pairs, 1)


def embed(metric, phi):
    for layer in (0, 2):
        phi = phi @ metric[layer].weight.T + metric[layer].bias
        phi = torch.where(phi > 0, phi, 0.2 * phi)
    return phi


def meta(network, metric, data, h, train, test):
    """L_global and L_local of a network (at θ')."""
    sources, pairs = data.by_domain(), []
    for i in train:
        for j in test:
            total = 0.0
            for c in range(3):
                if all((sources[k][1] == c).any() for k in (i, j)):
                    s, t = (confusion(network, *sources[k], c, h.temperature) for k in (i, j))
                    total = total + ((s * (s / t).log()).sum() + (t * (t / s).log()).sum()) / 2
            pairs.append(total / 3)
    e = embed(metric, network.backbone(data.images))
    return sum(pairs) / len(pairs), triplets(e, data.labels.tolist(), h.margin)


def transcribed(algorithm, data, seed):
    """(F, L_global, L_local, gradients of θ, gradients of φ)."""
    h, sources = algorithm.hparams, data.by_domain()
    train, test = split(len(sources), h.meta_test, seed)
    f = task(algorithm.network, sources, train)
    inner, total = stepped(algorithm.network, f, h.inner_lr or h.lr)
    alignment, clustering = meta(inner, algorithm.embedding, data, h, train, test)
    loss = h.alignment * alignment + h.clustering * clustering
    *of_meta, w1, b1, w2, b2 = torch.autograd.grad(
        loss, [*inner.parameters(), *algorithm.embedding.parameters()], materialize_grads=True, allow_unused=True
    )
    theta = [g + m for g, m in zip(total, of_meta, strict=True)]
    return f.item(), alignment.item(), clustering.item(), theta, [w1, b1, w2, b2]


@pytest.mark.parametrize("sizes", [*SIZES, (2, 3, 4, 1, 5)])
@pytest.mark.parametrize(
    "given", [{}, {"inner_lr": 0.5, "alignment": 0.3, "clustering": 2.0, "margin": 0.01, "meta_test": 2}]
)
def test_losses_and_gradients_are_those_of_the_equations(sizes, given):
    """Class 0 is absent from the first source; with a large inner step, tensors are clipped."""
    algorithm, data = build("masf", len(sizes), **given), batch(sizes)
    for seed in range(2):
        f, alignment, clustering, theta, phi = transcribed(algorithm, data, seed)
        (descent,) = descents(algorithm, data, seed=seed)
        for mine, wanted in zip(descent.gradients, theta, strict=True):
            torch.testing.assert_close(mine, wanted)
        stepping = copy.deepcopy(algorithm)
        shown = update(stepping, data, seed=seed)
        found = [shown[key].item() for key in ("nll", "alignment", "clustering")]
        assert found == pytest.approx([f, alignment, clustering], rel=1e-8, abs=1e-12)
        for p, wanted in zip(stepping.embedding.parameters(), phi, strict=True):
            torch.testing.assert_close(p.grad, wanted)


def test_gradient_agrees_with_finite_differences_at_both_points():
    """Of F at θ plus the weighted losses at θ', along the same direction."""
    algorithm, data, step = build("masf", alignment=0.7, clustering=0.5, inner_lr=0.1), batch(), 1e-7
    h, sources = algorithm.hparams, data.by_domain()
    train, test = split(3, 1, seed=3)
    inner, _ = stepped(algorithm.network, task(algorithm.network, sources, train), h.inner_lr)
    torch.manual_seed(8)
    direction = [torch.randn_like(p) for p in inner.parameters()]

    def slope(network, loss):
        ends = []
        for sign in (1, -1):
            moved = copy.deepcopy(network)
            with torch.no_grad():
                for p, d in zip(moved.parameters(), direction, strict=True):
                    p += sign * step * d
                ends.append(float(loss(moved)))
        return (ends[0] - ends[1]) / (2 * step)

    def weighted(network):
        alignment, clustering = meta(network, algorithm.embedding, data, h, train, test)
        return 0.7 * alignment + 0.5 * clustering

    wanted = slope(algorithm.network, lambda network: task(network, sources, train)) + slope(inner, weighted)
    (descent,) = descents(algorithm, data)
    found = sum((g * d).sum().item() for g, d in zip(descent.gradients, direction, strict=True))
    assert found == pytest.approx(wanted, rel=1e-4)


def test_weights_zero_are_erm_on_the_meta_train_sources():
    algorithm, data = build("masf", alignment=0, clustering=0), batch((5, 3, 2))
    train, _ = split(3, 1, seed=3)
    loss = task(algorithm.network, data.by_domain(), train)
    wanted = torch.autograd.grad(loss, list(algorithm.network.parameters()))
    (descent,) = descents(algorithm, data)
    for mine, other in zip(descent.gradients, wanted, strict=True):
        assert torch.equal(mine, other)


def test_triplets_take_the_nearest_that_is_farther_and_else_the_farthest():
    places = torch.tensor([0.0, 1.0, 3.0, 2.0, 0.5]).double().unsqueeze(1)
    labels = torch.tensor([0, 0, 0, 1, 1])
    mine = semi_hard_triplets(places, labels, margin=0.5)
    assert mine.item() == pytest.approx(float(triplets(places, labels.tolist(), 0.5)))
    # anchor 0, positive 1 (d 1): the nearest farther negative is at 4; positive 2 (d 9): none is, so the one at 4
    hinges = {(0, 1): 0.0, (0, 2): 9 - 4 + 0.5}
    hinges |= {(1, 0): 1 - 1 + 0.5, (1, 2): 4 - 1 + 0.5, (2, 0): 9 - 6.25 + 0.5, (2, 1): 0.0}
    hinges |= {(3, 4): 2.25 - 4 + 0.5, (4, 3): 2.25 - 6.25 + 0.5}
    assert mine.item() == pytest.approx(sum(max(value, 0) for value in hinges.values()) / 8)


@pytest.mark.parametrize("labels", [[1] * 6, [0, 1, 2, 3, 4, 5]])
def test_triplets_without_a_positive_or_a_negative_are_none(labels):
    e = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    loss = semi_hard_triplets(e, torch.tensor(labels), margin=1.0)
    loss.backward()
    assert loss == 0
    assert not e.grad.any()


def test_a_source_is_always_left_to_train_on():
    update(build("masf", 2, meta_test=2), batch((3, 3)))
    assert build("masf").min_domains == 2


def test_embedding_has_its_own_rate():
    assert build("masf", lr=1e-3, metric_lr=1e-2).optimizers["metric"].param_groups[0]["lr"] == 1e-2
    assert build("masf", lr=1e-3).optimizers["metric"].param_groups[0]["lr"] == 1e-3


def test_resumes():
    assert resumed("masf", batch(), steps=3, at=1)


def test_autocast_changes_little():
    plain, cast = in_bfloat16(build("masf", lr=1e-3), batch())
    for key in plain:
        assert cast[key].dtype == torch.float32
        assert cast[key].item() == pytest.approx(plain[key].item(), rel=0.05, abs=1e-4)
