"""Style: what is mixed, swapped or matched ends up with the statistics it should, and keeps its content."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from agfa.nn import style

CPU = torch.device("cpu")
MIXES = [style.mix_moments, style.mix_values, lambda maps, partners, share: style.swap_moments(maps, partners)]


def maps(n: int = 4, side: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(n, 3, side, side, dtype=torch.float64, generator=generator)
    return (drawn * (1 + torch.arange(n)).view(-1, 1, 1, 1) + torch.arange(3).view(1, -1, 1, 1)).to(dtype)


def shares(value: float, n: int = 4) -> Tensor:
    return torch.full((n, 1, 1, 1), value, dtype=torch.float64)


PARTNERS = torch.tensor([2, 3, 1, 0])


def test_moments_are_over_the_positions_of_each_channel():
    x = maps()
    mean, variance = style.moments(x)
    for i in range(4):
        for c in range(3):
            values = x[i, c].flatten().tolist()
            wanted = sum(values) / 25
            assert mean[i, c].item() == pytest.approx(wanted)
            assert variance[i, c].item() == pytest.approx(sum((v - wanted) ** 2 for v in values) / 25)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_mixed_moments_lie_between_the_two(share):
    x = maps()
    mean, variance = style.moments(x)
    new_mean, new_variance = style.moments(style.mix_moments(x, PARTNERS, shares(share)))
    torch.testing.assert_close(new_mean, share * mean + (1 - share) * mean[PARTNERS])
    mixed = share * variance.sqrt() + (1 - share) * variance[PARTNERS].sqrt()
    torch.testing.assert_close(new_variance.sqrt(), mixed, rtol=1e-5, atol=0)


def test_swapped_moments_are_the_partners():
    x = maps()
    for mine, theirs in zip(style.moments(style.swap_moments(x, PARTNERS)), style.moments(x[PARTNERS]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-12)


def test_matched_values_are_exactly_the_partners_in_ones_own_order():
    x = maps()
    matched = style.mix_values(x, PARTNERS, shares(0.0))
    torch.testing.assert_close(matched.flatten(2).sort(-1).values, x[PARTNERS].flatten(2).sort(-1).values)
    assert torch.equal(matched.flatten(2).argsort(-1), x.flatten(2).argsort(-1))


def test_equal_values_are_ranked_by_place():
    x = torch.zeros(2, 1, 2, 3)
    x[1] = torch.tensor([[5.0, 3.0, 4.0], [0.0, 2.0, 1.0]])
    matched = style.mix_values(x, torch.tensor([1, 0]), torch.zeros(2, 1, 1, 1))
    assert torch.equal(matched[0].flatten(), torch.arange(6.0))
    assert torch.equal(matched[1], torch.zeros(1, 2, 3))


@pytest.mark.parametrize("mix", MIXES)
def test_own_style_changes_nothing(mix):
    x = maps()
    torch.testing.assert_close(mix(x, torch.arange(4), shares(0.3)), x, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_precision_is_kept_and_statistics_are_at_least_float32(mix, dtype):
    x = maps(dtype=dtype)
    assert {m.dtype for m in style.moments(x)} == {torch.promote_types(dtype, torch.float32)}
    share = shares(0.3).float()
    mixed = mix(x, PARTNERS, share)
    assert mixed.dtype == dtype
    tolerance = {torch.bfloat16: 3e-2, torch.float16: 4e-3}.get(dtype, 1e-5)  # of maps that go up to 10
    torch.testing.assert_close(mixed.double(), mix(x.double(), PARTNERS, share), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("x", [torch.zeros(4, 3, 5, 5), torch.ones(4, 3, 1, 1), maps(side=1, dtype=torch.float32)])
def test_constant_channels_and_single_positions_stay_finite(mix, x):
    x.requires_grad_()
    mixed = mix(x, PARTNERS, shares(0.3).float())
    mixed.square().sum().backward()
    assert mixed.isfinite().all()
    assert x.grad.isfinite().all()


# Partners -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(4, 4), (4, 4, 4), (1, 1), (3, 5, 2), (7, 1)])
def test_partners_across_are_of_another_domain_the_same_one_for_all_of_a_domain(sizes):
    domains = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    seen = set()
    for seed in range(40):
        torch.manual_seed(seed)
        partners = style.cross_domain_partners(sizes, CPU)
        assert partners.shape == domains.shape
        assert (domains[partners] != domains).all()
        others = [set(domains[partners][domains == d].tolist()) for d in range(len(sizes))]
        assert all(len(other) == 1 for other in others)
        seen |= {(d, *other) for d, other in enumerate(others)}
        if len(set(sizes)) == 1:
            assert partners.sort().values.equal(torch.arange(len(domains)))  # a permutation
    assert len(seen) == len(sizes) * (len(sizes) - 1)  # every pair of domains is met


def test_any_partners_are_a_permutation_and_shares_one_draw_an_image():
    assert style.any_partners((3, 4), CPU).sort().values.equal(torch.arange(7))
    torch.manual_seed(0)
    drawn = style.beta_shares(4000, 0.1, CPU)
    assert drawn.shape == (4000, 1, 1, 1)
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.03)
    assert drawn.var().item() == pytest.approx(1 / (4 * 1.2), abs=0.02)  # of Beta(a, a): 1 / (4·(2a + 1))


def test_what_has_no_chance_never_happens_and_what_is_certain_always():
    torch.manual_seed(0)
    assert not any(style.happens(0.0) for _ in range(100))
    assert all(style.happens(1.0) for _ in range(100))
    assert 60 < sum(style.happens(0.16) for _ in range(600)) < 130
