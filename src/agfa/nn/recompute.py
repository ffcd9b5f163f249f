"""Less memory: activations that are not kept for the backward pass, but computed anew in it.

The result is the same to the last bit: randomness, statistics and parameters are those of the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from agfa.nn import exchange


def recomputed(function: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> Tensor:
    """function(x), a pass through the module of which x alone is kept for the backward pass."""
    if not torch.is_grad_enabled():
        return function(x)
    again = _Again(module)
    y: Tensor = checkpoint(function, x, use_reentrant=False, context_fn=lambda: (nullcontext(), again))
    return y


def recompute_blocks(body: nn.Module) -> int:
    """From now on, recompute each of the `blocks` of the body; returns how many they are."""
    found = blocks(body)
    for block in found:
        block.forward = partial(recomputed, block.forward, block)
    return len(found)


def blocks(body: nn.Module) -> list[nn.Module]:
    """A ResNet's bottlenecks, a ViT's layers: the smallest modules of several layers that stand in a row.

    The stages whose outputs methods change (agfa.nn.stages) are made of them, and so none is inside of one.
    """
    rows = [module for module in body.modules() if isinstance(module, nn.Sequential)]
    found = {part: None for row in rows for part in row if not isinstance(part, nn.Sequential) and _layers(part) > 1}
    return [block for block in found if not any(part in found for part in list(block.modules())[1:])]


def _layers(module: nn.Module) -> int:
    return sum(isinstance(part, nn.Conv2d | nn.Linear) for part in module.modules())


class _Again(AbstractContextManager[None]):
    """The module as it is now, for later: its parameters, its mode, the pass that it is in. Statistics stay as they
    will be then: those of the batch are found again, and leave no trace."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.share = module, exchange.region
        self.then = [(part, part.training, _learning(part._parameters)) for part in module.modules()]

    def __enter__(self) -> None:
        self.stack = ExitStack()
        for part, training, parameters in self.then:
            self.stack.callback(_put, part, part.training, part._parameters, part._buffers)
            copies = {name: None if b is None else b.clone() for name, b in part._buffers.items()}
            _put(part, training, {name: _as(p, learns) for name, (p, learns) in parameters.items()}, copies)
        self.stack.enter_context(exchange.over_rows(self.module, self.share))

    def __exit__(self, *error: object) -> None:
        self.stack.close()


def _learning(parameters: dict[str, nn.Parameter | None]) -> dict[str, tuple[nn.Parameter | None, bool]]:
    return {name: (p, p is not None and p.requires_grad) for name, p in parameters.items()}


def _as(p: nn.Parameter | None, learns: bool) -> Any:
    """The parameter, with or without a gradient: it may have been a constant then, and not now."""
    return p if p is None or p.requires_grad == learns else p.detach().requires_grad_(learns)


def _put(part: nn.Module, training: bool, parameters: dict[str, Any], buffers: dict[str, Tensor | None]) -> None:
    part.training, part._parameters, part._buffers = training, parameters, buffers
