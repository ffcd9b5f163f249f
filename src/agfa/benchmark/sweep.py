"""A sweep file: which datasets, methods, seeds and hyperparameters to train, and with what settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from agfa.errors import UsageError, describe, unknown
from agfa.training.config import Averaging, TrainConfig, read

SHIPPED = Path(__file__).parent / "sweeps"
# What the sweep itself says of each run.
DECIDED = ("data", "target", "source", "algorithm", "hparams", "averaging", "backbone", "seed", "out")
FREE = tuple(key for key in TrainConfig.model_fields if key not in DECIDED)


def _listed(given: object) -> object:
    """One of something, as a list of it."""
    return [given] if isinstance(given, (str, dict)) else given


def _seeds(given: object) -> object:
    """A number of seeds, as the first so many."""
    return list(range(given)) if isinstance(given, int) and not isinstance(given, bool) else given


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
Seed = Annotated[int, Field(ge=0)]


class Sweep(BaseModel, extra="forbid", frozen=True):
    """Every combination of what is listed here."""

    datasets: Names = Field(min_length=1, description="known names, or folders, tables, hf:OWNER/NAME")
    protocol: Literal["leave_one_out", "single_source"] = Field(
        "leave_one_out", description="hold each domain out in turn, or train on each alone"
    )
    targets: Names = Field((), description="the domains to hold out in turn (default: all)")
    methods: Annotated[tuple[str | dict[str, dict[str, Any]], ...], BeforeValidator(_listed)] = Field(
        min_length=1, description="as `agfa algorithms` lists them; or with hyperparameters: {agfa: {eta: 0.5}}"
    )
    averaging: Annotated[tuple[Averaging, ...], BeforeValidator(_listed)] = Field(
        (), description="how the models of each method are averaged (default: as its paper does)"
    )
    backbones: Names = Field((), description="(default: the dataset's)")
    seeds: Annotated[tuple[Seed, ...], BeforeValidator(_seeds)] = Field(
        (0,), min_length=1, description="of splits, weights, order, noise, draws; or how many"
    )
    hparams: dict[str, Any] = Field({}, description="set in every method that has them")
    grid: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(
        {}, description="likewise, every combination of these values"
    )
    draws: int = Field(
        0, ge=0, description="random draws of the hyperparameters, the first of them the defaults; 0: defaults alone"
    )
    selection: Annotated[
        tuple[Literal["training_domain", "leave_one_domain_out", "oracle"], ...], BeforeValidator(_listed)
    ] = Field(("training_domain",), description="what is to choose between draws; leave_one_domain_out adds runs")
    settings: dict[str, Any] = Field({}, description="any other setting of `agfa train`: steps, image_size, ...")


def find(name: str) -> Path:
    """The sweep file at that path, or shipped under that name."""
    path = Path(name)
    if path.is_file():
        return path
    if name in shipped():
        return SHIPPED / f"{name}.yaml"
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UsageError(f"no sweep file {name}; `agfa sweep --list` names those that come with the package")
    raise unknown("sweep", name, shipped())


def shipped() -> list[str]:
    """The names of the sweeps that come with the package."""
    return sorted(path.stem for path in SHIPPED.glob("*.yaml"))


def summary(name: str) -> str:
    """What a shipped sweep is: the comment that its file begins with."""
    with (SHIPPED / f"{name}.yaml").open(encoding="utf-8") as file:
        return file.readline().removeprefix("#").strip()


def read_sweep(path: Path) -> list[tuple[str, Sweep]]:
    """The parts of the sweep in a file, each with what to call it in errors.

    `parts` is a list of what differs from the rest of the file; without it the file is the only part.

    Raises:
        UsageError: what is wrong, by file and key.
    """
    whole = read(path)
    parts = whole.pop("parts", None)
    if parts is None:
        return [(str(path), _parse(whole, str(path)))]
    if not isinstance(parts, list) or not parts or not all(isinstance(part, dict) for part in parts):
        raise UsageError(f"{path}: parts: a list of the keys that differ from the rest of the file, not {parts!r}")
    found = []
    for i, part in enumerate(parts, 1):
        where = f"{path}: part {i}"
        merged = {key: {**whole[key], **part[key]} for key in ("settings", "hparams") if _both(key, whole, part)}
        found.append((where, _parse({**whole, **part, **merged}, where)))
    return found


def _both(key: str, *values: dict[str, Any]) -> bool:
    return all(isinstance(value.get(key), dict) for value in values)


def _parse(values: dict[str, Any], where: str) -> Sweep:
    try:
        sweep = Sweep.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"{where}: {describe(error, Sweep)}") from error
    for key in sweep.settings:
        if key in DECIDED:
            raise UsageError(f"{where}: settings: {key} is not a setting of a sweep's runs; the sweep decides it")
        if key not in FREE:
            raise UsageError(f"{where}: settings: {unknown('key', key, FREE)}")
    if sweep.targets and sweep.protocol == "single_source":
        raise UsageError(f"{where}: targets: single_source trains on each domain in turn and holds out the rest")
    if sweep.settings.get("devices", 1) != 1:
        raise UsageError(
            f"{where}: settings: devices: each run of a sweep is one process; --jobs runs several at once"
        )
    return sweep
