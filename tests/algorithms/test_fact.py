"""FACT against its equation, image by image, and its teacher against the recursion of the authors' code."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from agfa.algorithms import get
from agfa.algorithms.base import Problem, plain_backward
from agfa.nn.backbones import build_backbone
from support_methods import (
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


def apart(algorithm):
    """The algorithm with a teacher of another opinion: at the start it has none of its own."""
    torch.manual_seed(5)
    with torch.no_grad():
        for p in algorithm.teacher.parameters():
            p += 0.3 * torch.randn_like(p)
    return algorithm


def softmax(f: np.ndarray) -> np.ndarray:
    return np.exp(f) / np.exp(f).sum()


def transcribed(algorithm, data, step: int, seed: int = 3) -> tuple[float, float, float]:
    """The cross-entropy, the consistency, and the loss of a step."""
    h, n = algorithm.hparams, len(data.images)
    torch.manual_seed(seed)
    mixed = algorithm.mixed(data.images)
    with torch.no_grad():
        own, theirs = (
            [f(images).numpy() for images in (data.images, mixed)] for f in (algorithm.network, algorithm.teacher)
        )
    nll = consistency = 0.0
    for i, label in enumerate(data.labels.tolist()):
        nll -= sum(math.log(softmax(f[i])[label]) for f in own) / (2 * n)
        for view in (0, 1):
            q, p = softmax(theirs[1 - view][i] / h.temperature), softmax(own[view][i] / h.temperature)
            consistency += sum(a * math.log(a / b) for a, b in zip(q, p, strict=True)) / n
    passed = min(step / (h.warmup * algorithm.problem.steps), 1)
    return nll, consistency, nll + h.consistency * math.exp(-5 * (1 - passed) ** 2) * consistency


@pytest.mark.parametrize("sizes", [*SIZES, (1,), (5,)])
@pytest.mark.parametrize(("step", "given"), [(0, {}), (2, {"warmup": 0.5, "temperature": 2, "alpha": 0.3}), (9, {})])
def test_loss_is_that_of_the_equation(sizes, step, given):
    algorithm, data = apart(build("fact", len(sizes), **given)), batch(sizes)
    nll, consistency, loss = transcribed(algorithm, data, step)
    assert consistency > 1e-4
    assert descents(algorithm, data, step)[0].loss == pytest.approx(loss, rel=1e-9)
    shown = update(algorithm, data, step)
    assert (shown["nll"].item(), shown["consistency"].item()) == pytest.approx((nll, consistency), rel=1e-9)


@pytest.mark.parametrize("sizes", SIZES)
def test_gradient_agrees_with_finite_differences(sizes):
    algorithm = apart(build("fact", len(sizes), consistency=200, warmup=0))
    slope, wanted = slopes(algorithm, batch(sizes))
    assert slope == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("sizes", SIZES)
def test_without_alpha_and_consistency_the_gradient_is_that_of_erm(sizes):
    """To the last rounding, as for Amp-Mixup; without consistency alone it is Amp-Mixup's, to the bit."""
    data = batch(sizes)
    algorithm = apart(build("fact", len(sizes), alpha=0, consistency=0))
    for gradient, wanted in zip(descents(algorithm, data)[0].gradients, erm_gradients(algorithm, data), strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-14)
    ours = descents(apart(build("fact", len(sizes), consistency=0)), data)[0]
    theirs = descents(build("ampmixup", len(sizes)), data)[0]
    assert all(map(torch.equal, ours.gradients, theirs.gradients))
    assert not any(
        map(torch.equal, descents(apart(build("fact", len(sizes))), data, 9)[0].gradients, theirs.gradients)
    )


def test_consistency_rises_to_its_weight_and_stays():
    algorithm = build("fact", consistency=3, warmup=0.5)  # of 10 steps
    weights = []
    for algorithm.step in range(10):
        weights.append(algorithm.weight())
    assert weights[:5] == pytest.approx([3 * math.exp(-5 * (1 - t / 5) ** 2) for t in range(5)])
    assert weights[5:] == [3] * 5
    assert build("fact", warmup=0).weight() == 2


@pytest.mark.parametrize("momentum", [0.0, 0.7, 0.9995, 1.0])
def test_teacher_follows_the_network_by_the_recursion(momentum):
    """m is 1/2, 2/3, 3/4, ... until it is `momentum`; nothing but this moves the teacher."""
    algorithm, data = build("fact", momentum=momentum), batch()
    wanted = [p.detach().clone() for p in algorithm.network.parameters()]
    for found, start in zip(algorithm.teacher.parameters(), wanted, strict=True):
        assert torch.equal(found, start)
    for step in range(6):
        update(algorithm, data, step, seed=step)
        m = min(momentum, 1 - 1 / (step + 2))
        wanted = [m * w + (1 - m) * p.detach() for w, p in zip(wanted, algorithm.network.parameters(), strict=True)]
        for found, value in zip(algorithm.teacher.parameters(), wanted, strict=True):
            torch.testing.assert_close(found, value, rtol=1e-12, atol=1e-14)
    assert all(p.grad is None and not p.requires_grad for p in algorithm.teacher.parameters())
    trained = {p for o in algorithm.optimizers.values() for group in o.param_groups for p in group["params"]}
    assert trained == set(algorithm.network.parameters())


@pytest.mark.parametrize("frozen", [True, False])
def test_batch_norm_statistics_are_the_teachers_own_or_frozen(frozen):
    torch.manual_seed(0)
    backbone = build_backbone("resnet18", image_size=32, weights="none", freeze_batchnorm=frozen)
    recipe = get("fact")
    algorithm = recipe.method(backbone, Problem(3, 2, 40, (3, 32, 32), 4), recipe.hparams({"lr": 1e-2})).train()
    data = batch((4, 4))._replace(images=torch.rand(8, 3, 32, 32))
    before = copy.deepcopy(dict(algorithm.teacher.named_buffers()))
    for step in range(2):
        update(algorithm, data, step)
    after = dict(algorithm.teacher.named_buffers())
    moved = {key.rsplit(".", 1)[1] for key, value in after.items() if not torch.equal(value, before[key])}
    assert moved == (set() if frozen else {"running_mean", "running_var", "num_batches_tracked"})
    theirs = dict(algorithm.network.named_buffers())
    assert all(torch.equal(value, theirs[key]) for key, value in after.items()) == frozen


def test_the_network_predicts_and_not_the_teacher():
    """As in the authors' code; only it is averaged and shipped."""
    algorithm, data = apart(build("fact")), batch()
    assert not any(key.startswith("teacher") for key in algorithm.network.state_dict())
    assert any(key.startswith("teacher") for key in algorithm.state_dict())
    assert not torch.allclose(algorithm.network(data.images), algorithm.teacher(data.images))


def test_resumes_with_its_teacher():
    assert resumed("fact", batch(), steps=4, at=2, momentum=0.6)


def test_two_processes_have_one_teacher():
    """It needs nothing sent: after a joint step the networks are the same, and so are the teachers."""
    algorithm, halves = build("fact"), [batch((2, 2, 2), seed) for seed in (1, 2)]
    gradients = []

    def noted(loss, parameters):
        parameters = list(parameters)
        plain_backward(loss, parameters)
        gradients.append([p.grad.clone() for p in parameters])

    def joint(loss, parameters):
        for p, *each in zip(parameters, *gradients, strict=True):
            p.grad = sum(each) / len(each)

    for seed, half in enumerate(halves):
        torch.manual_seed(seed)
        copy.deepcopy(algorithm).update(half, noted)
    ranks = [copy.deepcopy(algorithm) for _ in halves]
    for seed, (rank, half) in enumerate(zip(ranks, halves, strict=True)):
        torch.manual_seed(seed)
        rank.update(half, joint)
    for key, value in ranks[0].state_dict().items():
        assert torch.equal(value, ranks[1].state_dict()[key]), key


def test_autocast_changes_little():
    plain, cast = in_bfloat16(apart(build("fact", warmup=0)), batch((16, 16, 16)))
    assert {value.dtype for value in cast.values()} == {torch.float32}
    torch.testing.assert_close(cast["nll"], plain["nll"], rtol=0.02, atol=0)
    torch.testing.assert_close(cast["consistency"], plain["consistency"], rtol=0.1, atol=0)


def test_defaults_are_those_of_the_authors_code():
    h = get("fact").hparams({})
    assert (h.alpha, h.ratio, h.consistency, h.temperature, h.momentum, h.warmup) == (1, 1, 2, 10, 0.9995, 0.1)
    assert (get("fact+swad").method.name, get("fact+swad").averaging) == ("fact", "swad")
    assert get("Amp-Mixup").method.name == "ampmixup"
    assert get("ampmixup+swad").averaging == "swad"
