"""DSON against its equations, transcribed in float64 from the values of whole domains."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agfa.data.batches import Batch
from support_stages import batch, build, erm_gradients, features_through, gradients, slope, step

EPS = 1e-5


def stirred(domains: int = 2, **hparams: object):
    """DSON whose gains, biases and mixture are no longer those of the start."""
    algorithm = build("dson", domains=domains, **hparams)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in (*algorithm.network.norms.parameters(), algorithm.network.mixture):
            p.add_(torch.randn(p.shape, dtype=p.dtype, generator=generator), alpha=0.3)
    return algorithm


def normalised(x: Tensor, d: int, stage: int, network, statistics: list[tuple[Tensor, Tensor]]) -> Tensor:
    """DSON_d of the maps of domain d, given (mean, variance) of every domain's channels."""
    norm, w = network.norms[str(stage)], 1 / (1 + (-network.mixture[d]).exp())
    mean_all = sum(mean for mean, _ in statistics) / len(statistics)
    variance_all = sum(var + mean**2 for mean, var in statistics) / len(statistics) - mean_all**2
    y = torch.empty_like(x)
    for i in range(x.shape[0]):
        for c in range(x.shape[1]):
            mean, variance = statistics[d][0][c], statistics[d][1][c]
            mu = w * mean + (1 - w) * x[i, c].mean()
            sigma = (w * variance + (1 - w) * x[i, c].var(correction=0) + EPS) ** 0.5
            straight = norm.gain[d, c, 0, 0] * (x[i, c] - mu) / sigma + norm.bias[d, c, 0, 0]
            y[i, c] = (variance_all[c] + EPS) ** 0.5 * straight + mean_all[c]
    return y


def of_domain(x: Tensor) -> tuple[Tensor, Tensor]:
    values = x.transpose(0, 1).flatten(1)  # of each channel, wherever they are
    return values.mean(1), values.var(1, correction=0)


def transcribed_loss(network, data: Batch, stages: int) -> Tensor:
    def change(stage: int, maps: Tensor) -> Tensor:
        if stage > stages:
            return maps
        parts = maps.split(list(data.sizes))
        statistics = [of_domain(part) for part in parts]
        return torch.cat([normalised(part, d, stage, network, statistics) for d, part in enumerate(parts)])

    return F.cross_entropy(network.head(features_through(network, data.images, change)), data.labels)


@pytest.mark.parametrize(("sizes", "stages"), [((2, 2), 1), ((3, 1, 2), 3), ((2,), 2)])
def test_loss_and_gradients_are_those_of_the_equation(sizes, stages):
    algorithm, data = stirred(len(sizes), stages=stages), batch(*sizes)
    network = copy.deepcopy(algorithm.network)
    shown = step(algorithm, data)
    wanted = transcribed_loss(network, data, stages)
    wanted.backward()
    torch.testing.assert_close(shown["nll"], wanted.detach())
    found = gradients(algorithm.network)
    assert found.keys() == gradients(network).keys() == dict(network.named_parameters()).keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, gradients(network)[key], rtol=1e-6, atol=1e-9)
    by_gradients, by_differences = slope(lambda: transcribed_loss(network, data, stages), list(network.parameters()))
    assert by_gradients == pytest.approx(by_differences, rel=1e-5)


def test_one_source_and_batch_statistics_alone_are_erm():
    algorithm, data = build("dson", domains=1), batch(5)
    with torch.no_grad():
        algorithm.network.mixture.fill_(60)  # w = 1 in float64
    wanted = erm_gradients(algorithm, data)
    step(algorithm, data)
    found = gradients(algorithm.network)
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("weight", [60.0, -60.0])  # w = 1, w = 0
def test_what_differs_between_domains_is_gone(weight):
    """With batch statistics every domain has the same mean and variance afterwards; with the image's, every image."""
    norm = build("dson", stages=1).network.norms["1"]
    x = torch.randn(5, 16, 4, 4, dtype=torch.float64) * torch.arange(1, 6).view(-1, 1, 1, 1) + 3
    domains, w = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([weight] * 2, dtype=torch.float64).sigmoid()
    y = norm(x, domains, w, (3, 2)).detach()
    parts = y.split([3, 2]) if weight > 0 else y.split(1)
    for part in parts:
        for mine, first in zip(of_domain(part), of_domain(parts[0]), strict=True):
            torch.testing.assert_close(mine, first, rtol=1e-4, atol=1e-9)


def test_running_statistics_follow_the_batches():
    algorithm, data = build("dson", stages=1), batch(4, 2)
    maps = []
    features_through(algorithm.network, data.images, lambda stage, x: maps.append(x.detach()) or x)
    step(algorithm, data)
    norm = algorithm.network.norms["1"]
    for d, part in enumerate(maps[0].split([4, 2])):
        mean, variance = of_domain(part)
        torch.testing.assert_close(norm.mean[d].flatten(), 0.1 * mean)
        torch.testing.assert_close(norm.variance[d].flatten(), 0.9 + 0.1 * variance)


def test_prediction_is_the_mean_of_the_domains_logits_with_running_statistics():
    algorithm, data = stirred(3), batch(2, 2, 2)
    for seed in range(3):
        step(algorithm, data, seed)
    network, before = algorithm.network.eval(), copy.deepcopy(algorithm.network.state_dict())
    logits = []
    for d in range(3):

        def change(stage: int, maps: Tensor, d: int = d) -> Tensor:
            if stage > 3:
                return maps
            norm = network.norms[str(stage)]
            running = [(norm.mean[k].flatten(), norm.variance[k].flatten()) for k in range(3)]
            return normalised(maps, d, stage, network, running)

        logits.append(network.head(features_through(network, data.images, change)))
    torch.testing.assert_close(network(data.images), sum(logits) / 3)
    torch.testing.assert_close(network(data.images)[:1], network(data.images[:1]))  # alone as in company
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


def test_the_mixture_has_its_own_learning_rate():
    algorithm = build("dson", lr=0.1, mixture_lr=0.2)
    rates = {id(p): g["lr"] for g in algorithm.optimizers["model"].param_groups for p in g["params"]}
    assert rates.pop(id(algorithm.network.mixture)) == 0.2
    assert set(rates.values()) == {0.1}
    assert len(rates) == len(list(algorithm.parameters())) - 1


def test_single_images_a_class_alone_and_black_ones_stay_finite():
    algorithm, data = build("dson"), batch(1, 2)
    for seed in range(2):
        black = Batch(torch.zeros_like(data.images), torch.zeros_like(data.labels), data.domains, data.sizes)
        assert step(algorithm, black, seed)["nll"].isfinite()
    assert all(value.isfinite().all() for value in algorithm.state_dict().values())
