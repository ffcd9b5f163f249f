"""From a sweep to its runs: complete configurations, each in a folder named after what it holds."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from agfa import algorithms
from agfa.algorithms import Recipe
from agfa.algorithms.presets import PRESETS
from agfa.algorithms.search import draw
from agfa.benchmark.sweep import Sweep, read_sweep
from agfa.data import catalog
from agfa.data.domains import DomainDataset
from agfa.errors import UsageError, unknown
from agfa.training.config import INCIDENTAL, CompleteConfig, TrainConfig, parse
from agfa.training.setup import resolve


def expand(file: Path, out: Path) -> list[CompleteConfig]:
    """The runs of a sweep file, each once, in folders below `out`.

    Raises:
        UsageError: what is wrong, by file and key.
    """
    outline = lru_cache(catalog.outline)  # one's own folder is listed once
    runs: dict[str, CompleteConfig] = {}
    for where, sweep in read_sweep(file):
        with _at(where):
            for values in _combinations(sweep, outline):
                dataset, settings = outline(values["data"])
                config, _ = resolve(parse({**values, "out": out}, TrainConfig, "settings"), dataset, settings)
                name = run_name(config)
                runs.setdefault(name, config.model_copy(update={"out": out / name}))
    return list(runs.values())


def run_name(config: CompleteConfig) -> str:
    """A name that is readable, and another one for whatever decides the outcome.

    A setting at its default is no part of it, so that settings that are added later rename no run.
    """
    values = config.model_dump(mode="json")
    defaults = TrainConfig().model_dump(mode="json")
    decisive = {k: v for k, v in values.items() if k not in INCIDENTAL and (v != defaults[k] or k == "algorithm")}
    digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:10]
    held_out = "+".join(config.target)
    roles = f"only-{config.source[0]}" if len(config.source) == 1 < len(config.target) else f"not-{held_out}"
    parts = (Path(config.data).stem, config.algorithm, roles, f"seed{config.seed}")
    return "-".join(re.sub(r"[^\w+%.]+", "_", part)[:60] for part in (*parts, digest))


def _combinations(sweep: Sweep, outline: Any) -> Iterator[dict[str, Any]]:
    """The settings of every run, those that follow from the dataset left open; some may come twice."""
    methods = [_method(entry) for entry in sweep.methods]
    _refuse_strangers(sweep, [recipe for recipe, _ in methods])
    for data, seed, backbone in itertools.product(sweep.datasets, sweep.seeds, sweep.backbones or (None,)):
        with _at("datasets"):
            dataset, known = outline(data)[0], catalog.known_as(data)
        for recipe, own in methods:
            for roles in _roles(sweep, dataset):
                for hparams in _hparams(sweep, recipe, own, seed):
                    for averaging in _averaging(sweep, recipe):
                        yield {
                            **sweep.settings,
                            **roles,
                            "data": known.name if known else data,
                            "algorithm": recipe.method.name,
                            "hparams": hparams,
                            "averaging": averaging,
                            "backbone": backbone,
                            "seed": seed,
                        }


def _method(entry: str | dict[str, dict[str, Any]]) -> tuple[Recipe, dict[str, Any]]:
    """A method as the file has it: a name, or a name with hyperparameters."""
    named = {entry: dict[str, Any]()} if isinstance(entry, str) else entry
    if len(named) != 1:
        raise UsageError(f"methods: one method an entry, as `- agfa: {{eta: 0.5}}`, not {entry!r}")
    (name, own), *_ = named.items()
    with _at("methods"):
        recipe = algorithms.get(name)
        recipe.hparams(own)
    return recipe, own


def _refuse_strangers(sweep: Sweep, recipes: list[Recipe]) -> None:
    """A hyperparameter that no method of the sweep has is a mistake."""
    known = sorted({key for recipe in recipes for key in recipe.method.hparams_type.model_fields})
    for where, keys in (("hparams", sweep.hparams), ("grid", sweep.grid)):
        for key in keys:
            if key not in known:
                raise UsageError(f"{where}: {unknown('hyperparameter', key, known)}")


def _roles(sweep: Sweep, dataset: DomainDataset) -> Iterator[Mapping[str, tuple[str, ...]]]:
    """What is held out, run by run; a second domain too for leave-one-domain-out validation."""
    domains = dataset.domain_names
    if sweep.protocol == "single_source":
        yield from ({"source": (domain,)} for domain in domains)
        return
    with _at("targets"):
        targets = [dataset[target].name for target in sweep.targets or domains]
    yield from ({"target": (target,)} for target in targets)
    if "leave_one_domain_out" in sweep.selection:
        yield from ({"target": (t, second)} for t in targets for second in domains if second != t)


def _hparams(sweep: Sweep, recipe: Recipe, own: dict[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """Every draw, with every point of the grid, under what is set for all and for this method."""
    kind = recipe.method.hparams_type
    fields = kind.model_fields
    fixed = {**{k: v for k, v in sweep.hparams.items() if k in fields}, **recipe.preset, **own}
    grid = {k: values for k, values in sweep.grid.items() if k in fields and k not in recipe.preset | own}
    for number in range(max(1, sweep.draws)):
        drawn = draw(kind, number, seed) if number else {}
        for point in itertools.product(*grid.values()):
            yield {**drawn, **fixed, **dict(zip(grid, point, strict=True))}


def _averaging(sweep: Sweep, recipe: Recipe) -> list[str]:
    """The trainings that give every average that is wanted of a method: one that averages gives the rest too.

    A method that stands in the tables with SWAD is always trained with it, so that the row with it and the row
    without it are one training, whichever was asked for first.
    """
    policies = set[str](sweep.averaging) or {recipe.averaging}
    method = recipe.method
    averaged = {method.averaging, *(p.averaging for p in PRESETS.values() if p.method == method.name)}
    if not sweep.averaging and "swad" in averaged:
        policies = {"swad"}
    return sorted(policies - {"none"} or policies)


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Say where, in front of what is wrong."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error
