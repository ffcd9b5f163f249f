"""The methods, one a file. A file here that defines an `Algorithm` is a method, called by the file's name."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from pydantic import ValidationError

from agfa.algorithms.base import Algorithm, Hparams
from agfa.errors import UsageError, describe, unknown


def names() -> list[str]:
    """Every method's name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "base")


def get(name: str) -> type[Algorithm]:
    """The method called `name`."""
    if name not in names():
        raise unknown("algorithm", name, names())
    module = importlib.import_module(f"{__name__}.{name}")
    return next(
        found
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, Algorithm) and found.__module__ == module.__name__
    )


def hparams(method: type[Algorithm], given: dict[str, Any]) -> Hparams:
    """The method's hyperparameters: `given` ones over its defaults."""
    try:
        return method.hparams_type.model_validate(given)
    except ValidationError as error:
        raise UsageError(f"hparams of {method.name}: {describe(error, method.hparams_type)}") from error
