"""Where a random search draws hyperparameters from: beside each default, as `Annotated[float, Uniform(0, 1)]`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel


@dataclass(frozen=True)
class Uniform:
    """Any number between two."""

    low: float
    high: float

    def draw(self, rng: np.random.Generator) -> float:
        """One of them."""
        return float(rng.uniform(self.low, self.high))

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class LogUniform:
    """Any number between two, every magnitude as likely; `whole` ones are rounded down, as in DomainBed."""

    low: float
    high: float
    whole: bool = False

    def draw(self, rng: np.random.Generator) -> float | int:
        """One of them."""
        drawn = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        return int(drawn) if self.whole else drawn

    def __str__(self) -> str:
        return f"{self.low:.4g} to {self.high:.4g}, logarithmic"


@dataclass(frozen=True)
class Choice:
    """One of some values."""

    values: tuple[Any, ...]

    def draw(self, rng: np.random.Generator) -> Any:
        """One of them."""
        return self.values[rng.integers(len(self.values))]

    def __str__(self) -> str:
        return " or ".join(str(value) for value in self.values)


Distribution = Uniform | LogUniform | Choice


def distributions(hparams: type[BaseModel]) -> dict[str, Distribution]:
    """The hyperparameters that a random search draws, and from where."""
    return {
        name: found
        for name, field in hparams.model_fields.items()
        for found in field.metadata
        if isinstance(found, Distribution)
    }


def draw(hparams: type[BaseModel], *seeds: int) -> dict[str, Any]:
    """The seeds' draw of each of them. A hyperparameter's draw depends on the seeds and on its own name alone."""
    return {
        name: where.draw(np.random.default_rng([*seeds, *name.encode()]))
        for name, where in distributions(hparams).items()
    }
