"""The store holds what Pillow reads, once, whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from agfa.data import store
from agfa.data.decode import decode
from agfa.data.domains import Domain, DomainDataset, from_folder
from agfa.data.store import open_images, shrink
from agfa.errors import UsageError

RNG = np.random.default_rng(0)


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return RNG.integers(0, 256, (height, width, channels), np.uint8)


def dataset_of(root: Path, **images: Image.Image | np.ndarray) -> DomainDataset:
    """One domain d and class c, each image a PNG."""
    (root / "d" / "c").mkdir(parents=True)
    for name, image in images.items():
        pixels = image if isinstance(image, Image.Image) else Image.fromarray(image)
        pixels.save(root / "d" / "c" / f"{name}.png")
    return from_folder(root)


def stored(dataset: DomainDataset, image_size: int = 16, channels: int = 3) -> list[np.ndarray]:
    images = open_images(dataset, image_size, channels)["d"]
    return [np.asarray(images[i].permute(1, 2, 0)) for i in range(len(images))]


# --- pixels


def test_small_images_are_stored_as_they_are(tmp_path: Path) -> None:
    arrays = {"a": noise(5, 7), "b": noise(19, 30), "c": noise(40, 8)}
    for got, want in zip(stored(dataset_of(tmp_path / "r", **arrays)), arrays.values(), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("height", "width", "size", "want"),
    [
        (100, 200, 16, (19, 38)),  # the shorter side is 1.2 times 16
        (200, 100, 16, (38, 19)),
        (50, 50, 32, (38, 38)),
        (1000, 21, 16, (905, 19)),
        (19, 1000, 16, (19, 1000)),  # never enlarged
        (3, 3, 224, (3, 3)),
    ],
)
def test_the_shorter_side_is_brought_to_the_size_and_the_aspect_kept(
    height: int, width: int, size: int, want: tuple[int, int], tmp_path: Path
) -> None:
    array = noise(height, width)
    (got,) = stored(dataset_of(tmp_path / "r", a=array), size)
    assert got.shape == (*want, 3)
    resized = Image.fromarray(array).resize(want[::-1], Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(got, np.asarray(resized))


def test_each_domain_has_its_own_images_in_their_order(tiny: Path) -> None:
    dataset = from_folder(tiny)
    images = open_images(dataset, 8)
    for domain in dataset.domains:
        assert len(images[domain.name]) == len(domain)
        for i in (0, 13, 29):
            with Image.open(str(domain.images[i])) as opened:
                want = np.asarray(shrink(opened.convert("RGB"), 8))
            np.testing.assert_array_equal(images[domain.name][i].permute(1, 2, 0), want)
    assert len(images["ink"][4:7]) == 3
    assert torch.equal(images["ink"][4:7][1], images["ink"][5])


# --- the store


def files() -> list[Path]:
    return sorted(Path("cache").rglob("*"))


def test_images_are_views_of_one_mapped_file(tmp_path: Path) -> None:
    first, second = open_images(dataset_of(tmp_path / "r", a=noise(9, 9), b=noise(5, 9)), 16)["d"]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert second.data_ptr() - first.data_ptr() == 9 * 9 * 3
    assert sorted(p.name for p in files() if p.is_file()) == ["digests.npy", "pixels.u8", "sizes.npy"]
    assert sum(p.stat().st_size for p in files() if p.name == "pixels.u8") == (9 * 9 + 5 * 9) * 3


def test_changing_a_view_does_not_change_the_file(tmp_path: Path) -> None:
    array = noise(9, 9)
    dataset = dataset_of(tmp_path / "r", a=array)
    open_images(dataset, 16)["d"][0].zero_()
    np.testing.assert_array_equal(stored(dataset)[0], array)


def test_decoded_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []

    def counted(path: Path, channels: int = 3) -> Image.Image:
        seen.append(path)
        return decode(path, channels)

    monkeypatch.setattr(store, "decode", counted)
    open_images(from_folder(tiny), 8)
    assert len(seen) == len(set(seen)) == 90
    open_images(from_folder(tiny), 8)
    assert len(seen) == 90


def rewrite(path: Path) -> None:
    Image.new("RGB", (24, 20), "red").save(path)


def touch(path: Path) -> None:
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def rename(path: Path) -> None:
    path.rename(path.with_name("z.png"))


@pytest.mark.parametrize("change", [rewrite, touch, rename, os.unlink])
def test_built_again_when_a_file_changes(change: Callable[[Path], object], tiny: Path) -> None:
    open_images(from_folder(tiny), 8)
    change(tiny / "ink" / "top" / "01.png")
    dataset = from_folder(tiny)
    images = open_images(dataset, 8)["ink"]
    assert len(list(Path("cache/store").iterdir())) == 2
    for i, path in enumerate(dataset["ink"].images):
        np.testing.assert_array_equal(images[i].permute(1, 2, 0), np.asarray(shrink(decode(Path(path)), 8)))


def test_sizes_and_channels_are_kept_apart(tiny: Path) -> None:
    shapes = {open_images(from_folder(tiny), size, c)["ink"][0].shape for size in (8, 12) for c in (1, 3)}
    assert shapes == {(1, 10, 12), (3, 10, 12), (1, 14, 17), (3, 14, 17)}
    assert len(list(Path("cache/store").iterdir())) == 4


def test_progress(tiny: Path) -> None:
    seen: list[tuple[int, int]] = []
    open_images(from_folder(tiny), 8, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 90) for n in range(1, 91)]


def test_images_that_cannot_be_read_are_all_counted_and_leave_nothing(tiny: Path) -> None:
    (tiny / "ink" / "left" / "01.png").write_text("text")
    (tiny / "ink" / "top" / "00.jpg").write_bytes(b"")
    with pytest.raises(UsageError, match=r"2 of 90 images cannot be read, .*left/01.png \(not an image\)"):
        open_images(from_folder(tiny), 8)
    assert [p for p in files() if p.is_file() or p.name.startswith(".")] == []


def test_interrupted_it_leaves_nothing(tiny: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done == 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_images(from_folder(tiny), 8, progress=stop)
    assert list(Path("cache/store").iterdir()) == []


def test_two_processes_at_once(tiny: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from agfa.data.domains import from_folder;"
        "from agfa.data.store import open_images; import numpy as np;"
        "dataset = from_folder(Path(sys.argv[1])); print('ready', flush=True); sys.stdin.readline();"
        "images = open_images(dataset, 8)['sky'];"
        "print(sum(int(image.sum()) for image in images))"
    )
    command = [sys.executable, "-c", code, str(tiny)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        print(file=process.stdin, flush=True)
    sums = [process.communicate()[0] for process in processes]
    want = sum(int(image.sum()) for image in open_images(from_folder(tiny), 8)["sky"])
    assert sums == [f"{want}\n"] * 3
    assert len(list(Path("cache/store").iterdir())) == 1


def test_who_comes_second_takes_what_is_there(tiny: Path) -> None:
    """Another process finishes the same store between our look and our move."""

    def other(done: int, total: int) -> None:
        if done == total:
            open_images(from_folder(tiny), 8)

    open_images(from_folder(tiny), 8, progress=other)
    assert len(list(Path("cache/store").iterdir())) == 1


def test_the_race_for_the_folder_can_be_lost_at_the_last_moment(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, done = Path.rename, []

    def late(self: Path, target: Path) -> Path:
        if not done:
            done.append(True)
            open_images(from_folder(tiny), 8)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    assert len(open_images(from_folder(tiny), 8)["ink"]) == 30
    assert len(list(Path("cache/store").iterdir())) == 1


def test_a_store_that_may_not_be_written_can_be_read(tiny: Path) -> None:
    first = open_images(from_folder(tiny), 8)["ink"][0].clone()
    for path in files():
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert torch.equal(open_images(from_folder(tiny), 8)["ink"][0], first)


def test_images_in_memory_need_no_store() -> None:
    pixels = noise(4, 4 * 6).reshape(4, 4, 6, 3)
    pixels.flags.writeable = False
    domain = Domain("d", tuple("abcd"), np.zeros(4, np.int64), pixels)
    images = open_images(DomainDataset("m", ("c",), (domain,)), 8)["d"]
    assert len(images) == 4
    np.testing.assert_array_equal(images[2].permute(1, 2, 0), pixels[2])
    assert not Path("cache").exists()


def test_the_cache_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGFA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert store.cache_folder() == Path("/xdg/agfa")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert store.cache_folder() == Path.home() / ".cache" / "agfa"
