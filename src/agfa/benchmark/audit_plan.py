"""What an audit trains: a sweep that leaves out each domain in turn, made to fit a budget of time.

The plan is the sweep file in the audit's folder. Once it is there its number of steps stays, however long steps take
on another day: what was trained must fit together. Rounds and methods may be added to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agfa import algorithms
from agfa.benchmark.estimate import Cost, costs, duration, kind, seconds
from agfa.benchmark.expansion import expand
from agfa.benchmark.missing import count
from agfa.benchmark.running import Workers
from agfa.data import catalog
from agfa.data.domains import DomainDataset
from agfa.data.inventory import changes, inventory
from agfa.data.own import FORMS
from agfa.errors import AgfaError, UsageError
from agfa.files import put
from agfa.training.config import CompleteConfig, TrainConfig, read
from agfa.training.progress import Display

FEWEST = 100  # steps; a training of fewer says nothing of the method
MOST_ROUNDS = 3  # that are planned unasked: more say little of the next domain
EVALUATIONS = 20  # of a shortened training, at least
DECIDED = {  # the audit itself says these of each training
    **{"target": "it holds out each domain in turn", "source": "it trains on all domains but one"},
    **{"algorithm": "say --methods", "seed": "say --rounds"},
    **{"averaging": "a method's name says it, as swad or agfa-no-swad", "selection": "each method has its own"},
    "track_target": "held-out domains decide nothing",
}


@dataclass(frozen=True)
class Plan:
    """The sweep file of an audit, the trainings it stands for, and what they are of."""

    file: Path
    trainings: dict[str, list[CompleteConfig]]  # of each method; ERM and SWAD, say, share theirs
    dataset: DomainDataset
    settings: dict[str, Any]  # of every training, the steps among them
    rounds: int

    @property
    def runs(self) -> list[CompleteConfig]:
        """Every training once."""
        return list({run.out: run for runs in self.trainings.values() for run in runs}.values())


def hours(text: str) -> float:
    """The seconds in "90s", "30m", "8h" or "1h30m"."""
    parts = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", text.strip().lower())
    found = sum(float(n or 0) * unit for n, unit in zip(parts.groups(), (3600, 60, 1), strict=True)) if parts else 0
    if not found:
        raise UsageError(f"--budget {text!r} is no time; write it as 90s, 30m, 8h or 1h30m")
    return found


def make_plan(
    given: TrainConfig,
    methods: Sequence[str],
    budget: float,
    rounds: int | None,
    out: Path,
    workers: Workers,
    display: Display,
) -> Plan:
    """The plan in the folder `out`: the one that is there, with the methods and rounds now asked for, or a new one.

    Raises:
        UsageError: the settings or the data do not allow it, or the budget is too small.
    """
    if given.data is None:
        raise UsageError(f"say what to audit: --data with {FORMS}, or one of {', '.join(catalog.CATALOG)}")
    if rounds is not None and rounds < 1:
        raise UsageError("--rounds is at least 1")
    dataset, defaults = catalog.load(given.data)
    if len(dataset.domains) < 2:
        raise UsageError(f"{dataset.name} has one domain, {dataset.domain_names[0]}: nothing is left to train on")
    names = tuple(dict.fromkeys(algorithms.get(name).name for name in methods))
    settings = _settings(given)
    wanted: dict[str, Any] = {"datasets": [given.data], "methods": list(names), "hparams": given.hparams}
    wanted |= {"backbones": [given.backbone] if given.backbone else [], "settings": settings}

    file = out / "sweep.yaml"
    if file.exists():
        there = _same(file, wanted, dataset)
        wanted |= {"settings": there["settings"], "seeds": rounds or there["seeds"]}
        _write(file, wanted, dataset)
        display.say(f"going on with the plan in {out}: {wanted['settings']['steps']} steps a training")
    else:
        draft = {**wanted, "seeds": 1, "settings": {**settings, "steps": given.steps or defaults.steps}}
        known = _costs(draft, out, workers, display)
        steps, every, number = fit(known, given, rounds, budget, workers.slots())
        wanted |= {"seeds": number, "settings": {**settings, "steps": steps, "evaluate_every": every}}
        _write(file, wanted, dataset)
    trainings = {name: _expanded({**wanted, "methods": [name]}, out) for name in names}
    plan = Plan(file, trainings, dataset, wanted["settings"], wanted["seeds"])
    display.say(
        f"plan: {len(dataset.domains)} domains ({', '.join(dataset.domain_names)}), each held out in turn; "
        f"{', '.join(names)}; {count(plan.rounds, 'round')}: {count(len(plan.runs), 'training')} of "
        f"{plan.settings['steps']} steps"
    )
    return plan


def fit(
    known: Sequence[tuple[CompleteConfig, Cost]], given: TrainConfig, rounds: int | None, budget: float, slots: int
) -> tuple[int, int, int]:
    """Steps, steps between evaluations, and rounds, such that the trainings of every round fit into the budget.

    `known` are the trainings of one round, with what they cost. Steps come first: rounds are added when trainings of
    the full length leave time for them.

    Raises:
        UsageError: not even `FEWEST` steps fit.
    """
    full = known[0][0]

    def every(steps: int) -> int:
        shortened = min(full.evaluate_every, max(1, steps // EVALUATIONS))
        return given.evaluate_every or (shortened if steps < full.steps else full.evaluate_every)

    def took(steps: int, number: int) -> float:
        changed = {"steps": steps, "evaluate_every": every(steps)}
        each = [seconds(config.model_copy(update=changed), cost) for config, cost in known]
        return max(number * sum(each) / slots, max(each))

    if given.steps is not None or took(full.steps, rounds or 1) <= budget:
        number = rounds or max((n for n in range(1, MOST_ROUNDS + 1) if took(full.steps, n) <= budget), default=1)
        return full.steps, every(full.steps), number
    low, high = 0, full.steps  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if took(middle, rounds or 1) <= budget else (low, middle)
    if low < min(FEWEST, full.steps):
        least = took(min(FEWEST, full.steps), rounds or 1)
        raise UsageError(
            f"{len(known) * (rounds or 1)} trainings need {duration(least)} for {FEWEST} steps each, and less says "
            f"nothing; give --budget {_budget(least)}, fewer --methods, or a smaller --backbone or --image-size"
        )
    return low // every(low) * every(low), every(low), rounds or 1


def _settings(given: TrainConfig) -> dict[str, Any]:
    """What is set of every training; the steps only if asked for."""
    said = given.model_dump(mode="json", exclude_unset=True)
    for key, why in DECIDED.items():
        if key in said:
            raise UsageError(f"--{key.replace('_', '-')} is not for an audit: {why}")
    if given.batch_size == "auto":
        raise UsageError("--batch-size auto is not for an audit: its trainings must be alike; give a number")
    if given.devices != 1:
        raise UsageError("--devices is not for an audit: each training is one process; --jobs runs several at once")
    return {key: value for key, value in said.items() if key not in ("data", "hparams", "backbone", "out", "devices")}


def _costs(draft: dict[str, Any], out: Path, workers: Workers, display: Display) -> list[tuple[CompleteConfig, Cost]]:
    """The trainings of one round, with what they cost by a few timed steps of each kind."""
    runs = _expanded(draft, out)
    display.say("timing a few steps of each method")
    known = costs(runs, out / f"estimate-{workers.device}.json", workers.measure)
    for config in runs:
        if kind(config) not in known:
            raise AgfaError(
                f"a few steps of {config.algorithm} failed; `agfa train --data {config.data} --target "
                f"{config.target[0]} --algorithm {config.algorithm}` with the same settings says why"
            )
    return [(config, known[kind(config)]) for config in runs]


def _expanded(sweep: dict[str, Any], out: Path) -> list[CompleteConfig]:
    """The trainings that a sweep stands for."""
    file = out / ".draft.yaml"
    put(file, yaml.safe_dump(sweep).encode())
    try:
        return expand(file, out)
    finally:
        file.unlink(missing_ok=True)


def _same(file: Path, wanted: dict[str, Any], dataset: DomainDataset) -> dict[str, Any]:
    """The plan that is there.

    Raises:
        UsageError: it is of something else.
    """
    there, of = read(file), json.loads(file.with_name("data.json").read_text())
    fitted = {k: v for k, v in there["settings"].items() if k in wanted["settings"] or k not in _FITTED}
    kept = {**there, "settings": fitted}
    keys = [key for key in ("datasets", "hparams", "backbones", "settings") if kept[key] != wanted[key]]
    if keys:
        raise UsageError(
            f"{file.parent} is an audit of other {' and '.join(keys)}; choose another --out, or delete it"
        )
    if different := changes(of, inventory(dataset)):
        raise UsageError(
            f"{file.parent} is an audit of other images ({'; '.join(different)}); choose another --out, or delete it"
        )
    return there


_FITTED = ("steps", "evaluate_every")


def _write(file: Path, sweep: dict[str, Any], dataset: DomainDataset) -> None:
    put(file.with_name("data.json"), json.dumps(inventory(dataset)).encode())
    put(file, yaml.safe_dump(sweep, sort_keys=False).encode())


def _budget(least: float) -> str:
    """A budget that would do, as it is written."""
    minutes = int(least // 60) + 1
    return f"{minutes}m" if minutes < 120 else f"{minutes // 60 + 1}h"
