"""The live table of a sweep: it follows the runs, and ends when nobody works on them any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from agfa.benchmark import status
from agfa.benchmark.estimate import Cost, kind
from agfa.benchmark.expansion import expand
from agfa.benchmark.running import set_aside
from agfa.training.config import CompleteConfig
from agfa.training.run_folder import RunFolder
from support import QUICK

RATE = 0.01  # seconds between two looks, here


@pytest.fixture
def runs(tiny: Path) -> list[CompleteConfig]:
    settings = {key: value for key, value in QUICK.items() if key not in ("backbone", "hparams")}
    content = {"datasets": "tiny", "methods": "erm", "backbones": "convnet", "settings": settings}
    Path("s.yaml").write_text(yaml.safe_dump(content))
    return expand(Path("s.yaml"), Path("sweeps/s"))


class Watched:
    """A terminal on which somebody watches."""

    def __init__(self, runs: list[CompleteConfig], costs: dict[str, Cost]) -> None:
        self.screen = StringIO()
        console = Console(file=self.screen, force_terminal=True, width=150)
        self.thread = threading.Thread(target=status.watch, args=(runs, costs, console))
        self.thread.start()

    def until(self, what: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + 20
        while not what(self.screen.getvalue()):
            assert time.monotonic() < deadline, self.screen.getvalue()
            time.sleep(RATE)


def test_the_table_follows_the_runs(runs: list[CompleteConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "LOOK", RATE)
    monkeypatch.setattr(status, "IDLE", 30)
    first, second = (RunFolder(config.out) for config in runs[:2])
    cost = Cost(start=0, trained=10, evaluated=0, images=dict.fromkeys(("ink", "paper", "sky"), 30))
    with first.held():
        watched = Watched(runs, {kind(runs[0]): cost})
        watched.until(lambda screen: "0 done, 1 running, 0 failed, 2 waiting" in screen and " 0/6 " in screen)
        first.rewind(0)
        first.record(kind="train", step=2, losses={}, seconds=60.0)
        watched.until(lambda screen: " 2/6 " in screen and "33%" in screen and "2 min" in screen)
        # 120 s of the first, and of each other 6 steps of 4 images of 2 sources
        watched.until(lambda screen: "about 18 min left" in screen)
    first.done.touch()
    watched.until(lambda screen: "1 done, 0 running, 0 failed, 2 waiting" in screen)  # and it stays
    with second.held():
        watched.until(lambda screen: "1 done, 1 running, 0 failed, 1 waiting" in screen)
        set_aside(runs[2], "out of memory", 3)
        watched.until(lambda screen: "1 done, 1 running, 1 failed, 0 waiting" in screen and "out of memory" in screen)
        assert watched.thread.is_alive()
    second.done.touch()
    watched.thread.join(timeout=20)
    assert not watched.thread.is_alive()
    assert "2 done, 0 running, 1 failed, 0 waiting" in watched.screen.getvalue()


def test_it_ends_when_those_at_work_stop(runs: list[CompleteConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "LOOK", RATE)
    with RunFolder(runs[0].out).held():
        watched = Watched(runs, {})
        watched.until(lambda screen: "1 running" in screen)
    watched.thread.join(timeout=20)
    assert not watched.thread.is_alive()
    assert "0 done, 0 running, 0 failed, 3 waiting" in watched.screen.getvalue()


def test_where_nobody_works_it_is_shown_once(runs: list[CompleteConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status.time, "sleep", lambda _: pytest.fail("nothing to wait for"))
    screen = StringIO()
    status.watch(runs, {}, Console(file=screen, force_terminal=True, width=150))
    assert "3 runs: 0 done, 0 running, 0 failed, 3 waiting" in screen.getvalue()
