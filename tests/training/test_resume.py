"""A run that was interrupted, anywhere and anyhow, ends with the same bits as one that never was."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import agfa as package
from agfa import files
from agfa.data.batches import seed_of
from agfa.errors import UsageError
from agfa.training import checkpoint, predictions, run_folder, trainer
from agfa.training.state import Training
from support import QUICK, Agfa, flags, same, weights
from support_forks import Forks

LONG = {
    **QUICK,
    "target": "sky",
    "augment": True,
    "steps": 60,
    "evaluate_every": 5,
    "swad_patience": 1,
    "swad_tolerance": 2,
    "checkpoint_seconds": 0,
}


def test_killed_at_ten_moments(tiny: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL at random moments and at chosen ones: in the first files, while decoding, in the last files."""

    def command(run: str) -> list[str]:
        return ["train", *flags(**LONG, data=tiny, out=run)]

    status, _ = forks.agfa(*command("warm"))
    assert status == 0, Path("out.txt").read_text()
    shutil.rmtree("cache")
    status, usual = forks.agfa(*command("undisturbed"))
    assert status == 0
    assert (
        Path("undisturbed/models/swad.safetensors").read_bytes()
        != Path("undisturbed/models/last.safetensors").read_bytes()
    )

    rng = random.Random(0)
    chosen: list[dict[str, Any]] = [
        {"file": "cache/store"},
        {"file": "RUN/.config.yaml.draft"},
        {"file": "RUN/config.yaml"},
        {"file": "RUN/checkpoint/.latest.pt.draft"},
        {"file": "RUN/checkpoint/latest.pt"},
        *({"seconds": rng.uniform(0.1, 0.6) * usual} for _ in range(10)),
        {"file": "RUN/models/last.json"},
        {"file": "RUN/model.safetensors"},
        {"file": "RUN/players.safetensors"},
    ]
    shutil.rmtree("cache")
    kills, runs, said = 0, [], ""
    while chosen:
        run = f"run{len(runs)}"
        runs.append(Path(run))
        status = -9
        while status == -9 and chosen:
            how = chosen.pop(0)
            if file := how.get("file"):
                how = {"file": file.replace("RUN", run)}
            status, _ = forks.agfa(*command(run), **how)
            said += Path("out.txt").read_text()
            kills += status == -9
        if status == -9:
            status, _ = forks.agfa(*command(run))
            said += Path("out.txt").read_text()
        assert status == 0, Path("out.txt").read_text()
    print(f"{usual=}, {kills=}, {len(runs)=}, resumed {said.count('resuming')}")
    assert kills >= 12
    assert said.count("resuming") >= 1
    for run_folder_ in runs:
        same(run_folder_, Path("undisturbed"))
        assert not (run_folder_ / "checkpoint" / "latest.pt").exists()


class Killed(BaseException):
    """Nothing catches this."""


def interrupted_by(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, n: int) -> None:
    """The n-th call of a function does half of what it should and is the last thing that happens."""
    calls, original = 0, getattr(owner, name)

    def function(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == n:
            raise Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, function)


METHODS: dict[str, dict[str, Any]] = {
    "erm": {"algorithm": "erm", "averaging": "none"},
    "erm, swa": {"algorithm": "erm", "averaging": "swa", "augment": True},
    "agfa, alternating": {"hparams": {"lr": 1e-3, "schedule": "alternating"}, "swad_patience": 1},
    "agfa, no target tracked": {"track_target": False, "swad_patience": 1, "swad_tolerance": 1, "swad_ratio": 1},
    "agfa, one source": {"source": ("ink",), "target": (), "precision": "bf16-mixed"},
    "agfa, stop early": {"stop_early": True, "swad_patience": 1, "swad_tolerance": 1, "swad_ratio": 1},
}


@pytest.mark.parametrize("method", METHODS)
def test_interrupted_in_this_process(
    method: str, tiny: Path, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**quick, "data": str(tiny), "target": "sky", "steps": 11, "checkpoint_seconds": 0, **METHODS[method]}
    whole = package.train(**settings, out="whole")
    for n in (1, 4, 2, 3):  # evaluations between one interruption and the next
        with monkeypatch.context() as patch:
            interrupted_by(patch, trainer, "_record", n)
            with pytest.raises(Killed):
                package.train(**settings, out="run")
        torch.manual_seed(n)  # whatever state the new process starts in
    resumed = package.train(**settings, out="run")
    same(Path("run"), Path("whole"))
    assert resumed.scores == whole.scores


def test_killed_at_any_write(tiny: Path, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file in turn is the last, of which only a draft is there."""
    settings = {**quick, "data": str(tiny), "target": "sky", "algorithm": "swad", "checkpoint_seconds": 0, "steps": 4}
    package.train(**settings, out="whole")
    original, seen = files.replace, 0

    def killed(path: Path, write: Any, **options: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == last:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(f".{path.name}.draft").write_bytes(b"half of it")
            raise Killed
        original(path, write, **options)

    for last in range(1, 100):
        seen = 0
        with monkeypatch.context() as patch:
            for module in (files, checkpoint, predictions):
                patch.setattr(module, "replace", killed)
            try:
                package.train(**settings, out=f"run{last}")
                break
            except Killed:
                pass
        package.train(**settings, out=f"run{last}")
        same(Path(f"run{last}"), Path("whole"))
    # configuration, environment; checkpoints; models; README; predictions; done; and no more
    assert last == 2 + 2 + 2 * 5 + 1 + 1 + 1 + 1


def test_killed_before_done_was_written(tiny: Path, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**quick, "data": str(tiny), "target": "sky", "checkpoint_seconds": 0}
    package.train(**settings, out="whole")
    with monkeypatch.context() as patch:
        interrupted_by(patch, run_folder.RunFolder, "finish", 1)
        with pytest.raises(Killed):
            package.train(**settings, out="run")
    assert Path("run/model.safetensors").exists()
    package.train(**settings, out="run")
    same(Path("run"), Path("whole"))


def test_a_torn_last_record_is_forgotten(tiny: Path, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**quick, "data": str(tiny), "target": "sky", "checkpoint_seconds": 0}
    package.train(**settings, out="whole")
    with monkeypatch.context() as patch:
        interrupted_by(patch, trainer, "_record", 2)
        with pytest.raises(Killed):
            package.train(**settings, out="run")
    with Path("run/metrics.jsonl").open("a") as file:
        file.write('{"kind": "eval", "step": 4, "dom')
    package.train(**settings, out="run")
    same(Path("run"), Path("whole"))


def interrupt(settings: dict[str, Any], run: str) -> None:
    """Leave a run after its second evaluation, with the checkpoint of the first or second."""
    with pytest.MonkeyPatch.context() as patch:
        interrupted_by(patch, trainer, "_record", 3)
        with pytest.raises(Killed):
            package.train(**settings, out=run)
    assert Path(run, "checkpoint/latest.pt").exists()


def test_other_data_is_refused(tiny: Path, quick: dict[str, Any]) -> None:
    settings = {**quick, "data": str(tiny), "target": "sky", "checkpoint_seconds": 0}
    interrupt(settings, "run")
    before = Path("run/checkpoint/latest.pt").read_bytes(), Path("run/metrics.jsonl").read_bytes()
    image = tiny / "ink" / "top" / "00.jpg"
    shutil.copy(image, image.with_name("new.jpg"))
    with pytest.raises(UsageError, match=r"images of tiny .* was trained on: ink/top had 10 images, now 11; put"):
        package.train(**settings, out="run")
    assert before == (Path("run/checkpoint/latest.pt").read_bytes(), Path("run/metrics.jsonl").read_bytes())
    image.with_name("new.jpg").unlink()
    package.train(**settings, out="run")


def test_where_it_runs_may_change(tiny: Path, quick: dict[str, Any]) -> None:
    """Not the outcome: the place of the folder, the pace of checkpoints, the accelerator."""
    settings = {**quick, "data": str(tiny), "target": "sky", "checkpoint_seconds": 0, "accelerator": "cpu"}
    package.train(**settings, out="whole")
    interrupt(settings, "run")
    Path("run").rename("moved")
    package.train(**{**settings, "checkpoint_seconds": 100, "accelerator": "auto"}, out="moved")
    same(Path("moved"), Path("whole"))


def test_what_it_trains_on_may_not_change(tiny: Path, quick: dict[str, Any]) -> None:
    settings = {**quick, "data": str(tiny), "target": "sky", "checkpoint_seconds": 0}
    interrupt(settings, "run")
    with pytest.raises(UsageError, match=r"batch_size is 4 there, 6 here"):
        package.train(**{**settings, "batch_size": 6}, out="run")
    with pytest.raises(UsageError, match=r"hparams is"):
        package.train(**{**settings, "hparams": {"lr": 1e-3, "eta": 0.2}}, out="run")


def test_a_finished_run_is_not_trained_again(tiny: Path, quick: dict[str, Any], monkeypatch: Any) -> None:
    settings = {**quick, "data": str(tiny), "target": "sky"}
    first = package.train(**settings, out="run")
    before = weights(Path("run")), Path("run/metrics.jsonl").read_bytes()
    monkeypatch.setattr(trainer, "build", None)  # what training would start with
    again = package.train(**settings, out="run")
    assert again.scores == first.scores
    assert again.accuracy == first.accuracy
    assert (weights(Path("run")), Path("run/metrics.jsonl").read_bytes()) == before


def test_config_yaml_is_the_whole_run(train: Agfa, agfa: Agfa) -> None:
    assert train(target="sky", out="run", val_fraction=0.3, seed=5).status == 0
    ended = agfa("train", "--config", "run/config.yaml", "--out", "again")
    assert ended.status == 0
    same(Path("again"), Path("run"))
    one, other = (yaml.safe_load(Path(run, "config.yaml").read_text()) for run in ("run", "again"))
    assert one | {"out": "again"} == other
    assert None not in one.values()
    ended = agfa("train", "--config", "run/config.yaml")
    assert "run is finished already" in ended.error


def test_flags_override_the_file(train: Agfa, agfa: Agfa) -> None:
    assert train(target="sky", out="run", algorithm="agfa").status == 0
    ended = agfa("train", "--config", "run/config.yaml", "--out", "ink", "--target", "ink", "--hparams.eta", "0.5")
    assert ended.status == 0, ended.err
    config = yaml.safe_load(Path("ink/config.yaml").read_text())
    assert (config["target"], config["source"]) == (["ink"], ["paper", "sky"])
    assert (config["hparams"]["eta"], config["hparams"]["lr"]) == (0.5, 1e-3)


def test_the_checkpoint_goes_when_the_run_is_done(tiny: Path, quick: dict[str, Any]) -> None:
    package.train(**quick, data=str(tiny), target="sky", out="run")
    assert sorted(p.name for p in Path("run/checkpoint").iterdir()) == []
    for name in ("latest", "previous"):  # killed before they went
        Path(f"run/checkpoint/{name}.pt").touch()
    package.train(**quick, data=str(tiny), target="sky", out="run")
    assert sorted(p.name for p in Path("run/checkpoint").iterdir()) == []


def test_the_log_grows_in_time(tiny: Path, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds go on where they stopped: they are not of the last process alone."""
    settings = {**quick, "data": str(tiny), "target": "sky", "checkpoint_seconds": 0}
    original = Training.load_state_dict

    def hours_later(self: Training, state: dict[str, Any]) -> None:
        original(self, state)
        self.seconds += 3600

    interrupt(settings, "run")
    with monkeypatch.context() as patch:
        patch.setattr(Training, "load_state_dict", hours_later)
        package.train(**settings, out="run")
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if line["kind"] == "train"]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 3600


def test_randomness_depends_on_the_step_alone() -> None:
    seeds = [seed_of(a, b, c, d) for a in range(4) for b in range(50) for c in range(3) for d in range(2)]
    assert len(set(seeds)) == len(seeds)
