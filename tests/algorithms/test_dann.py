"""DANN and CDANN against their equations in numpy, and their turns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agfa.data.batches import Batch
from support_methods import (
    CLASSES,
    SIZES,
    batch,
    build,
    descents,
    erm_gradients,
    in_bfloat16,
    resumed,
    slopes,
    update,
)

SMALL = {"width": 6, "depth": 3}


def transcribed(algorithm, data: Batch) -> tuple[float, float]:
    """The cross-entropy of the classes, and L_d with its penalty, image by image, layer by layer."""
    h = algorithm.hparams
    with torch.no_grad():
        phi = algorithm.network.backbone(data.images).numpy()
        logits = algorithm.network(data.images).numpy()
    conditional = algorithm.name == "cdann"
    network = algorithm.discriminator["domains"] if conditional else algorithm.discriminator
    parameters = [p.detach().numpy() for p in network.parameters()]
    labels, domains, n = data.labels.tolist(), data.domains.tolist(), len(phi)
    nll = sum(math.log(np.exp(f).sum()) - f[y] for f, y in zip(logits, labels, strict=True)) / n

    loss = penalty = 0.0
    for i in range(n):
        z = phi[i] + algorithm.discriminator["classes"].weight[labels[i]].detach().numpy() if conditional else phi[i]
        inputs, out = [], z
        for k in range(0, len(parameters), 2):
            inputs.append(out)
            out = parameters[k] @ out + parameters[k + 1]
            if k < len(parameters) - 2:
                out = np.maximum(out, 0)
        p = np.exp(out) / np.exp(out).sum()
        weight = 1 / (len(set(labels)) * labels.count(labels[i])) if conditional else 1 / n
        loss -= weight * math.log(p[domains[i]])
        gradient = p - np.eye(len(p))[domains[i]]
        for k in reversed(range(0, len(parameters), 2)):
            gradient = parameters[k].T @ gradient
            if k:
                gradient = gradient * (inputs[k // 2] > 0)
        penalty += (gradient**2).sum() / n
    return nll, loss + h.gradient_penalty * penalty


@pytest.mark.parametrize("name", ["dann", "cdann"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_losses_of_both_turns_are_those_of_the_equations(name, sizes, penalty):
    data = batch(sizes)
    if name == "cdann":  # a class is absent from the batch
        data = data._replace(labels=data.labels.clamp(min=1))
    algorithm = build(name, len(sizes), strength=0.3, gradient_penalty=penalty, **SMALL)
    nll, loss = transcribed(algorithm, data)
    for step, descended in ((0, nll - 0.3 * loss), (1, loss)):
        (descent,) = descents(algorithm, data, step)
        assert descent.loss == pytest.approx(descended, rel=1e-9)
    shown = update(algorithm, data)
    assert (shown["nll"].item(), shown["discriminator"].item()) == pytest.approx((nll, loss), rel=1e-9)


@pytest.mark.parametrize("name", ["dann", "cdann"])
@pytest.mark.parametrize("penalty", [0.0, 0.7])
def test_gradient_agrees_with_finite_differences(name, penalty):
    by_gradient, by_differences = slopes(build(name, gradient_penalty=penalty, **SMALL), batch())
    assert by_gradient == pytest.approx(by_differences, rel=1e-4)


@pytest.mark.parametrize("name", ["dann", "cdann"])
def test_strength_zero_has_erms_gradient(name):
    algorithm, data = build(name, strength=0, **SMALL), batch()
    (descent,) = descents(algorithm, data)
    for mine, wanted in zip(descent.gradients, erm_gradients(algorithm, data), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("name", ["dann", "cdann"])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_one_step_of_the_model_in_each_round_and_k_of_the_discriminator(name, k):
    """Each turn moves its own player alone; DomainBed counts steps from 1."""
    algorithm, turns = build(name, discriminator_steps=k, **SMALL), []
    for step in range(2 * (k + 1)):
        before = {key: value.clone() for key, value in algorithm.state_dict().items()}
        update(algorithm, batch(seed=step), step)
        moved = {key.split(".")[0] for key, v in algorithm.state_dict().items() if not torch.equal(v, before[key])}
        assert len(moved) == 1
        turns += moved
    assert turns == ["network" if (step + 1) % (k + 1) >= k else "discriminator" for step in range(2 * (k + 1))]
    assert turns.count("network") == 2


def test_class_embeddings_learn_with_the_discriminator():
    algorithm = build("cdann", **SMALL)
    before = algorithm.discriminator["classes"].weight.detach().clone()
    update(algorithm, batch(), step=1)
    assert (algorithm.discriminator["classes"].weight != before).any(1).all()
    assert before.shape == (CLASSES, 32)


def test_discriminator_has_its_own_rate_decay_and_moments():
    given = {"lr": 1e-3, "discriminator_lr": 1e-4, "weight_decay": 0.1, "discriminator_weight_decay": 0.2}
    optimizers = build("dann", beta1=0.25, **given).optimizers
    for name, lr, decay in (("model", 1e-3, 0.1), ("discriminator", 1e-4, 0.2)):
        (group,) = optimizers[name].param_groups
        assert (group["lr"], group["weight_decay"], group["betas"]) == (lr, decay, (0.25, 0.9))
    assert build("dann", lr=1e-3).optimizers["discriminator"].param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("name", ["dann", "cdann"])
def test_resumes_between_turns(name):
    assert resumed(name, batch(), steps=4, at=1, dropout=0.5, discriminator_steps=2, **SMALL)


@pytest.mark.parametrize("step", [0, 1])
def test_autocast_changes_little(step):
    plain, cast = in_bfloat16(build("cdann", gradient_penalty=0.5, **SMALL), batch(), step)
    for key in plain:
        assert cast[key].dtype == torch.float32
        assert cast[key].item() == pytest.approx(plain[key].item(), rel=0.05)
