"""SagNet against its equations, and who learns what."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from agfa.algorithms import get
from agfa.algorithms.base import Problem, plain_backward
from agfa.algorithms.sagnet import EPS, randomise_content, randomise_style
from agfa.errors import UsageError
from agfa.nn.backbones import build_backbone
from support_methods import SIZES, batch, build, descents, in_bfloat16, resumed, slopes, update


def statistics(maps: np.ndarray) -> tuple[float, float]:
    """Mean and unbiased variance of one channel, or of a vector."""
    return maps.mean(), ((maps - maps.mean()) ** 2).sum() / (maps.size - 1)


@pytest.mark.parametrize("shape", [(5, 3, 4, 2), (4, 6)])
def test_randomisations_are_those_of_the_paper(shape):
    z = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3 + 1
    torch.manual_seed(5)
    styled = randomise_style(z)
    torch.manual_seed(5)
    share, other = torch.rand(len(z)).double().numpy(), torch.randperm(len(z)).tolist()
    torch.manual_seed(6)
    swapped = randomise_content(z)
    torch.manual_seed(6)
    another = torch.randperm(len(z)).tolist()
    channels = z.numpy().reshape(len(z), *((-1, z[0, 0].numel()) if z.ndim == 4 else (1, -1)))
    for i in range(len(z)):
        for c in range(channels.shape[1]):
            (mean, var), (mean_o, var_o), (mean_a, var_a) = (
                statistics(channels[j, c]) for j in (i, other[i], another[i])
            )
            m, s2 = (share[i] * a + (1 - share[i]) * b for a, b in ((mean, mean_o), (var, var_o)))
            wanted = np.sqrt(s2 + EPS) * (channels[i, c] - mean) / np.sqrt(var + EPS) + m
            found = styled.numpy().reshape(channels.shape)[i, c]
            np.testing.assert_allclose(found, wanted, rtol=1e-6)  # the share is drawn in float32
            content = (channels[another[i], c] - mean_a) / np.sqrt(var_a + EPS)
            found = swapped.numpy().reshape(channels.shape)[i, c]
            np.testing.assert_allclose(found, np.sqrt(var + EPS) * content + mean, rtol=1e-9)


def test_gradient_goes_to_the_style_and_not_to_the_content():
    """All contents being alike, what an image's own style gets is all that there is."""
    z = torch.randn(1, 3, 4, 2, dtype=torch.float64).repeat(4, 1, 1, 1).requires_grad_()
    upstream = torch.randn(4, 3, 4, 2, dtype=torch.float64)
    (found,) = torch.autograd.grad((randomise_content(z) * upstream).sum(), z)
    variance, mean = torch.var_mean(z, dim=(2, 3), keepdim=True)
    content = ((z - mean) / (variance + EPS).sqrt()).detach()
    (wanted,) = torch.autograd.grad(((content * (variance + EPS).sqrt() + mean) * upstream).sum(), z)
    torch.testing.assert_close(found, wanted)


def test_maps_of_one_place_have_no_spread_but_a_mean():
    z = torch.rand(4, 3, 1, 1)
    assert randomise_style(z).isfinite().all()
    torch.testing.assert_close(randomise_content(z), z)


def by_hand(algorithm, x, stage, change, style=False):
    """The tiny ConvNet layer by layer, `change` after the stage; from there the style network's layers, for style."""
    body, own = algorithm.network.backbone.body, algorithm.style_backbone
    out = (x - 0.5) / 0.5
    for i, layer in enumerate(body):
        out = (own.body[i] if style and stage < 5 and i >= 3 * stage else layer)(out)
        if i == 3 * stage - 1 and stage < 5:
            out = change(out)
    out = change(out) if stage == 5 else out
    return (algorithm.style_head if style else algorithm.network.head)(out)


@pytest.mark.parametrize("stage", [1, 2, 4, 5])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 3, 2), (5,)])
def test_a_step_is_the_three_of_the_equations_one_after_another(stage, sizes):
    algorithm = build("sagnet", len(sizes), lr=1e-2, stage=stage, strength=0.5)
    manual = copy.deepcopy(algorithm)
    adam = {
        name: torch.optim.Adam(part, lr=1e-2)
        for name, part in (
            ("f", manual.network.backbone.parameters()),
            ("c", manual.network.head.parameters()),
            ("s", [*manual.style_backbone.parameters(), *manual.style_head.parameters()]),
        )
    }

    def descend(loss, *players):
        manual.zero_grad()
        loss.backward()
        for player in players:
            adam[player].step()
        return loss.detach()

    for step in range(2):
        data = batch(sizes, seed=step)
        x, y, *_ = data
        shown = update(algorithm, data, step, seed=step)
        torch.manual_seed(step)
        wanted = {"nll": descend(F.cross_entropy(by_hand(manual, x, stage, randomise_style), y), "f", "c")}
        logits = by_hand(manual, x, stage, lambda z: randomise_content(z.detach()), style=True)
        wanted["style"] = descend(F.cross_entropy(logits, y), "s")
        logits = by_hand(manual, x, stage, randomise_content, style=True)
        loss = -0.5 * logits.softmax(1).log().mean()
        # through f alone: what the style network learns from this is thrown away
        wanted["adversary"] = descend(loss, "f") / 0.5
        for key, value in wanted.items():
            torch.testing.assert_close(shown[key], value)
    for (name, mine), other in zip(algorithm.named_parameters(), manual.parameters(), strict=True):
        torch.testing.assert_close(mine, other, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("stage", [2, 5])
def test_gradient_of_the_content_agrees_with_finite_differences(stage):
    by_gradient, by_differences = slopes(build("sagnet", stage=stage), batch(), descent=0)
    assert by_gradient == pytest.approx(by_differences, rel=1e-4)


def test_strength_zero_leaves_out_the_adversary_alone():
    algorithm, data = build("sagnet", strength=0), batch()
    assert len(descents(algorithm, data)) == 2
    assert len(descents(build("sagnet"), data)) == 3
    assert update(algorithm, data)["adversary"].isfinite()


def test_style_network_starts_as_a_copy_and_never_predicts():
    algorithm = build("sagnet")
    for own, main in zip(algorithm.style_backbone.parameters(), algorithm.network.backbone.parameters(), strict=True):
        assert own is not main
        assert torch.equal(own, main)
    wanted = algorithm.network(batch().images)
    for p in [*algorithm.style_backbone.parameters(), *algorithm.style_head.parameters()]:
        p.data.zero_()
    assert torch.equal(algorithm.network(batch().images), wanted)


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_lite0"])
@pytest.mark.parametrize("method", ["sagnet", "rsc"])
def test_works_on_other_backbones_and_leaves_their_hooks_as_they_were(name, method):
    backbone = build_backbone(name, image_size=32, weights="none").train()
    algorithm = get(method).method(backbone, Problem(3, 1, 40, (3, 32, 32)), get(method).hparams({"stage": 3}))
    data = batch((4,))._replace(images=torch.rand(4, 3, 32, 32))
    shown = update(algorithm, data)
    assert all(value.isfinite() for value in shown.values())
    assert backbone.training
    assert not any(module._forward_hooks for module in backbone.modules())


@pytest.mark.parametrize("method", ["sagnet", "rsc"])
def test_a_backbone_without_stages_is_refused_at_the_start_unless_features_are_meant(method):
    backbone = build_backbone("vit_tiny_patch16_224", image_size=224, weights="none")
    problem = Problem(3, 1, 40, (3, 224, 224))
    with pytest.raises(UsageError, match=r"vit_tiny.* has no four convolutional stages"):
        get(method).method(backbone, problem, get(method).hparams({"stage": 2}))
    get(method).method(backbone, problem, get(method).hparams({"stage": 5}))


@pytest.mark.parametrize("stage", [2, 5])
def test_resumes(stage):
    assert resumed("sagnet", batch(), steps=3, at=1, stage=stage)


@pytest.mark.parametrize("sizes", [*SIZES, (1, 1)])
def test_any_sizes(sizes):
    algorithm = build("sagnet", len(sizes))
    torch.manual_seed(0)
    shown = algorithm.update(batch(sizes), plain_backward)
    assert all(value.isfinite() for value in shown.values())


def test_autocast_changes_little():
    """Three passes with a step between each: none may use the weights of the one before."""
    plain, cast = in_bfloat16(build("sagnet", lr=3e-2), batch())
    for key in plain:
        assert cast[key].dtype == torch.float32
        assert cast[key].item() == pytest.approx(plain[key].item(), rel=0.05)
