"""Several processes train one model: what one process would have, and one log. Each start costs some seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import agfa as package
from agfa import errors
from agfa.algorithms.erm import ERM
from agfa.training import predictions
from support import QUICK, Agfa, Ended, flags, records

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
import os
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
# What `agfa train` does until the evaluation after step 4, where one process, or all, fail.
FAILS = """
import os
import agfa.training.trainer as t
from agfa.errors import AgfaError
measured = t.mean_accuracy
calls = []
def fail(scores, split):
    calls.append(split)
    if calls.count("oracle") == 2 and os.environ.get("LOCAL_RANK", "0") in {ranks!r}:
        raise AgfaError("enough")
    return measured(scores, split)
t.mean_accuracy = fail
from agfa.cli import main
main()
"""


def run(*python: str, **settings: Any) -> Ended:
    arguments = ["train", *flags(**{**SETTINGS, **settings})]
    command = [sys.executable, *python, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return Ended(done.returncode, done.stdout, done.stderr)


def stop(*python: str, ranks: str = "01", **settings: Any) -> None:
    """A run whose processes, or one of them, fail after step 4; one says so."""
    Path("fails.py").write_text(FAILS.format(ranks=list(ranks)))
    stopped = run(*python, "fails.py", **settings)
    assert stopped.status == 1
    assert [line for line in stopped.err.splitlines() if line.startswith("agfa: ")] == ["agfa: enough"]
    assert python or "Traceback" not in stopped.err  # torchrun adds a report of its own
    saved = torch.load(f"{settings['out']}/checkpoint/latest.pt")
    assert saved["training"]["step"] == (2 if "0" in ranks else 4)


def same_predictions(one: str, other: str) -> None:
    """What the models say of each image, in the same order, at the same temperature."""
    a, b = (predictions.read(Path(out)) for out in (one, other))
    images = ["model", "domain", "split", "key", "label", "predicted"]
    assert a.select(images).equals(b.select(images))
    for name in ("probabilities", "disagreement", "temperature"):
        np.testing.assert_allclose(a[name].to_numpy(), b[name].to_numpy(), atol=1e-3, rtol=1e-3)
    cards = [json.loads(Path(out, "model.json").read_text())["temperature"] for out in (one, other)]
    assert cards[0] == pytest.approx(cards[1], rel=1e-3)


def same_models(one: str, other: str, names: tuple[str, ...] = ("last", "best", "swad"), atol: float = 1e-5) -> None:
    for name in names:
        a, b = (safetensors.torch.load_file(f"{out}/models/{name}.safetensors") for out in (one, other))
        for key, value in a.items():
            torch.testing.assert_close(b[key], value, rtol=0, atol=atol)


def test_two_processes_are_one_on_the_joint_batch(tiny: Path, agfa: Agfa) -> None:
    """AGFA and SWAD, with augmentation: what is drawn at random is the same, however many processes there are."""
    Path("watched.py").write_text(WATCHED)
    one = agfa("train", **{**SETTINGS, "data": tiny, "out": "one", "augment": True})
    assert one.status == 0, one.err
    two = run("watched.py", data=tiny, out="two", augment=True, devices=2)
    assert two.status == 0, two.err
    assert two.out.replace("two", "one") == one.out  # said once
    assert two.err == one.err
    ranks = [torch.load(f"rank{rank}.pt") for rank in (0, 1)]
    assert any(key.startswith("generator") for key in ranks[0])
    for key, value in ranks[0].items():
        assert torch.equal(value, ranks[1][key]), key
    same_models("one", "two")
    same_predictions("one", "two")
    for a, b in zip(records(Path("one")), records(Path("two")), strict=True):
        assert a.pop("losses", {}) == pytest.approx(b.pop("losses", {}), rel=1e-4)
        assert a == {**b, **({"loss": pytest.approx(b["loss"], rel=1e-4)} if "loss" in b else {})}


def test_two_processes_then_one(tiny: Path, agfa: Agfa) -> None:
    """As on a cluster that gave us two processes first and one later: the run ends as if nothing had happened."""
    settings = {**SETTINGS, "data": tiny, "augment": True}
    assert agfa("train", **settings, out="whole").status == 0
    stop(*TORCHRUN, data=tiny, out="run", augment=True)
    resumed = agfa("train", **settings, out="run")
    assert resumed.status == 0, resumed.err
    assert "resuming run after step 2" in resumed.err
    assert [line["step"] for line in records(Path("run"), "train")] == [2, 4, 6]
    assert resumed.out.count("model: run/model.safetensors") == 1
    same_models("whole", "run")


@pytest.mark.slow  # starts four processes
def test_one_process_then_two(tiny: Path, agfa: Agfa) -> None:
    settings = {"data": tiny, "augment": True, "algorithm": "sagnet"}
    assert agfa("train", **{**SETTINGS, **settings}, out="whole").status == 0
    stop(**settings, out="run")
    resumed = run("-m", "agfa", **settings, out="run", devices=2)
    assert resumed.status == 0, resumed.err
    same_models("whole", "run", ("last", "best"))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_when_one_process_fails_all_end(rank: str, tiny: Path) -> None:
    stop(data=tiny, out="run", devices=2, ranks=rank)


def test_of_processes_that_are_alike_one_says_what_is_wrong(agfa: Agfa, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they can settle which: the first on each machine."""
    assert "unknown algorithm" in agfa("train", data="digits", algorithm="ermm").error
    monkeypatch.setattr(errors, "speaks", False)
    ended = agfa("train", data="digits", algorithm="ermm")
    assert (ended.status, ended.err) == (2, "")


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
    assert "16 source images a step cannot be shared by 3 processes" in ended.error
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


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_or_the_fastest_kernels_and_only_while_training(
    deterministic: bool, tiny: Path, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def now() -> tuple[bool, ...]:
        cudnn = torch.backends.cudnn
        return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark

    seen, update = set(), ERM.update

    def watched(self: ERM, batch: Any, backward: Any) -> Any:
        seen.add(now())
        return update(self, batch, backward)

    monkeypatch.setattr(ERM, "update", watched)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = now()
    settings = {**quick, "algorithm": "erm", "accelerator": "cpu", "deterministic": deterministic}
    package.train(**settings, data=str(tiny), target="sky", out="run")
    assert seen == {(deterministic, deterministic, not deterministic)}
    assert now() == before
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == deterministic  # which CUDA's products need
