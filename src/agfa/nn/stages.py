"""Working on a backbone's feature maps on their way: four stages, for ResNets, EfficientNets and the ConvNet alike.

with after_stages(backbone, {1: mix, 2: mix}):
    features = backbone(x)          # `mix` has changed what stages 1 and 2 gave

maps = upto(backbone, 2, x)                     # or on their own: what stage 2 gives,
features = onward(backbone, 2, mix(maps), x)    # and what the backbone makes of such maps
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from agfa.errors import UsageError
from agfa.nn.backbones import Backbone, ConvNet
from agfa.nn.shares import in_even_shares, whole

STAGES = (1, 2, 3, 4)
FEATURES = 5  # for `upto` and `onward`: after all stages and the pooling, where the feature vector is

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
    compiled, backbone.compiled = backbone.compiled, None  # compiled code does not see hooks
    handles = [
        ends[stage].register_forward_hook(lambda module, given, maps, change=change: whole(change, maps))
        for stage, change in changes.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        backbone.compiled = compiled


class _ReachedError(Exception):
    """Ends a pass through the backbone at a stage; carries its maps."""


def upto(backbone: Backbone, stage: int, x: Tensor) -> Tensor:
    """The maps that `stage` gives for images x, in full precision; what follows the stage is not run."""
    if stage == FEATURES:
        return backbone(x)  # type: ignore[no-any-return]  # nn.Module's call is Any

    def stop(maps: Tensor) -> Tensor:
        raise _ReachedError(maps)

    try:
        with after_stages(backbone, {stage: stop}):
            backbone(x)
    except _ReachedError as reached:
        maps: Tensor = reached.args[0]
        return maps if maps.dtype == torch.float64 else maps.float()
    raise AssertionError(f"the pass did not come by stage {stage}")


def onward(backbone: Backbone, stage: int, maps: Tensor, x: Tensor) -> Tensor:
    """The features that the backbone makes of `maps`, as if `stage` had given them; x: images of the same size.

    Any backbone runs from its beginning, so one image (of each process) goes through the stages before; it leaves no
    trace in them.
    """
    if stage == FEATURES:
        return maps
    training = backbone.training

    def put(_: Tensor) -> Tensor:
        backbone.train(training)
        return maps

    try:
        with after_stages(backbone.eval(), {stage: put}):
            return backbone(x[: in_even_shares(len(maps))])  # type: ignore[no-any-return]
    finally:
        backbone.train(training)
