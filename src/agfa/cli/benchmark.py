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

    from agfa.training.config import CompleteConfig


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
    if out.parts and out.parts[0].endswith(":") and len(out.parts[0]) > 2:  # s3:, but not C:
        raise UsageError(
            f"--out is a folder, not an address: mount {out.parts[0]}//..., or copy the runs there later"
        )
    runs = expand(path, out)
    if status:
        return _status(runs, out)
    if (jobs is not None and jobs < 1) or retries < 0 or (gpus or 0) < 0 or (cpus is not None and cpus <= 0):
        raise UsageError("--jobs is at least 1, --cpus more than 0, --gpus and --retries at least 0")

    from agfa.benchmark.cluster import connected
    from agfa.benchmark.running import Here, forgive, run_sweep
    from agfa.training.progress import Display

    if again:
        forgive(runs)
    if jobs in (None, 1) and cpus is None and gpus is None and address is None:
        run_sweep(path, runs, out, Here(), retries, Display())
    else:
        with connected(address, jobs, cpus, gpus) as workers:
            run_sweep(path, runs, out, workers, retries, Display())
    return _result(runs, out)


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
