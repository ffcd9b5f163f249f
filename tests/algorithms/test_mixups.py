"""Mixup within a minibatch and between domains, against their equations in plain loops of float64."""

from __future__ import annotations

import math

import pytest
import torch

from agfa.algorithms import get
from agfa.algorithms.imixup import partners
from agfa.nn.mixup import beta, mixed_cross_entropy
from support_methods import SIZES, batch, build, descents, erm_gradients, in_bfloat16, resumed, slopes, update

METHODS = ["mixup", "imixup"]


def soft_loss(network, one, other, share: float) -> float:
    """CE of the mixed image with the mixed one-hot label, summed over classes."""
    (x_i, y_i), (x_j, y_j) = one, other
    with torch.no_grad():
        f = network((share * x_i + (1 - share) * x_j)[None])[0].tolist()
    target = [share * (c == y_i) + (1 - share) * (c == y_j) for c in range(len(f))]
    log_z = math.log(sum(map(math.exp, f)))
    return -sum(t * (value - log_z) for t, value in zip(target, f, strict=True))


@pytest.mark.parametrize("alpha", [0.2, 5.0])
@pytest.mark.parametrize("sizes", [*SIZES, (1,)])
def test_mixup_is_the_cross_entropy_of_mixed_images_with_mixed_labels(sizes, alpha):
    algorithm, data = build("mixup", len(sizes), alpha=alpha), batch(sizes)
    torch.manual_seed(3)
    order = torch.randperm(sum(sizes)).tolist()
    share = torch.distributions.Beta(alpha, alpha).sample().item()
    images = list(zip(data.images, data.labels.tolist(), strict=True))
    losses = [soft_loss(algorithm.network, images[i], images[j], share) for i, j in enumerate(order)]
    assert descents(algorithm, data)[0].loss == pytest.approx(sum(losses) / len(losses), rel=1e-9)
    assert update(algorithm, data)["nll"].item() == pytest.approx(sum(losses) / len(losses), rel=1e-9)


@pytest.mark.parametrize("alpha", [0.2, 5.0])
@pytest.mark.parametrize("sizes", SIZES)
def test_imixup_mixes_every_domain_with_the_next_of_a_random_order(sizes, alpha):
    algorithm, data = build("imixup", len(sizes), alpha=alpha), batch(sizes)
    torch.manual_seed(3)
    order = torch.randperm(len(sizes)).tolist()
    shares = torch.distributions.Beta(alpha, alpha).sample((len(sizes),)).tolist()
    domains = [list(zip(x, y.tolist(), strict=True)) for x, y in data.by_domain()]
    losses = []
    for position, share in enumerate(shares):
        mine, theirs = domains[order[position]], domains[order[(position + 1) % len(sizes)]]
        losses += [soft_loss(algorithm.network, one, theirs[k % len(theirs)], share) for k, one in enumerate(mine)]
    assert descents(algorithm, data)[0].loss == pytest.approx(sum(losses) / sum(sizes), rel=1e-7)


@pytest.mark.parametrize("sizes", SIZES)
def test_partners_come_from_another_domain_and_every_image_is_first_once(sizes):
    domains = batch(sizes).domains
    seen = set()
    for seed in range(20):
        torch.manual_seed(seed)
        i, j, pairs = partners(sizes)
        assert sorted(i.tolist()) == list(range(sum(sizes)))
        assert (domains[i] != domains[j]).all()
        assert torch.equal(domains[i], domains[i].unique_consecutive().repeat_interleave(pairs))
        seen.add(tuple(domains[j].tolist()))
    assert len(seen) > 1


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_gradient_agrees_with_finite_differences(name, sizes):
    slope, wanted = slopes(build(name, len(sizes), alpha=1.0), batch(sizes))
    assert slope == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", METHODS)
def test_without_alpha_the_gradient_is_that_of_erm(name, sizes):
    """To the last rounding: imixup has the images in another order."""
    data = batch(sizes)
    algorithm = build(name, len(sizes), alpha=0)
    for gradient, wanted in zip(descents(algorithm, data)[0].gradients, erm_gradients(algorithm, data), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-14)
    mixed = descents(build(name, len(sizes), alpha=1.0), data)[0].gradients
    assert not any(map(torch.allclose, mixed, erm_gradients(algorithm, data)))


def test_shares_are_symmetric_and_a_small_alpha_mixes_less():
    torch.manual_seed(0)
    wide, narrow = beta(1.0, 4000), beta(0.2, 4000)
    assert wide.mean().item() == pytest.approx(0.5, abs=0.02)
    assert narrow.mean().item() == pytest.approx(0.5, abs=0.03)
    assert wide.var().item() == pytest.approx(1 / 12, rel=0.05)
    assert narrow.var().item() == pytest.approx(1 / (4 * 1.4), rel=0.05)
    assert torch.equal(beta(0, 3), torch.ones(3))


def test_mixed_cross_entropy_is_linear_in_the_share():
    logits = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one, other = torch.tensor([0, 1, 2, 0]), torch.tensor([2, 2, 1, 0])
    ends = [mixed_cross_entropy(logits, one, other, torch.full((4,), share)) for share in (0.0, 0.25, 1.0)]
    torch.testing.assert_close(ends[1], 0.75 * ends[0] + 0.25 * ends[2])


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_ends_with_the_same_bits(name):
    assert resumed(name, batch((5, 3, 2)), 4, 2)


@pytest.mark.parametrize("name", METHODS)
def test_autocast_leaves_the_loss_in_float32(name):
    plain, shown = in_bfloat16(build(name), batch((16, 16, 16)))
    assert shown["nll"].dtype == torch.float32
    torch.testing.assert_close(shown["nll"], plain["nll"], rtol=0.02, atol=0)


def test_defaults_are_those_of_domainbed_and_swad():
    assert {get(name).hparams({}).alpha for name in METHODS} == {0.2}
    assert [get(name).method.min_domains for name in METHODS] == [1, 2]
