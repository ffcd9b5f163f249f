"""Sweeps on Ray: several workers, several nodes, killed workers, killed drivers; the same bits as in one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from agfa.benchmark.cluster import OnRay
from agfa.benchmark.expansion import expand
from agfa.training.config import CompleteConfig
from support import QUICK, Agfa, same

pytest.importorskip("ray")

TINY = {
    "datasets": "tiny",
    "methods": ["erm", "agfa"],
    "backbones": "convnet",
    "hparams": {"lr": 0.001},
    "settings": {k: v for k, v in QUICK.items() if k not in ("backbone", "hparams")}
    | {"steps": 40, "evaluate_every": 5, "checkpoint_seconds": 0},
}
DIGITS = {
    "datasets": "digits",
    "methods": ["erm", "coral", "agfa"],
    "seeds": 2,
    "settings": {"image_size": 8, "steps": 30, "evaluate_every": 10, "checkpoint_seconds": 0, "track_target": False},
}


def write(content: dict[str, Any], out: str = "ray") -> list[CompleteConfig]:
    Path("s.yaml").write_text(yaml.safe_dump(content))
    return expand(Path("s.yaml"), Path(out))


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agfa", "sweep", "s.yaml", "--out", "ray", "--cpus", "1", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    deadline = time.monotonic() + 240
    while not (found := what()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def in_the_middle(runs: list[CompleteConfig]) -> list[int]:
    """The processes that work on runs that have a checkpoint."""
    locks = [c.out / ".lock" for c in runs if (c.out / "checkpoint" / "latest.pt").exists()]
    return [int(text.split()[1]) for lock in locks if (text := lock.read_text())]


def log(out: str = "ray") -> list[dict[str, Any]]:
    """Every event, with the node and the process that logged it."""
    return [
        {**json.loads(line), "node": file.stem.rpartition("-")[0], "process": int(file.stem.rpartition("-")[2])}
        for file in Path(out, "logs").glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]


def killed_and_resumed(content: dict[str, Any], agfa: Agfa) -> None:
    """A worker is killed, then the driver; the same command ends what they began, with one process's bits."""
    runs = write(content)
    driver = start("--jobs", "2")
    victim = wait_for(lambda: in_the_middle(runs), driver)[0]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: any(event["event"] == "done" and event["process"] != victim for event in log()), driver)
    wait_for(lambda: in_the_middle(runs), driver)
    driver.kill()
    driver.communicate()
    done = {
        config.out.name: (config.out / "done").stat().st_mtime_ns for config in runs if (config.out / "done").exists()
    }
    assert 0 < len(done) < len(runs)

    driver = start("--jobs", "2")
    out, err = driver.communicate(timeout=900)
    assert driver.returncode == 0, err
    assert out == f"{len(runs)} of {len(runs)} runs are done, in ray\n"
    ended = [event["run"] for event in log() if event["event"] == "done"]
    assert sorted(ended) == sorted(config.out.name for config in runs)  # none lost, none twice
    assert all(Path("ray", name, "done").stat().st_mtime_ns == when for name, when in done.items())
    assert not list(Path("ray").rglob("failed.json"))
    assert not list(Path("ray").rglob("checkpoint/latest.pt"))

    assert agfa("sweep", "s.yaml", "--out", "alone").status == 0
    for config in runs:
        same(config.out, Path("alone", config.out.name))


@pytest.mark.slow  # most of a minute, in which Ray starts twice and waits for its dead
def test_killed_workers_and_drivers_change_nothing(tiny: Path, agfa: Agfa) -> None:
    killed_and_resumed(TINY, agfa)


@pytest.mark.slow
def test_killed_workers_and_drivers_change_nothing_on_digits(agfa: Agfa) -> None:
    """Slow: 24 runs, each twice; minutes on two cores."""
    assert len(write(DIGITS)) == 3 * 4 * 2
    killed_and_resumed(DIGITS, agfa)


def test_two_nodes_share_a_sweep(tiny: Path) -> None:
    from ray.cluster_utils import Cluster

    runs = write(TINY)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=1)
        driver = start("--address", cluster.address)
        _, err = driver.communicate(timeout=300)
    finally:
        cluster.shutdown()
    assert driver.returncode == 0, err
    assert "6 runs to do, 2 at once" in err
    done = [event for event in log() if event["event"] == "done"]
    assert sorted(event["run"] for event in done) == sorted(config.out.name for config in runs)
    nodes = {event["node"] for event in done}
    assert len(nodes) == 2
    print({node: sum(event["node"] == node for event in done) for node in nodes})


@pytest.mark.slow  # a third of a minute, for a Ray of its own
def test_ctrl_c_stops_the_workers_too(tiny: Path) -> None:
    runs = write({**TINY, "settings": {**TINY["settings"], "steps": 5000}})
    driver = start("--jobs", "2")
    workers = wait_for(lambda: in_the_middle(runs), driver)
    driver.send_signal(signal.SIGINT)
    _, err = driver.communicate(timeout=60)
    assert driver.returncode == 130
    assert err.splitlines()[-1] == "agfa: stopped; the same command goes on where it stopped"
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("cpus", "gpus", "jobs", "slots"),
    [
        (1, 0, None, 12),
        (1, 0.25, None, 12),
        (2, 0.5, None, 6),
        (1, 1, None, 3),
        (1, 2, None, 1),
        (9, 1, None, 0),
        (1, 0, 5, 5),
    ],
)
def test_a_run_fits_on_one_node(cpus: float, gpus: float, jobs: int | None, slots: int) -> None:
    class Ray:
        """A cluster of a node with 8 cores and 2 GPUs, one with 4 and 1, and one that is gone."""

        @staticmethod
        def remote(**_: Any) -> Any:
            return lambda function: function

        @staticmethod
        def nodes() -> list[dict[str, Any]]:
            sizes = ((8.0, 2.0, True), (4.0, 1.0, True), (8.0, 8.0, False))
            return [{"Alive": alive, "Resources": {"CPU": c, "GPU": g}} for c, g, alive in sizes]

    assert OnRay(Ray, jobs, cpus, gpus).slots() == slots


def test_a_cluster_that_is_not_there(tiny: Path, agfa: Agfa) -> None:
    write(TINY)
    ended = agfa("sweep", "s.yaml", "--address", "127.0.0.1:1")
    assert ended.status == 2
    assert "no Ray cluster at 127.0.0.1:1" in ended.error
