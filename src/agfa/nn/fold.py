"""Frozen batch normalisations folded into the convolutions before them.

With frozen statistics a batch normalisation is a gain and a shift of each channel,

    γ·(W*x - mean)/√(var + ε) + β = (s·W)*x + (β - mean·s),    s = γ/√(var + ε),

so the convolution does it, and autograd differentiates s·W, which is small, where it had to go through the maps.
Parameters and their names stay; while the statistics follow the batch, all is as it was.
"""

from __future__ import annotations

import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn


def fold_normalisations(body: nn.Module) -> int:
    """Fold every batch normalisation that follows a convolution, and it alone; returns how many there are."""
    try:
        nodes = list(_Tracer().trace(body).nodes)
    except Exception:  # a body whose flow depends on its input cannot be traced: it stays as it is
        return 0
    modules = dict(body.named_modules())
    called = [node.target for node in nodes if node.op == "call_module"]
    found = 0
    for node in nodes:
        norm = modules.get(node.target) if node.op == "call_module" else None
        before = node.args[0] if node.args else None
        if not isinstance(norm, nn.BatchNorm2d) or type(norm) not in FOLDED:
            continue
        if not isinstance(before, torch.fx.Node) or before.op != "call_module":
            continue
        convolution = modules[str(before.target)]
        alone = len(before.users) == 1 and called.count(node.target) == called.count(before.target) == 1
        if type(convolution) is nn.Conv2d and alone and norm.track_running_stats and norm.affine:
            convolution.__class__ = FoldedConv2d
            vars(convolution)["norm"] = (norm,)  # in a tuple, it is no part of the convolution's own state
            norm.__class__ = FOLDED[type(norm)]
            found += 1
    return found


class _Tracer(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, (nn.Conv2d, nn.BatchNorm2d)) or super().is_leaf_module(m, module_qualified_name)


class FoldedConv2d(nn.Conv2d):
    """A convolution that does the normalisation after it, while that is frozen."""

    norm: tuple[nn.BatchNorm2d]

    def forward(self, x: Tensor) -> Tensor:
        """The normalised maps."""
        if self.norm[0].training:
            return super().forward(x)
        maps: Tensor = self._conv_forward(x, *folded(self, self.norm[0]))
        return maps


class PassingNorm(nn.BatchNorm2d):
    """A normalisation that the convolution before has done already, while it is frozen."""

    def forward(self, x: Tensor) -> Tensor:
        """The maps as they are, or normalised by the batch."""
        return super().forward(x) if self.training else x


class PassingNormAct(BatchNormAct2d):
    """The same, with timm's activation in it."""

    def forward(self, x: Tensor) -> Tensor:
        """The activation of the maps, or of the maps normalised by the batch."""
        maps: Tensor = super().forward(x) if self.training else self.act(self.drop(x))  # type: ignore[no-untyped-call]
        return maps


FOLDED: dict[type, type] = {nn.BatchNorm2d: PassingNorm, BatchNormAct2d: PassingNormAct}


def folded(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Weight and bias of a convolution that does the frozen normalisation too."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
    mean = norm.running_mean if convolution.bias is None else norm.running_mean - convolution.bias
    return convolution.weight * scale.view(-1, 1, 1, 1), norm.bias - mean * scale
