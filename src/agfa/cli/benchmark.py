"""`agfa sweep`: many runs from one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from agfa.cli.app import app
from agfa.cli.show import table
from agfa.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agfa.benchmark.running import Workers
    from agfa.training.config import CompleteConfig
    from agfa.training.progress import Display


@app.command
def sweep(
    file: str | None = None,
    /,
    *,
    out: Path | None = None,
    jobs: int | None = None,
    cpus: float | None = None,
    gpus: float | None = None,
    address: str | None = None,
    retries: int = 2,
    again: Annotated[bool, Parameter(negative=())] = False,
    status: Annotated[bool, Parameter(negative=())] = False,
    shipped: Annotated[bool, Parameter(name="--list", negative=())] = False,
) -> int:
    """Run every combination of datasets, methods, targets, seeds and hyperparameters that a file names.

    One run after another in this process; with any of --jobs, --cpus, --gpus and --address on Ray. The same command
    goes on where it stopped, and runs only what is new when the file has grown. Started several times, also on
    several machines that share the folder, the processes share the work.

    Args:
        file: a sweep file, or the name of one that comes with the package.
        out: where the runs go (default: sweeps/NAME).
        jobs: most runs at once (default with --cpus, --gpus or --address: as many as there is room for).
        cpus: cores for each run (default: this machine's, shared by the jobs; in a cluster 1).
        gpus: GPUs for each run, 0.25 puts four on one (default: 1 where there are any).
        address: of a Ray cluster, HOST:PORT, ray://HOST:PORT, or auto.
        retries: how often a failed run goes on from its checkpoint, before it is set aside.
        again: try once more what was set aside.
        status: show how far it is, live on a terminal, and run nothing.
        shipped: list the sweeps that come with the package.
    """
    from agfa.benchmark import sweep as files
    from agfa.benchmark.expansion import expand

    if shipped:
        table(("name", "what it is"), [(name, files.summary(name)) for name in files.shipped()])
        return 0
    if file is None:
        raise UsageError("say which sweep: a file, or a name that `agfa sweep --list` gives")
    path = files.find(file)
    out = out or Path("sweeps", path.stem)
    runs = expand(path, out)
    if status:
        return _status(runs, out)
    if (jobs is not None and jobs < 1) or retries < 0 or (gpus or 0) < 0 or (cpus is not None and cpus <= 0):
        raise UsageError("--jobs is at least 1, --cpus more than 0, --gpus and --retries at least 0")

    from agfa.benchmark.cluster import connected
    from agfa.benchmark.running import Here, forgive
    from agfa.files import replace
    from agfa.training.progress import Display

    display = Display()
    replace(out / "sweep.yaml", lambda f: f.write(path.read_bytes()))
    if again:
        forgive(runs)
    if jobs in (None, 1) and cpus is None and gpus is None and address is None:
        _run(runs, out, Here(), retries, display)
    else:
        with connected(address, jobs, cpus, gpus) as workers:
            _run(runs, out, workers, retries, display)
    return _result(runs, out)


def _run(runs: Sequence[CompleteConfig], out: Path, workers: Workers, retries: int, display: Display) -> None:
    """Say what there is to do and how long it will take, and do it."""
    from agfa.benchmark.estimate import costs, kind, seconds
    from agfa.benchmark.running import run_all, state
    from agfa.benchmark.status import duration
    from agfa.data import catalog

    found = [state(config) for config in runs]
    todo = [config for config, now in zip(runs, found, strict=True) if now in ("waiting", "running")]
    display.say(f"{out}: {len(runs)} runs, {found.count('done')} done, {found.count('failed')} set aside")
    if not todo:
        return
    for data in dict.fromkeys(config.data for config in todo):
        catalog.load(data)  # what is not here is said before anything starts
    slots = workers.slots()
    display.say("timing a few steps of each kind of run")
    known = costs(todo, out / f"estimate-{workers.device}.json", workers.measure)
    timed = [seconds(config, known[kind(config)]) for config in todo if kind(config) in known]
    untimed = f" and {len(todo) - len(timed)} that could not be timed" if len(timed) < len(todo) else ""
    took = duration(max(sum(timed) / slots, max(timed, default=0)))
    display.say(f"{len(todo)} runs to do, {slots} at once: about {took}{untimed}")
    run_all(runs, workers, retries, display)


def _status(runs: Sequence[CompleteConfig], out: Path) -> int:
    from rich.console import Console

    from agfa.benchmark.estimate import cached
    from agfa.benchmark.status import watch

    console = Console()
    known = {kind: cost for file in out.glob("estimate-*.json") for kind, cost in cached(file).items()}
    watch(runs, known, console if console.is_terminal else Console(width=400))
    return 0


def _result(runs: Sequence[CompleteConfig], out: Path) -> int:
    """Exit status 1 when something was set aside."""
    from agfa.benchmark.running import state

    failed = [config for config in runs if state(config) == "failed"]
    print(f"{len(runs) - len(failed)} of {len(runs)} runs are done, in {out}")
    if failed:
        print(
            f"{len(failed)} were set aside, the first is {failed[0].out.name}; --status says why, --again tries again"
        )
    return 1 if failed else 0
