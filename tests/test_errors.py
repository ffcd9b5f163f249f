"""What goes wrong gives one line, the right exit status, and costs nothing that was already computed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from agfa.data import store
from agfa.errors import AgfaError, UsageError, unknown
from agfa.training import checkpoint, model_file
from agfa.training.run_folder import RunFolder
from agfa.training.state import Training
from support import QUICK, Agfa, fill, flags, make_images, records, weights

# --- what cannot be trained on: status 2


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def empty_class(root: Path) -> None:
    for domain in root.iterdir():
        (domain / "zigzag").mkdir()


def class_in_one_domain(root: Path) -> None:
    shutil.copytree(root / "ink" / "top", root / "ink" / "zigzag")


def class_in_target_alone(root: Path) -> None:
    shutil.copytree(root / "sky" / "top", root / "sky" / "zigzag")


def one_domain(root: Path) -> None:
    shutil.rmtree(root / "ink")
    shutil.rmtree(root / "paper")


def keep_one_image(root: Path) -> None:
    for path in sorted((root / "ink").rglob("*.*"))[3:]:
        path.unlink()
    for name in ("cross", "left"):
        shutil.copy(next((root / "paper" / name).iterdir()), root / "ink" / name / "a.png")
    shutil.copy(next((root / "paper" / "top").iterdir()), root / "ink" / "top" / "a.png")


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no images": (
        lambda root: [path.unlink() for path in root.rglob("*.*")],
        ["no images in", "DOMAIN/CLASS/IMAGE"],
    ),
    "missing": (shutil.rmtree, ["no folder", "domain/class/image"]),
    "a domain lacks a class": (
        lambda root: shutil.rmtree(root / "paper" / "left"),
        ["tiny/paper", "has no images of class 'left'", "--allow-missing-classes"],
    ),
    "a class in one source alone": (class_in_one_domain, ["class 'zigzag' is in 'ink' alone"]),
    "a class in the target alone": (class_in_target_alone, ["class 'zigzag'", "no source domain", "only in sky"]),
    "an empty class": (empty_class, ["class 'zigzag' is empty in every domain"]),
    "a domain without images": (
        lambda root: [path.unlink() for path in (root / "ink").rglob("*.*")],
        ["tiny/ink", "has no images"],
    ),
    "a truncated JPEG": (
        lambda root: truncate(root / "ink" / "top" / "04.jpg"),
        ["1 of 90 images cannot be read", "ink/top/04.jpg (", "runcated", "agfa data check"],
    ),
    "a text file called PNG": (
        lambda root: (root / "ink" / "top" / "05.png").write_text("hello"),
        ["ink/top/05.png (not an image)"],
    ),
    "one domain": (one_domain, ["no source domain is left", "tiny has only sky"]),
    "too few images": (keep_one_image, ["tiny/ink has 6 images", "too few to hold out 5%"]),
}


@pytest.mark.parametrize("spoil", BAD_FOLDERS)
def test_a_folder_that_cannot_be_trained_on(spoil: str, train: Agfa, tiny: Path) -> None:
    change, said = BAD_FOLDERS[spoil]
    change(tiny)
    ended = train(target="sky", out="run", val_fraction=0.05)
    for words in said:
        assert words in ended.error
    assert ended.status == 2
    assert ended.out == ""
    assert not list(Path("cache").rglob("*.u8")) or spoil == "too few images"


BAD_SETTINGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "target": ({"target": "skye"}, ["unknown domain of tiny 'skye'", "did you mean 'sky'?"]),
    "source": ({"source": "jungle"}, ["unknown domain of tiny 'jungle'", "there are: ink, paper, sky"]),
    "overlap": ({"source": ["ink", "sky"], "target": "sky"}, ["'sky' is both source and target"]),
    "no source left": ({"target": ["ink", "paper", "sky"]}, ["no source domain is left"]),
    "algorithm": ({"algorithm": "agva"}, ["unknown algorithm 'agva'", "did you mean 'agfa'?"]),
    "hparam": ({"hparams": {"etta": 1}}, ["hparams of agfa: unknown key 'etta'", "did you mean 'eta'?"]),
    "hparam's value": ({"hparams": {"alpha": 2}}, ["hparams of agfa: alpha", "less than or equal to 1", "not '2'"]),
    "dataset": ({"data": "digit"}, ["unknown dataset 'digit'", "did you mean 'digits'?"]),
    "no data": ({"data": None}, ["--data", "digits"]),
    "backbone": ({"backbone": "resnet5"}, ["unknown backbone 'resnet5'", "did you mean 'resnet50'?"]),
    "weights": ({"weights": "w.pth"}, ["no weights file w.pth"]),
    "a value out of range": ({"val_fraction": 1.5}, ["less than 1"]),
    "steps": ({"steps": 0}, ["steps", "greater than or equal to 1"]),
    "not a number": ({"steps": "many"}, ["steps", "many"]),
    "a choice": ({"precision": "16"}, ["precision", "16"]),
    "odd batch": ({"batch_size": 5}, ["batch_size 5 must be a multiple of 2: agfa"]),
    "selection": ({"averaging": "none", "selection": "swad"}, ["selection swad needs --averaging swad"]),
    "oracle": ({"selection": "oracle"}, ["selection oracle needs a --target"]),
    "accelerator": ({"accelerator": "gpux"}, ["accelerator 'gpux'"]),
}


@pytest.mark.parametrize("what", BAD_SETTINGS)
def test_a_setting_that_is_not_allowed(what: str, train: Agfa) -> None:
    settings, said = BAD_SETTINGS[what]
    ended = train(**settings)
    for words in said:
        assert words in ended.error
    assert ended.status == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stepps: 3\n", ["unknown key 'stepps'", "did you mean 'steps'?"]),
        ("steps: many\n", ["steps: input should be a valid integer", "not 'many'"]),
        ("steps: [1, 2\n", ["is not YAML", "line"]),
        ("a list\n", ["holds no keys"]),
        ("hparams: 3\n", ["hparams"]),
        (b"\xff\xfe\x00", ["is not YAML"]),
        (None, ["cannot read settings.yaml", "No such file"]),
    ],
)
def test_a_configuration_file_that_is_wrong(text: str | bytes | None, said: list[str], agfa: Agfa) -> None:
    if text is not None:
        Path("settings.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    ended = agfa("train", "--config", "settings.yaml")
    for words in ("settings.yaml", *said):
        assert words in ended.error
    assert ended.status == 2


# --- folders that are in the way


def test_a_run_of_another_configuration_is_left_alone(train: Agfa) -> None:
    assert train(target="sky", algorithm="erm", out="run").status == 0
    before = weights(Path("run")), records(Path("run"))
    ended = train(target="sky", algorithm="erm", out="run", steps=8, seed=3)
    assert "run is a run of another configuration" in ended.error
    assert "steps is 6 there, 8 here" in ended.error
    assert "seed is 0 there, 3 here" in ended.error
    assert "--out" in ended.error
    assert ended.status == 2
    assert (weights(Path("run")), records(Path("run"))) == before


@pytest.mark.parametrize("file", [False, True])
def test_a_folder_that_is_no_run_is_left_alone(file: bool, train: Agfa) -> None:
    if file:
        Path("thesis").write_text("precious")
    else:
        Path("thesis").mkdir()
        Path("thesis/chapter.txt").write_text("precious")
    ended = train(target="sky", out="thesis")
    assert ended.status == 2
    assert "thesis exists and is not a run" in ended.error
    assert [p.name for p in Path().rglob("config.yaml")] == []


def test_somebody_elses_config_is_left_alone(train: Agfa) -> None:
    Path("config.yaml").write_text("server: localhost\n")
    ended = train(target="sky", out=".")
    assert ended.status == 2
    assert "config.yaml" in ended.error
    assert Path("config.yaml").read_text() == "server: localhost\n"


def test_a_mistake_does_not_occupy_the_folder(train: Agfa, tiny: Path) -> None:
    """The corrected command goes through, although it is the same folder and another configuration."""
    assert train(target="sky", algorithm="erm", out="run", backbone="resnet5").status == 2
    assert train(target="sky", algorithm="erm", out="run", val_fraction=0.01).status == 2
    truncate(tiny / "ink" / "top" / "00.jpg")
    assert train(target="sky", algorithm="erm", out="run").status == 2
    (tiny / "ink" / "top" / "00.jpg").unlink()
    assert train(target="sky", algorithm="erm", out="run").status == 0
    assert yaml.safe_load(Path("run/config.yaml").read_text())["backbone"] == "convnet"


# --- the disk is full, or not ours


class Moment:
    """Fills the disk, but for so many bytes, right before the n-th call of a function."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, disk: Path, owner: Any, name: str, n: int, leaving: int = 0
    ) -> None:
        self.calls, original = 0, getattr(owner, name)

        def full(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == n:
                fill(disk, leaving)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, full)


MOMENTS: dict[str, tuple[Any, ...]] = {
    "claiming the folder": (RunFolder, "claim", 1),
    "the first record": (RunFolder, "record", 1),
    "a later record": (RunFolder, "record", 30),
    "the first checkpoint": (Training, "state_dict", 1),
    "the last checkpoint": (Training, "state_dict", 3),
    "amid a checkpoint": (Training, "state_dict", 2, 1 << 20),
    "the first model": (model_file, "save", 1),
    "amid a model": (model_file, "save", 2, 1 << 20),
    "the last model": (model_file, "save", 4),
}


@pytest.fixture
def undisturbed(train: Agfa) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    assert train(target="sky", out="undisturbed").status == 0
    return weights(Path("undisturbed")), records(Path("undisturbed"))


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_full_disk_costs_nothing(
    moment: str, train: Agfa, undisturbed: Any, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = small_disk / "run"
    shutil.rmtree(run, ignore_errors=True)
    command = {"target": "sky", "out": run, "checkpoint_seconds": 0}
    with monkeypatch.context() as patch:
        Moment(patch, small_disk, *MOMENTS[moment])
        ended = train(**command)
    assert ended.status == 1
    *progress, error = ended.err.splitlines()
    assert all(line.startswith(("step ", "swad found no start")) for line in progress)
    assert error.startswith("agfa: cannot write")
    assert "no space left on the disk; free some and run the same command again" in error
    assert str(run) in error
    assert not list(run.rglob("*.draft"))
    if moment != "claiming the folder":
        assert yaml.safe_load((run / "config.yaml").read_text())["target"] == ["sky"]
    reached = max((int(line.split()[1].rstrip(":")) for line in progress if line.startswith("step")), default=0)
    saved = checkpoint.load(run / "checkpoint" / "latest.pt")
    if reached >= 4:
        assert saved is not None
        assert saved["training"]["step"] >= reached - 2
        assert len((run / "metrics.jsonl").read_bytes()) >= saved["log_size"]
    (small_disk / "ballast").unlink()
    ended = train(**command)
    assert ended.status == 0
    assert ("resuming" in ended.err) == (saved is not None)
    assert (weights(run), records(run)) == undisturbed


def test_a_full_disk_while_images_are_decoded(
    train: Agfa, undisturbed: Any, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGFA_CACHE", str(small_disk / "cache"))
    fill(small_disk, leaving=8192)
    monkeypatch.setattr(store, "free_space", lambda _: 1 << 20)  # there was room when it began
    ended = train(target="sky", out="run")
    assert ended.status == 1
    assert f"cannot write {small_disk}/cache/store/" in ended.error
    assert "no space left on the disk" in ended.error
    assert list((small_disk / "cache" / "store").iterdir()) == []
    (small_disk / "ballast").unlink()
    assert train(target="sky", out="run").status == 0
    assert (weights(Path("run")), records(Path("run"))) == undisturbed


@pytest.mark.parametrize("what", ["run", "cache"])
def test_no_permission(what: str, agfa: Agfa, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        tiny = make_images(root / "tiny", per_class=3)
        (root / "free").mkdir()
        (root / "free").chmod(0o777)
        places = {key: str(root / ("closed" if key == what else "free") / key) for key in ("run", "cache")}
        (root / "closed").mkdir()
        (root / "closed").chmod(0o555)
        monkeypatch.setenv("AGFA_CACHE", places["cache"])
        monkeypatch.chdir(root)
        arguments = flags(**QUICK, data=tiny, target="sky", out=places["run"])
        root_user = os.geteuid() == 0
        if root_user:  # who may write anywhere
            os.seteuid(65534)
        try:
            ended = agfa("train", *arguments)
        finally:
            if root_user:
                os.seteuid(0)
        monkeypatch.chdir("/")
    assert ended.status == 1
    assert f"cannot write {places[what]}" in ended.error
    assert "Permission denied" in ended.error


def test_a_damaged_checkpoint(train: Agfa) -> None:
    def broken(*_: Any) -> None:
        raise AgfaError("stopped")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Training, "models", broken)
        assert train(target="sky", out="run", checkpoint_seconds=0).status == 1
    for name in ("latest", "previous"):
        truncate(Path(f"run/checkpoint/{name}.pt"))
    ended = train(target="sky", out="run", checkpoint_seconds=0)
    assert ended.status == 1
    error = ended.err.splitlines()[-1]
    assert "run/checkpoint/latest.pt and run/checkpoint/previous.pt are damaged" in error
    assert "delete run/checkpoint to start the run again" in error
    shutil.rmtree("run/checkpoint")
    assert train(target="sky", out="run", checkpoint_seconds=0).status == 0


def test_a_diverging_run_says_so(train: Agfa) -> None:
    ended = train(target="sky", out="run", algorithm="erm", hparams={"lr": 1e30}, steps=40)
    assert ended.status == 1
    assert re.search(r"a loss or gradient of step \d+ is not finite.*--hparams.lr", ended.err.splitlines()[-1])


# --- the same from a shell


def test_from_a_shell_too(tiny: Path) -> None:
    command = [sys.executable, "-m", "agfa", "train", "--data", tiny, "--target", "skye"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "agfa: unknown domain of tiny 'skye'; did you mean 'sky'?\n"


# --- in Python


def test_errors_are_one_kind_and_tell_use_from_failure() -> None:
    assert issubclass(UsageError, AgfaError)
    assert (AgfaError.exit_status, UsageError.exit_status) == (1, 2)


def test_the_nearest_name_is_suggested() -> None:
    assert str(unknown("pet", "cta", ["cat", "dog"])) == "unknown pet 'cta'; did you mean 'cat'?"
    assert str(unknown("pet", "zebra", ["cat", "dog"])) == "unknown pet 'zebra'; there are: cat, dog"


def test_nothing_saved_is_executed(tmp_path: Path) -> None:
    """A checkpoint from a stranger can name a function to call; it is refused, though it be whole."""
    checkpoint.save(tmp_path / "latest.pt", {"training": os.system})
    with pytest.raises(AgfaError, match="cannot be resumed from"):
        checkpoint.load(tmp_path / "latest.pt")
