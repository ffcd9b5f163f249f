"""What the trainings of an audit found, all on images of domains that were held out from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from agfa import algorithms
from agfa.benchmark.audit_interval import Expected, expected
from agfa.benchmark.audit_plan import Plan
from agfa.benchmark.paired import Difference, Interval, difference, t_interval
from agfa.benchmark.tables import Accuracies
from agfa.benchmark.uncertainty import Believed
from agfa.data.domains import DomainDataset
from agfa.errors import AgfaError
from agfa.training import predictions
from agfa.training.calibration import coverage

MISTAKES = 4  # of each domain, the surest
SHARES = tuple(share / 50 for share in range(50, 0, -1))  # of images answered, that the card tells of


@dataclass(frozen=True)
class Measured:
    """A method on every domain when it was held out, and what to expect of it on the next one."""

    name: str
    accuracies: Accuracies  # by domain and round
    images: dict[str, int]  # that each domain was measured on, in a round
    believed: Believed  # its probabilities

    @property
    def by_domain(self) -> dict[str, float]:
        """The mean accuracy over rounds."""
        return {domain: float(np.mean(list(rounds.values()))) for domain, rounds in self.accuracies.items()}

    @cached_property
    def expected(self) -> Expected:
        """On the next domain."""
        return expected(list(self.by_domain.values()), [self.images[domain] for domain in self.accuracies])

    @cached_property
    def answers(self) -> pl.DataFrame:
        """What it said of every image: those of all domains and rounds together."""
        return pl.concat(self.believed.answers)


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
    place: int  # in the domain
    key: str
    truth: str
    said: str
    probability: float


@dataclass(frozen=True)
class Findings:
    """All that the page says. Classes, coverage and mistakes are of the chosen method."""

    plan: Plan
    methods: tuple[Measured, ...]
    gains: tuple[Gain, ...]
    classes: npt.NDArray[np.float64]  # accuracy by class and domain; nan where a domain lacks the class
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
        return min(self.chosen.by_domain, key=self.chosen.by_domain.__getitem__)

    @property
    def by_class(self) -> dict[str, float]:
        """Each class's accuracy, the mean over the domains that have it."""
        means = np.nanmean(self.classes, axis=1).tolist()
        return dict(zip(self.plan.dataset.classes, means, strict=True))

    @property
    def weakest_class(self) -> str:
        """The class with the lowest."""
        return min(self.by_class, key=self.by_class.__getitem__)


def best(methods: Sequence[Measured]) -> Measured:
    """The method with the highest mean accuracy; of equals the first."""
    return max(methods, key=lambda method: method.expected.accuracy)


def find(plan: Plan) -> Findings:
    """Read what the plan's trainings left behind.

    Raises:
        AgfaError: one of them is not finished.
    """
    methods = tuple(_measured(plan, name) for name in plan.trainings)
    chosen = best(methods)
    return Findings(
        plan=plan,
        methods=methods,
        gains=tuple(_gains(methods)),
        classes=_by_class(plan.dataset, chosen.answers),
        coverage=tuple(_coverage(chosen.answers)),
        temperature=prod(chosen.believed.temperatures) ** (1 / len(chosen.believed.temperatures)),
        mistakes=tuple(_mistakes(plan.dataset, chosen.answers)),
    )


def _measured(plan: Plan, name: str) -> Measured:
    """A method's figures, from the predictions of its trainings."""
    averaging = algorithms.get(name).averaging
    model = "best" if averaging == "none" else averaging
    accuracies: Accuracies = {domain: {} for domain in plan.dataset.domain_names}
    images, believed = dict[str, int](), Believed()
    for run in plan.trainings[name]:
        told = predictions.read(run.out)
        if told is None:
            raise AgfaError(f"{run.out} has no {predictions.FILE}; delete it, and the same command trains it again")
        of_model = told.filter(pl.col("model") == model)
        test, (domain,) = of_model.filter(pl.col("split") == "test"), run.target
        figures = predictions.figures(test, of_model.filter(pl.col("split") == "val"))
        accuracies[domain][run.seed], images[domain] = figures.accuracy, figures.images
        believed.figures[domain, run.seed] = figures
        believed.temperatures.append(float(test["temperature"][0]))
        believed.answers.append(test)
    return Measured(name, accuracies, images, believed)


def _gains(methods: Sequence[Measured]) -> Iterator[Gain]:
    """AGFA against every other method; where it is not among them, the best."""
    by_name = {method.name: method for method in methods}
    lead = by_name.get("agfa", best(methods))
    for other in methods:
        here = difference(lead.name, lead.accuracies, other.name, other.accuracies)
        if other is not lead and here is not None:
            by_domain = {domain: of - other.by_domain[domain] for domain, of in lead.by_domain.items()}
            yield Gain(lead.name, other.name, by_domain, t_interval(list(by_domain.values())), here)


def _by_class(dataset: DomainDataset, answers: pl.DataFrame) -> npt.NDArray[np.float64]:
    """Accuracy by class and domain."""
    found = np.full((len(dataset.classes), len(dataset.domains)), np.nan)
    for domain, label, share in answers.group_by("domain", "label").agg(pl.col("right").mean()).rows():
        found[label, dataset.domain_names.index(domain)] = share
    return found


def _coverage(answers: pl.DataFrame) -> Iterator[tuple[float, float, float]]:
    """Some points of the whole curve, all images first."""
    curve = coverage(answers["confidence"].to_numpy(), answers["right"].to_numpy())
    places = dict.fromkeys(int(np.flatnonzero(curve.share >= share - 1e-9)[0]) for share in SHARES)
    yield from ((float(curve.confidence[i]), float(curve.share[i]), float(curve.accuracy[i])) for i in places)


def _mistakes(dataset: DomainDataset, answers: pl.DataFrame) -> Iterator[Mistake]:
    """The surest of every domain, no image twice."""
    wrong = answers.filter(~pl.col("right")).sort("confidence", "index", descending=[True, False])
    surest: Mapping[str, pl.DataFrame] = {
        str(of["domain"][0]): of.unique("index", maintain_order=True).head(MISTAKES)
        for of in wrong.partition_by("domain", maintain_order=True)
    }
    for domain in dataset.domain_names:
        rows = surest[domain].iter_rows(named=True) if domain in surest else ()
        for row in rows:
            words = dataset.classes[row["label"]], dataset.classes[row["predicted"]]
            yield Mistake(domain, row["index"], row["key"], *words, row["confidence"])
