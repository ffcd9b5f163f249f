"""What a training run is told: typed, checked, complete once resolved, and the same in YAML, flags and Python."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from agfa.errors import UsageError, describe

Averaging = Literal["none", "swa", "swad"]
Selection = Literal["swad", "swa", "validation", "last", "oracle"]
Channels = Annotated[
    Literal[1, 2, 3], BeforeValidator(lambda given: {"1": 1, "2": 2, "3": 3}.get(given, given))
]  # flags are text


class TrainConfig(BaseModel, extra="forbid", frozen=True):
    """A training run. What is None takes the dataset's setting (agfa.data.catalog) or follows from the rest."""

    data: str | None = Field(None, description="a folder domain/class/image, a table, hf:OWNER/NAME, or a known name")
    target: tuple[str, ...] = Field((), description="domains to hold out; the rest are sources")
    source: tuple[str, ...] = Field((), description="domains to train on; the rest are held out")
    algorithm: str = Field("agfa", description="the method; `agfa algorithms` lists them")
    hparams: dict[str, Any] = Field({}, description="the method's hyperparameters, as --hparams.eta 0.1")
    averaging: Averaging | None = Field(
        None, description="average of the models along the way (default: as the method's paper does)"
    )
    swad_patience: int = Field(3, ge=1, description="N_s: evaluations without improvement that start SWAD")
    swad_tolerance: int = Field(6, ge=1, description="N_e: evaluations above the threshold that end SWAD")
    swad_ratio: float | None = Field(None, ge=1, description="r: SWAD's threshold relative to its start")
    stop_early: bool = Field(False, description="stop where SWAD ends")
    selection: Selection | None = Field(
        None, description="which model is the result; oracle looks at the target and is cheating"
    )
    backbone: str | None = Field(None, description="convnet, efficientnet_lite0, resnet50, any of timm's")
    weights: str = Field("pretrained", description="pretrained, none, or a file of the backbone's weights")
    freeze_batchnorm: bool | None = Field(None, description="keep batch-norm statistics (default: if pretrained)")
    image_size: int | None = Field(None, ge=8, description="training and test size in pixels")
    channels: Channels | None = Field(None, description="image channels")
    augment: bool | None = Field(None, description="random crop, flip, colour jitter, grayscale")
    steps: int | None = Field(None, ge=1, description="optimiser steps")
    evaluate_every: int | None = Field(None, ge=1, description="V: steps between evaluations")
    batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] | None = Field(
        None,
        description="images through the backbone per source domain and step (AGFA: half are generated); "
        "auto: as many as fit into memory",
    )
    class_balanced: bool = Field(False, description="draw every class of a source domain equally often")
    accumulate: int = Field(
        1, ge=1, description="passes through the backbone that share a minibatch's images: less memory, same result"
    )
    activation_checkpointing: bool = Field(
        False, description="compute activations twice rather than keep them: less memory, same result"
    )
    val_fraction: float = Field(0.2, gt=0, lt=1, description="share of each domain held out for validation")
    stratified: bool = Field(False, description="hold out that share of each class")
    track_target: bool | None = Field(
        None,
        description="evaluate held-out domains along the way too; only oracle selects by them (default: if oracle)",
    )
    allow_missing_classes: bool = Field(False, description="train although a source domain lacks a class")
    seed: int = Field(0, ge=0, description="of splits, initial weights, order and noise")
    precision: Literal["32", "bf16-mixed"] = Field("32", description="of the arithmetic in the networks")
    compile: bool = Field(True, description="torch.compile the backbone where that pays: on a GPU")
    deterministic: bool = Field(False, description="only kernels that give the same bits each time, not the fastest")
    skip_nonfinite: bool = Field(
        False, description="leave out steps whose loss or gradient is not finite, rather than stop at the first"
    )
    accelerator: str = Field("auto", description="cpu, cuda, mps or auto")
    devices: int = Field(1, ge=1, description="processes on this machine (torchrun: leave it)")
    checkpoint_seconds: float = Field(30, ge=0, description="least time between checkpoints")
    out: Path | None = Field(None, description="the run's folder; the same command resumes it")


class CompleteConfig(TrainConfig, frozen=True):
    """A configuration with nothing left open: what config.yaml holds."""

    data: str
    averaging: Averaging
    swad_ratio: float
    selection: Selection
    backbone: str
    freeze_batchnorm: bool
    track_target: bool
    image_size: int
    channels: Channels
    augment: bool
    steps: int
    evaluate_every: int
    batch_size: int
    out: Path

    @property
    def chosen(self) -> str:
        """The name of the model that `selection` picks."""
        return "best" if self.selection == "validation" else self.selection


# These change where and how fast a run goes, not what comes out of it: a resumed run may differ in them.
INCIDENTAL = {
    *("out", "accelerator", "devices", "compile", "deterministic"),
    *("checkpoint_seconds", "accumulate", "activation_checkpointing"),
    "skip_nonfinite",  # the record says which steps; so a run that stopped at one may go on without it
}


C = TypeVar("C", bound=TrainConfig)


def parse(values: dict[str, Any], kind: type[C], where: str = "configuration") -> C:
    """Check `values`.

    Raises:
        UsageError: an unknown key, with the nearest known one, or a value that is not allowed.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"{where}: {describe(error, kind)}") from error


def read(path: Path) -> dict[str, Any]:
    """The keys and values in a YAML file."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds no keys; it should look like `agfa train`'s flags, one `key: value` a line")
    return values


def dump(config: TrainConfig) -> str:
    """The configuration as YAML that `read` and `parse` take back."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """How two configurations differ, key by key, in what decides the outcome."""
    then, now = old.model_dump(mode="json"), new.model_dump(mode="json")
    return [
        f"{key} is {then[key]!r} there, {now[key]!r} here"
        for key in then
        if key not in INCIDENTAL and then[key] != now[key]
    ]
