"""Which row of a table a model belongs to: a method, its variant, and whether the model is an average.

One training gives several rows: its model at a step, and the average along it (ERM and SWAD, say). Rows are called as
`agfa.algorithms` calls what would train them; where it has no name for one, `+swad` or `-no-swad` is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from agfa import algorithms
from agfa.algorithms import Recipe
from agfa.errors import UsageError

AVERAGES = ("swa", "swad")  # models that are averages; all others are a training's model at a step

TITLES = {
    "agfa": "AGFA",
    "agfa-bayes": "Bayesian head alone",
    "agfa-frozen": "AGFA, frozen generator",
    "agfa-mcd": "AGFA, unsupervised MCD",
    "agfa-no-mix": "AGFA without post-mixup",
    "agfa-no-swad": "AGFA without SWAD",
    "agfa-pixel": "AGFA, pixel-based",
    "agfa-pixel-mlp": "AGFA, pixel-based, MLP",
    "ampmixup": "Amp-Mixup",
    "arm": "ARM",
    "cdann": "C-DANN",
    "coral": "CORAL",
    "dann": "DANN",
    "dmg": "DMG",
    "dson": "DSON",
    "efdmix": "EFDMix",
    "eisnet": "EISNet",
    "er": "ER",
    "erm": "ERM",
    "fact": "FACT",
    "groupdro": "GroupDRO",
    "imixup": "I-Mixup",
    "irm": "IRM",
    "masf": "MASF",
    "mcd": "MCD",
    "metareg": "MetaReg",
    "mixstyle": "MixStyle",
    "mixup": "Mixup",
    "mldg": "MLDG",
    "mmd": "MMD",
    "mtl": "MTL",
    "padain": "pAdaIN",
    "rsc": "RSC",
    "sagnet": "SagNet",
    "swad": "SWAD",
    "vrex": "VREx",
}


def row_of(algorithm: str, hparams: Mapping[str, Any], model: str | None) -> str:
    """The row of a `model` (None: one at a step) of a training with complete `hparams`."""
    average = model if model in AVERAGES else "none"
    # a method that this version does not know is its own row
    found = [recipe for recipe in _variants(algorithm) if recipe.preset.items() <= hparams.items()]
    if not found:
        return algorithm if average == "none" else f"{algorithm}+{average}"
    most = max(len(recipe.preset) for recipe in found)
    closest = [recipe for recipe in found if len(recipe.preset) == most]
    for recipe in closest:
        if recipe.averaging == average:
            return recipe.name
    return closest[0].name + (f"-no-{closest[0].averaging}" if average == "none" else f"+{average}")


def title(row: str) -> str:
    """The row's name in the paper's tables."""
    if row in TITLES:
        return TITLES[row]
    if "+" in row:
        return f"{title(row.rpartition('+')[0])}+{row.rpartition('+')[2].upper()}"
    variant, without, average = row.rpartition("-no-")
    if not without:
        return row
    return f"{title(variant)}{',' if ' ' in title(variant) else ''} without {average.upper()}"


def method_of(algorithm: str) -> str:
    """The method that a name, preset or alias stands for; a name that nobody knows stands for itself."""
    variants = _variants(algorithm)
    return variants[0].method.name if variants else algorithm


@cache
def _variants(algorithm: str) -> tuple[Recipe, ...]:
    """What can be trained by the method that `algorithm` names, the plain method first."""
    try:
        method = algorithms.get(algorithm).method
    except UsageError:
        return ()
    others = (algorithms.get(name) for name in algorithms.recipes() if name != method.name)
    return (algorithms.get(method.name), *(recipe for recipe in others if recipe.method is method))
