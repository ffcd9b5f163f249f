"""Steps whose loss or gradient is not finite: found where they happen, without effect, and told at the next record.

Nothing is read from the device in a step, so no step waits for another. What is wrong becomes a flag on the device,
and the flag is the optimisers' `found_inf`: a fused optimiser that has it set leaves everything as it is. Buffers are
put back likewise. When nothing is wrong, no bit is other than without the watch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from agfa.algorithms.base import Algorithm


class Watch:
    """Looks at every step of an algorithm. After a bad one nothing changes any more, unless such steps are `skipped`.

    Within a step, what players did before one whose loss or gradient is not finite has been done.
    """

    def __init__(self, algorithm: Algorithm, steps: int, device: torch.device, skipped: bool) -> None:
        self.optimizers, self.skipped = algorithm.optimizers, skipped
        self.wrong = torch.zeros((), device=device)
        self.seen = torch.zeros(steps, device=device)  # those since the last record, by their number modulo `steps`
        self.buffers = _changing(algorithm)
        self.before = [buffer.clone() for buffer in self.buffers]

    def begin(self) -> None:
        """A step begins."""
        if self.skipped:
            self.wrong.zero_()
        for optimizer in self.optimizers.values():
            optimizer.found_inf = self.wrong  # type: ignore[attr-defined]  # torch's own way in, for its GradScaler
        if self.buffers:
            torch._foreach_copy_(self.before, self.buffers)

    @torch.no_grad()
    def look(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        """Gradients of this loss are there, and the optimisers have not used them yet."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        self._flag([loss.detach(), *_sizes(gradients)])

    @torch.no_grad()
    def end(self, step: int, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """Step number `step` ends; its losses, or zeros if something was wrong."""
        self._flag(list(losses.values()))
        self.seen[step % len(self.seen)] = self.wrong
        wrong = self.wrong.bool()
        for buffer, before in zip(self.buffers, self.before, strict=True):
            torch.where(wrong, before, buffer, out=buffer)
        return {name: value.masked_fill(wrong, 0) for name, value in losses.items()}

    def found(self, step: int) -> list[int]:
        """The numbers of the bad steps since this was asked last, `step` being the latest. Waits for the device."""
        n = len(self.seen)
        bad = [step - (step - place) % n for place in self.seen.nonzero().flatten().tolist()]
        self.seen.zero_()
        return sorted(bad)

    def _flag(self, values: list[Tensor]) -> None:
        finite = torch.stack([value.float() for value in values]).isfinite().all()
        torch.maximum(self.wrong, finite.logical_not().float(), out=self.wrong)


def _sizes(gradients: list[Tensor]) -> list[Tensor]:
    """A number for each gradient that is finite exactly if all of it is (and its sum can be a number at all)."""
    if gradients and gradients[0].device.type == "cpu":
        return [gradient.sum() for gradient in gradients]
    return list(torch._foreach_norm(gradients, torch.inf))  # of all at once


def _changing(algorithm: Algorithm) -> list[Tensor]:
    """Buffers that a step may change: those of frozen batch norm it does not."""
    frozen = {id(b) for m in algorithm.modules() if isinstance(m, _BatchNorm) and not m.training for b in m.buffers()}
    return [buffer for buffer in algorithm.buffers() if id(buffer) not in frozen]
