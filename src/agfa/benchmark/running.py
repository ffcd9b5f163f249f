"""Run what a sweep expands to: whatever is not done, by one process or many, and nothing twice.

The run folders are all that is known. A run is done when its folder says so, is somebody's while its lock is held,
and is set aside when it failed too often; every process that works on a sweep looks there, and needs no other.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import torch

from agfa.benchmark.estimate import Cost, costs, duration, kind, measure, seconds
from agfa.data import catalog
from agfa.errors import AgfaError, UsageError
from agfa.files import put, replace, writing
from agfa.training.config import CompleteConfig
from agfa.training.progress import Display
from agfa.training.run_folder import HeldError, RunFolder, holder, locked
from agfa.training.trainer import train

LOOK = 2.0  # seconds between looks at runs that others hold
State = Literal["done", "failed", "running", "waiting"]


class Outcome(NamedTuple):
    """How an attempt at a run ended. What was `hopeless` would end like that again."""

    kind: Literal["done", "held", "failed"]
    reason: str = ""
    hopeless: bool = False


class Workers(Protocol):
    """Who takes on runs."""

    device: str  # what they compute on: a kind of run is timed once on each

    def slots(self) -> int:
        """How many runs they can take on at once; it may change."""

    def start(self, config: CompleteConfig) -> None:
        """Take this run on."""

    def wait(self, seconds: float) -> list[tuple[CompleteConfig, Outcome]]:
        """The attempts that have ended, at once when there are some, else within that time."""

    def measure(self, configs: Sequence[CompleteConfig]) -> Iterable[Cost | None]:
        """What runs of these kinds cost."""


class Bars(Display):
    """The bars of the runs without their lines, of which a sweep has too many."""

    def say(self, text: str) -> None:
        """Nothing."""


class Here:
    """This process: one run after another."""

    def __init__(self) -> None:
        self.device = "gpu" if torch.cuda.is_available() or torch.backends.mps.is_available() else "cpu"
        self.taken: CompleteConfig | None = None

    def slots(self) -> int:
        """One."""
        return 1

    def start(self, config: CompleteConfig) -> None:
        """Take it; it is run when the outcome is waited for."""
        self.taken = config

    def wait(self, seconds: float) -> list[tuple[CompleteConfig, Outcome]]:
        """Run it."""
        config, self.taken = self.taken, None
        if config is None:
            time.sleep(seconds)
            return []
        return [(config, attempt(config, Bars()))]

    def measure(self, configs: Sequence[CompleteConfig]) -> Iterable[Cost | None]:
        """One after the other."""
        return map(measure, configs)


def state(config: CompleteConfig) -> State:
    """What has become of a run."""
    folder = RunFolder(config.out)
    if folder.done.exists():
        return "done"
    if folder.failed.exists():
        return "failed"
    return "running" if holder(folder.path) else "waiting"


def forgive(configs: Sequence[CompleteConfig]) -> None:
    """Let runs that were set aside be tried again."""
    for config in configs:
        RunFolder(config.out).failed.unlink(missing_ok=True)


def run_sweep(
    file: Path, runs: Sequence[CompleteConfig], out: Path, workers: Workers, retries: int, display: Display
) -> None:
    """Say what there is to do and how long it will take, and do it.

    Raises:
        UsageError: a dataset is not here; said before anything starts.
    """
    with _in_turn(out):
        replace(out / "sweep.yaml", lambda copy: copy.write(file.read_bytes()))
        found = [state(config) for config in runs]
        todo = [config for config, now in zip(runs, found, strict=True) if now in ("waiting", "running")]
        display.say(f"{out}: {len(runs)} runs, {found.count('done')} done, {found.count('failed')} set aside")
        if not todo:
            return
        for data in dict.fromkeys(config.data for config in todo):
            catalog.load(data)
        display.say("timing a few steps of each kind of run")
        known = costs(todo, out / f"estimate-{workers.device}.json", workers.measure)
    slots = workers.slots()
    timed = [seconds(config, known[kind(config)]) for config in todo if kind(config) in known]
    untimed = f" and {len(todo) - len(timed)} that could not be timed" if len(timed) < len(todo) else ""
    took = duration(max(sum(timed) / slots, max(timed, default=0)))
    display.say(f"{len(todo)} runs to do, {slots} at once: about {took}{untimed}")
    run_all(runs, workers, retries, display)


@contextmanager
def _in_turn(out: Path) -> Iterator[None]:
    """Processes that are started together prepare one after the other, and what one has timed serves the next."""
    lock = out / ".lock"
    with writing(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("a", encoding="utf-8")
    with file:
        while not locked(file, exclusively=True):
            time.sleep(LOOK / 10)
        yield


def run_all(configs: Sequence[CompleteConfig], workers: Workers, retries: int, display: Display) -> None:
    """Run all that is not done or set aside, until nothing is left; what others hold is waited for."""
    waiting, held = deque(configs), list[CompleteConfig]()  # held by other processes
    failures, done, busy, looked = Counter[str](), 0, 0, time.monotonic()
    while waiting or held or busy:
        while waiting and busy < workers.slots():
            config = waiting.popleft()
            now = state(config)
            done += now == "done"
            if now == "running":
                held.append(config)
            elif now == "waiting":
                workers.start(config)
                busy += 1
        for config, outcome in workers.wait(LOOK) if busy or held else ():
            name = config.out.name
            busy -= 1
            if outcome.kind == "held":
                held.append(config)
            elif outcome.kind == "done":
                done += 1
                display.say(f"{name}: done, {done} of {len(configs)}")
            elif not outcome.hopeless and failures[name] < retries:
                failures[name] += 1
                display.say(f"{name}: {outcome.reason}; trying again, {failures[name]} of {retries}")
                waiting.append(config)
            else:
                set_aside(config, outcome.reason, failures[name] + 1)
                display.say(f"{name}: {outcome.reason}; set aside")
        if held and time.monotonic() - looked > LOOK:
            waiting.extend(held)
            held, looked = [], time.monotonic()


def attempt(config: CompleteConfig, display: Display, node: str | None = None) -> Outcome:
    """Train, from the checkpoint if there is one. What goes wrong is an outcome like others."""
    note = partial(_note, config, f"{node or platform.node()}-{os.getpid()}")
    note("began")
    try:
        train(config, display)
        outcome = Outcome("done")
    except HeldError as error:
        outcome = Outcome("held", str(error))
    except Exception as error:
        if isinstance(error, AgfaError):
            reason = str(error)
        else:
            reason = f"{type(error).__name__}: {error}"
            note("raised", traceback=traceback.format_exc())
        outcome = Outcome("failed", " ".join(reason.split()), hopeless=isinstance(error, UsageError))
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    note(outcome.kind, reason=outcome.reason)
    return outcome


def set_aside(config: CompleteConfig, reason: str, attempts: int) -> None:
    """Leave a run alone from now on, and say why."""
    values = {"reason": reason, "attempts": attempts, "time": _now()}
    put(RunFolder(config.out).failed, (json.dumps(values) + "\n").encode())


def _note(config: CompleteConfig, process: str, event: str, **more: str) -> None:
    """Add a line to the log of this process: when, which run, what happened.

    Each process has a log of its own, for shared storage does not like two to write to one file.
    """
    file = config.out.parent / "logs" / f"{process}.jsonl"
    line = {"time": _now(), "run": config.out.name, "event": event} | {k: v for k, v in more.items() if v}
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
