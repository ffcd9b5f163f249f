"""How long runs will take: a few steps of each kind of run, timed, and scaled to all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from agfa.algorithms.base import plain_backward
from agfa.data.augment import Augmentation
from agfa.data.batches import Part, training_batches
from agfa.data.store import open_images
from agfa.files import put
from agfa.training import processes
from agfa.training.config import CompleteConfig
from agfa.training.evaluate import totals
from agfa.training.setup import build, complete, source_batch, split

SECONDS, STEPS = 2.0, 10  # a kind is timed for no longer, and one step at least
EVALUATED = 256  # images


class Cost(NamedTuple):
    """Seconds: until the first step, for an image through the backbone in training, for one in an evaluation."""

    start: float
    trained: float
    evaluated: float
    images: dict[str, int]  # of each domain


def kind(config: CompleteConfig) -> str:
    """What the cost of an image depends on; runs of one kind are timed once."""
    keys = ("algorithm", "data", "backbone", "image_size", "batch_size", "precision", "augment")
    return " ".join(str(getattr(config, key)) for key in keys)


def measure(config: CompleteConfig) -> Cost | None:
    """Time the beginning of a run; None if it fails, which the run itself will explain."""
    try:
        return _measure(config)
    except Exception:
        return None


def _measure(config: CompleteConfig) -> Cost:
    config, dataset, roles = complete(config)
    fabric = processes.prepare(config)
    images = open_images(dataset, config.image_size, config.channels)  # once for all runs: not counted
    began = time.monotonic()
    splits = split(dataset, images, roles, config)
    algorithm = build(config, dataset, splits)
    algorithm.to(fabric.device)
    algorithm.train()
    batches = training_batches(
        list(splits.train.values()),
        batch_size=source_batch(config),
        image_size=config.image_size,
        augmentation=Augmentation() if config.augment else None,
        seed=config.seed,
        first_step=0,
        device=fabric.device,
    )

    def step() -> None:
        with fabric.autocast():
            losses = algorithm.update(next(batches), plain_backward)
        sum(float(value) for value in losses.values())  # waits for the device

    with closing(batches):
        step()  # the first one warms up
        ready = time.monotonic()
        steps = 0
        while steps == 0 or (steps < STEPS and time.monotonic() - ready < SECONDS):
            step()
            steps += 1
        trained = time.monotonic() - ready
    part = next(iter(splits.train.values()))
    part = Part(part.images, part.labels, part.indices[:EVALUATED])
    before = time.monotonic()
    totals(algorithm.network, part, config.image_size, fabric.device)
    evaluated = time.monotonic() - before
    return Cost(
        start=ready - began,
        trained=trained / steps / (config.batch_size * len(roles.sources)),
        evaluated=evaluated / len(part),
        images={domain.name: len(domain) for domain in dataset.domains},
    )


def seconds(config: CompleteConfig, cost: Cost) -> float:
    """What a run of this kind takes from start to end."""
    steps = config.steps * config.batch_size * len(config.source) * cost.trained
    validation = config.val_fraction * sum(cost.images[name] for name in config.source)
    unseen = sum(cost.images[name] for name in config.target)
    along = -(-config.steps // config.evaluate_every) * (validation + unseen * config.track_target)
    models = 2 + (config.averaging != "none") + bool(config.target and config.track_target)
    return cost.start + steps + (along + models * (validation + unseen)) * cost.evaluated


def costs(
    runs: Iterable[CompleteConfig], cache: Path, measured: Callable[[list[CompleteConfig]], Iterable[Cost | None]]
) -> dict[str, Cost]:
    """The cost of every kind of these runs: from the cache, or `measured` and put there."""
    known = cached(cache)
    new = {kind(config): config for config in runs if kind(config) not in known}
    for name, cost in zip(new, measured(list(new.values())), strict=True):
        if cost is not None:
            known[name] = cost
            content = json.dumps({name: cost._asdict() for name, cost in known.items()}, indent=1)
            put(cache, content.encode())
    return known


def cached(cache: Path) -> dict[str, Cost]:
    """The costs that were measured earlier, by kind."""
    try:
        return {name: Cost(**values) for name, values in json.loads(cache.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):  # none, or damaged: it is only a cache
        return {}


def duration(seconds: float) -> str:
    """A time that people can read."""
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{seconds / 3600:.0f} h" if seconds < 72 * 3600 else f"{seconds / 86400:.0f} days"
