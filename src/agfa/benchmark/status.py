"""How far a sweep is, from its run folders: counts, who works on what, how long it will take, what failed."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agfa.benchmark.estimate import Cost, duration, kind, seconds
from agfa.benchmark.running import State, state
from agfa.training.config import CompleteConfig
from agfa.training.run_folder import RunFolder, holder

LOOK = 2.0  # seconds between two looks
IDLE = 5  # looks without anybody at work: from one run to the next it can take some seconds
TAIL = 4096  # bytes: more than a training record


def watch(runs: Sequence[CompleteConfig], costs: Mapping[str, Cost], console: Console) -> None:
    """Show how far the runs are: once, or on a terminal for as long as somebody works on them."""
    if not console.is_terminal:
        console.print(overview(runs, costs))
        return
    with Live(overview(runs, costs), console=console, auto_refresh=False) as live:
        idle = 0 if "running" in map(state, runs) else IDLE
        while idle < IDLE:
            time.sleep(LOOK)
            live.update(overview(runs, costs), refresh=True)
            found = set(map(state, runs))
            idle = 0 if "running" in found else idle + 1 if "waiting" in found else IDLE


def overview(runs: Sequence[CompleteConfig], costs: Mapping[str, Cost]) -> Group:
    """One line of counts, a table of those at work, and one of those set aside."""
    found: dict[State, list[CompleteConfig]] = {"done": [], "running": [], "failed": [], "waiting": []}
    for config in runs:
        found[state(config)].append(config)
    counts = ", ".join(f"{len(configs)} {name}" for name, configs in found.items())
    parts: list[Text | Table] = [Text(f"{len(runs)} runs: {counts}")]
    left = sum(seconds(c, costs[kind(c)]) for c in found["waiting"] if kind(c) in costs)
    if found["running"]:
        table = _table("running", "step", "", "left", "by")
        for config in found["running"]:
            step, remaining = progress(config)
            left += remaining or 0
            share = f"{step / config.steps:.0%}"
            ends = "" if remaining is None else duration(remaining)
            table.add_row(config.out.name, f"{step}/{config.steps}", share, ends, holder(config.out))
        parts.append(table)
    if left:
        parts.append(Text(f"about {duration(left / max(1, len(found['running'])))} left"))
    if found["failed"]:
        table = _table("set aside", "attempts", "reason")
        for config in found["failed"]:
            table.add_row(config.out.name, *_why(config))
        parts.append(table)
    return Group(*parts)


def _why(config: CompleteConfig) -> tuple[str, str]:
    """How often a run was attempted, and the reason why it was set aside."""
    try:
        told = json.loads(RunFolder(config.out).failed.read_text())
        return str(told["attempts"]), str(told["reason"])
    except (OSError, ValueError, KeyError, TypeError):  # forgiven just now, or damaged
        return "", "unknown"


def progress(config: CompleteConfig) -> tuple[int, float | None]:
    """The last step that a run has recorded, and about how many seconds it still needs."""
    last = last_training_record(RunFolder(config.out).metrics)
    if last is None:
        return 0, None
    step, spent = int(last["step"]), float(last["seconds"])
    return step, spent / step * (config.steps - step)


def last_training_record(file: Path) -> dict[str, float] | None:
    """The last whole record of training steps, read from the end of the file."""
    try:
        with file.open("rb") as log:
            size = log.seek(0, 2)
            for start in (max(0, size - TAIL), 0):
                log.seek(start)
                found = [line for line in log.read().split(b"\n")[:-1] if line.startswith(b'{"kind": "train"')]
                if found:
                    return json.loads(found[-1])  # type: ignore[no-any-return]
    except (OSError, ValueError):
        pass
    return None


def _table(*header: str) -> Table:
    from rich import box

    return Table(*header, box=box.SIMPLE_HEAD)
