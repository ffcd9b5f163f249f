"""Clocks, interleaved repetitions, intervals, a machine's peak, and the memory a step needs."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

DRAWS = 1000  # of the bootstrap


class Figure(NamedTuple):
    """A median, and the 90% interval that the bootstrap gives it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Figure:
        """From one value a repetition."""
        draw = random.Random(0)
        medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(DRAWS))
        return cls(statistics.median(values), medians[DRAWS // 20], medians[-DRAWS // 20])


class Clock:
    """Moments on a device: events on a GPU, whose work is queued; else the time."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.moments: list[float | torch.cuda.Event] = []

    def mark(self) -> None:
        """This moment."""
        if not self.cuda:
            self.moments.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self.moments.append(event)

    def seconds(self) -> list[float]:
        """What passed between each mark and the next; forgets them."""
        moments, self.moments = self.moments, []
        if not self.cuda:
            return [b - a for a, b in pairwise(moments)]  # type: ignore[operator]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1000 for a, b in pairwise(moments)]  # type: ignore[union-attr, arg-type]


def interleave(
    steps: dict[str, Callable[[Clock], None]], device: torch.device, repeats: int, warmup: int = 2
) -> dict[str, list[list[float]]]:
    """Seconds between the marks of each step, a list a repetition; all steps in turn, to see the same noise."""
    clock = Clock(device)
    found: dict[str, list[list[float]]] = {name: [] for name in steps}
    for repeat in range(warmup + repeats):
        for name, step in steps.items():
            clock.mark()
            step(clock)
            clock.mark()
            seconds = clock.seconds()
            if repeat >= warmup:
                found[name].append(seconds)
    return found


def product(dtype: torch.dtype, size: int, device: torch.device, times: int = 1) -> Callable[[Clock], None]:
    """`times` large matrix products: 2·size³ operations each, the most a machine does."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def multiply(clock: Clock) -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    return multiply


def held_bytes(modules: list[nn.Module], optimizers: list[Optimizer]) -> int:
    """What a method keeps between steps: parameters, buffers, optimiser states."""
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    states = [t for o in optimizers for state in o.state.values() for t in state.values()]
    return sum(t.numel() * t.element_size() for t in [*tensors, *(t for t in states if isinstance(t, torch.Tensor))])


def step_bytes(step: Callable[[], object], device: torch.device) -> int:
    """The most memory that a step has beyond what is there before it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most
