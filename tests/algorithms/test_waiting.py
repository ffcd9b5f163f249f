"""No step waits for its device: on torch's meta device there are no values, and whoever asks for one fails."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from agfa.algorithms import names
from agfa.algorithms.base import plain_backward
from agfa.algorithms.erm import ERM
from support_methods import batch, build

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("agfa", {"schedule": "alternating"}),
    ("agfa", {"target": "pixel", "discrepancy": "mcd"}),
    ("dann", {"gradient_penalty": 1.0}),
]


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the meta device does not know."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())


def step(name: str, **hparams: Any) -> None:
    algorithm, data = build(name, **hparams).to("meta"), batch()
    on_meta = {key: getattr(data, key).to("meta") for key in ("images", "labels", "domains")}
    algorithm.step = 3
    algorithm.update(data._replace(**on_meta), plain_backward)


@pytest.mark.parametrize(("name", "hparams"), [*((name, {}) for name in names()), *VARIANTS])
def test_no_step_asks_for_a_value(name: str, hparams: dict[str, Any]) -> None:
    step(name, **hparams)


@pytest.mark.parametrize("read", [torch.Tensor.item, float, torch.Tensor.tolist, torch.Tensor.nonzero])
def test_one_that_does_is_found(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    update = ERM.update

    def asking(self: ERM, *given: Any) -> Any:
        losses = update(self, *given)
        read(losses["nll"])
        return losses

    monkeypatch.setattr(ERM, "update", asking)
    with pytest.raises((RuntimeError, NotImplementedError)):
        step("erm")
