"""Storage that lies, fills up, goes away or becomes another: a line that says so, and afterwards the same bits.

Full disks during training are in `tests/test_errors.py`.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import agfa as package
from agfa.benchmark.estimate import Cost, cached
from agfa.data import fetch
from agfa.data.domains import from_folder
from agfa.data.store import open_images
from agfa.errors import AgfaError, UsageError
from agfa.training import checkpoint, trainer
from agfa.training.run_folder import RunFolder
from agfa.training.state import Training
from serving import NOW, Server
from support import Agfa, same

LATEST, PREVIOUS = Path("run/checkpoint/latest.pt"), Path("run/checkpoint/previous.pt")


class Stopped(BaseException):
    """The process ends here."""


def interrupted(settings: dict[str, Any]) -> dict[str, Any]:
    """`whole`, an undisturbed run, and `run`, which stopped with checkpoints of steps 4 and 6."""
    settings = {**settings, "target": "sky", "checkpoint_seconds": 0, "steps": 8, "augment": True}
    package.train(**settings, out="whole")
    with pytest.MonkeyPatch.context() as patch:
        saves = Training.state_dict

        def state_dict(self: Training) -> dict[str, Any]:
            if self.step == 8:
                raise Stopped
            return saves(self)

        patch.setattr(Training, "state_dict", state_dict)
        with pytest.raises(Stopped):
            package.train(**settings, out="run")
    return settings


# --- checkpoints


def flip(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def shorten(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(1, file.stat().st_size))


def empty(file: Path, rng: random.Random) -> None:
    os.truncate(file, 0)


DAMAGES: dict[Callable[[Path, random.Random], None], int] = {flip: 60, shorten: 30, empty: 1}  # and how often


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_any_damage_to_a_checkpoint_is_seen(damage: Callable[..., None], tmp_path: Path) -> None:
    rng, path = random.Random(0), tmp_path / "latest.pt"
    for number in range(2):
        checkpoint.save(path, {"number": number, "tensor": np.arange(3000).tolist()})
    good = path.read_bytes()
    for _ in range(DAMAGES[damage]):
        damage(path, rng)
        said: list[str] = []
        found = checkpoint.load(path, said.append)
        assert found is not None
        assert found["number"] == 0
        assert said == [f"{path} is damaged"]
        path.write_bytes(good)
    assert checkpoint.load(path)["number"] == 1


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_run_goes_on_from_the_checkpoint_before(
    damage: Callable[..., None], tiny: Path, quick: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    settings = interrupted({**quick, "data": str(tiny)})
    damage(LATEST, random.Random(1))
    package.train(**settings, out="run", quiet=False)
    assert capfd.readouterr().err.splitlines()[:2] == [f"{LATEST} is damaged", "resuming run after step 4"]
    same(Path("run"), Path("whole"))
    assert not PREVIOUS.exists()


def test_killed_between_the_two_renames(tiny: Path, quick: dict[str, Any]) -> None:
    settings = interrupted({**quick, "data": str(tiny)})
    LATEST.replace(PREVIOUS)
    package.train(**settings, out="run")
    same(Path("run"), Path("whole"))


def test_a_log_that_lost_records(tiny: Path, quick: dict[str, Any]) -> None:
    """The log was not on the disk when the power went, or somebody cut it: nothing is made up."""
    settings = interrupted({**quick, "data": str(tiny)})
    os.truncate("run/metrics.jsonl", 200)
    with pytest.raises(AgfaError, match=r"metrics.jsonl has lost records since the checkpoint; delete run"):
        package.train(**settings, out="run")
    assert Path("run/metrics.jsonl").stat().st_size == 200


def test_a_damaged_log_of_a_finished_run(tiny: Path, quick: dict[str, Any]) -> None:
    settings = {**quick, "data": str(tiny), "target": "sky", "out": "run"}
    package.train(**settings)
    with Path("run/metrics.jsonl").open("r+b") as file:
        file.write(b"\0\0\0")
    with pytest.raises(AgfaError, match=r"run/metrics.jsonl is damaged .*; delete run"):
        package.train(**settings)


# --- the run's folder goes away, or may not be written any more

# Records: an early one, one amid the run, one of the last; the latter tell nothing new, and are slow together.
MOMENTS = [pytest.param(2, marks=pytest.mark.slow), 7, pytest.param(14, marks=pytest.mark.slow)]


def at(monkeypatch: pytest.MonkeyPatch, n: int, happens: Callable[[], object]) -> None:
    """Right before the n-th record."""
    calls, original = 0, RunFolder.record

    def record(self: RunFolder, **values: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == n:
            happens()
        original(self, **values)

    monkeypatch.setattr(RunFolder, "record", record)


@pytest.fixture
def undisturbed(train: Agfa) -> Path:
    assert train(target="sky", out="whole", augment=True).status == 0
    return Path("whole")


def goes_on(train: Agfa, out: Path, undisturbed: Path) -> None:
    assert train(target="sky", out=out, augment=True, checkpoint_seconds=0).status == 0
    same(out, undisturbed)


@pytest.mark.parametrize("n", MOMENTS)
def test_the_folder_disappears(n: int, train: Agfa, undisturbed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        at(patch, n, lambda: Path("run").rename("elsewhere"))
        ended = train(target="sky", out="run", augment=True, checkpoint_seconds=0)
    assert ended.status == 1
    assert ended.err.splitlines()[-1] == "agfa: cannot write run/metrics.jsonl: No such file or directory"
    assert not Path("run").exists()  # it is not made anew where a disk was mounted
    Path("elsewhere").rename("run")
    goes_on(train, Path("run"), undisturbed)


def mount(*arguments: object) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True, capture_output=True)


@pytest.mark.parametrize("n", MOMENTS)
def test_the_disk_becomes_read_only(
    n: int, train: Agfa, undisturbed: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The permission to write is revoked, by a mount over the folder."""

    def revoke() -> None:
        mount("--bind", "run", "run")
        mount("-o", "remount,bind,ro", "run")

    with monkeypatch.context() as patch:
        at(patch, n, revoke)
        ended = train(target="sky", out="run", augment=True, checkpoint_seconds=0)
    subprocess.run(["umount", "-l", "run"], check=True)
    assert ended.status == 1
    assert ended.err.splitlines()[-1] == "agfa: cannot write run/metrics.jsonl: Read-only file system"
    goes_on(train, Path("run"), undisturbed)


@pytest.mark.parametrize("n", MOMENTS)
def test_the_mount_is_gone(
    n: int, train: Agfa, undisturbed: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a network's storage is unmounted: an empty folder is in its place, and nothing may be written there."""
    disk = small_disk / "run"
    shutil.rmtree(disk, ignore_errors=True)
    disk.mkdir()
    Path("run").mkdir()
    mount("--bind", disk, "run")
    with monkeypatch.context() as patch:
        at(patch, n, lambda: subprocess.run(["umount", "-l", "run"], check=True))
        ended = train(target="sky", out="run", augment=True, checkpoint_seconds=0)
    assert ended.status == 1
    assert ended.err.splitlines()[-1] == "agfa: cannot write run/metrics.jsonl: No such file or directory"
    assert list(Path("run").iterdir()) == []
    mount("--bind", disk, "run")
    try:
        goes_on(train, Path("run"), undisturbed)
    finally:
        subprocess.run(["umount", "-l", "run"], check=True)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("n", MOMENTS)
def test_the_storage_answers_with_errors(
    code: int, n: int, train: Agfa, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a moment on, whatever touches the folder fails."""
    with monkeypatch.context() as patch:

        def failing(original: Any) -> Any:
            def function(self: Path, *args: Any, **options: Any) -> Any:
                if Path("run").absolute() in (self.absolute(), *self.absolute().parents):
                    raise OSError(code, os.strerror(code), str(self))
                return original(self, *args, **options)

            return function

        def drop() -> None:
            for name in ("open", "stat", "mkdir", "replace", "unlink"):
                patch.setattr(Path, name, failing(getattr(Path, name)))

        at(patch, n, drop)
        ended = train(target="sky", out="run", augment=True, checkpoint_seconds=0)
        again = train(target="sky", out="run", augment=True, checkpoint_seconds=0)
    assert ended.status == again.status == 1
    assert ended.err.splitlines()[-1] == f"agfa: cannot write run/metrics.jsonl: {os.strerror(code)}"
    assert again.error.startswith("agfa: run/")
    assert os.strerror(code) in again.error
    goes_on(train, Path("run"), undisturbed)


# --- images


def test_images_change_while_a_run_is_stopped(tiny: Path, quick: dict[str, Any]) -> None:
    """Removed, added, moved to another class, drawn anew: refused, with what is different."""
    settings = interrupted({**quick, "data": str(tiny)})
    image = tiny / "ink" / "top" / "00.jpg"
    aside, pixels = tiny.parent / "aside.jpg", image.read_bytes()
    changes: dict[str, Callable[[], object]] = {
        "ink/top had 10 images, now 9": lambda: image.rename(aside),
        "ink/left had 10 images, now 11; ink/top had 10 images, now 9": lambda: aside.rename(
            tiny / "ink" / "left" / "new.jpg"
        ),
        "images in ink/top have other names": lambda: (tiny / "ink" / "left" / "new.jpg").rename(
            image.with_name("x.jpg")
        ),
        "images in ink/top have other pixels": lambda: Image.new("RGB", (24, 20)).save(
            image.with_name("x.jpg").rename(image)
        ),
    }
    for said, change in changes.items():
        change()
        with pytest.raises(UsageError, match=f"are no longer those that run was trained on: {said}; put them back"):
            package.train(**settings, out="run")
    image.write_bytes(pixels)
    package.train(**settings, out="run")
    same(Path("run"), Path("whole"))


def test_an_image_goes_while_images_are_decoded(tiny: Path, train: Agfa, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = trainer.require_trainable

    def late(*args: Any) -> None:
        listed(*args)
        (tiny / "sky" / "top" / "00.jpg").unlink()

    monkeypatch.setattr(trainer, "require_trainable", late)
    ended = train(target="sky", out="run")
    assert ended.status == 2
    assert "1 of 90 images cannot be read, the first is" in ended.error
    assert "sky/top/00.jpg" in ended.error
    assert "No such file" in ended.error


def test_an_image_goes_during_training(
    tiny: Path, train: Agfa, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are decoded by then: it makes no difference."""
    at(monkeypatch, 5, (tiny / "ink" / "top" / "00.jpg").unlink)
    assert train(target="sky", out="run", augment=True).status == 0
    same(Path("run"), undisturbed)


def cut_pixels(folder: Path) -> None:
    os.truncate(folder / "pixels.u8", (folder / "pixels.u8").stat().st_size - 1)


def no_sizes(folder: Path) -> None:
    os.truncate(folder / "sizes.npy", 0)


def nonsense(folder: Path) -> None:
    (folder / "digests.npy").write_bytes(b"nonsense")


def missing(folder: Path) -> None:
    (folder / "sizes.npy").unlink()


@pytest.mark.parametrize("damage", [cut_pixels, no_sizes, nonsense, missing])
def test_a_damaged_store_is_built_anew(damage: Callable[[Path], None], tiny: Path) -> None:
    def opened() -> list[int]:
        return [int(image.sum()) for image in open_images(from_folder(tiny), 8)["sky"]]

    want = opened()
    (folder,) = Path("cache/store").iterdir()
    damage(folder)
    assert opened() == want
    assert list(Path("cache/store").iterdir()) == [folder]


def test_drafts_of_the_living_stay(tiny: Path) -> None:
    open_images(from_folder(tiny), 8)
    (folder,) = Path("cache/store").iterdir()
    shutil.rmtree(folder)
    dead = subprocess.Popen(["true"])
    dead.wait()
    living, gone = (folder.with_name(f".{folder.name}.{os.uname().nodename}-{pid}.x") for pid in (1, dead.pid))
    living.mkdir()
    gone.mkdir()
    open_images(from_folder(tiny), 8)
    assert sorted(folder.parent.iterdir()) == [living, folder]


# --- downloads, and what sweeps remember


def test_a_note_is_never_of_another_file_than_the_part(server: Server, tmp_path: Path, monkeypatch: Any) -> None:
    """The file changes on the server; the process dies when it has noted that, before the first new byte came."""
    old, new = os.urandom(5_000_000), os.urandom(5_000_000)  # several pieces
    limits, path = fetch.Limits(None, 1 << 23, verified=False), tmp_path / "file"
    server.files["/file"] = old

    def stop(have: int, total: int) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        fetch.fetch(f"{server.url}/file", path, limits, progress=stop)
    assert 0 < path.with_name("file.part").stat().st_size < 5_000_000
    server.files["/file"] = new
    with monkeypatch.context() as patch:
        patch.setattr(fetch.shutil, "disk_usage", lambda folder: (_ for _ in ()).throw(Stopped))
        with pytest.raises(Stopped):
            fetch.fetch(f"{server.url}/file", path, limits, waits=NOW)
    fetch.fetch(f"{server.url}/file", path, limits, waits=NOW)
    assert path.read_bytes() == new


def test_a_damaged_estimate_is_made_again(tmp_path: Path) -> None:
    for text in ("", "{", "[]", '{"a": {"start": 1}}', '{"a": 1}'):
        (tmp_path / "estimate.json").write_text(text)
        assert cached(tmp_path / "estimate.json") == {}
    assert cached(tmp_path / "none.json") == {}
    good = Cost(1.0, 2.0, 3.0, {"ink": 30})
    (tmp_path / "estimate.json").write_text(
        '{"a": {"start": 1, "trained": 2, "evaluated": 3, "images": {"ink": 30}}}'
    )
    assert cached(tmp_path / "estimate.json") == {"a": good}
