"""Stages of backbones: where they are, and that changing what they give changes what follows, and nothing after."""

from __future__ import annotations

import pytest
import torch

from agfa.errors import UsageError
from agfa.nn.backbones import build_backbone
from agfa.nn.stages import STAGES, after_stages, stage_channels, stages


@pytest.mark.parametrize(
    ("name", "channels"),
    [
        ("convnet", (64, 128, 128, 128)),
        ("resnet18", (64, 128, 256, 512)),
        ("efficientnet_lite0", (24, 40, 112, 320)),
        ("mobilenetv3_small_050", None),
    ],
)
def test_four_stages_each_coarser_than_the_one_before(name, channels):
    backbone = build_backbone(name, image_size=64, weights="none")
    found = stage_channels(backbone, (3, 64, 64))
    assert tuple(found) == STAGES
    if channels is not None:
        assert tuple(found.values()) == channels
    seen = []
    with after_stages(backbone, {k: lambda maps: seen.append(maps.shape[-1]) or maps for k in STAGES}):
        backbone(torch.rand(2, 3, 64, 64))
    assert len(seen) == 4
    assert seen == sorted(seen, reverse=True)


def test_resnets_stages_are_its_layers():
    backbone = build_backbone("resnet18", image_size=64, weights="none")
    assert list(stages(backbone).values()) == [getattr(backbone.body, f"layer{k}") for k in STAGES]


def test_a_change_reaches_the_features_and_ends_with_the_block():
    backbone = build_backbone("convnet", image_size=16, weights="none").eval()
    x = torch.rand(2, 3, 16, 16)
    before = backbone(x)
    with after_stages(backbone, {4: lambda maps: maps * 2}):
        torch.testing.assert_close(backbone(x), before * 2)
    assert torch.equal(backbone(x), before)
    with pytest.raises(ZeroDivisionError), after_stages(backbone, {1: lambda maps: 1 / 0}):
        backbone(x)
    assert torch.equal(backbone(x), before)


def test_looking_at_channels_leaves_the_backbone_as_it_was():
    backbone = build_backbone("resnet18", image_size=64, weights="none", freeze_batchnorm=False).train()
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    stage_channels(backbone, (3, 64, 64))
    assert backbone.training
    assert all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())


def test_a_backbone_without_stages_is_refused_in_one_line():
    backbone = build_backbone("vit_tiny_patch16_224", image_size=224, weights="none")
    with pytest.raises(UsageError, match=r"vit_tiny.* has no four convolutional stages.*convnet, ResNets") as caught:
        stages(backbone)
    assert "\n" not in str(caught.value)
