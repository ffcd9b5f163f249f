"""A step's work shared out, so that no method need know of it.

All processes take the same step on the same joint minibatch, with the same random numbers. What costs is the pass
through a backbone, and that alone is shared out:

    features = shared(body, images)     # body(images); each process computes its rows and is given the others'

So whatever a method makes of features is right over several processes, losses that are no sums over images included.
Another network that costs something may be called in this way too; it must treat images one by one, or by
`F.batch_norm`. In several passes (`passes`), activations of one at a time are in memory, at the price of computing
them twice; that is as exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from agfa.errors import UsageError
from agfa.nn import exchange
from agfa.nn.exchange import Share, to_rows, to_whole
from agfa.nn.recompute import recomputed

_now: Share | None = None  # how the work is shared out; None: not at all


@contextmanager
def sharing(share: Share) -> Iterator[None]:
    """Share out, in this block, what `shared` computes."""
    global _now
    before, _now = _now, share if share.processes * share.passes > 1 else None
    try:
        yield
    finally:
        _now = before


def shared(module: nn.Module, x: Tensor, call: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """module(x), its rows shared out; where they do not come out even, every process computes all.

    Args:
        call: what is called in the module's place: a compiled form of it, say.
    """
    share, call = _now, call or module
    if share is None or exchange.region is not None:
        return call(x)
    if in_even_shares(len(x)) != share.processes:
        share = Share(passes=share.passes)
    with exchange.over_rows(module, share):
        if share.processes == 1:
            return _in_passes(module, call, x, share.passes)
        if torch.is_grad_enabled():
            exchange.average_gradients(module, share)
        return to_whole(_in_passes(module, call, to_rows(x, share), share.passes), share)


def in_even_shares(n: int) -> int:
    """Between how many processes n rows are shared out: all, or none."""
    return _now.processes if _now is not None and n % _now.processes == 0 else 1


def whole(change: Callable[[Tensor], Tensor], maps: Tensor) -> Tensor:
    """change(maps), inside of a shared pass, as of the whole minibatch: it may look at other images than its own."""
    share = exchange.region
    if share is None:
        return change(maps)
    if share.passes > 1:
        raise UsageError(
            "this method works on feature maps of the whole minibatch, which --accumulate never has; "
            "use --activation-checkpointing, or a smaller --batch-size"
        )
    with exchange.within(None):
        if share.processes == 1:
            return change(maps)
        changed = change(to_whole(maps, share))
    return to_rows(changed, share)


def _in_passes(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, passes: int) -> Tensor:
    """call(x), a few rows at a time."""
    if passes == 1:
        return call(x)
    if exchange.has_batch_statistics(module):
        raise UsageError(
            "--accumulate never has the whole minibatch, whose statistics this network's batch norm takes; "
            "freeze them (--freeze-batchnorm), or use --activation-checkpointing"
        )
    return torch.cat([recomputed(call, module, part) for part in x.tensor_split(min(passes, len(x)))])
