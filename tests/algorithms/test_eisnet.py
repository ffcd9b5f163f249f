"""EISNet against its equations, triplet by triplet and tile by tile."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F

from agfa.algorithms.eisnet import arrange, tile_orders
from support_methods import SIZES, batch, build, descents, erm_gradients, in_bfloat16, resumed, slopes, update

SMALL = {"memory": 20, "whole": 0.3, "permutations": 5}


def ready(domains: int = 3, **given):
    """After three steps: the momentum encoder lags, and the memory has other images."""
    algorithm = build("eisnet", domains, **{**SMALL, "momentum": 0.5, "lr": 1e-3, **given})
    for step in range(3):
        update(algorithm, batch((3,) * domains, seed=20 + step), step, seed=step)
    return algorithm


def unit(e):
    return e / (e * e).sum(1, keepdim=True).sqrt()


def drawn(algorithm, n, seed=3):
    """The orders of the images, and that of the memory, at this seed."""
    torch.manual_seed(seed)
    order = torch.randint(algorithm.hparams.permutations + 1, (n,))
    order[torch.rand(n) < algorithm.hparams.whole] = 0
    return order, torch.randperm(algorithm.hparams.memory)


def puzzle(image, order):
    """Tile by tile; what is over stays."""
    shown = image.clone()
    h, w = image.shape[1] // 3, image.shape[2] // 3
    for k, tile in enumerate(order.tolist()):
        row, column = (k // 3) * h, (k % 3) * w
        from_row, from_column = (tile // 3) * h, (tile % 3) * w
        shown[:, row : row + h, column : column + w] = image[
            :, from_row : from_row + h, from_column : from_column + w
        ]
    return shown


def triplets(algorithm, q, k, labels, places):
    """The mean over all taken, with the memory as it is after this step's embeddings came in."""
    h = algorithm.hparams
    memory = [*zip(algorithm.memory, algorithm.memory_labels.tolist(), strict=True), *zip(k, labels, strict=True)]
    memory = memory[-h.memory :]
    total, count = 0.0, 0
    for a in range(len(q)):
        for p in range(len(q)):
            if a == p or labels[a] != labels[p]:
                continue
            near, taken = ((q[a] - k[p]) ** 2).sum(), 0
            for place in places.tolist():
                embedding, label = memory[place]
                if label in (-1, labels[a]) or taken == h.negatives:
                    continue
                far = ((q[a] - embedding) ** 2).sum()
                if near < far < near + h.margin:
                    total, taken = total + (near - far + h.margin), taken + 1
            count += taken
    return total / max(count, 1), count


def transcribed(algorithm, data):
    """The three losses, with a graph to the parameters."""
    order, places = drawn(algorithm, len(data.images))
    rows = tile_orders()
    shown = torch.stack([puzzle(x, rows[o]) for x, o in zip(data.images, order, strict=True)])
    phi = algorithm.network.backbone(shown)
    u, v, w = algorithm.embedding, algorithm.jigsaw, algorithm.network.head
    q = unit(phi @ u.weight.T + u.bias)
    with torch.no_grad():
        backbone, slow = algorithm.momentum_encoder
        k = unit(backbone(data.images) @ slow.weight.T + slow.bias)
    metric, count = triplets(algorithm, q, k, data.labels.tolist(), places)
    nll = F.cross_entropy(phi @ w.weight.T + w.bias, data.labels)
    return nll, metric, F.cross_entropy(phi @ v.weight.T + v.bias, order), count


@pytest.mark.parametrize("sizes", [*SIZES, (7,)])
@pytest.mark.parametrize("given", [{}, {"metric": 2.0, "jigsaw": 0.3, "margin": 0.2, "negatives": 2, "memory": 7}])
def test_losses_and_gradients_are_those_of_the_equations(sizes, given):
    algorithm, data = ready(len(sizes), **given), batch(sizes)
    h = algorithm.hparams
    nll, metric, jigsaw, count = transcribed(copy.deepcopy(algorithm), data)
    assert count > 0
    shown = update(copy.deepcopy(algorithm), data)
    found = [shown[key].item() for key in ("nll", "metric", "jigsaw")]
    assert found == pytest.approx([nll.item(), float(metric.detach()), jigsaw.item()], rel=1e-9)

    theirs = copy.deepcopy(algorithm)
    nll, metric, jigsaw, _ = transcribed(theirs, data)
    wanted = torch.autograd.grad(nll + h.metric * metric + h.jigsaw * jigsaw, list(theirs.network.parameters()))
    (descent,) = descents(algorithm, data)
    for mine, other in zip(descent.gradients, wanted, strict=True):
        torch.testing.assert_close(mine, other)


def test_gradient_agrees_with_finite_differences():
    by_gradient, by_differences = slopes(ready(), batch((5, 3, 2)))
    assert by_gradient == pytest.approx(by_differences, rel=1e-4)


def test_weights_zero_have_erms_gradient():
    algorithm, data = ready(metric=0, jigsaw=0), batch((5, 3, 2))
    (descent,) = descents(algorithm, data)
    for mine, wanted in zip(descent.gradients, erm_gradients(algorithm, data), strict=True):
        assert torch.equal(mine, wanted)


def test_momentum_encoder_follows_after_the_step_and_is_not_trained():
    algorithm, data = ready(momentum=0.8), batch()
    before = copy.deepcopy(algorithm.momentum_encoder.state_dict())
    update(algorithm, data)
    now = torch.nn.Sequential(algorithm.network.backbone, algorithm.embedding).state_dict()
    for key, value in algorithm.momentum_encoder.state_dict().items():
        torch.testing.assert_close(value, 0.8 * before[key] + 0.2 * now[key])
    optimised = {id(p) for o in algorithm.optimizers.values() for g in o.param_groups for p in g["params"]}
    trained = {id(p) for p in algorithm.parameters() if p.requires_grad}
    assert optimised == trained
    assert not any(p.requires_grad for p in algorithm.momentum_encoder.parameters())


def test_memory_keeps_the_latest_embeddings_and_their_classes():
    algorithm = build("eisnet", memory=5)
    assert (algorithm.memory_labels == -1).all()
    first, second = batch((1, 1, 1), seed=1), batch((2, 1, 1), seed=2)
    update(algorithm, first)
    assert algorithm.memory_labels.tolist() == [-1, -1, *first.labels.tolist()]
    update(algorithm, second)
    assert algorithm.memory_labels.tolist() == [*first.labels.tolist()[2:], *second.labels.tolist()]
    torch.testing.assert_close(algorithm.memory.norm(dim=1), torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("shown", [[1] * 6, [0, 1, 2]])
def test_without_a_positive_or_a_negative_there_are_no_triplets(shown):
    algorithm = build("eisnet", 1)
    data = batch((len(shown),))._replace(labels=torch.tensor(shown))
    assert update(algorithm, data)["metric"] == 0
    assert all(value.isfinite().all() for value in algorithm.state_dict().values())


@pytest.mark.parametrize(("height", "width"), [(9, 9), (8, 10), (3, 5)])
def test_tiles_are_arranged(height, width):
    torch.manual_seed(0)
    images, orders = torch.rand(6, 2, height, width), tile_orders()[torch.randint(72, (6,))]
    wanted = torch.stack([puzzle(x, order) for x, order in zip(images, orders, strict=True)])
    assert torch.equal(arrange(images, orders), wanted)


def test_orders_of_tiles_differ_in_eight_places_at_least():
    orders = tile_orders()
    assert orders.shape == (72, 9)
    assert orders[0].tolist() == list(range(9))
    assert torch.equal(orders.sort(1).values, torch.arange(9).expand(72, 9))
    differing = (orders.unsqueeze(1) != orders).sum(2)
    assert differing[~torch.eye(72, dtype=torch.bool)].min() == 8


def test_whole_images_are_as_frequent_as_asked():
    algorithm = build("eisnet", whole=0.6, permutations=9)
    seen = torch.cat([drawn(algorithm, 500, seed)[0] for seed in range(4)])
    expected = 0.6 + 0.4 / 10
    assert (seen == 0).double().mean().item() == pytest.approx(expected, abs=3 * math.sqrt(expected / 2000))
    assert set(seen.tolist()) == set(range(10))


def test_resumes():
    assert resumed("eisnet", batch(), steps=4, at=2, **SMALL)


def test_autocast_changes_little():
    plain, cast = in_bfloat16(build("eisnet", lr=1e-3, **SMALL), batch())
    for key in plain:
        assert cast[key].dtype == torch.float32
        assert cast[key].item() == pytest.approx(plain[key].item(), rel=0.05)
