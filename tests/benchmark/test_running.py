"""A sweep runs whatever is not done, once, by one process or several, and comes through what goes wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

import agfa as package
from agfa.benchmark import running
from agfa.benchmark.estimate import Cost, measure, seconds
from agfa.benchmark.expansion import expand
from agfa.errors import AgfaError, UsageError
from agfa.training.config import CompleteConfig
from support import QUICK, Agfa, same

SETTINGS = {key: value for key, value in QUICK.items() if key not in ("backbone", "hparams")}


def write(**changes: Any) -> list[CompleteConfig]:
    """A sweep file of three quick runs, or what the changes make of it, and its runs."""
    content = {
        "datasets": "tiny",
        "methods": "erm",
        "backbones": "convnet",
        "hparams": QUICK["hparams"],
        "settings": SETTINGS,
        **changes,
    }
    Path("s.yaml").write_text(yaml.safe_dump(content))
    return expand(Path("s.yaml"), Path("sweeps/s"))


def events(out: Path = Path("sweeps/s")) -> Counter[tuple[str, str]]:
    """How often each (run, event) stands in the logs."""
    lines = [json.loads(line) for file in out.glob("logs/*.jsonl") for line in file.read_text().splitlines()]
    return Counter((line["run"], line["event"]) for line in lines)


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "agfa", "sweep", "s.yaml", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(what: Any) -> Any:
    deadline = time.monotonic() + 120
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_the_same_command_runs_only_what_is_new(tiny: Path, agfa: Agfa) -> None:
    first = write()
    ended = agfa("sweep", "s.yaml")
    assert ended.status == 0
    said = ended.err.splitlines()
    assert said[0] == "sweeps/s: 3 runs, 0 done, 0 set aside"
    assert said[2].startswith("3 runs to do, 1 at once: about ")
    assert said[3:] == [f"{config.out.name}: done, {i} of 3" for i, config in enumerate(first, 1)]
    assert ended.out == "3 of 3 runs are done, in sweeps/s\n"
    assert Path("sweeps/s/sweep.yaml").read_bytes() == Path("s.yaml").read_bytes()
    assert all(events()[config.out.name, "done"] == 1 for config in first)
    was = {path: path.stat().st_mtime_ns for c in first for path in c.out.rglob("*") if path.is_file()}

    ended = agfa("sweep", "s.yaml")
    assert ended.err == "sweeps/s: 3 runs, 3 done, 0 set aside\n"
    more = write(methods=["swad", "coral"], seeds=2)
    ended = agfa("sweep", "s.yaml")
    assert len(more) == 12
    assert "sweeps/s: 12 runs, 3 done, 0 set aside" in ended.err
    assert {path: path.stat().st_mtime_ns for path in was} == was
    assert sorted(events()[config.out.name, "done"] for config in more) == [1] * 12


def test_what_fails_is_tried_again_from_its_checkpoint_then_set_aside(
    tiny: Path, agfa: Agfa, monkeypatch: pytest.MonkeyPatch
) -> None:
    once, always, hopeless = (config.out.name for config in write(settings={**SETTINGS, "checkpoint_seconds": 0}))
    real, record = running.train, running.RunFolder.record

    def breaks(self: Any, **values: Any) -> None:
        name = self.path.name
        if name == once and values.get("step") == 4 and not events()[once, "failed"]:
            raise AgfaError("the disk was full")
        if name == always:
            raise ZeroDivisionError("division\nby zero")
        record(self, **values)

    def refuses(config: Any, display: Any) -> Any:
        if config.out.name == hopeless:
            raise UsageError("it cannot be")
        return real(config, display)

    with monkeypatch.context() as patch:
        patch.setattr(running.RunFolder, "record", breaks)
        patch.setattr(running, "train", refuses)
        ended = agfa("sweep", "s.yaml")
    assert ended.status == 1
    assert f"{once}: the disk was full; trying again, 1 of 2" in ended.err
    assert f"{always}: ZeroDivisionError: division by zero; trying again, 2 of 2" in ended.err
    assert f"{always}: ZeroDivisionError: division by zero; set aside" in ended.err
    assert f"{hopeless}: it cannot be; set aside" in ended.err
    assert ended.out.splitlines()[0] == "1 of 3 runs are done, in sweeps/s"
    why = json.loads(Path("sweeps/s", always, "failed.json").read_text())
    assert (why["reason"], why["attempts"]) == ("ZeroDivisionError: division by zero", 3)
    assert json.loads(Path("sweeps/s", hopeless, "failed.json").read_text())["attempts"] == 1
    assert events()[always, "began"] == 3
    assert [r["step"] for r in running.RunFolder(Path("sweeps/s", once)).records() if r["kind"] == "train"] == [
        2,
        4,
        6,
    ]
    traces = [line for file in Path("sweeps/s/logs").iterdir() for line in file.read_text().splitlines()]
    assert any("in breaks" in json.loads(line).get("traceback", "") for line in traces)

    ended = agfa("sweep", "s.yaml")  # what was set aside is left alone
    assert (ended.status, events()[always, "began"]) == (1, 3)
    status = agfa("sweep", "s.yaml", "--status")
    assert "3 runs: 1 done, 0 running, 2 failed, 0 waiting" in status.out
    assert "ZeroDivisionError: division by zero" in status.out
    ended = agfa("sweep", "s.yaml", "--again")
    assert (ended.status, ended.out) == (0, "3 of 3 runs are done, in sweeps/s\n")
    assert not list(Path("sweeps").rglob("failed.json"))


def test_two_processes_share_a_sweep_and_one_ends_what_the_other_began(tiny: Path) -> None:
    """Started twice; one is killed in the middle of a run."""
    runs = write(seeds=3, settings={**SETTINGS, "steps": 40, "checkpoint_seconds": 0})
    processes = [start(), start()]
    wait_for(lambda: len(list(Path("sweeps/s").glob("logs/*.jsonl"))) == 2)
    victim, torn = wait_for(
        lambda: [(pid, c) for c in runs if (pid := _working_on(c)) and (c.out / "checkpoint/latest.pt").exists()]
    )[0]
    next(process for process in processes if process.pid == victim).kill()
    for process in processes:
        process.communicate(timeout=300)
    assert {process.pid: process.returncode for process in processes} == {
        process.pid: -9 if process.pid == victim else 0 for process in processes
    }
    assert [events()[config.out.name, "done"] for config in runs] == [1] * 9
    assert sum(events()[config.out.name, "began"] for config in runs) == 10
    workers = {file.stem.rpartition("-")[2] for file in Path("sweeps/s/logs").iterdir()}
    assert workers == {str(process.pid) for process in processes}
    for config in (torn, runs[-1]):
        package.train(**{**config.model_dump(), "out": Path("alone", config.out.name)})
        same(config.out, Path("alone", config.out.name))


def _working_on(config: CompleteConfig) -> int | None:
    lock = config.out / ".lock"
    found = lock.read_text().split() if lock.exists() else []
    return int(found[1]) if found else None


def test_interrupted_it_goes_on_where_it_stopped(tiny: Path, agfa: Agfa) -> None:
    runs = write(settings={**SETTINGS, "steps": 2000, "evaluate_every": 20, "checkpoint_seconds": 0})
    process = start()
    wait_for(lambda: (runs[0].out / "checkpoint" / "latest.pt").exists())
    status = agfa("sweep", "s.yaml", "--status").out
    assert "3 runs: 0 done, 1 running, 0 failed, 2 waiting" in status
    assert f"process {process.pid} on " in status
    assert "/2000" in status
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "agfa: stopped; the same command goes on where it stopped"
    assert out == ""
    assert not list(Path("sweeps").rglob("*.draft"))
    assert "3 runs: 0 done, 0 running, 0 failed, 3 waiting" in agfa("sweep", "s.yaml", "--status").out


def test_an_estimate_is_measured_once_for_each_kind_of_run(
    tiny: Path, agfa: Agfa, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(methods=["erm", "coral"], targets="sky")
    timed: list[str] = []

    def counted(config: CompleteConfig) -> Cost | None:
        timed.append(config.algorithm)
        return measure(config)

    monkeypatch.setattr(running, "measure", counted)
    assert agfa("sweep", "s.yaml").status == 0
    assert timed == ["erm", "coral"]
    assert set(json.loads(Path("sweeps/s/estimate-cpu.json").read_text())) == {
        "erm tiny convnet 8 4 32 False",
        "coral tiny convnet 8 4 32 False",
    }
    write(methods=["erm", "coral", "mmd"], targets="sky", seeds=2)
    assert agfa("sweep", "s.yaml").status == 0
    assert timed == ["erm", "coral", "mmd"]


def test_an_estimate_scales_with_all_that_takes_time(tiny: Path) -> None:
    config = write()[0].model_copy(update={"steps": 100, "evaluate_every": 30, "batch_size": 8})
    cost = Cost(start=3.0, trained=0.01, evaluated=0.002, images={"ink": 10, "paper": 20, "sky": 30})
    training = 100 * 8 * 2 * 0.01
    images = 0.2 * (20 + 30) + 10
    evaluating = (4 + 4) * images * 0.002  # four along the way; last, best, swad and oracle
    assert seconds(config, cost) == pytest.approx(3 + training + evaluating)
    blind = config.model_copy(update={"track_target": False, "averaging": "none"})
    assert seconds(blind, cost) == pytest.approx(3 + training + (4 * 0.2 * 50 + 2 * images) * 0.002)


def test_what_cannot_be_timed_is_run_all_the_same(tiny: Path, agfa: Agfa) -> None:
    write(hparams={"lr": 1e30})
    ended = agfa("sweep", "s.yaml", "--retries", "0")
    assert ended.status == 1
    assert "a loss or gradient of step " in ended.err
    assert " is not finite; the step is kept in " in ended.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "say which sweep"),
        (("pcas",), "unknown sweep 'pcas'; did you mean 'pacs'?"),
        (("nowhere.yaml",), "no sweep file nowhere.yaml"),
        (("digits.txt",), "unknown sweep 'digits.txt'; did you mean 'digits'?"),
        (("s.yaml", "--jobs", "0"), "--jobs is at least 1"),
        (("s.yaml", "--cpus", "0"), "--cpus more than 0"),
        (("s.yaml", "--out", "s3://bucket/runs"), "--out is a folder, not an address: mount s3://"),
    ],
)
def test_mistakes_in_one_line(arguments: tuple[str, ...], said: str, tiny: Path, agfa: Agfa) -> None:
    write()
    ended = agfa("sweep", *arguments)
    assert ended.status == 2
    assert said in ended.error


def test_missing_data_is_said_before_anything_starts(tiny: Path, agfa: Agfa, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGFA_DATA", str(tiny.parent / "none"))
    write(datasets=["tiny", "VLCS"])
    ended = agfa("sweep", "s.yaml")
    assert ended.status == 2
    assert "VLCS is not on this machine; agfa data get VLCS" in ended.err
    assert not list(Path("sweeps").rglob("config.yaml"))


def test_shipped_sweeps_are_found_by_name(agfa: Agfa) -> None:
    listed = agfa("sweep", "--list").out
    assert "The paper's ablations on PACS" in listed
    ended = agfa("sweep", "ablations", "--status")
    assert "48 runs: 0 done, 0 running, 0 failed, 48 waiting" in ended.out
    assert not Path("sweeps").exists()
