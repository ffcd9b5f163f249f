"""The Bayesian head against draws of its weights W, torch.distributions, and closed forms in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from agfa.nn.heads import BayesianLinear, logits_of

N, FEATURES, CLASSES = 3, 5, 4


def head(seed: int = 0, classes: int = CLASSES, spread: float = 0.5) -> BayesianLinear:
    """A head in float64 with variances of every size."""
    torch.manual_seed(seed)
    made = BayesianLinear(FEATURES, classes).double()
    with torch.no_grad():
        made.mean.normal_()
        made.log_variance.normal_(2 * math.log(spread), 0.5)
    return made


def features(seed: int = 0, n: int = N) -> Tensor:
    return torch.randn(n, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 50))


def drawn_logits(posterior: BayesianLinear, phi: Tensor, samples: int, seed: int = 1) -> Tensor:
    """Logits phi·Wᵀ of `samples` matrices W ~ Q, one matrix for all images: (samples, n, classes)."""
    noise = torch.randn(
        samples, *posterior.mean.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    w = posterior.mean + noise * torch.exp(posterior.log_variance / 2)
    return torch.einsum("nd,scd->snc", phi, w).detach()


def test_a_new_head_has_the_asked_variance_and_the_usual_means():
    posterior = BayesianLinear(400, 10, initial_sd=0.03)
    torch.testing.assert_close(posterior.log_variance.exp(), torch.full((10, 400), 0.03**2))
    assert posterior.mean.abs().max() <= 1 / 20
    assert posterior.mean.std().item() == pytest.approx(1 / 20 / math.sqrt(3), rel=0.05)
    assert {name for name, _ in posterior.named_parameters()} == {"mean", "log_variance"}  # no bias


def test_calling_the_head_gives_the_logits_at_the_posterior_means():
    posterior, phi = head(), features()
    wanted = np.array([[m @ row for m in posterior.mean.detach().numpy()] for row in phi.numpy()])
    np.testing.assert_allclose(posterior(phi).detach().numpy(), wanted)


def test_moments_are_the_papers_closed_form():
    posterior, phi = head(), features()
    mu, sigma = (t.detach().numpy() for t in posterior.moments(phi))
    for i in range(N):
        for j in range(CLASSES):
            row, covariance = phi[i].numpy(), np.diag(np.exp(posterior.log_variance[j].detach().numpy()))
            assert mu[i, j] == pytest.approx(posterior.mean[j].detach().numpy() @ row)
            assert sigma[i, j] == pytest.approx(math.sqrt(row @ covariance @ row))


def test_moments_are_those_of_drawn_weights():
    posterior, phi, samples = head(), features(), 100_000
    logits = drawn_logits(posterior, phi, samples)
    mu, sigma = posterior.moments(phi)
    assert ((logits.mean(0) - mu).abs() < 5 * sigma / math.sqrt(samples)).all()
    assert ((logits.std(0) / sigma - 1).abs() < 5 / math.sqrt(2 * samples)).all()


def test_kl_is_the_sum_over_all_weights():
    posterior = head()
    prior = Normal(torch.zeros_like(posterior.mean), 1)
    wanted = kl_divergence(Normal(posterior.mean, (posterior.log_variance / 2).exp()), prior).sum()
    torch.testing.assert_close(posterior.kl(), wanted)


@pytest.mark.parametrize(
    ("mean", "variance", "wanted"),
    [
        (0.0, 1.0, 0.0),
        (2.0, 1.0, 2.0),
        (0.0, 4.0, 0.5 * (4 - 1 - math.log(4))),
        (1.0, 0.5, 0.5 * (0.5 + math.log(2))),
    ],
)
def test_kl_by_hand(mean, variance, wanted):
    posterior = BayesianLinear(1, 1).double()
    with torch.no_grad():
        posterior.mean.fill_(mean)
        posterior.log_variance.fill_(math.log(variance))
    assert posterior.kl().item() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_expected_nll_agrees_with_drawing_weights(spread):
    posterior, phi, labels, samples = head(spread=spread), features(), torch.tensor([0, 3, 1]), 40_000
    nll = -drawn_logits(posterior, phi, samples).log_softmax(-1)[:, torch.arange(N), labels].mean(1)
    torch.manual_seed(2)
    blocks = torch.stack([posterior.expected_nll(phi, labels, 400).detach() for _ in range(100)])
    error = math.hypot(nll.std() / math.sqrt(samples), blocks.std() / 10)
    assert abs(blocks.mean() - nll.mean()) < 4 * error
    assert error < 0.01 * nll.mean()  # or the line above says little


def test_expected_nll_is_the_mean_over_images_and_draws_of_the_papers_softmax():
    posterior, phi, labels = head(), features(), torch.tensor([0, 3, 1])
    torch.manual_seed(3)
    got = posterior.expected_nll(phi, labels, 7)
    torch.manual_seed(3)
    noise = torch.randn(7, N, CLASSES, dtype=torch.float64).numpy()
    mu, sigma = (t.detach().numpy() for t in posterior.moments(phi))
    total = 0.0
    for s in range(7):
        for i, y in enumerate(labels.tolist()):
            f = mu[i] + sigma[i] * noise[s, i]
            total -= f[y] - math.log(sum(math.exp(v) for v in f))
    assert got.item() == pytest.approx(total / (7 * N))


def test_expected_nll_is_per_image_whatever_the_batch_size():
    posterior, phi, labels = head(spread=1e-6), features(), torch.tensor([0, 3, 1])
    once = posterior.expected_nll(phi, labels, 3)
    torch.testing.assert_close(posterior.expected_nll(phi.repeat(4, 1), labels.repeat(4), 3), once, rtol=1e-4, atol=0)
    torch.testing.assert_close(once, F.cross_entropy(phi @ posterior.mean.T, labels), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_features_give_finite_gradients(dtype):
    posterior = BayesianLinear(FEATURES, CLASSES).to(dtype)
    phi = torch.zeros(N, FEATURES, dtype=dtype, requires_grad=True)
    mu, sigma = posterior.moments(phi)
    (posterior.expected_nll(phi, torch.zeros(N, dtype=torch.long), 5) + (mu + sigma).sum()).backward()
    for tensor in (phi, posterior.mean, posterior.log_variance):
        assert tensor.grad.isfinite().all()


def test_frozen_moments_are_the_same_and_give_gradients_to_the_features_alone():
    posterior, phi = head(), features().requires_grad_()
    for free, frozen in zip(posterior.moments(phi), posterior.moments(phi, frozen=True), strict=True):
        assert torch.equal(free, frozen)
    sum(posterior.moments(phi, frozen=True)).sum().backward()
    assert posterior.mean.grad is None
    assert posterior.log_variance.grad is None
    frozen = phi.grad.clone()
    phi.grad = None
    sum(posterior.moments(phi)).sum().backward()
    torch.testing.assert_close(phi.grad, frozen)
    assert (posterior.mean.grad != 0).all()
    assert (posterior.log_variance.grad != 0).all()


def test_gradients_of_moments_nll_and_kl():
    posterior, phi, labels = head(), features(), torch.tensor([0, 3, 1])

    def losses(features, mean, log_variance):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            state = {"mean": mean, "log_variance": log_variance}
            call = torch.func.functional_call
            return (
                *call(Part("moments"), state, (features,)),
                call(Part("expected_nll"), state, (features, labels, 4)),
                call(Part("kl"), state, ()),
            )

    class Part(BayesianLinear):
        def __init__(self, name):
            super().__init__(FEATURES, CLASSES)
            self.name = name

        def forward(self, *args):
            return getattr(self, self.name)(*args)

    inputs = [t.detach().clone().requires_grad_() for t in (phi, posterior.mean, posterior.log_variance)]
    assert torch.autograd.gradcheck(losses, inputs, fast_mode=True)


@pytest.mark.parametrize("spread", [0.1, 0.5, 2.0])
def test_predictive_is_the_mean_softmax_over_drawn_weights(spread):
    posterior, phi = head(spread=spread), features(n=6)
    logits = drawn_logits(posterior, phi, 40_000)
    predicted = posterior.predictive(phi)
    torch.testing.assert_close(predicted.probabilities, logits.softmax(-1).mean(0), atol=0.03, rtol=0)
    hot = posterior.predictive(phi, temperature=3)
    torch.testing.assert_close(hot.probabilities, (logits / 3).softmax(-1).mean(0), atol=0.03, rtol=0)
    torch.testing.assert_close(hot.disagreement, predicted.disagreement)
    chosen = F.one_hot(logits.argmax(-1), CLASSES).double()
    pairs = 1 - (chosen[0::2] * chosen[1::2]).sum(-1).mean(0)  # two independent classifiers each
    torch.testing.assert_close(predicted.disagreement, pairs, atol=0.02, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_predictive_is_the_same_for_an_image_in_any_batch_and_at_any_call(dtype):
    posterior, phi = head().to(dtype), features(n=9).to(dtype)
    together = posterior.predictive(phi)
    torch.manual_seed(99)
    again = posterior.predictive(phi)
    assert torch.equal(together.probabilities, again.probabilities)
    assert torch.equal(together.disagreement, again.disagreement)
    for i in range(9):
        alone = posterior.predictive(phi[i : i + 1])
        torch.testing.assert_close(alone.probabilities[0], together.probabilities[i], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(alone.disagreement[0], together.disagreement[i], rtol=0, atol=1e-4)


def test_predictive_takes_nothing_from_the_random_state_and_keeps_no_graph():
    posterior, phi = head(), features()
    before = torch.get_rng_state()
    predicted = posterior.predictive(phi)
    assert torch.equal(torch.get_rng_state(), before)
    assert not predicted.probabilities.requires_grad


def test_probabilities_sum_to_one_and_disagreement_stays_within_its_bounds():
    for classes in (2, 3, 7):
        predicted = head(classes=classes, spread=5).predictive(features(n=20))
        torch.testing.assert_close(predicted.probabilities.sum(-1), torch.ones(20, dtype=torch.float64))
        assert (predicted.disagreement >= 0).all()
        assert (predicted.disagreement <= 1 - 1 / classes + 1e-12).all()
        assert predicted.disagreement.max() > 0.1


def test_certain_weights_never_disagree():
    posterior, phi = head(spread=1e-9), features(n=20)
    predicted = posterior.predictive(phi)
    assert (predicted.disagreement < 1e-12).all()
    torch.testing.assert_close(predicted.probabilities, posterior(phi).softmax(-1).detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast_leaves_the_head_in_float32(given):
    posterior, phi, labels = head().float(), features().to(given), torch.tensor([0, 3, 1])
    plain = (*posterior.moments(phi.float()), posterior(phi.float()), posterior.predictive(phi.float()).probabilities)
    with torch.autocast("cpu", torch.bfloat16):
        cast = (*posterior.moments(phi), posterior(phi), posterior.predictive(phi).probabilities)
        losses = posterior.expected_nll(phi, labels), posterior.kl()
    assert {t.dtype for t in (*cast, *losses)} == {torch.float32}
    for a, b in zip(plain, cast, strict=True):
        torch.testing.assert_close(a, b)


def test_logits_of_any_head():
    posterior, phi, linear = head(), features(), torch.nn.Linear(FEATURES, CLASSES)
    assert all(map(torch.equal, logits_of(posterior, phi), posterior.moments(phi)))
    mu, sigma = logits_of(linear, phi.float())
    assert sigma is None
    torch.testing.assert_close(mu, linear(phi.float()))
    with torch.autocast("cpu", torch.bfloat16):
        assert logits_of(linear, phi.float())[0].dtype == torch.float32
