"""MTL against its equation, and what it predicts by."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from agfa import load, train
from support_methods import SIZES, batch, build, descents, in_bfloat16, resumed, slopes, update


@pytest.mark.parametrize("sizes", [*SIZES, (5,)])
@pytest.mark.parametrize("ema", [1.0, 0.7])
def test_loss_of_two_steps_is_that_of_the_equation(sizes, ema):
    algorithm = build("mtl", len(sizes), ema=ema)
    stored = np.zeros((len(sizes), 32))
    for step in range(2):
        data = batch(sizes, seed=step)
        with torch.no_grad():
            phi = algorithm.network.backbone(data.images).numpy()
        weight, bias = (p.detach().numpy() for p in algorithm.network.head.parameters())
        wanted = 0.0
        for d in range(len(sizes)):
            mine = [i for i, of in enumerate(data.domains.tolist()) if of == d]
            stored[d] = ema * sum(phi[i] for i in mine) / len(mine) + (1 - ema) * stored[d]
            for i in mine:
                f = weight @ np.concatenate([phi[i], stored[d]]) + bias
                wanted += (math.log(np.exp(f).sum()) - f[data.labels[i]]) / len(mine) / len(sizes)
        assert update(algorithm, data, step)["nll"].item() == pytest.approx(wanted, rel=1e-9)
        np.testing.assert_allclose(algorithm.embeddings.numpy(), stored, rtol=1e-12)


def test_gradient_agrees_with_finite_differences_through_the_mean_too():
    by_gradient, by_differences = slopes(build("mtl", ema=0.7), batch())
    assert by_gradient == pytest.approx(by_differences, rel=1e-4)


def test_the_past_is_a_constant_and_shown_to_the_head():
    algorithm = build("mtl", ema=0.5)
    algorithm.embeddings.fill_(2.0)
    (descent,) = descents(algorithm, batch())
    algorithm.embeddings.fill_(0.0)
    (other,) = descents(algorithm, batch())
    assert descent.loss != other.loss
    assert not algorithm.embeddings.requires_grad


def test_predicts_by_the_mean_of_the_batch():
    network, data = build("mtl").network.eval(), batch()
    phi = network.backbone(data.images)
    wanted = network.head(torch.cat([phi, phi.mean(0, keepdim=True).repeat(len(phi), 1)], 1))
    torch.testing.assert_close(network(data.images), wanted)
    assert not torch.allclose(network(data.images[:2]), wanted[:2])
    alone = network(data.images[:1])
    torch.testing.assert_close(alone, network.head(phi[:1].repeat(1, 2)))


def test_resumes_with_its_embeddings():
    assert resumed("mtl", batch(), steps=4, at=2, ema=0.5)


def test_autocast_changes_little():
    plain, cast = in_bfloat16(build("mtl"), batch())
    assert cast["nll"].dtype == torch.float32
    assert cast["nll"].item() == pytest.approx(plain["nll"].item(), rel=0.05)


@pytest.mark.parametrize("name", ["mtl", "arm"])
def test_a_model_that_adapts_is_made_again_from_its_file(name: str, tiny: Any, quick: dict[str, Any]):
    run = train(data=str(tiny), target="sky", algorithm=name, averaging="swa", **quick)
    predictor = load(run.folder)
    assert type(predictor.network).__name__ in ("MarginalNetwork", "ContextNetwork")
    answers = predictor.predict(sorted((tiny / "sky").rglob("*.png"))[:5])
    assert all(abs(sum(answer.probabilities.values()) - 1) < 1e-5 for answer in answers)
