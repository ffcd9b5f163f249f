"""MixStyle, EFDMix and pAdaIN against their equations, transcribed in float64, channel by channel."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from agfa.data.batches import Batch
from agfa.errors import UsageError
from support_stages import batch, build, erm_gradients, features_through, gradients, slope, step

METHODS = ["mixstyle", "efdmix", "padain"]
ALPHA = 0.7


class Constants(dict):
    """What is a constant to the gradient: as it was when it was first asked for."""

    def __call__(self, place: object, name: object, value: Tensor) -> Tensor:
        return self.setdefault((place, name), value.detach())


def deviation(values: Tensor, eps: float) -> Tensor:
    return (((values - values.sum() / values.numel()) ** 2).sum() / values.numel() + eps) ** 0.5


def mixstyle(x: Tensor, other: Tensor, own: Tensor, constant) -> Tensor:
    mu, sigma = constant("mu", x.mean()), constant("sigma", deviation(x, 1e-6))
    mu_other, sigma_other = constant("mu~", other.mean()), constant("sigma~", deviation(other, 1e-6))
    return (own * sigma + (1 - own) * sigma_other) * (x - mu) / sigma + own * mu + (1 - own) * mu_other


def efdmix(x: Tensor, other: Tensor, own: Tensor, constant) -> Tensor:
    flat, ranked = x.flatten(), other.flatten().sort().values
    rank = {place: k for k, place in enumerate(sorted(range(len(flat)), key=flat.tolist().__getitem__))}
    matched = torch.stack([ranked[rank[i]] for i in range(len(flat))])
    return (flat + (1 - own) * matched - (1 - own) * constant("x", flat)).view_as(x)


def padain(x: Tensor, other: Tensor, own: Tensor, constant) -> Tensor:
    mu_other, sigma_other = constant("mu~", other.mean()), constant("sigma~", deviation(other, 1e-5))
    return sigma_other * (x - x.mean()) / deviation(x, 1e-5) + mu_other


EQUATIONS = {"mixstyle": mixstyle, "efdmix": efdmix, "padain": padain}


def draws(name: str, n: int, p: float, stages: int, seed: int) -> dict[int, tuple[Tensor, Tensor]]:
    """Of the stages after which something happens: shares and partners, drawn in this order from the seed."""
    torch.manual_seed(seed)
    found = {}
    for stage in range(1, stages + 1):
        if torch.rand(()) < p:
            beta = torch.distributions.Beta(torch.tensor(ALPHA), torch.tensor(ALPHA))
            share = torch.ones(n) if name == "padain" else beta.sample((n,))
            found[stage] = share, torch.randperm(n)
    return found


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("p", "stages"), [(1.0, 1), (0.6, 3)])
def test_loss_and_gradients_are_those_of_the_equation(name, p, stages):
    settings = {} if name == "padain" else {"alpha": ALPHA}
    algorithm, data, seed = build(name, p=p, stages=stages, **settings), batch(2, 1), 47
    network, drawn, constants = copy.deepcopy(algorithm.network), draws(name, 3, p, stages, seed), Constants()
    assert len(drawn) == (1 if stages == 1 else 2)  # this seed leaves one of three alone

    def change(stage: int, maps: Tensor) -> Tensor:
        if stage not in drawn:
            return maps
        share, partners = drawn[stage]
        mixed = torch.empty_like(maps)
        for i, partner in enumerate(partners.tolist()):
            for c in range(maps.shape[1]):
                held = partial(constants, (stage, i, c))
                mixed[i, c] = EQUATIONS[name](maps[i, c], maps[partner, c], share[i], held)
        return mixed

    def loss() -> Tensor:
        return F.cross_entropy(network.head(features_through(network, data.images, change)), data.labels)

    shown = step(algorithm, data, seed)
    wanted = loss()
    wanted.backward()
    torch.testing.assert_close(shown["nll"], wanted.detach())
    for key, gradient in gradients(algorithm.network).items():
        torch.testing.assert_close(gradient, gradients(network)[key], rtol=1e-6, atol=1e-9)
    for parameter, trained in zip(network.parameters(), algorithm.network.parameters(), strict=True):
        parameter.grad = trained.grad
    by_gradients, by_differences = slope(loss, list(network.parameters()))
    assert by_gradients == pytest.approx(by_differences, rel=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_without_strength_gradients_are_erms_to_the_bit(name):
    algorithm, data = build(name, p=0), batch(4, 2)
    wanted = erm_gradients(algorithm, data)
    step(algorithm, data)
    found = gradients(algorithm.network)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in found)


@pytest.mark.parametrize("name", METHODS)
def test_with_strength_they_are_not(name):
    algorithm, data = build(name, p=1), batch(4, 2)
    wanted = erm_gradients(algorithm, data)
    step(algorithm, data)
    assert not torch.allclose(gradients(algorithm.network)["head.weight"], wanted["head.weight"], rtol=1e-3)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("sizes", [(1,), (5,), (1, 1), (4, 1, 3)])
def test_any_number_of_domains_unequal_and_a_class_alone(name, sizes):
    algorithm, data = build(name, domains=len(sizes), p=1), batch(*sizes)
    for seed in range(2):
        shown = step(algorithm, Batch(data.images, torch.zeros_like(data.labels), data.domains, data.sizes), seed)
        assert shown["nll"].isfinite()
        assert not shown["nll"].requires_grad
    assert all(p.isfinite().all() for p in algorithm.parameters())


@pytest.mark.parametrize("name", ["mixstyle", "efdmix"])
def test_across_domains_images_take_only_after_those_of_another(name):
    algorithm, data = build(name, p=1, alpha=ALPHA, mix="crossdomain", stages=1), batch(3, 3)
    seen = []
    algorithm.mixed = lambda maps, partners, share: seen.append(partners) or maps
    for seed in range(5):
        step(algorithm, data, seed)
    for partners in seen:
        assert (partners[:3] >= 3).all()
        assert (partners[3:] < 3).all()
    assert len({tuple(partners.tolist()) for partners in seen}) > 1


@pytest.mark.parametrize("name", ["mixstyle", "efdmix"])
def test_across_domains_there_must_be_two(name):
    with pytest.raises(UsageError, match=rf"hparams of {name}: mix crossdomain needs 2 .* set mix random") as caught:
        build(name, domains=1, mix="crossdomain")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", METHODS)
def test_prediction_is_not_mixed(name):
    algorithm, data = build(name, p=1), batch(4, 2)
    network = algorithm.network
    torch.testing.assert_close(network(data.images), network.head(network.backbone(data.images)), rtol=0, atol=0)
    torch.testing.assert_close(network(data.images)[:1], network(data.images[:1]))
