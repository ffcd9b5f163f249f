"""Endless minibatches, every one a function of (seed, step): nothing to save, and resuming is exact."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import count
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from agfa.data.augment import Augmentation, Map, crop_resize, flip_and_color, random_boxes, whole_boxes
from agfa.data.domains import FloatArray, IntArray
from agfa.data.sampling import sample
from agfa.data.store import FileImages, Images

T = TypeVar("T")
AT_ONCE = 256  # images, of those that are looked at but once
NOISE, AUGMENTATION = 0, 1  # the randomness of a training step, and that of its images


class Batch(NamedTuple):
    """Images (n, C, H, W) in [0, 1], their classes, and the number of the source domain each comes from.

    Domains follow one another; `sizes` are their numbers of images, known without asking the device.
    """

    images: Tensor
    labels: Tensor
    domains: Tensor
    sizes: tuple[int, ...]

    def by_domain(self) -> list[tuple[Tensor, Tensor]]:
        """The images and classes of each domain."""
        return list(
            zip(self.images.split_with_sizes(self.sizes), self.labels.split_with_sizes(self.sizes), strict=True)
        )


class Part(NamedTuple):
    """Some images of one domain: those at `indices`. In training they are drawn by their weights, if any."""

    images: Images
    labels: IntArray
    indices: IntArray
    weights: FloatArray | None = None  # one for each of `indices`

    def __len__(self) -> int:
        return len(self.indices)

    def share(self, rank: int, processes: int, even: bool = False) -> Part:
        """Every so-manieth image: one process's. `even` gives each as many, the first ones again if need be."""
        n = -(-len(self) // processes) * processes if even else len(self)
        return self.at(np.resize(self.indices, n)[rank::processes])

    def at(self, indices: IntArray) -> Part:
        """Other images of the same domain."""
        return Part(self.images, self.labels, indices)


def training_batches(
    parts: Sequence[Part],
    *,
    batch_size: int,
    image_size: int,
    augmentation: Augmentation | None,
    seed: int,
    first_step: int,
    device: torch.device,
    share: tuple[int, int] = (0, 1),
) -> Generator[Batch, None, None]:
    """The minibatches of steps `first_step`, `first_step` + 1, ...: `batch_size` images of each part.

    With `share` = (rank, processes), the rest of a minibatch comes with one process's part of its images alone, the
    rank-th when it is cut evenly. Images are read, cropped and resized ahead, in threads; the rest of the
    augmentation happens on `device`.
    """
    rank, processes = share
    n = batch_size * len(parts) // processes
    mine = slice(rank * n, (rank + 1) * n)
    weights = [part.weights if part.weights is None else part.weights.tobytes() for part in parts]

    def read(step: int) -> tuple[Tensor, Tensor, torch.Generator]:
        generator = torch.Generator().manual_seed(seed_of(seed, step, 0, AUGMENTATION))
        images: list[Tensor] = []
        labels: list[int] = []
        for d, part in enumerate(parts):
            places = part.indices[sample(len(part), batch_size, step, (seed, d), weights[d])]
            images += _look_up(part.images, places, pool)
            labels += part.labels[places].tolist()
        sizes = torch.tensor([image.shape[1:] for image in images])
        boxes = whole_boxes(sizes) if augmentation is None else random_boxes(sizes, augmentation, generator)
        pixels = crop_resize(images[mine], boxes[mine], image_size, pool.map)
        if device.type == "cuda":
            pixels = pixels.pin_memory()
        return pixels, torch.tensor(labels), generator

    domains = torch.arange(len(parts)).repeat_interleave(batch_size).to(device)
    workers = max(1, (os.cpu_count() or 1) // processes)
    with ThreadPoolExecutor(workers) as pool, closing(_ahead(read, count(first_step))) as batches:
        for pixels, labels, generator in batches:
            if augmentation is None:
                x = to_unit(pixels, device)
            else:
                x = flip_and_color(pixels.to(device, non_blocking=True), augmentation, generator, share)
            yield Batch(x, labels.to(device, non_blocking=True), domains, (batch_size,) * len(parts))


def evaluation_batches(
    part: Part, *, batch_size: int, image_size: int, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Every image of the part once, whole, squashed to the size: (images in [0, 1], labels).

    They are read ahead, in threads.
    """

    def read(start: int) -> tuple[Tensor, Tensor]:
        places = part.indices[start : start + batch_size]
        pixels = _squash(_look_up(part.images, places, pool), image_size, pool.map)
        return pixels.pin_memory() if device.type == "cuda" else pixels, torch.from_numpy(part.labels[places])

    starts = range(0, len(part), batch_size)
    with ThreadPoolExecutor(os.cpu_count()) as pool, closing(_ahead(read, starts)) as batches:
        for pixels, labels in batches:
            yield to_unit(pixels, device), labels.to(device, non_blocking=True)


def squashed(part: Part, image_size: int) -> Part:
    """The part with its images squashed to the size already, and kept in memory: each is read once."""
    pixels = torch.empty(len(part), len(part.images[0]), image_size, image_size, dtype=torch.uint8)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(part), AT_ONCE):
            images = _look_up(part.images, part.indices[start : start + AT_ONCE], pool)
            pixels[start : start + AT_ONCE] = _squash(images, image_size, pool.map)
    kept: Images = pixels  # type: ignore[assignment]  # indexed like a Sequence
    return Part(kept, part.labels[part.indices], np.arange(len(part)))


def _look_up(images: Images, places: IntArray, pool: ThreadPoolExecutor) -> list[Tensor]:
    """The images at those places: views of a store, of which nothing is read here; or files, decoded in threads."""
    at = places.tolist()
    return list(pool.map(images.__getitem__, at)) if isinstance(images, FileImages) else [images[i] for i in at]


def _squash(images: Sequence[Tensor], image_size: int, map: Map) -> Tensor:
    """Whole images, squashed to the size."""
    return crop_resize(images, whole_boxes(torch.tensor([image.shape[1:] for image in images])), image_size, map)


def to_unit(pixels: Tensor, device: torch.device) -> Tensor:
    """uint8 pixels as numbers in [0, 1] on the device, in one memory layout: in another, kernels round otherwise."""
    moved = pixels.to(device, non_blocking=True)
    return moved.to(torch.float32, memory_format=torch.channels_last).div_(255)


def seed_of(*numbers: int) -> int:
    """One seed from several numbers; unlike sums or products of them, different ones do not meet."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def _ahead(produce: Callable[[int], T], numbers: Iterable[int], depth: int = 3) -> Generator[T, None, None]:
    """`produce` of each number, made `depth` ahead in a thread of their own; errors come through."""
    ready: queue.Queue[T | BaseException] = queue.Queue(depth)
    stop = threading.Event()

    def put(made: T | BaseException) -> None:
        while not stop.is_set():
            try:
                return ready.put(made, timeout=0.1)
            except queue.Full:
                pass

    def work() -> None:
        try:
            for number in numbers:
                if stop.is_set():
                    return
                put(produce(number))
            put(StopIteration())
        except BaseException as error:
            put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while not isinstance(made := ready.get(), StopIteration):
            if isinstance(made, BaseException):
                raise made
            yield made
    finally:
        stop.set()
        thread.join()
