"""Averages of a model along its training: SWA, and SWAD (dense, and blind to overfitting).

A policy sees the model after every step and the validation loss at every evaluation, and works for any algorithm.
What it averages is all of the predicting network, each head and the floating-point buffers included. Statistics of
batch norm that is not frozen belong to the weights that they were taken with: an average's are taken anew in the end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

State = dict[str, Tensor]


class Mean:
    """A running mean of model states, on the device of the models it is given."""

    def __init__(self, state: State | None = None, count: int = 0) -> None:
        self.state, self.count = state or {}, count

    @torch.no_grad()
    def add(self, state: State, count: int = 1) -> None:
        """Take in one state, or a mean of `count` of them. Whole-number buffers are those of the latest."""
        if self.count == 0:
            self.state = {key: value.detach().clone() for key, value in state.items()}
        else:
            weight = count / (self.count + count)
            floats = [key for key, value in state.items() if value.is_floating_point()]
            theirs = [state[key].detach().to(self.state[key].device) for key in floats]
            torch._foreach_lerp_([self.state[key] for key in floats], theirs, weight)
            for key in state.keys() - set(floats):
                self.state[key].copy_(state[key])
        self.count += count

    def to_host(self) -> Mean:
        """The same mean in host memory."""
        return Mean({key: value.cpu() for key, value in self.state.items()}, self.count)

    def state_dict(self) -> dict[str, Any]:
        """What `Mean(**...)` makes this again from."""
        return {"state": self.state, "count": self.count}


class Averaging(Protocol):
    """A policy: what it keeps of the models it sees, and the average it makes of them."""

    name: str

    def after_step(self, model: nn.Module) -> None:
        """See the model after an optimiser step."""

    def after_evaluation(self, model: nn.Module, step: int, loss: float) -> None:
        """See the model and its validation loss, after `after_step` of the same step."""

    def average(self) -> State | None:
        """The averaged state, or None when there is none."""

    def state_dict(self) -> dict[str, Any]:
        """All that resuming needs."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""


class Swa:
    """SWA: the plain mean of the models at the evaluations from step `start` on."""

    name = "swa"

    def __init__(self, start: int) -> None:
        self.start, self.mean = start, Mean()

    def after_step(self, model: nn.Module) -> None:
        """Nothing: SWA is not dense."""

    def after_evaluation(self, model: nn.Module, step: int, loss: float) -> None:
        """Take the model in, once `start` is reached."""
        if step >= self.start:
            self.mean.add(host_state(model))

    def average(self) -> State | None:
        """The mean so far."""
        return self.mean.state or None

    def state_dict(self) -> dict[str, Any]:
        """The mean so far."""
        return self.mean.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.mean = Mean(**state)


FIELDS = ("start", "end", "threshold", "losses", "closed_until")  # of Swad, beside its means


class Swad:
    """SWAD, as in the AGFA paper's appendix: the mean of every iterate t_s, ..., t_e (both inclusive).

    With validation losses l at the evaluations (multiples of V):
        t_s = the first t with l^t <= l^t', for the `patience` (N_s) evaluations t' = t, t + V, ...;
        l̄   = the mean of those losses;
        t_e = t - N_e·V for the first t, after t_s was found, whose last `tolerance` (N_e) losses all exceed r·l̄.
    With no t_e the mean runs to the last step; with no t_s there is no mean (average() is None).
    A loss that is not finite starts nothing, is no part of l̄, and counts as above r·l̄.

    Only the earliest evaluation not yet beaten can become t_s: a loss below its loss is also below those of all
    later candidates. So one mean from that candidate on, and a queue of the segments (of V iterates) that a later
    t_e may cut off, are all that is kept: at most N_e + 1 states, of which the open segment alone lies beside
    the model and the rest in host memory.
    """

    name = "swad"

    def __init__(self, patience: int = 3, tolerance: int = 6, ratio: float = 1.3) -> None:
        self.n_s, self.n_e, self.ratio = patience, tolerance, ratio
        self.start: int | None = None  # the candidate for t_s, and t_s once `threshold` is known
        self.end: int | None = None
        self.threshold: float | None = None  # r·l̄
        self.losses: list[float] = []  # at and after `start`
        self.closed = Mean()  # iterates start, ..., closed_until: t_e can no longer cut these off
        self.closed_until = 0
        self.segments: deque[tuple[int, Mean]] = deque()  # (last step, mean) after that
        self.open = Mean()  # the iterates since the last evaluation

    def after_step(self, model: nn.Module) -> None:
        """Take the iterate in."""
        if self.start is not None and not self.finished:
            self.open.add(_state(model))

    def after_evaluation(self, model: nn.Module, step: int, loss: float) -> None:
        """Decide on t_s and t_e."""
        if self.finished:
            return
        loss = math.inf if math.isnan(loss) else loss
        broken = loss == math.inf  # neither a start nor a part of l̄; above r·l̄
        if self.threshold is None and (self.start is None or broken or loss < self.losses[0]):
            self.start, self.closed_until, self.losses = (None, 0, []) if broken else (step, step, [loss])
            self.closed, self.open = Mean(), Mean()
            self.segments.clear()
            if not broken:
                self.closed.add(host_state(model))
        else:
            self.losses.append(loss)
            self.segments.append((step, self.open.to_host()))
            self.open = Mean()
        if self.threshold is None:
            if len(self.losses) == self.n_s:
                level = math.fsum(self.losses) / self.n_s
                self.threshold = self.ratio * max(level, self.losses[0])  # rounding can put a mean below its least
        elif len(self.losses) > self.n_e and min(self.losses[-self.n_e :]) > self.threshold:
            self.end = self.closed_until
            self.segments.clear()
        while len(self.segments) >= self.n_e:  # the next evaluation can cut off no more than n_e segments
            self.closed_until, mean = self.segments.popleft()
            self.closed.add(mean.state, mean.count)

    @property
    def finished(self) -> bool:
        """Whether t_e was found."""
        return self.end is not None

    @property
    def interval(self) -> tuple[int, int | None] | None:
        """(t_s, t_e), t_e None where no end was found; None where no start was."""
        return None if self.threshold is None or self.start is None else (self.start, self.end)

    def average(self) -> State | None:
        """The mean of the iterates t_s, ..., t_e, or to the last one seen."""
        if self.threshold is None:
            return None
        mean = Mean()
        for part in (self.closed, *(mean for _, mean in self.segments), self.open):
            if part.count:
                mean.add(part.to_host().state, part.count)
        return mean.state

    def state_dict(self) -> dict[str, Any]:
        """All that resuming needs."""
        return {
            **{key: getattr(self, key) for key in FIELDS},
            "closed": self.closed.state_dict(),
            "segments": [(last, mean.state_dict()) for last, mean in self.segments],
            "open": self.open.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        for key in FIELDS:
            setattr(self, key, state[key])
        self.closed, self.open = Mean(**state["closed"]), Mean(**state["open"])
        self.segments = deque((last, Mean(**mean)) for last, mean in state["segments"])


@torch.no_grad()
def renew_statistics(model: nn.Module, minibatches: Iterable[Tensor]) -> None:
    """Take the statistics of batch norm that is not frozen anew, as the mean over these minibatches.

    Where there is none, nothing is drawn. The model is left in evaluation mode.
    """
    model.train()
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training and m.track_running_stats]
    model.eval()
    if not layers:
        return
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the plain mean over minibatches
        layer.train()
    for x in minibatches:
        model(x)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
        layer.eval()


def _state(model: nn.Module) -> State:
    return {key: value.detach() for key, value in model.state_dict().items()}


def host_state(model: nn.Module) -> State:
    """A model's parameters and buffers in host memory (shared with the model where that is on the host)."""
    return {key: value.cpu() for key, value in _state(model).items()}
