"""The methods, one a file. A file here that defines an `Algorithm` is a method, called by the file's name."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from agfa.algorithms.base import Algorithm, Hparams
from agfa.algorithms.presets import ALIASES, PRESETS
from agfa.errors import UsageError, describe, unknown

SHARED = frozenset({"base", "presets", "search"})  # the files here that are no method


@dataclass(frozen=True)
class Recipe:
    """What a name stands for: a method, the hyperparameters that are set, how its models are averaged."""

    name: str
    title: str
    paper: str
    method: type[Algorithm]
    preset: dict[str, Any]
    averaging: str

    def hparams(self, given: dict[str, Any]) -> Hparams:
        """The method's hyperparameters: `given` ones over the preset's over its defaults."""
        try:
            return self.method.hparams_type.model_validate({**self.preset, **given})
        except ValidationError as error:
            raise UsageError(f"hparams of {self.name}: {describe(error, self.method.hparams_type)}") from error


def names() -> list[str]:
    """Every method's name."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in SHARED)


def recipes() -> list[str]:
    """Every name that can be trained: methods and presets."""
    found = names()
    return sorted([*found, *(name for name, preset in PRESETS.items() if preset.method in found)])


def get(name: str) -> Recipe:
    """What `name` stands for, as a method, a preset or an alias is called here or in the paper's tables."""
    by_spelling = {_plain(known): known for known in recipes()}
    by_spelling |= {_plain(alias): known for alias, known in ALIASES.items() if known in by_spelling.values()}
    if _plain(name) not in by_spelling:
        raise unknown("algorithm", name, by_spelling.values())
    name = by_spelling[_plain(name)]
    if name in PRESETS:
        preset = PRESETS[name]
        method = _method(preset.method)
        paper, averaging = preset.paper or method.paper, preset.averaging or method.averaging
        return Recipe(name, preset.title, paper, method, dict(preset.hparams), averaging)
    method = _method(name)
    return Recipe(name, method.title, method.paper, method, {}, method.averaging)


def _method(name: str) -> type[Algorithm]:
    module = importlib.import_module(f"{__name__}.{name}")
    return next(
        found
        for found in vars(module).values()
        if isinstance(found, type) and issubclass(found, Algorithm) and found.__module__ == module.__name__
    )


def _plain(name: str) -> str:
    """A name without what the tables spell differently: C-DANN and CDANN, Mixstyle and MixStyle."""
    return name.lower().translate(str.maketrans("", "", "-_ "))
