"""What the trainings of an audit found, all on domains that were held out from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from agfa import algorithms
from agfa.benchmark.audit_calibration import calibration_error, coverage, reliability
from agfa.benchmark.audit_interval import Expected, expected
from agfa.benchmark.audit_plan import Plan
from agfa.benchmark.audit_seen import Seen, seen
from agfa.benchmark.paired import Difference, Interval, difference, t_interval
from agfa.benchmark.records import read_runs
from agfa.benchmark.tables import Accuracies
from agfa.errors import AgfaError

MISTAKES = 4  # of each domain, the surest


class Measured(NamedTuple):
    """A method: its accuracy by domain and round, and what to expect of it on the next domain."""

    name: str
    accuracies: Accuracies
    expected: Expected

    @property
    def by_domain(self) -> dict[str, float]:
        """The mean over rounds."""
        return {domain: float(np.mean(list(rounds.values()))) for domain, rounds in self.accuracies.items()}


class Gain(NamedTuple):
    """One method against another: by domain, for other domains (t over domains), and for other seeds on these."""

    row: str
    other: str
    by_domain: dict[str, float]
    elsewhere: Interval | None
    here: Difference

    @property
    def mean(self) -> float:
        """The mean over domains."""
        return float(np.mean(list(self.by_domain.values())))


class Mistake(NamedTuple):
    """A held-out image that was called something else."""

    domain: str
    image: int  # its place in the domain
    key: str
    truth: str
    said: str
    probability: float


@dataclass(frozen=True)
class Findings:
    """All that the page says. Everything but `methods` and `gains` is of the chosen method."""

    plan: Plan
    methods: tuple[Measured, ...]
    gains: tuple[Gain, ...]
    images: dict[str, int]  # that each domain was measured on, in a round
    classes: npt.NDArray[np.float64]  # accuracy by class and domain; nan where a domain lacks the class
    calibration_error: dict[str, float]  # by domain, and of all together under ""
    bins: tuple[tuple[float, float, int], ...]  # reliability: (mean probability, accuracy, images), domains pooled
    coverage: tuple[tuple[float, float, float], ...]  # (least confidence, share answered, accuracy), domains pooled
    temperature: float
    mistakes: tuple[Mistake, ...]

    @property
    def chosen(self) -> Measured:
        """The method with the highest mean."""
        return best(self.methods)

    @property
    def weakest_domain(self) -> str:
        """Where the chosen method is worst."""
        of = self.chosen.by_domain
        return min(of, key=of.__getitem__)

    @property
    def by_class(self) -> dict[str, float]:
        """Each class's accuracy, the mean over the domains that have it."""
        return dict(zip(self.plan.dataset.classes, np.nanmean(self.classes, axis=1).tolist(), strict=True))

    @property
    def weakest_class(self) -> str:
        """The class with the lowest."""
        return min(self.by_class, key=self.by_class.__getitem__)


def best(methods: Sequence[Measured]) -> Measured:
    """The method with the highest mean accuracy; of equals the first."""
    return max(methods, key=lambda method: method.expected.accuracy)


def find(plan: Plan) -> Findings:
    """Read the plan's trainings.

    Raises:
        AgfaError: one of them is not finished.
    """
    names = plan.dataset.domain_names
    measured, images = _measured(plan)
    methods = tuple(
        Measured(
            name, of, expected([float(np.mean(list(of[d].values()))) for d in names], [images[d] for d in names])
        )
        for name, of in measured.items()
    )
    chosen = best(methods).name
    looked_at = [s for run in plan.trainings[chosen] for s in seen(run, model_of(chosen), plan.dataset)]
    pooled = np.concatenate([s.confidence for s in looked_at]), np.concatenate([s.right for s in looked_at])
    by_domain = {
        name: (
            np.concatenate([s.confidence for s in looked_at if s.domain == name]),
            np.concatenate([s.right for s in looked_at if s.domain == name]),
        )
        for name in names
    }
    temperatures = [s.temperature for s in looked_at]
    return Findings(
        plan=plan,
        methods=methods,
        gains=tuple(_gains(methods)),
        images=images,
        classes=_classes(plan, looked_at),
        calibration_error={
            "": calibration_error(*pooled),
            **{n: calibration_error(*of) for n, of in by_domain.items()},
        },
        bins=tuple(reliability(*pooled)),
        coverage=tuple(coverage(*pooled)),
        temperature=prod(temperatures) ** (1 / len(temperatures)),
        mistakes=tuple(_mistakes(plan, looked_at)),
    )


def model_of(method: str) -> str:
    """Which of a training's models is the method's."""
    averaging = algorithms.get(method).averaging
    return "best" if averaging == "none" else averaging


def _measured(plan: Plan) -> tuple[dict[str, Accuracies], dict[str, int]]:
    """The accuracies of every method, and on how many images each domain's are."""
    frame = read_runs([plan.file.parent]).filter(
        pl.col("kind") == "final", pl.col("role") == "target", pl.col("split") == "test", pl.col("done")
    )
    ended = {
        (row["run"], row["model"]): row for row in frame.select("run", "model", "accuracy", "n").iter_rows(named=True)
    }
    found: dict[str, Accuracies] = {name: {} for name in plan.trainings}
    images: dict[str, int] = {}
    for name, runs in plan.trainings.items():
        for run in runs:
            row = ended.get((str(run.out.resolve()), model_of(name)))
            if row is None:
                raise AgfaError(
                    f"{run.out} has not finished; the same command goes on with it, or says why it failed"
                )
            found[name].setdefault(run.target[0], {})[run.seed] = row["accuracy"]
            images[run.target[0]] = row["n"]
    return found, images


def _gains(methods: Sequence[Measured]) -> list[Gain]:
    """AGFA against every other method; where it is not among them, the best."""
    by_name = {method.name: method for method in methods}
    lead = by_name.get("agfa", best(methods))
    found = []
    for other in methods:
        here = difference(lead.name, lead.accuracies, other.name, other.accuracies)
        if other is not lead and here is not None:
            by_domain = {domain: of - other.by_domain[domain] for domain, of in lead.by_domain.items()}
            found.append(Gain(lead.name, other.name, by_domain, t_interval(list(by_domain.values())), here))
    return found


def _classes(plan: Plan, looked_at: Sequence[Seen]) -> npt.NDArray[np.float64]:
    counts = np.zeros((2, len(plan.dataset.classes), len(plan.dataset.domains)))  # images, and the right ones
    for s in looked_at:
        column = plan.dataset.domain_names.index(s.domain)
        np.add.at(counts[0, :, column], s.labels, 1)
        np.add.at(counts[1, :, column], s.labels, s.right)
    with np.errstate(invalid="ignore"):
        shares: npt.NDArray[np.float64] = counts[1] / counts[0]
    return shares


def _mistakes(plan: Plan, looked_at: Sequence[Seen]) -> list[Mistake]:
    """The surest of every domain, no image twice."""
    found = []
    for domain in plan.dataset.domains:
        surest: dict[int, Mistake] = {}
        for s in looked_at:
            if s.domain != domain.name:
                continue
            for i in np.flatnonzero(~s.right):
                image, said = int(s.indices[i]), int(s.probabilities[i].argmax())
                words = plan.dataset.classes[domain.labels[image]], plan.dataset.classes[said]
                mistake = Mistake(domain.name, image, domain.keys[image], *words, float(s.confidence[i]))
                if image not in surest or surest[image].probability < mistake.probability:
                    surest[image] = mistake
        found += sorted(surest.values(), key=lambda mistake: (-mistake.probability, mistake.image))[:MISTAKES]
    return found
