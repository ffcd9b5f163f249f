"""SMCD and MCD against hand-computed cases and a loop over images."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agfa.nn.discrepancy import Z, mcd, smcd

ALPHA = 1.96  # the paper's α


def plain_smcd(mu, sigma, labels):
    total = 0.0
    for m, s, y in zip(mu, sigma, labels, strict=True):
        rival = max(m[j] + ALPHA * s[j] for j in range(len(m)) if j != y)
        total += max(0.0, 1 + rival - (m[y] - ALPHA * s[y]))
    return total / len(mu)


def plain_mcd(mu, sigma):
    total = 0.0
    for m, s in zip(mu, sigma, strict=True):
        second = sorted((a + ALPHA * b for a, b in zip(m, s, strict=True)), reverse=True)[1]
        first = max(a - ALPHA * b for a, b in zip(m, s, strict=True))
        total += max(0.0, 1 + second - first)
    return total / len(mu)


def tensors(*rows):
    return [torch.tensor([row], dtype=torch.float64) for row in rows]


def test_z_is_the_one_sided_two_and_a_half_percent_point():
    assert Z == ALPHA


@pytest.mark.parametrize(
    ("mu", "sigma", "label", "wanted"),
    [
        ((2.0, 0.0, -1.0), (0.1, 0.2, 0.3), 0, 0.0),  # 1 + 0.392 - 1.804 < 0
        ((1.0, 0.0, -1.0), (0.1, 0.2, 0.3), 0, 1 + 0.392 - 0.804),
        ((1.0, 0.0, -1.0), (0.1, 0.2, 1.0), 0, 1 + 0.96 - 0.804),  # the widest rival, not the highest mean
        ((1.0, 0.0, -1.0), (0.1, 0.2, 0.3), 1, 1 + 1.196 + 0.392),
        ((1.0, 0.9), (0.1, 1.0), 0, 1 + 2.86 - 0.804),
        ((1.0, 0.9), (0.1, 1.0), 1, 1 + 1.196 + 1.06),
        ((0.5, 0.5, 0.5), (0.0, 0.0, 0.0), 2, 1.0),  # a three-way tie
        ((0.0, 3.0, 3.0), (0.1, 0.1, 0.1), 1, 1 + 3.196 - 2.804),  # a tie of label and rival
    ],
)
def test_smcd_by_hand(mu, sigma, label, wanted):
    assert smcd(*tensors(mu, sigma), torch.tensor([label])).item() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    ("mu", "sigma", "wanted"),
    [
        ((1.0, 0.9), (0.1, 1.0), 1.392),  # the top-k form: both picks fall on class 0
        ((1.0, 0.0), (0.1, 0.2), 1 + 0.392 - 0.804),
        ((0.0, 5.0, 1.0), (0.1, 0.1, 0.1), 0.0),
        ((0.5, 0.5, 0.5), (0.0, 0.0, 0.0), 1.0),
        ((2.0, 2.0, 0.0), (0.5, 0.5, 0.1), 1 + 2.98 - 1.02),  # the second largest of a tie is the largest
    ],
)
def test_mcd_by_hand(mu, sigma, wanted):
    assert mcd(*tensors(mu, sigma)).item() == pytest.approx(wanted, abs=1e-12)


def test_mcd_is_not_its_constraint_form():
    """With j* = argmax mu, the constraint form takes the rival's own upper end: here 1 + 2.86 - 0.804."""
    assert mcd(*tensors((1.0, 0.9), (0.1, 1.0))).item() == pytest.approx(1.392)
    assert mcd(*tensors((1.0, 0.9), (0.1, 1.0))).item() != pytest.approx(3.056)


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_both_are_the_mean_of_a_loop_over_images(data):
    n, classes = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 6))
    # quarters: ties are common
    numbers = st.lists(
        st.lists(st.integers(-20, 20).map(lambda k: k / 4), min_size=classes, max_size=classes),
        min_size=n,
        max_size=n,
    )
    mu, sigma = data.draw(numbers), [[abs(v) / 4 for v in row] for row in data.draw(numbers)]
    labels = data.draw(st.lists(st.integers(0, classes - 1), min_size=n, max_size=n))
    m, s = torch.tensor(mu, dtype=torch.float64), torch.tensor(sigma, dtype=torch.float64)
    assert smcd(m, s, torch.tensor(labels)).item() == pytest.approx(plain_smcd(mu, sigma, labels), abs=1e-10)
    assert mcd(m, s).item() == pytest.approx(plain_mcd(mu, sigma), abs=1e-10)


@pytest.mark.parametrize("loss", [lambda m, s: smcd(m, s, torch.tensor([0])), mcd], ids=["smcd", "mcd"])
def test_inactive_hinge_gives_no_loss_and_no_gradient(loss):
    mu, sigma = (t.requires_grad_() for t in tensors((9.0, 0.0, 1.0), (0.1, 0.2, 0.3)))
    value = loss(mu, sigma)
    value.backward()
    assert value.item() == 0
    assert (mu.grad == 0).all()
    assert (sigma.grad == 0).all()


@pytest.mark.parametrize("classes", [2, 5])
def test_gradients_away_from_ties(classes):
    torch.manual_seed(classes)
    mu = torch.randn(4, classes, dtype=torch.float64, requires_grad=True)
    sigma = torch.rand(4, classes, dtype=torch.float64).add(0.1).requires_grad_()
    labels = torch.arange(4) % classes
    assert torch.autograd.gradcheck(lambda m, s: smcd(m, s, labels), (mu, sigma), fast_mode=True)
    assert torch.autograd.gradcheck(mcd, (mu, sigma), fast_mode=True)


def test_gradient_lowers_the_rival_and_raises_the_label():
    mu, sigma = (t.requires_grad_() for t in tensors((1.0, 0.5, -3.0), (0.1, 0.2, 0.3)))
    smcd(mu, sigma, torch.tensor([0])).backward()
    torch.testing.assert_close(mu.grad, torch.tensor([[-1.0, 1.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(sigma.grad, torch.tensor([[ALPHA, ALPHA, 0.0]], dtype=torch.float64))
