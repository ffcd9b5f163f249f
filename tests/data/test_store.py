"""The store holds what Pillow reads, once, whole or not at all."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from agfa.data import store
from agfa.data.decode import decode
from agfa.data.domains import Domain, DomainDataset, from_folder
from agfa.data.store import lock_of, open_images, shrink
from agfa.errors import UsageError
from agfa.files import alone
from support import Agfa, same

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


def test_writing_to_a_view_does_not_change_the_file(tmp_path: Path) -> None:
    """It ends the process: the map is to be read alone."""
    array = noise(9, 9)
    dataset = dataset_of(tmp_path / "r", a=array)
    stored(dataset)
    code = (
        "import sys; from pathlib import Path; from agfa.data.domains import from_folder;"
        "from agfa.data.store import open_images;"
        "image = open_images(from_folder(Path(sys.argv[1])), 16)['d'][0]; print('ready', flush=True); image.zero_()"
    )
    written = subprocess.run([sys.executable, "-c", code, str(tmp_path / "r")], stdout=subprocess.PIPE, check=False)
    assert written.stdout == b"ready\n"
    assert written.returncode < 0
    np.testing.assert_array_equal(stored(dataset)[0], array)


def test_a_store_may_be_larger_than_memory(tmp_path: Path) -> None:
    """1 TB, a hole but for its last image."""
    arrays = {"a": noise(9, 9), "b": noise(5, 9)}
    dataset = dataset_of(tmp_path / "r", **arrays)
    stored(dataset)
    (folder,) = Path("cache/store").iterdir()
    height = 10**12 // (3 * 10**5)
    np.save(folder / "sizes.npy", np.array([(height, 10**5), (5, 9)]))
    with (folder / "pixels.u8").open("wb") as file:
        file.seek(height * 10**5 * 3)
        file.write(arrays["b"].tobytes())
    large, last = open_images(dataset, 16)["d"]
    assert large.shape == (3, height, 10**5)
    assert large[:, height // 2, ::1000].sum() == 0
    np.testing.assert_array_equal(last.permute(1, 2, 0), arrays["b"])


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


def test_who_waits_decodes_nothing(tiny: Path) -> None:
    """Another process builds what this one needs: it says so, waits, and takes what is there then."""
    first = open_images(from_folder(tiny), 8)["ink"][0].clone()
    (built,) = Path("cache/store").iterdir()
    draft, said = built.with_name("draft"), []
    built.rename(draft)
    decoded: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        with alone(lock_of(built), lambda: None):
            waits = pool.submit(
                open_images, from_folder(tiny), 8, progress=lambda *_: decoded.append(1), say=said.append
            )
            while not said:
                time.sleep(0.01)
            draft.rename(built)
        assert torch.equal(waits.result(timeout=60)["ink"][0], first)
    assert said == ["another process is decoding the images of tiny; waiting for it"]
    assert not decoded


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks: nothing is safe but the last move."""
    monkeypatch.setattr(store, "alone", lambda *_: nullcontext())


@pytest.mark.usefixtures("no_locks")
def test_who_comes_second_takes_what_is_there(tiny: Path) -> None:
    """Another process finishes the same store between our look and our move."""

    def other(done: int, total: int) -> None:
        if done == total:
            open_images(from_folder(tiny), 8)

    open_images(from_folder(tiny), 8, progress=other)
    assert len(list(Path("cache/store").iterdir())) == 1


@pytest.mark.usefixtures("no_locks")
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


# --- no room


def pressed(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """The disk has so many bytes left, whatever the real one has."""
    monkeypatch.setattr(store, "free_space", lambda _: free)


def test_without_room_files_are_read_anew_to_the_same_pixels(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = open_images(from_folder(tiny), 8)
    shutil.rmtree("cache")
    pressed(monkeypatch, 30_000)
    said: list[str] = []
    found = open_images(from_folder(tiny), 8, say=said.append)
    assert said == [
        f"tiny needs 0.00 GB decoded, and {Path('cache/store').absolute()} has 0.00 GB free: its files are decoded "
        "anew each time, which is slower (set AGFA_CACHE to a larger disk)"
    ]
    assert not Path("cache").exists()
    for name, images in wanted.items():
        assert len(found[name]) == len(images)
        for i in range(len(images)):
            assert torch.equal(found[name][i], images[i])
    assert torch.equal(found["ink"][3:5][1], wanted["ink"][4])
    assert open_images(from_folder(tiny), 8, 1)["ink"][0].shape == (1, *wanted["ink"][0].shape[1:])


@pytest.mark.parametrize("size", [8, 16, 200])
def test_how_much_is_needed_is_known_before(size: int, tiny: Path) -> None:
    dataset = from_folder(tiny)
    files = [image for domain in dataset.domains for image in domain.images]
    judged = store._needed(files, size, 3)
    open_images(dataset, size)
    (there,) = Path("cache/store").rglob("pixels.u8")
    assert judged == pytest.approx(there.stat().st_size, rel=0.02)


def test_what_is_judged_by_some_files_holds_for_all(tmp_path: Path) -> None:
    """Images of very different sizes, some of them unreadable: within a tenth."""
    rng = np.random.default_rng(1)
    shapes = rng.integers(20, 200, (300, 2)).tolist()
    dataset = dataset_of(tmp_path / "r", **{f"{i:03}": noise(*shape) for i, shape in enumerate(shapes)})
    files = list(dataset["d"].images)
    open_images(dataset, 64)
    (there,) = Path("cache/store").rglob("pixels.u8")
    Path(str(files[0])).write_text("text")
    assert store._needed(files, 64, 3) == pytest.approx(there.stat().st_size, rel=0.1)


def test_a_large_store_is_announced(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LARGE", 10_000)
    said: list[str] = []
    open_images(from_folder(tiny), 8, say=said.append)
    assert said == [f"decoding 90 images of tiny once: 0 GB in {Path('cache/store').absolute()}"]
    open_images(from_folder(tiny), 8, say=said.append)
    assert len(said) == 1


def test_trained_without_a_store_it_ends_with_the_same_bits(train: Agfa, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"target": "sky", "algorithm": "erm", "augment": True}
    assert train(**settings, out="stored").status == 0
    shutil.rmtree("cache")
    pressed(monkeypatch, 0)
    ended = train(**settings, out="plain")
    assert ended.status == 0
    assert "decoded anew each time" in ended.err
    same(Path("plain"), Path("stored"))
    assert not Path("cache").exists()


def test_a_file_that_cannot_be_read_without_a_store_is_one_line(
    train: Agfa, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pressed(monkeypatch, 0)
    for path in (tiny / "ink" / "top").iterdir():
        path.write_text("text")
    ended = train(target="sky", out="run", steps=40)
    assert ended.status == 2
    line = ended.err.splitlines()[-1]
    assert re.search(r"ink/top/\d+\.\w+ cannot be read \(not an image\); mend or remove it \(agfa data check", line)
    assert "Traceback" not in ended.err


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
