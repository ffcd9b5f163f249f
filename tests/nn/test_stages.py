"""Stages of backbones: where they are, and that changing what they give changes what follows, and nothing after."""

from __future__ import annotations

import pytest
import torch

from agfa.errors import UsageError
from agfa.nn.backbones import build_backbone
from agfa.nn.stages import FEATURES, STAGES, after_stages, onward, stage_channels, stages, upto


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


@pytest.mark.parametrize("name", ["convnet", "resnet18", "efficientnet_lite0"])
@pytest.mark.parametrize("stage", [*STAGES, FEATURES])
def test_up_to_a_stage_and_onward_is_the_whole_way(name, stage):
    backbone = build_backbone(name, image_size=32, weights="none").eval()
    x = torch.rand(3, 3, 32, 32)
    maps = upto(backbone, stage, x)
    assert maps.shape[0] == 3
    assert maps.ndim == (2 if stage == FEATURES else 4)
    torch.testing.assert_close(onward(backbone, stage, maps, x), backbone(x))
    torch.testing.assert_close(onward(backbone, stage, maps[:2] * 2, x), onward(backbone, stage, maps * 2, x)[:2])
    assert not any(module._forward_hooks for module in backbone.modules())


def test_what_is_not_on_the_way_is_not_run():
    """Statistics of batch norm show what ran: those after the stage alone, those before it alone."""
    x = torch.rand(3, 3, 64, 64)
    for going, ran in ((upto, "before"), (onward, "after")):
        backbone = build_backbone("resnet18", image_size=64, weights="none").train()
        before = {key: value.clone() for key, value in backbone.state_dict().items()}
        maps = torch.rand(3, 128, 8, 8)
        going(backbone, 2, *((x,) if going is upto else (maps, x)))
        changed = {
            key.split(".")[1] for key, value in backbone.state_dict().items() if not torch.equal(value, before[key])
        }
        assert changed == ({"bn1", "layer1", "layer2"} if ran == "before" else {"layer3", "layer4"})
        assert backbone.training


def test_gradients_go_through_both_parts_and_nowhere_else():
    backbone = build_backbone("resnet18", image_size=32, weights="none")
    x = torch.rand(2, 3, 32, 32)
    whole = torch.autograd.grad(backbone(x).sum(), list(backbone.parameters()))
    parts = torch.autograd.grad(onward(backbone, 2, upto(backbone, 2, x), x).sum(), list(backbone.parameters()))
    torch.testing.assert_close(parts, whole)
    maps = upto(backbone, 2, x).detach()
    found = torch.autograd.grad(onward(backbone, 2, maps, x).sum(), list(backbone.parameters()), allow_unused=True)
    reached = {
        name.split(".")[1] for (name, _), g in zip(backbone.named_parameters(), found, strict=True) if g is not None
    }
    assert reached == {"layer3", "layer4"}
