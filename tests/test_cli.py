"""The command line: quick to answer, one line for what is wrong, and a status that scripts can trust."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import agfa as package
from support import QUICK, Agfa, flags

COMMANDS = [
    ("audit",),
    ("bench",),
    ("demo",),
    ("train",),
    ("evaluate",),
    ("predict",),
    ("export",),
    ("serve",),
    ("push",),
    ("pull",),
    ("algorithms",),
    ("sweep",),
    ("report",),
    ("data",),
    ("data", "check"),
    ("data", "clean"),
    ("data", "get"),
    ("data", "list"),
]


def shell(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agfa", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    times = []  # the processor's: what others do on this machine is no part of it
    for _ in range(3):
        before = os.times()
        done = shell("--help")
        after = os.times()
        times.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert done.returncode == 0
    assert "Domain generalisation" in done.stdout
    assert min(times) < 0.5
    code = (
        "import sys; sys.argv = ['agfa', '--help']\n"
        "from agfa.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'timm', 'lightning_fabric', 'sklearn', 'matplotlib', 'polars', 'ray', 'PIL'}\n"
        "print('heavy:', heavy & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy: set()"


def test_importing_agfa_imports_no_torch() -> None:
    code = "import sys, agfa; from agfa import train; print('torch' in sys.modules, agfa.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", package.__version__]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help(command: tuple[str, ...], agfa: Agfa) -> None:
    ended = agfa(*command, "--help")
    assert (ended.status, ended.err) == (0, "")
    assert f"Usage: agfa {' '.join(command)}" in ended.out


def test_every_command_is_tested_here() -> None:
    from agfa.cli.app import app
    from agfa.cli.data import app as data_app

    def names(of: object) -> set[str]:
        return {name for name in of if not name.startswith("-")}  # type: ignore[attr-defined]

    assert names(app) == {command[0] for command in COMMANDS}
    assert names(data_app) == {command[1] for command in COMMANDS if len(command) == 2}


def test_help_tells_of_every_setting(agfa: Agfa) -> None:
    from agfa.training.config import TrainConfig

    text = agfa("train", "--help").out
    for key, setting in TrainConfig.model_fields.items():
        assert f"--{key.replace('_', '-')}" in text
        assert setting.description


def test_version(agfa: Agfa) -> None:
    assert agfa("--version").out.strip() == package.__version__


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], 'Unknown command "trian". Did you mean "train"?'),
        (["train", "--stepz", "3"], "Unknown option: --stepz. Did you mean --steps?"),
        (["train", "--no-augmet"], "Did you mean --no-augment?"),
        (["train", "x"], "'x'"),
        (["predict"], "MODEL"),
        (["evaluate", "run"], "--data"),
        (["data", "chek", "x"], "check"),
        (["data", "get", "PASC"], "did you mean 'PACS'?"),
        (["train", "--steps"], "--steps"),
        (["train", "--devices", "0"], "devices: input should be greater than or equal to 1"),
        (["predict", "run", "x.png", "--format", "xml"], "xml"),
        (["algorithms", "agva"], "did you mean 'agfa'?"),
    ],
)
def test_mistakes_in_one_line(arguments: list[str], said: str, agfa: Agfa) -> None:
    ended = agfa(*arguments)
    assert said in ended.error
    assert ended.error.startswith("agfa: ")
    assert (ended.status, ended.out) == (2, "")


def test_debug_shows_where(agfa: Agfa) -> None:
    for arguments in (
        ("train", "--data", "nowhere/at/all", "--debug"),
        ("--debug", "train", "--data", "nowhere/at/all"),
    ):
        ended = agfa(*arguments)
        assert ended.status == 2
        assert "Traceback (most recent call last)" in ended.err
        assert ended.err.splitlines()[-1].startswith("agfa: no folder nowhere/at/all")


def test_what_nobody_thought_of_is_one_line_too(agfa: Agfa, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr("agfa.training.trainer.train", broken)
    ended = agfa("train", "--data", "x")
    assert ended.status == 1
    assert ended.error == "agfa: ZeroDivisionError: division by zero (run it again with --debug for the traceback)"


def test_interrupted_it_says_how_to_go_on(tiny: Path) -> None:
    settings = {**QUICK, "steps": 100000, "evaluate_every": 20, "checkpoint_seconds": 0}
    command = [sys.executable, "-m", "agfa", "train", *flags(**settings, data=tiny, target="sky", out="run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not Path("run/checkpoint/latest.pt").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    *progress, last = err.splitlines()
    assert all(line.startswith("step ") for line in progress)
    assert last == "agfa: stopped; the same command goes on where it stopped"
    assert out == ""
    assert not list(Path("run").rglob("*.draft"))


def test_known_datasets_are_listed_with_where_they_are(
    agfa: Agfa, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGFA_DATA", str(tiny.parent))
    tiny.rename(tiny.parent / "pacs")
    ended = agfa("data", "list")
    assert ended.status == 0
    rows = {line.split()[0]: line for line in ended.out.splitlines() if line.strip()}
    assert rows["PACS"].rstrip().endswith("pacs")
    assert rows["VLCS"].rstrip().endswith(" no")
    assert rows["digits"].rstrip().endswith("in the package")


def test_algorithms(agfa: Agfa) -> None:
    ended = agfa("algorithms")
    assert ended.status == 0
    rows = [line.split() for line in ended.out.splitlines()]
    assert {"agfa", "erm"} <= {row[0] for row in rows if row}
    ended = agfa("algorithms", "agfa")
    assert "eta" in ended.out
    assert "weight of the discrepancy" in ended.out
    assert "ELBO" in ended.out


def test_tables_are_whole_where_nobody_looks(agfa: Agfa, tiny: Path) -> None:
    """Piped into a file, no cell is cut or wrapped, and nothing is coloured."""
    long = tiny.rename(tiny.parent / ("a_rather_long_name_" * 6))
    ended = agfa("data", "check", long / "..")
    assert "…" not in ended.out
    assert "\x1b" not in ended.out


def test_one_table_tells_what_a_run_ended_with(agfa: Agfa, tiny: Path) -> None:
    ended = agfa("train", **{**QUICK, "data": tiny, "target": "sky", "out": "run"})
    assert ended.status == 0
    rows = [line.split() for line in ended.out.splitlines()]
    chosen = [row for row in rows if len(row) > 1 and row[1] == "yes"]
    assert {row[0] for row in chosen} == {"swad"}
    assert [row[2] for row in chosen] == ["ink", "paper", "sky", "sky"]
    assert "cheating" in ended.out
    assert ended.out.splitlines()[-1] == f"model: {os.path.join('run', 'model.safetensors')}"  # noqa: PTH118
