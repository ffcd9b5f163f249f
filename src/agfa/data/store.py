"""Decode every image once: raw pixels in one memory-mapped file for each dataset and size.

An image is stored with its aspect kept, its shorter side at most MARGIN times the training size (never enlarged,
never cropped): training crops come from the whole image, and test images are the whole image. Where the disk has no
room for the store, files are decoded each time they are asked for instead, to the same pixels.
"""

from __future__ import annotations

import glob
import hashlib
import math
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import overload

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from agfa.data.decode import MODES, decode, reason
from agfa.data.domains import DomainDataset, IntArray, Pixels
from agfa.data.sources import Source, printable, stamp
from agfa.errors import AgfaError, UsageError
from agfa.files import alone, settle, writing

MARGIN = 1.2
FORMAT = 2  # raise it when what is stored changes
LOOKED_AT = 64  # files, of which the size of a store is judged
OF_FREE = 0.95  # of the disk: a store that takes more is not begun
LARGE = 1e9  # bytes: a store that takes more is announced

Images = Sequence[Tensor]  # of one domain: uint8, channels x height x width each
Progress = Callable[[int, int], None]  # (images done, images in all)
Say = Callable[[str], object]  # one line for people


def shrink(image: Image.Image, image_size: int) -> Image.Image:
    """Resize so that the shorter side is MARGIN times `image_size`; smaller images are left alone."""
    size = _shrunk(image.size, image_size)
    return image if size == image.size else image.resize(size, Image.Resampling.BILINEAR)


def _shrunk(size: tuple[int, int], image_size: int) -> tuple[int, int]:
    short = min(size)
    wanted = round(image_size * MARGIN)
    if short <= wanted:
        return size
    width, height = (max(1, round(side * wanted / short)) for side in size)
    return width, height


def open_images(
    dataset: DomainDataset,
    image_size: int,
    channels: int = 3,
    progress: Progress | None = None,
    say: Say = lambda _: None,
) -> dict[str, Images]:
    """Every image of every domain, decoded: from the store, which is built first where it is not there yet.

    Where it would not fit on the disk, that is said, with how much is needed, and files are read when asked for.

    Raises:
        UsageError: files that cannot be read, the first of them named.
    """
    in_memory = {d.name: d.images for d in dataset.domains if isinstance(d.images, np.ndarray)}
    if len(in_memory) == len(dataset.domains):
        made = next(iter(in_memory.values())).shape[-1]
        if made != channels:
            raise UsageError(f"the images of {dataset.name} have {made} channels, not {channels}")
        return {name: _tensors(pixels) for name, pixels in in_memory.items()}
    if channels not in MODES:
        raise UsageError(f"image files are read in 1 or 3 channels, not {channels}; see --channels")
    folder = cache_folder() / "store" / f"{dataset.name}-{image_size}-{_key(dataset, image_size, channels)}"
    found = _open(folder, channels)
    if found is None:
        files = [f for domain in dataset.domains if not isinstance(domain.images, np.ndarray) for f in domain.images]
        needed, free = _needed(files, image_size, channels), free_space(folder)
        if needed > OF_FREE * free:
            say(
                f"{dataset.name} needs {needed / 1e9:.2f} GB decoded, and {folder.parent} has {free / 1e9:.2f} GB "
                "free: its files are decoded anew each time, which is slower (set AGFA_CACHE to a larger disk)"
            )
            return {
                d.name: FileImages(d.images, image_size, channels)
                for d in dataset.domains
                if not isinstance(d.images, np.ndarray)
            }
        if needed > LARGE:
            say(f"decoding {len(files)} images of {dataset.name} once: {needed / 1e9:.0f} GB in {folder.parent}")
        _build_alone(dataset, files, image_size, channels, folder, progress, say)
        found = _open(folder, channels)
    if found is None:
        raise AgfaError(f"{folder} is damaged; delete it")
    pixels, sizes, digests = found
    images, first = {}, 0
    offsets = np.concatenate([[0], sizes.prod(axis=1).cumsum() * channels])
    for domain in dataset.domains:
        mine = slice(first, first + len(domain))
        images[domain.name] = StoredImages(pixels, offsets[mine], sizes[mine], channels, digests[mine])
        first = mine.stop
    return dict(images)


class StoredImages(Sequence[Tensor]):
    """The images of one domain: views of the memory map, of their own height and width each."""

    def __init__(self, pixels: Tensor, offsets: IntArray, sizes: IntArray, channels: int, digests: IntArray) -> None:
        self.pixels, self.offsets, self.sizes, self.channels = pixels, offsets, sizes, channels
        self.digests = digests  # of each image's pixels

    def __len__(self) -> int:
        return len(self.offsets)

    @overload
    def __getitem__(self, i: int) -> Tensor: ...
    @overload
    def __getitem__(self, i: slice) -> list[Tensor]: ...
    def __getitem__(self, i: int | slice) -> Tensor | list[Tensor]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        height, width = (int(side) for side in self.sizes[i])
        start = int(self.offsets[i])
        flat = self.pixels[start : start + height * width * self.channels]
        return flat.view(height, width, self.channels).permute(2, 0, 1)


class FileImages(Sequence[Tensor]):
    """The images of one domain, each decoded when it is asked for: the pixels that a store would hold."""

    def __init__(self, files: Sequence[Source], image_size: int, channels: int) -> None:
        self.files, self.image_size, self.channels = files, image_size, channels

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, i: int) -> Tensor: ...
    @overload
    def __getitem__(self, i: slice) -> list[Tensor]: ...
    def __getitem__(self, i: int | slice) -> Tensor | list[Tensor]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        file = self.files[i]
        try:
            return torch.from_numpy(_pixels_of(file, self.image_size, self.channels)).permute(2, 0, 1)
        except Exception as error:
            raise UsageError(
                f"{printable(str(file))} cannot be read ({reason(error)}); mend or remove it (agfa data check names "
                "all such files)"
            ) from error


def digests_of(images: Images) -> IntArray | None:
    """A digest of each image's pixels: known of those in the store, worked out for those in memory; not of files."""
    if isinstance(images, FileImages):
        return None  # every one would have to be decoded
    if isinstance(images, StoredImages):
        return images.digests
    pixels: Tensor = images  # type: ignore[assignment]  # all in one
    return np.array([_digest(image) for image in pixels.permute(0, 2, 3, 1).numpy()], dtype=np.int64)


def _digest(pixels: Pixels) -> int:
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=8)
    digest.update(pixels.tobytes())
    return int.from_bytes(digest.digest(), "big", signed=True)


def cache_folder() -> Path:
    """Where decoded images are kept: $AGFA_CACHE, else agfa in the user's cache folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "agfa"
    return Path(os.environ.get("AGFA_CACHE", default))


def _mapped(path: Path) -> Tensor:
    """The bytes of a file, to be read alone. A map that could be written to may be no larger than the memory."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r"))


def _tensors(pixels: Pixels) -> Images:
    pixels = pixels if pixels.flags.writeable else pixels.copy()  # torch warns of arrays it could not write to
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)  # type: ignore[return-value]  # indexed like a Sequence


def _key(dataset: DomainDataset, image_size: int, channels: int) -> str:
    """A digest of all that decides the pixels: the files, by name, size and time, and the settings."""
    digest = hashlib.sha256(f"{FORMAT} {image_size} {channels} {MARGIN}".encode())
    for domain in dataset.domains:
        if isinstance(domain.images, np.ndarray):
            continue
        for key, image in zip(domain.keys, domain.images, strict=True):
            digest.update(f"\0{domain.name}/{key}\0{stamp(image)}".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


def _open(folder: Path, channels: int) -> tuple[Tensor, IntArray, IntArray] | None:
    """The pixels of all images, their sizes and digests; None where there are none, or less than there should be."""
    try:
        sizes: IntArray = np.load(folder / "sizes.npy")
        digests: IntArray = np.load(folder / "digests.npy")
        size = int(sizes.prod(axis=1).sum()) * channels
        if len(sizes) != len(digests) or (folder / "pixels.u8").stat().st_size != size:
            return None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AgfaError(f"cannot read {folder}: {error.strerror or error}") from error
    except (ValueError, EOFError):  # no array
        return None
    return _mapped(folder / "pixels.u8"), sizes, digests


def free_space(path: Path) -> int:
    """Bytes free where `path` is or would be."""
    return shutil.disk_usage(next(folder for folder in path.absolute().parents if folder.exists())).free


def _needed(files: Sequence[Source], image_size: int, channels: int) -> int:
    """About how many bytes the store of these files takes, judging by the sizes of some of them."""

    def stored(source: Source) -> int | None:
        try:
            with Image.open(source if isinstance(source, Path) else BytesIO(source.read_bytes())) as opened:
                return math.prod(_shrunk(opened.size, image_size)) * channels
        except Exception:  # whoever decodes it will say so
            return None

    some = np.linspace(0, len(files) - 1, min(len(files), LOOKED_AT)).astype(int).tolist()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [size for size in pool.map(stored, (files[i] for i in some)) if size is not None]
    return sum(found) * len(files) // max(1, len(found))


def lock_of(folder: Path) -> Path:
    """What a process holds while it builds the store in this folder."""
    return folder.with_name(f".{folder.name}.lock")


def _build_alone(
    dataset: DomainDataset,
    files: Sequence[Source],
    image_size: int,
    channels: int,
    folder: Path,
    progress: Progress | None,
    say: Say,
) -> None:
    """Build the store, unless another process does so meanwhile: then wait for it."""
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    lock = lock_of(folder)
    with alone(lock, lambda: say(f"another process is decoding the images of {dataset.name}; waiting for it")):
        try:
            if _open(folder, channels) is None:
                _build(files, image_size, channels, folder, progress)
        finally:
            lock.unlink(missing_ok=True)  # should two meet because of that, both build and one of them wins


def _build(files: Sequence[Source], image_size: int, channels: int, folder: Path, progress: Progress | None) -> None:
    """Write the store beside its final place and move it there whole; a concurrent builder may win the race."""
    with writing(folder):
        _remove_dead(folder)
        draft = Path(tempfile.mkdtemp(prefix=f"{_drafts(folder)}{os.getpid()}.", dir=folder.parent))
    sizes: list[tuple[int, int]] = []
    digests: list[int] = []
    unreadable: list[str] = []
    try:
        with writing(draft / "pixels.u8"), (draft / "pixels.u8").open("wb") as file:
            for source, decoded in zip(files, _decode_all(files, image_size, channels), strict=True):
                if isinstance(decoded, str):
                    unreadable.append(f"{printable(str(source))} ({decoded})")
                else:
                    pixels, digest = decoded
                    file.write(pixels.tobytes())
                    sizes.append(pixels.shape[:2])
                    digests.append(digest)
                if progress is not None:
                    progress(len(sizes) + len(unreadable), len(files))
            file.flush()
            os.fsync(file.fileno())
        if unreadable:
            raise UsageError(
                f"{len(unreadable)} of {len(files)} images cannot be read, the first is {unreadable[0]}; "
                "mend or remove them (agfa data check names them all)"
            )
        for name, values in (("sizes.npy", sizes), ("digests.npy", digests)):
            with writing(draft / name):
                np.save(draft / name, np.array(values, dtype=np.int64))
        with writing(folder):
            if folder.exists() and _open(folder, channels) is None:
                shutil.rmtree(folder)  # what was damaged
        settle(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _drafts(folder: Path) -> str:
    """How the drafts of a store are called that are made on this machine; the process's number follows."""
    return f".{folder.name}.{platform.node()}-"


def _remove_dead(folder: Path) -> None:
    """Remove the drafts of processes of this machine that are no more."""
    start = _drafts(folder)
    for draft in folder.parent.glob(f"{glob.escape(start)}*"):
        number = draft.name.removeprefix(start).partition(".")[0]
        try:
            os.kill(int(number), 0)
        except ProcessLookupError:
            shutil.rmtree(draft, ignore_errors=True)
        except (ValueError, OSError):  # not ours to judge
            pass


def _pixels_of(source: Source, image_size: int, channels: int) -> Pixels:
    """An image as it is stored."""
    return np.atleast_3d(np.array(shrink(decode(source, channels), image_size)))


def _decode_all(files: Sequence[Source], image_size: int, channels: int) -> Iterator[tuple[Pixels, int] | str]:
    """Pixels and their digest, or why there are none, of each file in order. Pillow decodes outside Python's lock."""

    def pixels_of(source: Source) -> tuple[Pixels, int] | str:
        try:
            pixels = _pixels_of(source, image_size, channels)
            return pixels, _digest(pixels)
        except Exception as error:
            return reason(error)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(files), 256):  # a bounded number in memory
            yield from pool.map(pixels_of, files[start : start + 256])
