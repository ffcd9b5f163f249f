"""Rows of the paper's tables that are a method with some settings of its own, or a method under another name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SWAD = "Cha et al. 2021"


@dataclass(frozen=True)
class Preset:
    """A method with some of its hyperparameters set, or another averaging policy than its own."""

    method: str
    title: str
    hparams: Mapping[str, Any] = field(default_factory=dict)
    averaging: str | None = None
    paper: str | None = None  # where it is not the method's


PRESETS = {
    "swad": Preset("erm", "ERM, averaged by SWAD", averaging="swad", paper=SWAD),
    "fact+swad": Preset("fact", "FACT, averaged by SWAD", averaging="swad", paper=SWAD),
    "ampmixup+swad": Preset("ampmixup", "Amp-Mixup, averaged by SWAD", averaging="swad", paper=SWAD),
    "agfa-no-swad": Preset("agfa", "AGFA without SWAD (ablation)", averaging="none"),
    "agfa-mcd": Preset(
        "agfa", "AGFA that does not use the labels of what it generates (ablation)", {"discrepancy": "mcd"}
    ),
    "agfa-no-mix": Preset("agfa", "AGFA with generated amplitudes alone (ablation)", {"mix": False}),
    "agfa-pixel": Preset(
        "agfa", "AGFA that generates pixels, linearly (ablation)", {"target": "pixel", "discrepancy": "mcd"}
    ),
    "agfa-pixel-mlp": Preset(
        "agfa",
        "AGFA that generates pixels, with a hidden layer (ablation)",
        {"target": "pixel", "discrepancy": "mcd", "generator": "mlp"},
    ),
    "agfa-bayes": Preset("agfa", "AGFA's Bayesian head alone: nothing is generated (control)", {"eta": 0.0}),
    "agfa-frozen": Preset("agfa", "AGFA whose generator stays random: no adversary (control)", {"generator_lr": 0.0}),
}
ALIASES = {"dro": "groupdro", "ada": "dann", "condada": "cdann"}  # the MNIST tables' names
