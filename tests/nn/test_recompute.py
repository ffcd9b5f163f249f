"""Recomputing activations: the same result to the last bit, from less memory."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from agfa.algorithms.base import Algorithm
from agfa.errors import UsageError
from agfa.nn.backbones import Backbone, build_backbone
from agfa.nn.exchange import Share
from agfa.nn.recompute import blocks, recompute_blocks
from agfa.nn.shares import sharing
from support_processes import build
from support_processes import train as steps


@pytest.mark.parametrize(
    ("name", "number", "kind"),
    [
        ("resnet18", 8, "BasicBlock"),
        ("resnet50", 16, "Bottleneck"),
        ("efficientnet_lite0", 16, "DepthwiseSeparableConv"),
        ("vit_tiny_patch16_224", 12, "Block"),
        ("convnext_atto", 12, "ConvNeXtBlock"),
        ("vgg11", 0, ""),
    ],
)
def test_blocks_of_many_backbones(name: str, number: int, kind: str) -> None:
    with torch.device("meta"):
        body = timm.create_model(name, num_classes=0)
    found = blocks(body)
    assert len(found) == number
    assert not found or type(found[0]).__name__ == kind
    ends = {body.get_submodule(info["module"]) for info in body.feature_info}
    assert not any(part in ends for block in found for part in list(block.modules())[1:])


def trained(algorithm: Algorithm) -> dict[str, Tensor]:
    steps(algorithm, algorithm.problem.image_shape[-1], (4, 4, 4), None)
    return algorithm.state_dict()


@pytest.mark.parametrize("name", ["agfa", "dmg", "dson", "erm", "mixstyle", "mldg", "rsc", "sagnet"])
def test_methods_end_with_the_same_bits(name: str) -> None:
    """With batch statistics and with dropout; through changes of feature maps, and virtual parameters."""
    plain = build(name, "resnet")
    for module in plain.network.backbone.body.modules():
        if hasattr(module, "drop_block"):
            module.drop_block = nn.Dropout(0.1)
    recomputed = copy.deepcopy(plain)
    assert recompute_blocks(recomputed.network.backbone.body) == 4
    expected = trained(plain)
    for key, value in trained(recomputed).items():
        assert torch.equal(value, expected[key]), key


def test_the_block_is_as_it_was_when_it_is_computed_anew() -> None:
    """Whatever has been put in the place of its parameters, and its mode, since then; and it stays as it is now."""
    body = build("erm", "resnet").network.backbone.body
    x = torch.rand(4, 1, 16, 16, dtype=torch.float64)
    virtual = {key: (p + 0.1).detach().requires_grad_() for key, p in body.named_parameters()}
    expected = torch.autograd.grad(
        torch.func.functional_call(copy.deepcopy(body), virtual, (x,)).square().sum(), list(virtual.values())
    )
    recompute_blocks(body)
    loss = torch.func.functional_call(body, virtual, (x,)).square().sum()
    statistics = copy.deepcopy(dict(body.named_buffers()))
    body.eval()
    for _ in range(2):  # and any number of times
        found = torch.autograd.grad(loss, list(virtual.values()), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert all(torch.equal(value, statistics[key]) for key, value in body.named_buffers())
    assert not any(module.training for module in body.modules())


def test_what_was_a_constant_is_one_when_it_is_computed_anew() -> None:
    body = build("erm", "resnet").network.backbone.body
    x = torch.rand(4, 1, 16, 16, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(body(x).square().sum(), x)
    recompute_blocks(body)
    body.requires_grad_(False)
    loss = body(x).square().sum()
    body.requires_grad_(True)
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def kept(backbone: Backbone, passes: int = 1) -> int:
    """Bytes that a pass keeps for its backward pass."""
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), sharing(Share(passes=passes)):
        backbone(torch.rand(8, 3, 64, 64))
    return sum(found.values()) - sum(p.nbytes for p in backbone.parameters())


def test_less_is_kept() -> None:
    """Beside what the block at work needs for a moment: docs/guide.md has peaks on a GPU."""
    backbone = build_backbone("resnet50", weights="none", freeze_batchnorm=True)
    plain, in_passes = kept(backbone), kept(backbone, 4)
    recompute_blocks(backbone.body)
    assert kept(backbone) < plain / 2
    assert in_passes < plain / 10


@pytest.mark.parametrize("passes", [2, 5, 12, 50])
@pytest.mark.parametrize("name", ["agfa", "coral", "irm", "mixup", "mldg", "mtl", "rsc"])
def test_passes_of_few_images_are_one_of_all(name: str, passes: int) -> None:
    """Whatever the loss, since it is of all features; to rounding."""
    plain, parted = build(name, "convnet"), build(name, "convnet")
    expected = trained(plain)
    train_in(parted, passes)
    for key, value in parted.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-9)


def train_in(algorithm: Algorithm, passes: int) -> None:
    steps(algorithm, algorithm.problem.image_shape[-1], (4, 4, 4), Share(passes=passes))


@pytest.mark.parametrize(
    ("name", "body", "match"),
    [
        ("mixstyle", "convnet", "works on feature maps of the whole minibatch"),
        ("dson", "convnet", "works on feature maps of the whole minibatch"),
        ("sagnet", "convnet", "works on feature maps of the whole minibatch"),
        ("arm", "convnet", "--accumulate never has the whole minibatch, whose statistics"),
        ("erm", "resnet", "--accumulate never has the whole minibatch, whose statistics"),
    ],
)
def test_what_needs_the_whole_minibatch_on_its_way_refuses(name: str, body: str, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        train_in(build(name, body), 2)
