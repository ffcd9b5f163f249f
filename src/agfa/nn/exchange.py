"""What processes give each other, with gradients of every order: rows of a batch, whole batches, means.

A tensor is *whole* (the same in every process, and so is its gradient) or a process's own *rows* of one. All
processes work out the same loss, so what autograd finds for rows in one process is a share of it, and is counted as
many times as there are processes: the mean over processes is then right for the gradient of a parameter, whether it
came by way of rows, of whole tensors, or of both.

    whole -> rows: its own rows                  gradient: all rows, divided by the number of processes
    rows -> whole: all rows                      gradient: its own rows, times the number of processes
    parameters of a pass over rows: themselves   gradient: the mean over processes, now or once for all (`later`)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode


@dataclass
class Share:
    """What this process takes on of a step's work, and in how many passes through the network."""

    rank: int = 0
    processes: int = 1
    passes: int = 1
    later: bool = False  # whether the parameters' gradients are averaged by someone else, after this backward pass

    def gather(self, rows: Tensor) -> Tensor:
        """All rows, in the order of the processes; the layout in memory stays."""
        if self.processes == 1:
            return rows
        last = rows.ndim == 4 and not rows.is_contiguous() and rows.is_contiguous(memory_format=torch.channels_last)
        flat = rows.permute(0, 2, 3, 1) if last else rows.contiguous()
        whole = flat.new_empty(self.processes * len(flat), *flat.shape[1:])
        dist.all_gather_into_tensor(whole, flat)
        return whole.permute(0, 3, 1, 2) if last else whole

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor's mean over processes; all travel together."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        parts = torch.split(flat / self.processes, [tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def rows(self, whole: Tensor) -> Tensor:
        """This process's rows."""
        n = len(whole) // self.processes
        return whole[self.rank * n : (self.rank + 1) * n].clone()


def to_rows(whole: Tensor, share: Share) -> Tensor:
    """This process's rows of a whole tensor."""
    return _Rows.apply(whole, share)  # type: ignore[no-any-return]  # torch's apply is Any


def to_whole(rows: Tensor, share: Share) -> Tensor:
    """The whole tensor of which each process has its rows."""
    return _Whole.apply(rows, share)  # type: ignore[no-any-return]


class _Rows(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, share: Share) -> Tensor:
        ctx.share = share
        return share.rows(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return to_whole(grads[0], ctx.share) / ctx.share.processes, None


class _Whole(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, share: Share) -> Tensor:
        ctx.share = share
        return share.gather(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return to_rows(grads[0], ctx.share) * ctx.share.processes, None


def _mean(x: Tensor, share: Share) -> Tensor:
    """The mean over processes; so is its gradient."""
    return _Mean.apply(x, share)  # type: ignore[no-any-return]


class _Mean(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: Share) -> Tensor:
        ctx.share = share
        return share.mean([x])[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _mean(grads[0], ctx.share), None


class _MeanGradient(Function):
    """A parameter's gradient, from that of a pass over rows to the whole one; this has the whole one's gradient."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, share: Share) -> Tensor:
        return share.mean([gradient])[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def average_gradients(module: nn.Module, share: Share) -> None:
    """See that the gradients of the module's parameters, as they are now, are means over processes.

    So are those of what stands in for parameters (in `torch.func.functional_call`), and at once, because gradients
    go on from there. Averaging twice is averaging.
    """

    def averaged(gradient: Tensor) -> Tensor:
        return _MeanGradient.apply(gradient, share)  # type: ignore[no-any-return]

    def averaged_or_later(gradient: Tensor) -> Tensor | None:
        return None if share.later else averaged(gradient)

    for parameter in module.parameters():
        if parameter.requires_grad and getattr(parameter, "_averaged_by", None) is not share:
            parameter._averaged_by = share  # type: ignore[attr-defined]  # a mark of ours
            parameter.register_hook(averaged_or_later if parameter.is_leaf else averaged)  # type: ignore[no-untyped-call]  # torch's


def has_batch_statistics(module: nn.Module) -> bool:
    """Whether it has batch-norm layers that are not frozen."""
    return any(isinstance(part, _BatchNorm) and part.training for part in module.modules())


class JointBatchNorm(TorchFunctionMode):
    """Within this, `F.batch_norm` of a process's rows takes its statistics from all processes."""

    def __init__(self, share: Share) -> None:
        super().__init__()
        self.share = share

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Batch norm in its own way, all else as it is."""
        if func is F.batch_norm:
            return self.batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_variance: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """As `F.batch_norm`."""
        if not training or region is None:
            return F.batch_norm(x, running_mean, running_variance, weight, bias, training, momentum, eps)
        over, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
        full = x if x.dtype == torch.float64 else x.float()
        mean = _mean(full.mean(over), self.share)
        centred = full - mean.view(shape)
        variance = _mean(centred.square().mean(over), self.share)
        n = self.share.processes * x.numel() // x.shape[1]
        with torch.no_grad():
            for running, now in ((running_mean, mean), (running_variance, variance * n / max(n - 1, 1))):
                if running is not None:
                    running.lerp_(now.to(running.dtype), momentum)
        normed = centred / (variance + eps).sqrt().view(shape)
        if weight is not None:
            normed = normed * weight.view(shape)
        if bias is not None:
            normed = normed + bias.view(shape)
        return normed.to(x.dtype)


region: Share | None = None  # whose rows the pass is over that is going on; None outside of such a pass


@contextmanager
def within(share: Share | None) -> Iterator[None]:
    """A pass over the share's rows is going on; with None, none is."""
    global region
    before, region = region, share
    try:
        yield
    finally:
        region = before


@contextmanager
def over_rows(module: nn.Module, share: Share | None) -> Iterator[None]:
    """A pass of the share's rows through the module is going on.

    A module in evaluation mode may be put into training mode on the way: `agfa.nn.stages.onward` does so.
    """
    statistics = has_batch_statistics(module) or not module.training
    joint = share if share is not None and share.processes > 1 and statistics else None
    with within(share), JointBatchNorm(joint) if joint is not None else nullcontext():
        yield
