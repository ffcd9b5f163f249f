"""GroupDRO against Algorithm 1 of its paper, with q multiplied and divided by its sum."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from agfa.algorithms import get
from support_methods import SIZES, batch, build, descents, erm_gradients, in_bfloat16, resumed, slopes, update


@pytest.mark.parametrize("sizes", SIZES)
def test_steps_are_those_of_algorithm_1(sizes):
    algorithm, q = build("groupdro", len(sizes), eta=0.7), [1 / len(sizes)] * len(sizes)
    for step in range(4):
        data = batch(sizes, seed=step)
        with torch.no_grad():
            risks = [F.cross_entropy(algorithm.network(x), y).item() for x, y in data.by_domain()]
        q = [share * math.exp(0.7 * risk) for share, risk in zip(q, risks, strict=True)]
        q = [share / sum(q) for share in q]
        _, model = descents(algorithm, data)
        assert model.loss == pytest.approx(sum(share * risk for share, risk in zip(q, risks, strict=True)), rel=1e-12)
        shown = update(algorithm, data, step)
        assert shown["weighted"].item() == pytest.approx(model.loss)
        assert shown["largest_weight"].item() == pytest.approx(max(q))
        assert algorithm.log_weights.softmax(0).tolist() == pytest.approx(q)
    assert max(q) > 1.1 / len(sizes)
    assert not any(value.requires_grad for value in shown.values())


@pytest.mark.parametrize("sizes", SIZES)
def test_gradient_to_the_model_agrees_with_finite_differences_at_given_weights(sizes):
    algorithm = build("groupdro", len(sizes), eta=0)  # or q would follow the risks, which the gradient does not see
    with torch.no_grad():
        algorithm.log_weights.copy_(torch.arange(len(sizes)))
    slope, wanted = slopes(algorithm, batch(sizes))
    assert slope == pytest.approx(wanted, rel=1e-5)


def test_the_players_move_nothing_of_each_other():
    """At a rate of 0 for one, the other has the gradients that it has alone."""
    data = batch()
    weights, model = descents(build("groupdro", eta=0.5), data)
    assert all(gradient is None for gradient in weights.gradients)
    assert all(gradient is not None for gradient in model.gradients)


def test_without_a_rate_the_weights_stay_equal_and_the_gradient_is_that_of_erm():
    algorithm, data = build("groupdro", eta=0), batch((4, 4, 4))
    for gradient, wanted in zip(descents(algorithm, data)[-1].gradients, erm_gradients(algorithm, data), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-15)
    update(algorithm, data)
    assert torch.equal(algorithm.log_weights, torch.zeros(3, dtype=torch.float64))


def test_without_a_rate_domains_and_not_images_weigh_the_same():
    algorithm, data = build("groupdro", eta=0), batch((5, 3, 2))
    wanted = sum(F.cross_entropy(algorithm.network(x), y) for x, y in data.by_domain()) / 3
    assert update(algorithm, data)["weighted"].item() == pytest.approx(wanted.item())


def test_weights_are_saved_but_not_shipped_and_a_resumed_run_ends_with_the_same_bits():
    algorithm = build("groupdro")
    assert "log_weights" in algorithm.state_dict()
    assert not any("log_weights" in key for key in algorithm.network.state_dict())
    assert resumed("groupdro", batch((5, 3, 2)), 4, 2, eta=0.5)


def test_autocast_leaves_losses_and_weights_in_float32():
    data = batch((16, 16, 16))
    plain, shown = in_bfloat16(build("groupdro", eta=0.5), data)
    for key, value in shown.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, plain[key], rtol=0.02, atol=0)
    algorithm = build("groupdro", eta=0.5).float()
    with torch.autocast("cpu", torch.bfloat16):
        shown = update(algorithm, data._replace(images=data.images.float()))
    torch.testing.assert_close(algorithm.log_weights.detach().mean(), 0.5 * shown["nll"], rtol=1e-6, atol=0)


def test_a_weight_that_has_all_but_vanished_comes_back():
    algorithm = build("groupdro", eta=1.0)
    with torch.no_grad():
        algorithm.log_weights.copy_(torch.tensor([-2000.0, 0.0, 0.0]))
    shown = update(algorithm, batch())
    assert shown["weighted"].isfinite()
    assert algorithm.log_weights[0] > -2000


def test_defaults_are_those_of_domainbed():
    assert get("groupdro").hparams({}).eta == 0.01
    assert get("groupdro").method.min_domains == 2
