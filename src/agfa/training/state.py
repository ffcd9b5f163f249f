"""All that changes while a run goes on: what a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from agfa.algorithms.base import Algorithm
from agfa.averaging import Averaging, State, Swad, host_state
from agfa.training.config import CompleteConfig


@dataclass
class Best:
    """The model with the highest score so far, in host memory."""

    score: float = -1.0
    step: int = 0
    state: State = field(default_factory=dict)

    def offer(self, score: float | None, step: int, network: nn.Module) -> None:
        """Keep this model if its score is higher than any before."""
        if score is not None and score > self.score:
            self.score, self.step, self.state = score, step, _copy(network)


@dataclass
class Training:
    """All that changes as a run goes on, and so all that a checkpoint holds."""

    algorithm: Algorithm
    averaging: Averaging | None
    best: Best = field(default_factory=Best)
    oracle: Best = field(default_factory=Best)
    step: int = 0
    seconds: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain values and tensors."""
        return {
            "algorithm": self.algorithm.state_dict(),
            "optimizers": {name: o.state_dict() for name, o in self.algorithm.optimizers.items()},
            "averaging": self.averaging.state_dict() if self.averaging is not None else None,
            "best": vars(self.best),
            "oracle": vars(self.oracle),
            "step": self.step,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.algorithm.load_state_dict(state["algorithm"])
        for name, optimizer in self.algorithm.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        if self.averaging is not None:
            self.averaging.load_state_dict(state["averaging"])
        self.best, self.oracle = Best(**state["best"]), Best(**state["oracle"])
        self.step, self.seconds = state["step"], state["seconds"]

    def over(self, config: CompleteConfig) -> bool:
        """Whether there is nothing left to train."""
        stopped = config.stop_early and isinstance(self.averaging, Swad) and self.averaging.finished
        return stopped or self.step >= config.steps

    def models(self) -> dict[str, tuple[int, State]]:
        """(step, state) of every model that this training gives; an average that never began is the last model."""
        last = _copy(self.algorithm.network)
        found = {"last": (self.step, last), "best": (self.best.step, self.best.state)}
        if self.averaging is not None:
            found[self.averaging.name] = (self.step, self.averaging.average() or last)
        if self.oracle.state:
            found["oracle"] = (self.oracle.step, self.oracle.state)
        return found


def _copy(network: nn.Module) -> State:
    """A network's state in host memory, on its own."""
    return {key: value.clone() for key, value in host_state(network).items()}
