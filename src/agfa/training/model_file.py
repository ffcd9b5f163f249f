"""A trained model on disk: `NAME.safetensors` (the weights) and `NAME.json` (all else that predicting needs)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import safetensors.torch
import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from agfa import algorithms
from agfa.algorithms.base import Network, Problem
from agfa.errors import UsageError, describe
from agfa.files import put
from agfa.nn.backbones import build_backbone

FORMAT: Final = 2


class Audit(BaseModel, extra="forbid", frozen=True):
    """What models like this one did on domains that were held out from them in turn (`agfa audit`)."""

    expected: float  # accuracy on the next domain, with its interval
    low: float
    high: float
    domains: dict[str, float]  # the accuracy on each when it was held out
    target_images: dict[str, int]  # on how many of its images that is
    temperature: float  # of the held-out models: the geometric mean
    coverage: tuple[tuple[float, float, float], ...]  # (least confidence, share answered, accuracy), domains pooled


class ModelCard(BaseModel, extra="forbid", frozen=True):
    """What a model is, where it comes from, and how to feed it (its normalisation is in the weights)."""

    format: Literal[2] = FORMAT
    classes: tuple[str, ...]
    backbone: str  # architecture and weights it started from, fully resolved
    initial_weights: str  # digest of the weights it started from
    image_size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    algorithm: str
    hparams: dict[str, Any]
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    model: str  # last, best, swad, ...: which of the run's models
    step: int
    temperature: float = Field(1.0, gt=0)  # divides the logits, mean and deviation, before the softmax
    audit: Audit | None = None


def migrated(card: Any) -> Any:
    """The values of a card in today's format, whichever format they were written in.

    Raises:
        UsageError: a later version of agfa wrote it.
    """
    if not isinstance(card, dict) or not isinstance(written := card.get("format"), int):
        return card  # validation says what is wrong with it
    if written > FORMAT:
        raise UsageError(f"a card of format {written}, and this agfa reads up to {FORMAT}; install a newer agfa")
    if written == 1:  # before temperatures: probabilities were those of the logits as they are
        card = {**card, "format": 2, "temperature": 1.0, "audit": None}
    return card


def save(path: Path, state: dict[str, Tensor], card: ModelCard) -> None:
    """Write `path`.safetensors and `path`.json; the weights last, so that a model that is there is whole."""
    tensors = {key: value.contiguous().cpu() for key, value in state.items()}
    text = card.model_dump_json(indent=2).encode() + b"\n"
    put(path.with_suffix(".json"), text)
    content = safetensors.torch.save(tensors)
    put(path.with_suffix(".safetensors"), content)


def attach(path: Path, audit: Audit) -> None:
    """Put what an audit found into the card `path`.json."""
    file = path.with_suffix(".json")
    card = ModelCard.model_validate(migrated(json.loads(file.read_text(encoding="utf-8"))))
    text = card.model_copy(update={"audit": audit}).model_dump_json(indent=2).encode() + b"\n"
    put(file, text)


def load(path: Path) -> tuple[Network, ModelCard]:
    """The network and its card from a run folder, or from a model's .safetensors file."""
    weights = path / "model.safetensors" if path.is_dir() else path
    if not weights.is_file():
        what = "has no model.safetensors: the run has not finished" if path.is_dir() else "does not exist"
        raise UsageError(f"{path} {what}; give a finished run's folder, or a .safetensors file in it")
    file = weights.with_suffix(".json")
    try:
        card = ModelCard.model_validate(migrated(json.loads(file.read_text(encoding="utf-8"))))
    except FileNotFoundError as error:
        raise UsageError(f"{file} is missing; a model is its .safetensors and its .json together") from error
    except ValidationError as error:
        raise UsageError(f"{file}: {describe(error, ModelCard)}") from error
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    network = _build(card)
    try:
        network.load_state_dict(safetensors.torch.load_file(weights))
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise UsageError(f"{weights} does not hold the model that {file.name} describes: {first}") from error
    return network.eval(), card


def _build(card: ModelCard) -> Network:
    """The network that the card describes, with weights of no account."""
    recipe = algorithms.get(card.algorithm)
    shape = (card.channels, card.image_size, card.image_size)
    problem = Problem(n_classes=len(card.classes), n_domains=len(card.sources), n_images=1, image_shape=shape)
    with torch.random.fork_rng(devices=[]):
        backbone = build_backbone(card.backbone, card.channels, card.image_size, weights="none")
        return recipe.method.make_network(backbone, problem, recipe.hparams(card.hparams))
