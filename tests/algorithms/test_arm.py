"""ARM against its equation, and what it predicts by."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from agfa.algorithms import get
from agfa.algorithms.base import Problem
from agfa.nn.backbones import build_backbone
from support_methods import SIZES, batch, build, in_bfloat16, resumed, slopes, update


def transcribed_context(network, images):
    """c of each image, in training: batch norm over the whole minibatch, by hand."""
    out = (images - 0.5) / 0.5
    for layer in network.context:
        if isinstance(layer, torch.nn.Conv2d):
            out = F.conv2d(out, layer.weight, layer.bias, padding=2)
        elif isinstance(layer, torch.nn.BatchNorm2d):
            mean = out.mean((0, 2, 3), keepdim=True)
            out = (out - mean) / ((out - mean).square().mean((0, 2, 3), keepdim=True) + layer.eps).sqrt()
            out = out * layer.weight.view(-1, 1, 1) + layer.bias.view(-1, 1, 1)
        else:
            out = out.clamp(min=0)
    return out


@pytest.mark.parametrize("sizes", [*SIZES, (5,)])
def test_loss_of_a_step_is_that_of_the_equation(sizes):
    algorithm, data = build("arm", len(sizes)), batch(sizes)
    network, wanted = copy.deepcopy(algorithm.network), 0.0
    with torch.no_grad():
        contexts = transcribed_context(network, data.images)
        for i, d in enumerate(data.domains.tolist()):
            mean = sum(contexts[j] for j, of in enumerate(data.domains.tolist()) if of == d) / sizes[d]
            x = torch.cat([(data.images[i] - 0.5) / 0.5, mean])  # the context is not normalised
            f = network.head(network.backbone.body(x.unsqueeze(0)))[0].numpy()
            wanted += (math.log(np.exp(f).sum()) - f[data.labels[i]]) / len(data.labels)
    assert update(algorithm, data)["nll"].item() == pytest.approx(wanted, rel=1e-9)


def test_gradient_agrees_with_finite_differences():
    by_gradient, by_differences = slopes(build("arm"), batch())
    assert by_gradient == pytest.approx(by_differences, rel=1e-4)


def test_context_network_learns():
    algorithm = build("arm")
    before = [p.detach().clone() for p in algorithm.network.context.parameters()]
    update(algorithm, batch())
    moved = [not torch.equal(p, q) for p, q in zip(algorithm.network.context.parameters(), before, strict=True)]
    assert all(moved)


def test_predicts_by_the_batch_as_one_group():
    network, data = build("arm").network.eval(), batch()
    everything = network(data.images)
    torch.testing.assert_close(everything, network.head(network.features(data.images, (len(data.images),))))
    assert not torch.allclose(everything[:2], network(data.images[:2]))
    torch.testing.assert_close(everything.flip(0), network(data.images.flip(0)))


@pytest.mark.parametrize("name", ["convnet", "resnet18", "efficientnet_lite0", "vit_tiny_patch16_224"])
def test_any_backbone_takes_the_context(name):
    size = 224 if name.startswith("vit") else 32
    backbone = build_backbone(name, image_size=size, weights="none")
    plain = copy.deepcopy(backbone).eval()
    problem = Problem(3, 1, 40, (3, size, size))
    network = get("arm").method.make_network(backbone, problem, get("arm").hparams({})).eval()
    x = torch.rand(2, 3, size, size)
    assert network(x).shape == (2, 3)
    first = next(m for m in network.backbone.modules() if isinstance(m, torch.nn.Conv2d))
    assert torch.equal(first.weight[:, 3], first.weight[:, 0])
    first.weight.data[:, 3] = 0  # without the context it is the backbone it was
    torch.testing.assert_close(network.features(x), plain(x))


def test_resumes_with_the_statistics_of_its_context_network():
    assert resumed("arm", batch(), steps=4, at=2)


def test_autocast_changes_little():
    plain, cast = in_bfloat16(build("arm"), batch())
    assert cast["nll"].dtype == torch.float32
    assert cast["nll"].item() == pytest.approx(plain["nll"].item(), rel=0.05)
