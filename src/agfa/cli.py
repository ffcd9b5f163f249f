"""The commands: parse, call, print. What is slow to import is imported in the command that needs it."""

from __future__ import annotations

import csv
import json
import sys
import traceback
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import cyclopts
from cyclopts import App, Parameter
from pydantic import ValidationError

from agfa import __version__
from agfa.errors import AgfaError, UsageError, describe
from agfa.training.config import TrainConfig, parse, read

SUMMARY = "Domain generalisation: train an image classifier on a few known sources; it holds on one never seen."
app = App(
    name="agfa",
    version=__version__,
    suppress_keyboard_interrupt=False,
    help=f"{SUMMARY}\n\nAdd --debug to any command for tracebacks.",
)
data_app = App(name="data", help="Known datasets, and your own.")
app.command(data_app)
NOTHING = TrainConfig()  # no setting given


@app.command
def demo(*, out: Path = Path("demo"), seeds: int = 3) -> None:
    """Train ERM, SWAD and AGFA on three digit domains, test on the fourth, and write a report.

    Args:
        out: where the runs and report.html go; the same command goes on where it stopped.
        seeds: trainings of each method.
    """
    from agfa.benchmark.demo import run_demo
    from agfa.training.progress import Display

    rows, report = run_demo(out, seeds, Display())
    _table(
        ("method", "unseen domain", "source validation", "seeds", "seconds a training"),
        [
            (
                row.method,
                _percent(row.mean) + ("" if row.standard_error is None else f" ± {_percent(row.standard_error)}"),
                _percent(row.source_accuracy),
                row.seeds,
                f"{row.seconds:.0f}",
            )
            for row in rows
        ],
    )
    print("accuracy in percent, mean ± standard error over seeds")
    print(f"report: {report.resolve()}")


@app.command
def train(
    *,
    config: Path | None = None,
    settings: Annotated[TrainConfig, Parameter(name="*", negative_iterable=(), consume_multiple=True)] = NOTHING,
) -> None:
    """Train a model: hold --target out, or train on --source alone, or (neither) on every domain.

    The same command resumes a run that was stopped.

    Args:
        config: a YAML file of these settings (a run's config.yaml, say); flags override it.
    """
    from agfa.training.processes import is_first_process
    from agfa.training.progress import Display
    from agfa.training.trainer import train as run

    given = settings.model_dump(exclude_unset=True)
    in_file = parse(read(config), TrainConfig, str(config)).model_dump(exclude_unset=True) if config else {}
    if given.keys() & {"target", "source"}:  # a complete configuration says both
        in_file = {key: value for key, value in in_file.items() if key not in ("target", "source")}
    merged = {**in_file, **given, "hparams": {**in_file.get("hparams", {}), **given.get("hparams", {})}}
    finished = run(parse(merged, TrainConfig), Display())
    if not is_first_process():
        return
    rows = [
        (model, "yes" if model == finished.config.chosen else "", domain, f"{role} {split}", f"{score.accuracy:.1%}")
        for model, scores in finished.scores.items()
        for (role, domain, split), score in scores.items()
    ]
    _table(("model", "selected", "domain", "images", "accuracy"), rows)
    if "oracle" in finished.scores:
        print("oracle is the best model on 20% of the target's labels: cheating, for comparison only")
    print(f"model: {finished.folder / 'model.safetensors'}")


@app.command
def evaluate(model: Path, /, *, data: str, device: str = "cpu") -> None:
    """Measure a model on every image of every domain of a dataset.

    Args:
        model: a run's folder, or a .safetensors file in it.
        data: a folder domain/class/image, a table (CSV, Parquet), hf:OWNER/NAME, or a known dataset's name.
        device: cpu, cuda or mps.
    """
    from agfa.inference.predictor import load
    from agfa.training.progress import Display

    predictor = load(model, device)
    with Display().images() as seen:
        scores = predictor.evaluate(data, seen)
    rows = [
        (
            name,
            "trained on" if name in predictor.card.sources else "unseen",
            s.n,
            f"{s.accuracy:.1%}",
            f"{s.loss:.3f}",
        )
        for name, s in scores.items()
    ]
    _table(("domain", "", "images", "accuracy", "loss"), rows)


@app.command
def predict(
    model: Path,
    images: list[Path],
    /,
    *,
    format: Literal["table", "csv", "jsonl"] = "table",
    device: str = "cpu",
) -> None:
    """Name the class of images, with its probability and the posterior's disagreement.

    Args:
        model: a run's folder, or a .safetensors file in it.
        images: image files, or folders of them.
        format: how to print: a table, CSV, or a JSON object a line.
        device: cpu, cuda or mps.
    """
    from agfa.data.domains import image_files, image_suffixes
    from agfa.inference.predictor import load

    files = [f for path in images for f in (image_files(path, image_suffixes()) if path.is_dir() else [path])]
    missing = [path for path in files if not path.exists()]
    if missing or not files:
        raise UsageError(f"no image {missing[0]}" if missing else f"no images in {images[0]}")
    answers = zip(files, load(model, device).stream(files), strict=True)
    if format == "jsonl":
        for file, answer in answers:
            print(json.dumps({"image": str(file), **asdict(answer)}), flush=True)
        return
    header = ("image", "class", "probability", "disagreement")
    rows = (
        (str(file), a.label, f"{a.probability:.4f}", "" if a.disagreement is None else f"{a.disagreement:.4f}")
        for file, a in answers
    )
    if format == "csv":
        csv.writer(sys.stdout).writerows([header])
        for row in rows:
            csv.writer(sys.stdout).writerow(row)
    else:
        _table(header, list(rows))


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
            (r.name, m.paper, r.title, "needed" if m.needs_domains else "", m.min_domains, r.averaging)
            for r in known
            for m in [r.method]
        ]
        _table(header, listed)
        return
    recipe = methods.get(name)
    kind = recipe.method.hparams_type
    print(sys.modules[recipe.method.__module__].__doc__)
    drawn = distributions(kind)
    rows = [
        (key, recipe.preset.get(key, f.default), drawn.get(key, ""), f.description)
        for key, f in kind.model_fields.items()
    ]
    _table(("hyperparameter", "default", "random search", "meaning"), rows)


@data_app.command(name="list")
def list_datasets() -> None:
    """List the known datasets: what they hold, whose they are, how much there is to download, which are here."""
    from agfa.data import catalog

    rows = [
        (
            b.name,
            len(b.places),
            b.classes,
            b.images,
            "none" if b.embedded else "unknown" if b.download_size is None else f"{b.download_size / 1e6:,.0f} MB",
            b.licence,
            "in the package" if b.embedded else b.find() or "no",
        )
        for b in catalog.BENCHMARKS
    ]
    _table(("name", "domains", "classes", "images", "download", "licence", "on this machine"), rows)
    print(f"known datasets are looked for in {catalog.data_folder()} (set AGFA_DATA to another folder)")


@data_app.command(name="get")
def get_dataset(name: str, /) -> None:
    """Download a known dataset, verify and unpack it. The same command goes on where it was stopped.

    Args:
        name: a known dataset's name (agfa data list).
    """
    from agfa.data import catalog
    from agfa.data.download import get
    from agfa.training.progress import Display

    benchmark = catalog.benchmark(name)
    display = Display()
    display.say(f"{benchmark.name}: {benchmark.citation}; licence: {benchmark.licence}")
    with display.download() as progress:
        folder = get(benchmark, say=display.say, progress=progress)
    print(f"{benchmark.name} is in {folder or 'the package'}")


@data_app.command
def check(path: str, /) -> int:
    """Find everything that is wrong with a dataset; exit status 1 if training would fail.

    Args:
        path: a folder domain/class/image, a table (CSV, Parquet), hf:OWNER/NAME, or a known dataset's name.
    """
    from agfa.data import catalog
    from agfa.data.check import check as find_problems
    from agfa.data.check import compare_counts
    from agfa.training.progress import Display

    dataset, _ = catalog.load(path)
    counts = dataset.counts()
    rows = [(d.name, len(d), *counts[i]) for i, d in enumerate(dataset.domains)]
    _table(("domain", "images", *dataset.classes), rows)
    with Display().images("reading images") as seen:
        problems = find_problems(dataset, seen)
    if path.lower() in catalog.CATALOG and not Path(path).is_dir():
        problems += compare_counts(dataset, catalog.CATALOG[path.lower()])
    if problems:
        _table(("where", "what is wrong", "what to do"), [(p.where, p.what, p.remedy) for p in problems])
    fatal = sum(p.fatal for p in problems)
    print(f"{len(problems)} problems, {fatal} of them would stop training" if problems else "no problems")
    return 1 if fatal else 0


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{100 * share:.1f}"


def _table(header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> None:
    """Print a table; where the output is not a terminal, at full width."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*header, box=box.SIMPLE_HEAD)
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row))
    console = Console()
    console.print(table) if console.is_terminal else Console(width=400).print(table)


def main() -> NoReturn:
    """Run the command line: one line for what went wrong, 2 for bad use, 1 for failure."""
    arguments = sys.argv[1:]
    debug = "--debug" in arguments
    try:
        status = app(
            [a for a in arguments if a != "--debug"],
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
        sys.exit(status if isinstance(status, int) else 0)
    except KeyboardInterrupt:
        print("agfa: stopped; the same command goes on where it stopped", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"agfa: {_one_line(error)}", file=sys.stderr)
        bad_use = isinstance(error, cyclopts.CycloptsError)
        sys.exit(2 if bad_use else getattr(error, "exit_status", 1))


def _one_line(error: Exception) -> str:
    if isinstance(error, AgfaError):
        return " ".join(str(error).splitlines())
    if isinstance(error, cyclopts.CycloptsError):
        cause = error.__cause__
        text = describe(cause, TrainConfig) if isinstance(cause, ValidationError) else str(error)
        return f"{' '.join(text.split())} (agfa --help)"
    return f"{type(error).__name__}: {' '.join(str(error).split())} (run it again with --debug for the traceback)"
