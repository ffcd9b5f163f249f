"""`agfa demo`, `train`, `algorithms`: from data to a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from agfa.cli.app import app
from agfa.cli.show import console, table
from agfa.errors import UsageError
from agfa.training.config import TrainConfig, parse, read

if TYPE_CHECKING:
    from agfa.training.model_file import Audit

NOTHING = TrainConfig()  # no setting given


@app.command
def demo(*, out: Path = Path("demo"), seeds: int = 3) -> None:
    """Train ERM, SWAD and AGFA on three digit domains, test on the fourth, and write a report.

    Args:
        out: where the runs and report.html go; the same command goes on where it stopped.
        seeds: trainings of each method.
    """
    from agfa.benchmark import render
    from agfa.benchmark.demo import run_demo
    from agfa.training.progress import Display

    report, page = run_demo(out, seeds, Display())
    render.terminal(report.tables[:3], report.missing, console())
    print(f"report: {page.resolve()}")


@app.command
def train(
    *,
    config: Path | None = None,
    repeated: Annotated[Path | None, Parameter(name="--from")] = None,
    audit: Path | None = None,
    settings: Annotated[TrainConfig, Parameter(name="*", negative_iterable=(), consume_multiple=True)] = NOTHING,
) -> None:
    """Train a model: hold --target out, or train on --source alone, or (neither) on every domain.

    The same command resumes a run that was stopped.

    Args:
        config: a YAML file of these settings (a run's config.yaml, say); flags override it.
        repeated: a run's folder, to train the same once more (default --out: RUN-again).
        audit: the folder of an `agfa audit` of this data and method; what it found goes into the model's card.
    """
    from agfa.training import run_folder
    from agfa.training.model_file import attach
    from agfa.training.processes import is_first_process
    from agfa.training.progress import Display
    from agfa.training.trainer import train as run

    display, given = Display(), settings.model_dump(exclude_unset=True)
    if repeated is not None:
        if config is not None:
            raise UsageError("--from takes the configuration of a run: leave --config away")
        config = repeated / "config.yaml"
        given.setdefault("out", Path(f"{repeated}-again" if repeated.name else f"../{repeated.resolve().name}-again"))
    in_file = parse(read(config), TrainConfig, str(config)).model_dump(exclude_unset=True) if config else {}
    for difference in run_folder.other_environment(repeated) if repeated and is_first_process() else ():
        display.say(f"not as in {repeated}: {difference}; expect other bits")
    if given.keys() & {"target", "source"}:  # a complete configuration says both
        in_file = {key: value for key, value in in_file.items() if key not in ("target", "source")}
    merged = {**in_file, **given, "hparams": {**in_file.get("hparams", {}), **given.get("hparams", {})}}
    complete = parse(merged, TrainConfig)
    found = _audit(audit, complete) if audit else None
    finished = run(complete, display)
    if not is_first_process():
        return
    if found:
        attach(finished.folder / "model", found)
    rows = [
        (model, "yes" if model == finished.config.chosen else "", domain, f"{role} {split}", f"{score.accuracy:.1%}")
        for model, scores in finished.scores.items()
        for (role, domain, split), score in scores.items()
    ]
    table(("model", "selected", "domain", "images", "accuracy"), rows)
    if "oracle" in finished.scores:
        print("oracle is the best model on 20% of the target's labels: cheating, for comparison only")
    print(f"model: {finished.folder / 'model.safetensors'}")
    if repeated is not None:
        print(run_folder.compared(finished.folder, repeated))


def _audit(folder: Path, settings: TrainConfig) -> Audit:
    """What the audit in that folder found, if it speaks for a model with these settings."""
    from agfa.benchmark.audit import record_for
    from agfa.data.catalog import load

    if settings.data is None:
        raise UsageError("--audit needs --data: the data that was audited")
    return record_for(folder, load(settings.data)[0], settings.algorithm)


@app.command
def algorithms(name: str | None = None, /) -> None:
    """List the methods; or show one, with its equation and its hyperparameters.

    Args:
        name: a method.
    """
    from agfa import algorithms as methods
    from agfa.algorithms.search import distributions

    if name is None:
        known = [methods.get(name) for name in methods.recipes()]
        header = ("name", "paper", "what it does", "domain labels", "least sources", "averaging")
        listed = [
            (r.name, r.paper, r.title, "needed" if m.needs_domains else "", m.min_domains, r.averaging)
            for r in known
            for m in [r.method]
        ]
        table(header, listed)
        return
    recipe = methods.get(name)
    kind = recipe.method.hparams_type
    print(sys.modules[recipe.method.__module__].__doc__)
    drawn = distributions(kind)
    rows = [
        (key, recipe.preset.get(key, f.default), drawn.get(key, ""), f.description)
        for key, f in kind.model_fields.items()
    ]
    table(("hyperparameter", "default", "random search", "meaning"), rows)
