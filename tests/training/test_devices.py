"""Several processes train one model: what one process would have, and one log. Each start costs some seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import agfa as package
from support import QUICK, Ended, flags, records

SETTINGS = {
    **QUICK,
    "target": "sky",
    "accelerator": "cpu",
    "batch_size": 8,
    "hparams": {"lr": 1e-4},
    "checkpoint_seconds": 0,
}
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

# What `agfa train` does, and what each process ends with.
WATCHED = """
import os, sys
import torch
from agfa import cli
from agfa.training.state import Training
models = Training.models
def watched(self):
    torch.save(self.algorithm.state_dict(), f"rank{os.environ.get('LOCAL_RANK', 0)}.pt")
    return models(self)
Training.models = watched
cli.main()
"""


def run(*python: str, **settings: Any) -> Ended:
    arguments = ["train", *flags(**{**SETTINGS, **settings})]
    command = [sys.executable, *python, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return Ended(done.returncode, done.stdout, done.stderr)


def model(path: str) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


def test_two_processes_are_one_on_the_joint_batch(tiny: Path) -> None:
    Path("watched.py").write_text(WATCHED)
    one = run("watched.py", data=tiny, out="one", algorithm="swad")
    assert one.status == 0, one.err
    two = run("watched.py", data=tiny, out="two", algorithm="swad", devices=2)
    assert two.status == 0, two.err
    assert two.out.replace("two", "one") == one.out  # said once
    assert two.err == one.err
    ranks = [torch.load(f"rank{rank}.pt") for rank in (0, 1)]
    for key, value in ranks[0].items():
        assert torch.equal(value, ranks[1][key]), key
    for name in ("last", "best", "swad"):
        a, b = (model(f"{out}/models/{name}.safetensors") for out in ("one", "two"))
        for key, value in a.items():
            torch.testing.assert_close(b[key], value, rtol=0, atol=1e-5)
    for a, b in zip(records(Path("one")), records(Path("two")), strict=True):
        if a["kind"] != "train":  # a process records the loss of its own share
            assert {**a, "loss": 0} == {**b, "loss": 0}
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)


def test_agfa_under_torchrun_resumes_with_fewer_processes(tiny: Path) -> None:
    """As on a cluster that gave us two processes first and one later."""
    Path("stops.py").write_text(
        "import agfa.training.trainer as t\n"
        "from agfa.errors import AgfaError\n"
        "line = t._line\n"
        "def stop(step, scores):\n"
        "    if step == 4: raise AgfaError('enough')\n"
        "    return line(step, scores)\n"
        "t._line = stop\n"
        "from agfa.cli import main\n"
        "main()\n"
    )
    stopped = run(*TORCHRUN, "stops.py", data=tiny, out="run", augment=True)
    assert stopped.status != 0
    assert "agfa: enough" in stopped.err.splitlines()
    saved = torch.load("run/checkpoint/latest.pt")
    assert saved["training"]["step"] == 2
    resumed = run("-m", "agfa", data=tiny, out="run", augment=True)
    assert resumed.status == 0, resumed.err
    assert "resuming run after step 2" in resumed.err
    steps = [line["step"] for line in records(Path("run"), "train")]
    assert steps == [2, 4, 6]
    assert resumed.out.count("model: run/model.safetensors") == 1


@pytest.mark.slow
def test_torchrun_and_devices_are_the_same(tiny: Path) -> None:
    """Slow: four more processes; the default tests have one of each kind."""
    assert run("-m", "agfa", data=tiny, out="devices", devices=2).status == 0
    assert run(*TORCHRUN, "-m", "agfa", data=tiny, out="torchrun").status == 0
    for path in Path("devices").rglob("*.safetensors"):
        assert path.read_bytes() == Path("torchrun", *path.parts[1:]).read_bytes()
    assert records(Path("devices")) == records(Path("torchrun"))


def test_mistakes_are_found_before_there_are_processes(tiny: Path, agfa: Any) -> None:
    ended = agfa("train", **{**SETTINGS, "data": tiny, "devices": 3, "algorithm": "erm"})
    assert ended.status == 2
    assert "8 source images per domain and step cannot be shared by 3 processes" in ended.error
    Path("thesis").mkdir()
    Path("thesis/a").touch()
    ended = agfa("train", **{**SETTINGS, "data": tiny, "devices": 2, "out": "thesis"})
    assert ended.status == 2
    assert "thesis exists and is not a run" in ended.error


def test_the_record_says_what_hardware_it_was(tiny: Path, quick: dict[str, Any]) -> None:
    package.train(**quick, data=str(tiny), target="sky", out="run")
    environment = json.loads(Path("run/environment.json").read_text())
    assert environment["threads"] == torch.get_num_threads()
    assert environment["gpus"] == [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
