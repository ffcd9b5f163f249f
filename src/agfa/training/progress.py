"""What a person sees while a run goes on: a bar with rate, losses and time left, a line at each evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from torch import Tensor

from agfa.data.store import Progress as ImagesDone


class Advance(Protocol):
    """Called after each step with the step's losses."""

    def __call__(self, step: int, losses: dict[str, Tensor]) -> None:
        """Do so."""


class Display:
    """Progress on a console (standard error), or nowhere when `quiet`."""

    def __init__(self, quiet: bool = False) -> None:
        self.console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print one line, above a bar if there is one."""
        self.console.print(text, markup=False)

    @contextmanager
    def images(self, what: str = "decoding images") -> Iterator[ImagesDone]:
        """A bar for work on many images."""
        with self._bar(TextColumn("{task.fields[rate]}")) as bar:
            task, start = bar.add_task(what, total=None, rate=""), time.monotonic()
            before: list[int] = []  # what an earlier process did counts for the bar, and not for the rate

            def seen(done: int, total: int) -> None:
                if not before:
                    before.append(done)
                rate = f"{(done - before[0]) / max(1e-9, time.monotonic() - start):.0f}/s"
                bar.update(task, completed=done, total=total or None, rate=rate)

            yield seen

    @contextmanager
    def download(self, what: str = "downloading") -> Iterator[ImagesDone]:
        """A bar for the bytes of one file after another."""
        with self._bar(TransferSpeedColumn(), DownloadColumn()) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total or None)

    @contextmanager
    def training(self, first: int, last: int, images_per_step: int) -> Iterator[Advance]:
        """A bar for the steps after `first` up to `last`. Losses are read once a second: reading stalls a GPU."""
        with self._bar(TextColumn("{task.fields[state]}")) as bar:
            task = bar.add_task("training", total=last, completed=first, state="")
            shown, shown_at = first, time.monotonic()

            def advance(step: int, losses: dict[str, Tensor]) -> None:
                nonlocal shown, shown_at
                if bar.disable:
                    return
                now = time.monotonic()
                if now - shown_at < 1:
                    bar.update(task, completed=step)
                    return
                rate = (step - shown) * images_per_step / (now - shown_at)
                values = "  ".join(f"{name} {float(value):.3g}" for name, value in losses.items())
                bar.update(task, completed=step, state=f"{rate:.0f} images/s  {values}")
                shown, shown_at = step, now

            yield advance

    def _bar(self, state: ProgressColumn, count: ProgressColumn | None = None) -> Progress:
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            count or MofNCompleteColumn(),
            TimeRemainingColumn(),
            state,
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
