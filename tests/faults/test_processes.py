"""Clocks that go wrong, and two processes on one run."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

import agfa as package
from support import QUICK, flags, same
from support_forks import Forks

RUN = {**QUICK, "target": "sky", "augment": True, "checkpoint_seconds": 0}


@pytest.mark.parametrize("clock", ["back", "still", "leaping"])
def test_the_clock_decides_nothing(
    clock: str, tiny: Path, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**quick, "data": str(tiny), "target": "sky", "augment": True}
    package.train(**settings, out="whole")
    ticks = itertools.count(2**31, -(10**7))
    times = {"back": lambda: float(next(ticks)), "still": lambda: 7.0, "leaping": lambda: next(ticks) % 977 * 1e6}
    for name in ("time", "monotonic"):
        monkeypatch.setattr(time, name, times[clock])
    package.train(**settings, out="run")
    same(Path("run"), Path("whole"))


@pytest.mark.slow  # twenty processes
def test_two_processes_started_at_once(tiny: Path, forks: Forks) -> None:
    """Ten times: one trains, the other says that it does, or finds all done; the end is the same."""
    other = Forks("other.txt")
    package.train(**RUN, data=str(tiny), out="whole")
    statuses = []
    for number in range(10):
        for each in (forks, other):
            each.begin("train", *flags(**RUN, data=tiny, out=f"run{number}"))
        ended = [each.end()[0] for each in (forks, other)]
        assert sorted(ended) in ([0, 2], [0, 0])
        said = [Path(each.out).read_text() for each in (forks, other)]
        assert not any("Traceback" in text for text in said)
        if 2 in ended:
            line = said[ended.index(2)]
            assert line.count("\n") == 1
            assert "is being trained by process" in line
        same(Path(f"run{number}"), Path("whole"))
        statuses.append(sorted(ended))
    other.close()
    assert [0, 2] in statuses
