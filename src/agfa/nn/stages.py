"""Working on a backbone's feature maps on their way: four stages, for ResNets, EfficientNets and the ConvNet alike.

with after_stages(backbone, {1: mix, 2: mix}):
    features = backbone(x)          # `mix` has changed what stages 1 and 2 gave
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from agfa.errors import UsageError
from agfa.nn.backbones import Backbone, ConvNet

STAGES = (1, 2, 3, 4)

Change = Callable[[Tensor], Tensor]  # of feature maps (n, C, H, W)


def stages(backbone: Backbone) -> dict[int, nn.Module]:
    """The module that ends each stage: ResNet's layer1 to layer4, the ConvNet's four blocks, and the like.

    Raises:
        UsageError: the backbone has no such stages.
    """
    body = backbone.body
    if isinstance(body, ConvNet):
        ends = [f"{3 * block + 2}" for block in range(4)]
    else:  # timm lists the modules after which the resolution halves; the first may be the stem
        ends = [info["module"] for info in getattr(body, "feature_info", [])][-4:]
        if len(ends) < 4 or not any(
            isinstance(module, nn.Conv2d) for module in body.get_submodule(ends[0]).modules()
        ):
            raise UsageError(
                f"{backbone.tag} has no four convolutional stages, which this method works on; "
                "convnet, ResNets and EfficientNets have them"
            )
    return {stage: body.get_submodule(end) for stage, end in zip(STAGES, ends, strict=True)}


def _is_convolutional(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Conv2d) for part in module.modules())


@torch.no_grad()
def stage_channels(backbone: Backbone, image_shape: tuple[int, int, int]) -> dict[int, int]:
    """How many channels the feature maps of each stage have."""
    seen: dict[int, int] = {}

    def look(stage: int) -> Change:
        def change(maps: Tensor) -> Tensor:
            if maps.ndim != 4:
                raise UsageError(f"{backbone.tag} has no feature maps (n, C, H, W) after stage {stage}")
            seen[stage] = maps.shape[1]
            return maps

        return change

    training = backbone.training
    with after_stages(backbone, {stage: look(stage) for stage in STAGES}):
        backbone.eval()(torch.zeros(1, *image_shape))
    backbone.train(training)
    return seen


@contextmanager
def after_stages(backbone: Backbone, changes: Mapping[int, Change]) -> Iterator[None]:
    """Change the feature maps that the stages give, for as long as the block lasts."""
    ends = stages(backbone)
    handles = [
        ends[stage].register_forward_hook(lambda module, given, maps, change=change: change(maps))
        for stage, change in changes.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
