"""A run's folder belongs to one process at a time, and to none that is dead."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agfa.training.run_folder import HeldError, RunFolder, holder
from support import Agfa

HOLD = """
import sys, time
from pathlib import Path
from agfa.training.run_folder import RunFolder
with RunFolder(Path("run")).held():
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other() -> subprocess.Popen[str]:
    """Another process that holds the folder `run`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_two_processes_never_work_on_one_run(other: subprocess.Popen[str], train: Agfa) -> None:
    assert holder(Path("run")) == f"process {other.pid} on {platform.node()}"
    ended = train(target="sky", out="run")
    assert ended.status == 2
    assert f"run is being trained by process {other.pid} on {platform.node()}; wait" in ended.error
    assert not Path("run/config.yaml").exists()
    other.kill()
    other.wait()
    assert holder(Path("run")) is None
    assert train(target="sky", out="run").status == 0


def test_a_killed_process_lets_go(other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert Path("run/.lock").read_text()  # it had no time to say so
    with RunFolder(Path("run")).held():
        assert holder(Path("run")) == f"process {os.getpid()} on {platform.node()}"
    assert Path("run/.lock").read_text() == ""


def test_looking_disturbs_nobody() -> None:
    """Whoever looks holds the lock for a moment; whoever wants it waits that long."""
    code = "from pathlib import Path\nfrom agfa.training.run_folder import holder\nprint(1, flush=True)\n"
    looker = subprocess.Popen(
        [sys.executable, "-c", code + "while True: holder(Path('run'))"], stdout=subprocess.PIPE, text=True
    )
    assert looker.stdout is not None
    looker.stdout.readline()
    try:
        for _ in range(50):
            with RunFolder(Path("run")).held():
                pass
    finally:
        looker.kill()
        looker.wait()


def test_in_one_process_too() -> None:
    with RunFolder(Path("run")).held(), pytest.raises(HeldError), RunFolder(Path("run")).held():
        pass


def test_where_a_file_system_has_no_locks_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with RunFolder(Path("run")).held(), RunFolder(Path("run")).held():
        pass


def test_a_finished_run_needs_no_lock(train: Agfa) -> None:
    assert train(target="sky", out="run").status == 0
    with RunFolder(Path("run")).held():
        assert train(target="sky", out="run").status == 0
