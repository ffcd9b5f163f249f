"""ResNet's blocks on a CPU: shift, shortcut and ReLU inside the convolutions.

A CPU spends almost half of a step reading and writing maps between the convolutions. oneDNN adds the bias and the
shortcut and takes the ReLU while a convolution writes its result; here are the gradients that go with that. Where the
block begins with a 1x1 convolution, its input's gradient is a matrix product that adds the shortcut's on its way.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn

from agfa.nn.fold import FoldedConv2d, folded


def fuse_blocks(body: nn.Module) -> int:
    """Let every plain ResNet block with folded normalisations be done fused; returns how many there are.

    A first convolution of stride 2 gets a faster way to its images' gradient.
    """
    for convolution in [part for part in body.modules() if type(part) is FoldedConv2d and _is_stem(part)]:
        convolution.__class__ = StemConv2d
    plain = [block for block in body.modules() if type(block) in FUSED and _is_plain(block)]
    for block in plain:
        block.__class__ = FUSED[type(block)]
    return len(plain)


def _is_plain(block: nn.Module) -> bool:
    """Whether it is convolutions, folded normalisations, ReLUs and a shortcut, and nothing else."""
    convolutions = [module for module in block.modules() if isinstance(module, nn.Conv2d)]
    others = [
        module
        for name, module in block.named_modules()
        if not list(module.children()) and not isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.Identity))
    ]
    return not others and block.drop_path is None and all(isinstance(module, FoldedConv2d) for module in convolutions)


class FusedBasicBlock(BasicBlock):
    """Two convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        """The block's maps."""
        if not _usable(x, self.conv1):
            return super().forward(x)
        maps, x = _convolve(self.conv1, x, relu=True, fork=True)
        shortcut = x if self.downsample is None else self.downsample(x)
        return _convolve(self.conv2, maps, relu=True, shortcut=shortcut)[0]


class FusedBottleneck(Bottleneck):
    """Three convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        """The block's maps."""
        if not _usable(x, self.conv1):
            return super().forward(x)
        maps, x = _convolve(self.conv1, x, relu=True, fork=True)
        shortcut = x if self.downsample is None else self.downsample(x)
        maps, _ = _convolve(self.conv2, maps, relu=True)
        return _convolve(self.conv3, maps, relu=True, shortcut=shortcut)[0]


FUSED: dict[type, type] = {BasicBlock: FusedBasicBlock, Bottleneck: FusedBottleneck}


class StemConv2d(FoldedConv2d):
    """The convolution that is given the images."""

    def forward(self, x: Tensor) -> Tensor:
        """The normalised maps."""
        if not _usable(x, self) or x.shape[-1] % 2 or x.shape[-2] % 2:
            return super().forward(x)
        weight, bias = (t.to(_dtype(x)) for t in folded(self, self.norm[0]))
        maps: Tensor = _Stem.apply(x.to(_dtype(x)), weight, bias, self.padding)
        return maps


def _is_stem(convolution: nn.Conv2d) -> bool:
    """Whether it takes few channels and halves the sides."""
    k = convolution.kernel_size[0]
    plain = convolution.groups == 1 and convolution.dilation == (1, 1) and convolution.padding_mode == "zeros"
    halves = convolution.kernel_size == (k, k) and convolution.padding == (k // 2, k // 2) and k % 2 == 1
    return plain and halves and convolution.stride == (2, 2) and convolution.in_channels <= 4


def _usable(x: Tensor, convolution: nn.Conv2d) -> bool:
    """Whether oneDNN can do it: on a CPU, in its precisions, with frozen statistics."""
    assert isinstance(convolution, FoldedConv2d)
    if (
        x.device.type != "cpu"
        or convolution.norm[0].training
        or not hasattr(torch.ops.mkldnn, "_convolution_pointwise")
    ):
        return False
    lowered = _dtype(x) == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return bool(_dtype(x) == torch.float32 or lowered)


def _dtype(x: Tensor) -> torch.dtype:
    """What a convolution of x computes in: autocast's kind, for all but float64."""
    lowered = torch.is_autocast_enabled("cpu") and x.dtype != torch.float64
    return torch.get_autocast_dtype("cpu") if lowered else x.dtype


def _convolve(
    convolution: nn.Conv2d, x: Tensor, relu: bool, shortcut: Tensor | None = None, fork: bool = False
) -> tuple[Tensor, Tensor]:
    """relu(folded convolution of x + shortcut), and x for whoever else needs it (`fork`)."""
    assert isinstance(convolution, FoldedConv2d)
    dtype = _dtype(x)
    weight, bias = (t.to(dtype) for t in folded(convolution, convolution.norm[0]))
    geometry = list(convolution.stride), list(convolution.padding), list(convolution.dilation), convolution.groups
    shortcut = None if shortcut is None else shortcut.to(dtype)
    out: tuple[Tensor, Tensor] = _Convolution.apply(x.to(dtype), weight, bias, shortcut, relu, geometry, fork)
    return out


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        shortcut: Tensor | None,
        relu: bool,
        geometry: tuple[list[int], list[int], list[int], int],
        fork: bool,
    ) -> tuple[Tensor, Tensor]:
        stride, padding, dilation, groups = geometry
        common = (weight, bias, padding, stride, dilation, groups)
        after = "relu" if relu else "none"
        if shortcut is None:
            out = torch.ops.mkldnn._convolution_pointwise(x, *common, after, [], "")
        else:
            out = torch.ops.mkldnn._convolution_pointwise.binary(x, shortcut, *common, "add", None, after, [], None)
        ctx.set_materialize_grads(False)
        ctx.geometry, ctx.fork = geometry, fork
        ctx.save_for_backward(x, weight, out if relu else None)
        return out, x.view_as(x) if fork else x.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor, elsewhere: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        if out is not None:
            gradient = torch.ops.aten.threshold_backward(gradient, out, 0)
        to_x, to_weight, to_bias, to_shortcut = ctx.needs_input_grad[:4]
        elsewhere = elsewhere if ctx.fork else None
        joins = to_x and elsewhere is not None and weight.shape[2:] == (1, 1) and stride == [1, 1] and groups == 1
        of_x, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient, x, weight, [len(weight)], stride, padding, dilation, False, [0, 0], groups,
            [to_x and not joins, to_weight, to_bias],
        )  # fmt: skip
        if (
            joins and elsewhere is not None
        ):  # the shortcut's gradient is this function's own, and no one else's: it may be added to
            of_x = elsewhere.contiguous(memory_format=torch.channels_last)
            rows = of_x.permute(0, 2, 3, 1).view(-1, x.shape[1])
            rows.addmm_(gradient.permute(0, 2, 3, 1).reshape(-1, len(weight)), weight.flatten(1))
        elif to_x and elsewhere is not None:
            of_x = of_x.add_(elsewhere)
        return of_x, of_weight, of_bias, gradient if to_shortcut else None, None, None, None


class _Stem(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, padding: tuple[int, int]) -> Tensor:
        ctx.padding = padding
        ctx.save_for_backward(x, weight)
        return torch.conv2d(x, weight, bias, stride=2, padding=padding)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x, *to_parameters = ctx.needs_input_grad[:3]
        _, of_weight, of_bias = torch.ops.aten.convolution_backward(
            gradient, x, weight, [len(weight)], [2, 2], ctx.padding, [1, 1], False, [0, 0], 1, [False, *to_parameters]
        )
        return images_gradient(gradient, weight) if to_x else None, of_weight, of_bias, None


def images_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the images in a convolution of stride 2 that halves their sides.

    oneDNN is slow at images, of three channels; here every 2 x 2 pixels are one of twelve, and the stride is 1.
    """
    n, channels, k, _ = weight.shape
    first = k // 2 % 2  # so that the kernel begins on an even pixel
    last = (k + first) % 2
    even = torch.nn.functional.pad(weight, (first, last, first, last))
    taps = even.shape[-1] // 2
    packed = even.view(n, channels, taps, 2, taps, 2).permute(0, 1, 3, 5, 2, 4).reshape(n, 4 * channels, taps, taps)
    start, (height, width) = (k // 2 + first) // 2, gradient.shape[2:]
    spread = torch.conv_transpose2d(gradient, packed.contiguous(memory_format=torch.channels_last))
    return torch.pixel_shuffle(spread[:, :, start : start + height, start : start + width], 2)
