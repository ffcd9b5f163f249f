"""A quickened network computes the same: features, gradients, names, and what it does while statistics move."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from agfa.nn import residual
from agfa.nn.backbones import Backbone, build_backbone
from agfa.nn.fast import quicken
from agfa.nn.fold import FoldedConv2d, fold_normalisations
from agfa.nn.residual import FUSED, StemConv2d, images_gradient
from agfa.nn.stages import after_stages

BACKBONES = ["resnet18", "resnet50", "efficientnet_lite0"]


def backbone(name: str, frozen: bool = True) -> Backbone:
    """A random one whose statistics and affine parts are not those of a start."""
    torch.manual_seed(0)
    made = build_backbone(name, 3, 32, "none", frozen)
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0, 0.1)
    return made


def gradients(made: Backbone, x: torch.Tensor) -> dict[str, torch.Tensor]:
    made.zero_grad()
    x = x.clone().requires_grad_()
    features = made(x)
    features.square().mean().backward()
    return {"x": x.grad, "features": features.detach()} | {k: p.grad.clone() for k, p in made.named_parameters()}


def differ(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / (other.norm() + 1e-12))


@pytest.mark.parametrize("name", BACKBONES)
def test_features_and_gradients_stay(name: str) -> None:
    plain = backbone(name)
    fast = copy.deepcopy(plain)
    quicken(fast)
    assert list(fast.state_dict()) == list(plain.state_dict())
    x = torch.rand(3, 3, 32, 32)
    wanted, found = gradients(plain, x), gradients(fast, x)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert differ(found[key], value) < 1e-4, key
    assert all(torch.equal(value, fast.state_dict()[key]) for key, value in plain.state_dict().items())


@pytest.mark.parametrize("name", BACKBONES[::2])
def test_folding_is_exact_in_double_precision(name: str) -> None:
    plain = backbone(name).double()
    fast = copy.deepcopy(plain)
    quicken(fast)
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    wanted, found = gradients(plain, x), gradients(fast, x)
    assert all(differ(found[key], value) < 1e-10 for key, value in wanted.items())


@pytest.mark.parametrize("name", BACKBONES[::2])
def test_under_autocast_it_is_as_near_to_full_precision_as_the_plain_one(name: str) -> None:
    plain = backbone(name)
    fast = copy.deepcopy(plain)
    quicken(fast)
    x = torch.rand(4, 3, 32, 32)
    exact = gradients(plain, x)
    with torch.autocast("cpu", torch.bfloat16):
        one, other = gradients(plain, x), gradients(fast, x)
    for key in ("features", "x", "body.conv1.weight" if "resnet" in name else "body.conv_stem.weight"):
        assert differ(other[key], exact[key]) < max(0.02, 1.5 * differ(one[key], exact[key])), key


def test_everything_is_folded_and_fused() -> None:
    folded = {"resnet18": 20, "resnet50": 53, "efficientnet_lite0": 49}
    for name, count in folded.items():
        made = backbone(name)
        assert fold_normalisations(made.body) == count
    fast = backbone("resnet50")
    quicken(fast)
    assert sum(type(module) in FUSED.values() for module in fast.modules()) == 16
    assert fast.body.conv1.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_lite0"])
def test_statistics_that_follow_the_batch_still_do(name: str) -> None:
    plain = backbone(name, frozen=False).double()
    fast = copy.deepcopy(plain)
    quicken(fast)
    x = torch.rand(4, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(fast.train()(x), plain.train()(x))
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(fast.state_dict()[key], value)
    torch.testing.assert_close(fast.eval()(x), plain.eval()(x))


def test_a_copy_is_a_backbone_of_its_own() -> None:
    fast = backbone("resnet18")
    quicken(fast)
    other = copy.deepcopy(fast)
    convolution = other.body.layer1[0].conv1
    assert isinstance(convolution, FoldedConv2d)
    assert convolution.norm[0] is other.body.layer1[0].bn1
    x = torch.rand(1, 3, 32, 32)
    before = fast(x)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(fast(x), before)


def test_constant_weights_get_no_gradient_and_images_the_same() -> None:
    fast = backbone("resnet50")
    quicken(fast)
    x = torch.rand(2, 3, 32, 32)
    wanted = gradients(fast, x)["x"]
    fast.zero_grad()
    fast.requires_grad_(False)
    x.requires_grad_()
    fast(x).square().mean().backward()
    torch.testing.assert_close(x.grad, wanted)
    assert all(parameter.grad is None for parameter in fast.parameters())


class Branches(nn.Module):
    """A convolution that feeds more than its normalisation, and a flow that depends on the input."""

    def __init__(self, traced: bool) -> None:
        super().__init__()
        self.conv, self.bn, self.traced = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), traced

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.traced and x.sum() < 0:
            return x
        maps = self.conv(x)
        return self.bn(maps) + maps


@pytest.mark.parametrize("traced", [True, False])
def test_what_cannot_be_folded_is_left_alone(traced: bool) -> None:
    body = Branches(traced)
    assert fold_normalisations(body) == 0
    assert type(body.conv) is nn.Conv2d


def test_a_body_that_cannot_be_compiled_runs_as_it_is_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(body: nn.Module, **_: object) -> object:
        def run(x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no compiler\nto be found")

        return run

    monkeypatch.setattr(torch, "compile", refuse)
    made, said = build_backbone("convnet", 3, 16, "none"), []
    x = torch.rand(2, 3, 16, 16)
    wanted = made(x)
    quicken(made, compiled=True, say=said.append)
    torch.testing.assert_close(made(x), wanted)
    made(x)
    assert said == ["the backbone cannot be compiled and runs as it is: no compiler"]


def test_compiled_code_is_for_training_steps_that_nobody_watches() -> None:
    made, seen = build_backbone("convnet", 3, 16, "none"), []
    body = made.body
    made.compiled = lambda x: (seen.append("compiled"), body(x))[1]
    x = torch.rand(2, 3, 16, 16)
    made(x)
    with torch.no_grad():
        made(x)
    with after_stages(made, {1: lambda maps: maps}):
        made(x)
    made(x)
    assert seen == ["compiled", "compiled"]


@pytest.mark.parametrize(("kernel", "side"), [(1, 8), (3, 8), (3, 32), (5, 14), (7, 12), (7, 32), (9, 16)])
def test_the_images_gradient_is_the_convolutions(kernel: int, side: int) -> None:
    x = torch.randn(2, 3, side, side + 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 3, kernel, kernel, dtype=torch.float64)
    maps = torch.conv2d(x, weight, stride=2, padding=kernel // 2)
    gradient = torch.randn_like(maps)
    (want,) = torch.autograd.grad(maps, x, gradient)
    torch.testing.assert_close(images_gradient(gradient, weight), want)


@pytest.mark.parametrize("side", [63, 64])
def test_images_of_odd_sides_have_the_usual_stem(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, packed = backbone("resnet18"), []
    fast = copy.deepcopy(plain)
    quicken(fast)
    assert [type(part) is StemConv2d for part in fast.modules()].count(True) == 1

    def noted(*given: torch.Tensor) -> torch.Tensor:
        packed.append(side)
        return images_gradient(*given)

    monkeypatch.setattr(residual, "images_gradient", noted)
    x = torch.rand(2, 3, side, side)
    wanted, found = gradients(plain, x), gradients(fast, x)
    assert len(packed) == (side == 64)
    for key in ("x", "body.conv1.weight", "body.bn1.bias"):
        assert differ(found[key], wanted[key]) < 1e-4, key
