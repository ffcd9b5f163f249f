"""MLDG against its equation, with a real optimiser on a real copy for the virtual step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from support_methods import SIZES, batch, build, descents, in_bfloat16, resumed, update


def pairs(n: int, meta_test: int, seed: int) -> list[tuple[int, int]]:
    """Who trains and who tests at this seed: at least one source trains, each paired with a tester, in turns."""
    torch.manual_seed(seed)
    order = torch.randperm(n).tolist()
    n_test = min(meta_test, n - 1)
    train, test = order[: n - n_test], order[n - n_test :]
    return [(i, test[k % n_test]) for k, i in enumerate(train)]


def transcribed(algorithm, data, seed):
    """(mean F_i, mean F_j, gradient): a copy takes the virtual step with Adam, and its gradient is the original's."""
    h, sources = algorithm.hparams, data.by_domain()
    found = pairs(len(sources), h.meta_test, seed)
    train = test = 0.0
    total = [torch.zeros_like(p) for p in algorithm.network.parameters()]
    for i, j in found:
        inner = copy.deepcopy(algorithm.network)
        adam = torch.optim.Adam(inner.parameters(), lr=h.lr, weight_decay=h.weight_decay)
        f_i = F.cross_entropy(inner(sources[i][0]), sources[i][1])
        f_i.backward()
        for t, p in zip(total, inner.parameters(), strict=True):
            t += p.grad / len(found)
        adam.step()
        f_j = F.cross_entropy(inner(sources[j][0]), sources[j][1])
        for t, g in zip(total, torch.autograd.grad(f_j, list(inner.parameters())), strict=True):
            t += h.beta * g / len(found)
        train, test = train + f_i.item() / len(found), test + f_j.item() / len(found)
    return train, test, total


@pytest.mark.parametrize("sizes", [*SIZES, (2, 3, 4, 1, 5)])
@pytest.mark.parametrize("given", [{}, {"meta_test": 1, "beta": 0.3, "weight_decay": 0.05}])
def test_losses_and_gradient_are_those_of_the_equation(sizes, given):
    algorithm, data = build("mldg", len(sizes), **given), batch(sizes)
    for seed in range(2):
        train, test, gradient = transcribed(algorithm, data, seed)
        (descent,) = descents(algorithm, data, seed=seed)
        for mine, wanted in zip(descent.gradients, gradient, strict=True):
            torch.testing.assert_close(mine, wanted)
        shown = update(copy.deepcopy(algorithm), data, seed=seed)
        assert (shown["nll"].item(), shown["meta_test"].item()) == pytest.approx((train, test), rel=1e-9)


def test_gradient_agrees_with_finite_differences_at_both_points():
    """Of F_i at θ plus β times that of F_j at θ', both along the same direction."""
    algorithm, data, h = build("mldg", beta=0.7), batch(), 1e-8
    (i, j), *_ = pairs(3, 2, seed=3)
    sources = data.by_domain()
    inner = copy.deepcopy(algorithm.network)
    adam = torch.optim.Adam(inner.parameters(), lr=1e-2)
    F.cross_entropy(inner(sources[i][0]), sources[i][1]).backward()
    adam.step()
    torch.manual_seed(8)
    direction = [torch.randn_like(p) for p in inner.parameters()]

    def slope(network, source):
        ends = []
        for sign in (1, -1):
            moved = copy.deepcopy(network)
            with torch.no_grad():
                for p, d in zip(moved.parameters(), direction, strict=True):
                    p += sign * h * d
                ends.append(F.cross_entropy(moved(source[0]), source[1]).item())
        return (ends[0] - ends[1]) / (2 * h)

    wanted = slope(algorithm.network, sources[i]) + 0.7 * slope(inner, sources[j])
    (descent,) = descents(algorithm, data)
    found = sum((g * d).sum().item() for g, d in zip(descent.gradients, direction, strict=True))
    assert found == pytest.approx(wanted, rel=1e-4)


def test_beta_zero_is_erm_on_the_meta_train_source():
    algorithm, data = build("mldg", beta=0), batch()
    (i, _), *_ = pairs(3, 2, seed=3)
    images, labels = data.by_domain()[i]
    loss = F.cross_entropy(algorithm.network(images), labels)
    wanted = torch.autograd.grad(loss, list(algorithm.network.parameters()))
    (descent,) = descents(algorithm, data)
    for mine, other in zip(descent.gradients, wanted, strict=True):
        assert torch.equal(mine, other)


def test_a_source_is_always_left_to_train_on():
    update(build("mldg", 2, meta_test=2), batch((3, 3)))
    assert build("mldg").min_domains == 2


def test_resumes():
    assert resumed("mldg", batch(), steps=3, at=1)


def test_autocast_changes_little():
    plain, cast = in_bfloat16(build("mldg", lr=1e-3), batch())
    for key in plain:
        assert cast[key].dtype == torch.float32
        assert cast[key].item() == pytest.approx(plain[key].item(), rel=0.05)
