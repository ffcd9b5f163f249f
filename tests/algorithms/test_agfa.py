"""AGFA's step against Algorithm 1, transcribed in float64 with numpy's full FFT and angles."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from agfa.algorithms import get
from agfa.algorithms.agfa import AGFA
from agfa.algorithms.base import Problem, plain_backward
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone, ConvNet
from agfa.nn.discrepancy import smcd
from agfa.nn.spectrum import mix_amplitude

CLASSES, IMAGES, SIZE, SAMPLES = 3, 40, (8, 8), 6
ALPHA = 1.96  # the paper's α of the margins
SCHEDULES = ["fused", "alternating"]


def build(lr: float = 1e-2, channels: int = 1, size: tuple[int, int] = SIZE, **given: object) -> AGFA:
    torch.manual_seed(0)
    body = ConvNet(channels, widths=(8, 32))  # four channels a group: with one, every feature is 0
    backbone = Backbone(body, 32, (0.5,) * channels, (0.5,) * channels, "tiny")
    settings = {"lr": lr, "samples": SAMPLES, "initial_sd": 0.3, **given}
    return AGFA(backbone, Problem(CLASSES, 2, IMAGES, (channels, *size)), get("agfa").hparams(settings)).double()


def batch(n: int = 6, channels: int = 1, size: tuple[int, int] = SIZE) -> Batch:
    images = torch.rand(n, channels, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return Batch(images, torch.arange(n) % CLASSES, torch.arange(n) * 2 // n, (n // 2, n - n // 2))


def update(algorithm: AGFA, data: Batch, seed: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return algorithm.update(data, plain_backward)


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def equal(first: dict[str, Tensor], second: dict[str, Tensor], **tolerance: float) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


# Algorithm 1, line by line ------------------------------------------------------------------------------------------


def transcribed_images(x: np.ndarray, raw: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Lines 1 to 4: full spectra, angles, the half amplitude unfolded to A[-u, -v] = A[u, v]."""
    half = np.log1p(np.exp(raw))  # softplus
    height, width = x.shape[-2:]
    a_g = np.empty(x.shape)
    for u, v in itertools.product(range(height), range(width)):
        mirrored = half[..., -u % height, -v % width] if -v % width <= width // 2 else None
        own = half[..., u, v] if v <= width // 2 else None
        a_g[..., u, v] = own if mirrored is None else mirrored if own is None else (own + mirrored) / 2
    spectrum = np.fft.fft2(x, norm="ortho")
    a_s, p_s = np.abs(spectrum), np.angle(spectrum)
    mixed = share * a_g + (1 - share) * a_s
    made = np.fft.ifft2(mixed * np.exp(1j * p_s), norm="ortho")
    assert np.abs(made.imag).max() < 1e-10
    return made.real


def transcribed_losses(algorithm: AGFA, data: Batch, seed: int) -> dict[str, float]:
    """Line 5: -ELBO/N and SMCD, with the noise that this seed gives: first ε, then λ, then that of the logits."""
    h, n = algorithm.hparams, len(data.images)
    torch.manual_seed(seed)
    eps = torch.randn(n, 100, dtype=torch.float64)
    share = (torch.rand(n, 1, 1, 1) * h.alpha).double().numpy() if h.mix else np.ones((n, 1, 1, 1))
    noise = torch.randn(h.samples, n, CLASSES, dtype=torch.float64).numpy()
    with torch.no_grad():
        raw = algorithm.generator.layers(eps).view(n, *algorithm.generator.shape).numpy()
        x_t = transcribed_images(data.images.numpy(), raw, share)
        phi_s = algorithm.network.backbone(data.images).numpy()
        phi_t = algorithm.network.backbone(torch.from_numpy(x_t)).numpy()
        m, v = algorithm.head.mean.numpy(), np.exp(algorithm.head.log_variance.numpy())
    y = data.labels.numpy()

    nll = 0.0
    for s, i in itertools.product(range(h.samples), range(n)):
        f = [m[j] @ phi_s[i] + math.sqrt(phi_s[i] ** 2 @ v[j]) * noise[s, i, j] for j in range(CLASSES)]
        nll += (math.log(sum(map(math.exp, f))) - f[y[i]]) / (h.samples * n)
    kl = 0.5 * np.sum(v + m**2 - 1 - np.log(v)) / IMAGES
    margin = 0.0
    for i in range(n):
        mu = [m[j] @ phi_t[i] for j in range(CLASSES)]
        sigma = [math.sqrt(phi_t[i] ** 2 @ v[j]) for j in range(CLASSES)]
        rival = max(mu[j] + ALPHA * sigma[j] for j in range(CLASSES) if j != y[i])
        margin += max(0.0, 1 + rival - (mu[y[i]] - ALPHA * sigma[y[i]])) / n
    return {"nll": nll, "kl": kl, "discrepancy": margin}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("channels", "size", "given"),
    [(1, (8, 8), {}), (3, (7, 9), {"alpha": 0.4}), (2, (9, 6), {"mix": False}), (1, (8, 8), {"generator": "mlp"})],
)
def test_losses_of_a_step_are_those_of_algorithm_1(schedule, channels, size, given):
    algorithm, data = build(channels=channels, size=size, schedule=schedule, **given), batch(5, channels, size)
    wanted = transcribed_losses(algorithm, data, seed=3)
    shown = update(algorithm, data, seed=3)
    for name, value in wanted.items():
        assert shown[name].item() == pytest.approx(value, rel=1e-6), name
    assert not any(value.requires_grad for value in shown.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("eta", "parts"), [(0.5, ["backbone"]), (0.0, ["backbone", "head"])])
def test_gradient_of_the_model_agrees_with_finite_differences(schedule, eta, parts):
    """Of -ELBO/N + eta·SMCD along the features, and of -ELBO/N along the posterior, a constant to SMCD, too."""
    algorithm, data, losses, step = build(schedule=schedule, eta=eta, lr=1e-14), batch(), [], 1e-7
    torch.manual_seed(8)
    parameters = [p for part in parts for p in getattr(algorithm.network, part).parameters()]
    direction = [torch.randn_like(p) for p in parameters]

    def backward(loss, along):
        plain_backward(loss, along)
        losses.append((loss.item(), [p.grad.clone() for p in parameters]))

    for moved in (0, step, -2 * step):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p += moved * d
        torch.manual_seed(3)
        algorithm.update(data, backward)  # which moves next to nothing
    each = len(losses) // 3
    (_, found), (above, _), (below, _) = losses[::each]
    slope = sum((g * d).sum().item() for g, d in zip(found, direction, strict=True))
    assert slope == pytest.approx((above - below) / (2 * step), rel=1e-4)


@pytest.mark.parametrize("eta", [0.01, 0.5, 10.0])
def test_alternating_is_a_model_step_and_then_a_generator_step_at_the_new_model(eta):
    """Lines 5 to 8 by hand; the second step differs if it is taken at the old theta."""
    algorithm, data = build(lr=0.05, schedule="alternating", eta=eta), batch()
    manual = copy.deepcopy(algorithm)
    model = torch.optim.Adam(manual.network.parameters(), lr=0.05)
    players = torch.optim.Adam(manual.generator.parameters(), lr=0.05)
    for step in range(2):
        update(algorithm, data, seed=step)

        torch.manual_seed(step)
        x_t = manual.worst_case(data.images)
        phi = manual.network.backbone
        nll = manual.head.expected_nll(phi(data.images), data.labels, SAMPLES)
        mu, sigma = manual.head.moments(phi(x_t.detach()), frozen=True)
        loss = nll + manual.head.kl() / IMAGES + eta * smcd(mu, sigma, data.labels)
        model.zero_grad()
        loss.backward()
        model.step()
        old = values(manual.generator)
        mu, sigma = manual.head.moments(phi(x_t))
        players.zero_grad()
        (-smcd(mu, sigma, data.labels)).backward(inputs=list(manual.generator.parameters()))
        players.step()
    equal(values(algorithm.network), values(manual.network))
    equal(values(algorithm.generator), values(manual.generator))
    assert any(not torch.equal(old[name], value) for name, value in values(manual.generator).items())


def test_alternating_keeps_the_generator_out_of_the_model_step():
    """Line 5: nu is fixed, so nothing of the generator is kept for, or run through in, the backward pass."""
    algorithm, reached = build(schedule="alternating"), []

    def backward(loss, parameters):
        grads = torch.autograd.grad(
            loss, list(algorithm.generator.parameters()), allow_unused=True, retain_graph=True
        )
        reached.append([g is not None for g in grads])
        plain_backward(loss, parameters)

    algorithm.update(batch(), backward)
    assert reached == [[False, False], [True, True]]


def smcd_of(algorithm: AGFA, data: Batch, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return algorithm.discrepancy(algorithm.network.backbone(algorithm.worst_case(data.images)), data.labels)


def test_gradient_of_the_discrepancy_to_the_generator_agrees_with_finite_differences():
    algorithm, data = build(), batch()
    parameters = list(algorithm.generator.parameters())
    torch.manual_seed(8)
    direction = [torch.randn_like(p) for p in parameters]
    slope = sum(
        (g * d).sum()
        for g, d in zip(torch.autograd.grad(smcd_of(algorithm, data, 3), parameters), direction, strict=True)
    )
    ends = []
    with torch.no_grad():
        for step in (1e-6, -2e-6):
            for p, d in zip(parameters, direction, strict=True):
                p += step * d
            ends.append(smcd_of(algorithm, data, 3))
    assert slope.item() == pytest.approx(((ends[0] - ends[1]) / 2e-6).item(), rel=1e-5)


@pytest.mark.parametrize("eta", [0.01, 0.1, 1, 10])
@pytest.mark.parametrize("discrepancy", ["smcd", "mcd"])
def test_generator_gets_exactly_the_negated_gradient_of_the_discrepancy(eta, discrepancy):
    """`fused` at the old theta, `alternating` at the new one."""
    data = batch()
    fused = build(schedule="fused", eta=eta, discrepancy=discrepancy)
    wanted = torch.autograd.grad(smcd_of(fused, data, 3), list(fused.generator.parameters()))
    update(fused, data, seed=3)
    for parameter, gradient in zip(fused.generator.parameters(), wanted, strict=True):
        assert gradient.abs().max() > 0
        torch.testing.assert_close(parameter.grad, -gradient)

    alternating = build(schedule="alternating", eta=eta, discrepancy=discrepancy)
    before = copy.deepcopy(alternating.generator)
    update(alternating, data, seed=3)
    got = gradients(alternating.generator)
    alternating.generator.load_state_dict(before.state_dict())  # the old generator, the new theta
    wanted = torch.autograd.grad(smcd_of(alternating, data, 3), list(alternating.generator.parameters()))
    for gradient, parameter in zip(wanted, got.values(), strict=True):
        torch.testing.assert_close(parameter, -gradient)


@pytest.mark.parametrize("eta", [0.01, 0.1, 1, 10])
def test_both_schedules_give_the_model_the_same_gradients(eta):
    fused, alternating = build(schedule="fused", eta=eta), build(schedule="alternating", eta=eta)
    shown = update(fused, batch()), update(alternating, batch())
    equal(gradients(fused.network), gradients(alternating.network))
    equal(values(fused.network), values(alternating.network))
    equal(*shown)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_discrepancy_gives_no_gradient_to_the_posterior(schedule):
    """With the same noise, m and v get the gradient of the ELBO alone, whatever eta."""
    data, found = batch(), []
    for eta in (1e-3, 10.0):
        algorithm = build(schedule=schedule, eta=eta)
        update(algorithm, data)
        found.append(gradients(algorithm.head))
    equal(*found)
    algorithm.zero_grad()
    smcd_of(algorithm, data, 3).backward()
    assert gradients(algorithm.head) == {}
    assert all(g.abs().max() > 0 for g in gradients(algorithm.network.backbone).values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_eta_zero_is_the_bayesian_head_alone_and_leaves_the_generator_be(schedule):
    algorithm, data = build(schedule=schedule, eta=0), batch()
    manual = copy.deepcopy(algorithm)
    adam = torch.optim.Adam(manual.network.parameters(), lr=1e-2)
    untouched = values(algorithm.generator)
    algorithm.generator.forward = None  # a call would fail
    for seed in range(3):
        shown = update(algorithm, data, seed)
        torch.manual_seed(seed)
        nll = manual.head.expected_nll(manual.network.backbone(data.images), data.labels, SAMPLES)
        adam.zero_grad()
        (nll + manual.head.kl() / IMAGES).backward()
        adam.step()
    assert "discrepancy" not in shown
    equal(values(algorithm.network), values(manual.network))
    equal(values(algorithm.generator), untouched, rtol=0, atol=0)
    assert gradients(algorithm.generator) == {}
    assert not algorithm.optimizers["generator"].state


# The worst-case domain ----------------------------------------------------------------------------------------------


def shares(algorithm: AGFA, x: Tensor, seed: int = 3) -> Tensor:
    """The strength l that each image was mixed with, solved from x_T = (1-l)·x + l·irfft2(A_G·U)."""
    torch.manual_seed(seed)
    x_t = algorithm.worst_case(x).detach()
    torch.manual_seed(seed)
    whole = mix_amplitude(x, algorithm.generator(len(x)).detach(), 1.0)
    way, gone = (whole - x).flatten(1), (x_t - x).flatten(1)
    found = (way * gone).sum(1) / (way * way).sum(1)
    torch.testing.assert_close(gone, found[:, None] * way)
    return found


@pytest.mark.parametrize("alpha", [1.0, 0.2])
def test_strength_is_uniform_up_to_alpha_and_drawn_for_each_image(alpha):
    found = shares(build(alpha=alpha), batch(300).images)
    assert (found >= 0).all()
    assert (found <= alpha + 1e-9).all()
    assert len(found.unique()) > 290
    quantiles = torch.quantile(found, torch.linspace(0.1, 0.9, 9).double())
    torch.testing.assert_close(quantiles, alpha * torch.linspace(0.1, 0.9, 9).double(), atol=0.1 * alpha, rtol=0)


def test_without_mixing_the_whole_amplitude_is_generated():
    found = shares(build(mix=False, alpha=0.2), batch(20).images)
    torch.testing.assert_close(found, torch.ones(20, dtype=torch.float64))


def test_alpha_zero_gives_the_images_themselves():
    data = batch()
    torch.testing.assert_close(build(alpha=0).worst_case(data.images), data.images)


def test_pixel_images_use_no_source_image():
    algorithm = build(target="pixel", discrepancy="mcd")
    torch.manual_seed(1)
    first = algorithm.worst_case(batch().images)
    torch.manual_seed(1)
    second = algorithm.worst_case(torch.zeros_like(batch().images))
    assert torch.equal(first, second)
    assert first.shape == batch().images.shape
    assert ((first >= 0) & (first <= 1)).all()


def test_pixel_images_have_no_labels_and_so_no_smcd():
    with pytest.raises(ValidationError, match="needs discrepancy mcd"):
        AGFA.hparams_type(target="pixel", discrepancy="smcd")


def test_labels_do_not_matter_to_mcd():
    data, found = batch(), []
    for labels in (data.labels, data.labels.flip(0)):
        found.append(
            update(build(discrepancy="mcd"), Batch(data.images, labels, data.domains, data.sizes))["discrepancy"]
        )
    assert torch.equal(*found)


# Every variant ------------------------------------------------------------------------------------------------------

VARIANTS = [
    {"discrepancy": discrepancy, "mix": mix, "generator": generator, "target": target, "schedule": schedule}
    for discrepancy, mix, generator, target, schedule in itertools.product(
        ("smcd", "mcd"), (True, False), ("linear", "mlp"), ("amplitude", "pixel"), SCHEDULES
    )
    if (target, discrepancy) != ("pixel", "smcd")
]


@pytest.mark.parametrize("given", VARIANTS, ids=lambda given: "-".join(map(str, given.values())))
def test_every_variant_trains_both_players(given):
    algorithm = build(**given)
    network, generator = values(algorithm.network), values(algorithm.generator)
    for seed in range(2):
        shown = update(algorithm, batch(4), seed)
        assert shown.keys() == {"nll", "kl", "median_v", "discrepancy"}
        assert all(value.isfinite() for value in shown.values())
    assert all(not torch.equal(network[name], value) for name, value in values(algorithm.network).items())
    assert any(not torch.equal(generator[name], value) for name, value in values(algorithm.generator).items())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("n", [1, 3, 7])
def test_batches_of_one_and_of_odd_sizes(schedule, n):
    algorithm = build(schedule=schedule)
    wanted = transcribed_losses(algorithm, batch(n), seed=3)
    shown = update(algorithm, batch(n), seed=3)
    assert shown["discrepancy"].item() == pytest.approx(wanted["discrepancy"], rel=1e-6)
    assert all(value.isfinite() for value in shown.values())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_black_images_and_an_empty_feature_give_finite_parameters(schedule):
    algorithm, data = build(schedule=schedule), batch()
    for seed in range(2):
        update(algorithm, Batch(torch.zeros_like(data.images), data.labels, data.domains, data.sizes), seed)
    assert all(value.isfinite().all() for value in values(algorithm).values())


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("discrepancy", ["smcd", "mcd"])
def test_autocast_leaves_losses_and_parameters_in_float32(schedule, discrepancy):
    algorithm, data = build(schedule=schedule, discrepancy=discrepancy).float(), batch()
    plain = update(copy.deepcopy(algorithm), Batch(data.images.float(), data.labels, data.domains, data.sizes))
    with torch.autocast("cpu", torch.bfloat16):
        shown = update(algorithm, Batch(data.images.float(), data.labels, data.domains, data.sizes))
    assert {value.dtype for value in shown.values()} == {torch.float32}
    assert {value.dtype for value in values(algorithm).values()} == {torch.float32}
    for name, value in shown.items():
        torch.testing.assert_close(value, plain[name], rtol=0.05, atol=0.02)


# Hyperparameters ----------------------------------------------------------------------------------------------------


def test_each_part_has_its_own_learning_rate():
    algorithm = build(lr=0.1, mean_lr=0.2, variance_lr=0.3, generator_lr=0.4)
    rates = {id(p): g["lr"] for o in algorithm.optimizers.values() for g in o.param_groups for p in g["params"]}
    head, network = algorithm.head, algorithm.network
    assert {rates[id(p)] for p in network.backbone.parameters()} == {0.1}
    assert (rates[id(head.mean)], rates[id(head.log_variance)]) == (0.2, 0.3)
    assert {rates[id(p)] for p in algorithm.generator.parameters()} == {0.4}
    assert len(rates) == len(list(algorithm.parameters()))  # nothing is left out
    assert {g["lr"] for o in build(lr=0.1).optimizers.values() for g in o.param_groups} == {0.1}


def test_generator_is_no_part_of_the_network_that_is_averaged_and_shipped():
    algorithm = build()
    shipped = {id(p) for p in algorithm.network.parameters()}
    assert not any(id(p) in shipped for p in algorithm.generator.parameters())
    assert {id(algorithm.head.mean), id(algorithm.head.log_variance)} <= shipped


def test_kl_shown_is_per_source_image_and_median_v_is_that_of_the_posterior():
    algorithm = build(initial_sd=0.3)
    kl = algorithm.head.kl().item() / IMAGES
    shown = update(algorithm, batch())
    assert shown["kl"].item() == pytest.approx(kl)
    assert shown["median_v"].item() == pytest.approx(0.09)


@pytest.mark.parametrize("schedule", ["fused", "alternating"])
def test_a_frozen_generator_stays_random_and_the_model_learns_against_it_all_the_same(schedule):
    frozen, trained = (build(schedule=schedule, generator_lr=rate) for rate in (0.0, None))
    before = copy.deepcopy(frozen.generator.state_dict())
    gradients = []
    for algorithm in (frozen, trained):
        update(algorithm, batch())
        gradients.append([p.grad.clone() for p in algorithm.network.parameters()])
    assert all(torch.equal(value, before[key]) for key, value in frozen.generator.state_dict().items())
    assert "generator" not in frozen.optimizers
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_passes_count_what_goes_through_the_backbone():
    assert AGFA.passes(get("agfa").hparams({})) == 2
    assert AGFA.passes(get("agfa-bayes").hparams({})) == 1
