"""`agfa data`: known datasets, and your own."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App

from agfa.cli.app import app as whole
from agfa.cli.show import table

app = App(name="data", help="Known datasets, and your own.")
whole.command(app)


@app.command(name="list")
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
    table(("name", "domains", "classes", "images", "download", "licence", "on this machine"), rows)
    print(f"known datasets are looked for in {catalog.data_folder()} (set AGFA_DATA to another folder)")


@app.command(name="get")
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


@app.command
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
    table(("domain", "images", *dataset.classes), rows)
    with Display().images("reading images") as seen:
        problems = find_problems(dataset, seen)
    if path.lower() in catalog.CATALOG and not Path(path).is_dir():
        problems += compare_counts(dataset, catalog.CATALOG[path.lower()])
    if problems:
        table(("where", "what is wrong", "what to do"), [(p.where, p.what, p.remedy) for p in problems])
    fatal = sum(p.fatal for p in problems)
    print(f"{len(problems)} problems, {fatal} of them would stop training" if problems else "no problems")
    return 1 if fatal else 0


@app.command
def clean() -> None:
    """Remove decoded images that are kept for later runs, which decode them again. Datasets are left alone."""
    from agfa.data.clean import clean as remove_stores
    from agfa.data.store import cache_folder

    removed = [(name, f"{size / 1e6:,.1f} MB", size) for name, size in remove_stores()]
    if removed:
        table(("removed", "size"), [row[:2] for row in removed])
    print(f"{sum(row[2] for row in removed) / 1e9:,.2f} GB freed in {cache_folder() / 'store'}")
