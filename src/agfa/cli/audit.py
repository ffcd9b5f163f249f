"""`agfa audit`: what to expect on the next domain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from agfa.cli.app import app
from agfa.cli.show import console
from agfa.errors import UsageError
from agfa.training.config import TrainConfig

NOTHING = TrainConfig()  # no setting given


@app.command
def audit(
    *,
    methods: str = "erm,swad,agfa",
    budget: str = "30m",
    rounds: int | None = None,
    jobs: int | None = None,
    address: str | None = None,
    settings: Annotated[TrainConfig, Parameter(name="*", negative_iterable=(), consume_multiple=True)] = NOTHING,
) -> None:
    """Leave out each of your domains in turn, and say in one page what to expect on the next.

    The steps of each training are fitted to the budget, by timing a few; the plan is said before it starts. The page
    has the accuracy to expect with an interval, the weakest domain and class, whether AGFA pays, how far to believe
    the probabilities, mistakes as pictures, and the command that trains the final model. The same command goes on
    where it stopped. Settings are those of `agfa train`, but for what the audit decides itself.

    Args:
        methods: names that `agfa algorithms` lists, with commas between.
        budget: the time for all trainings together: 90s, 30m, 8h, 1h30m.
        rounds: trainings of each kind, with seeds 0, 1, ... (default: 1, more if full-length trainings leave time).
        jobs: trainings at once, on this machine's cores (needs Ray).
        address: of a Ray cluster, HOST:PORT, ray://HOST:PORT, or auto.
    """
    from agfa.benchmark.audit import run_audit
    from agfa.benchmark.audit_plan import hours
    from agfa.benchmark.audit_words import summary
    from agfa.benchmark.cluster import connected
    from agfa.benchmark.running import Here
    from agfa.training.progress import Display

    if jobs is not None and jobs < 1:
        raise UsageError("--jobs is at least 1")
    names = [name.strip() for name in methods.split(",") if name.strip()]
    out = settings.out or Path("audits", Path(settings.data or "").stem)
    asked = (settings, names, hours(budget), rounds, out)
    if jobs in (None, 1) and address is None:
        findings, page = run_audit(*asked, Here(), Display())
    else:
        with connected(address, jobs, None, None) as workers:
            findings, page = run_audit(*asked, workers, Display())
    for line in summary(findings):
        console().print(line, markup=False, highlight=False)
    console().print(f"page: {page.resolve()}", markup=False, highlight=False, soft_wrap=True)
