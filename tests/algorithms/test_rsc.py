"""RSC against its equations in numpy, on vectors and on maps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agfa.algorithms.rsc import largest, relevance
from support_methods import SIZES, batch, build, descents, erm_gradients, in_bfloat16, resumed, slopes, update


def softmax(f: np.ndarray) -> np.ndarray:
    return np.exp(f) / np.exp(f).sum()


def transcribed(algorithm, data, mode: str) -> float:
    """Equations (1) to (5), image by image; `mode`: what is muted, of vectors or of the last maps."""
    h, n = algorithm.hparams, len(data.labels)
    backbone, head = algorithm.network.backbone, algorithm.network.head
    with torch.no_grad():
        maps = torch.nn.Sequential(*list(backbone.body)[:12])((data.images - 0.5) / 0.5).numpy()
    weight, bias = head.weight.detach().numpy(), head.bias.detach().numpy()
    z = maps.mean((2, 3), keepdims=True) if mode == "vector" else maps
    places, labels = z[0, 0].size, data.labels.tolist()

    def logits(of: np.ndarray) -> np.ndarray:
        return weight @ of.mean((1, 2)) + bias

    masks, changes = [], []
    for i, y in enumerate(labels):
        g = np.broadcast_to((weight[y] / places)[:, None, None], z[i].shape)  # (1): h is a mean over places and W
        if mode == "places":
            score = (z[i] * g.mean((1, 2), keepdims=True)).sum(0, keepdims=True)
        else:
            score = g.mean((1, 2), keepdims=True)
        threshold = np.percentile(score, 100 * (1 - h.drop))
        masks.append(np.broadcast_to(score < threshold, z[i].shape))  # (2)
        changes.append(softmax(logits(z[i]))[y] - softmax(logits(z[i] * masks[i]))[y])  # (3-4), section 3.3
    threshold = np.percentile(changes, 100 * (1 - h.batch))
    loss = 0.0
    for i, y in enumerate(labels):
        mask = np.ones_like(z[i]) if changes[i] < threshold else masks[i]
        loss -= np.log(softmax(logits(z[i] * mask))[y]) / n  # (5)
    return loss


@pytest.mark.parametrize("sizes", [*SIZES, (7,)])
@pytest.mark.parametrize("shares", [(0.3, 0.3), (0.45, 0.27)])  # no rank at a threshold
def test_loss_on_vectors_is_that_of_the_equations(sizes, shares):
    algorithm, data = build("rsc", len(sizes), drop=shares[0], batch=shares[1]), batch(sizes)
    wanted = transcribed(algorithm, data, "vector")
    assert update(algorithm, data)["nll"].item() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_loss_on_maps_mutes_channels_or_places(seed):
    algorithm, data = build("rsc", stage=4, drop=0.41, batch=0.41), batch()
    torch.manual_seed(seed)
    mode = "channels" if torch.rand(()) < 0.5 else "places"
    wanted = transcribed(algorithm, data, mode)
    assert update(algorithm, data, seed=seed)["nll"].item() == pytest.approx(wanted, rel=1e-9)


def test_both_coins_are_tossed():
    z = torch.rand(2, 3, 4, 4)
    shapes = {tuple(relevance(z, z).shape) for _ in range(40)}
    assert shapes == {(2, 3, 1, 1), (2, 1, 4, 4)}


@pytest.mark.parametrize("n", [5, 12, 31])
@pytest.mark.parametrize("share", [0.0, 0.2, 1 / 3, 0.5, 1.0])
def test_largest_marks_the_share_of_each_row(n, share):
    values = torch.rand(4, n)
    marked = largest(values, share)
    assert (marked.sum(1) <= round(share * n + 0.5)).all()
    assert (marked.sum(1) >= share * (n - 1) - 1e-9).all()
    for row, mark in zip(values, marked, strict=True):
        assert not mark.any() or row[mark].min() > row[~mark].max()


@pytest.mark.parametrize("stage", [3, 5])
@pytest.mark.parametrize("none", ["drop", "batch"])
def test_nothing_muted_has_erms_gradient(stage, none):
    algorithm, data = build("rsc", stage=stage, **{none: 0}), batch()
    (descent,) = descents(algorithm, data)
    for mine, wanted in zip(descent.gradients, erm_gradients(algorithm, data), strict=True):
        assert torch.equal(mine, wanted)
    (muted,) = descents(build("rsc", stage=stage), data)
    assert not torch.equal(muted.gradients[-1], descent.gradients[-1])


@pytest.mark.parametrize("stage", [2, 5])
def test_gradient_agrees_with_finite_differences(stage):
    by_gradient, by_differences = slopes(build("rsc", stage=stage), batch())
    assert by_gradient == pytest.approx(by_differences, rel=1e-4)


@pytest.mark.parametrize("stage", [2, 5])
def test_resumes(stage):
    assert resumed("rsc", batch(), steps=3, at=1, stage=stage)


@pytest.mark.parametrize("stage", [4, 5])
def test_autocast_changes_little(stage):
    plain, cast = in_bfloat16(build("rsc", stage=stage), batch())
    assert cast["nll"].dtype == torch.float32
    assert cast["nll"].item() == pytest.approx(plain["nll"].item(), rel=0.1)
