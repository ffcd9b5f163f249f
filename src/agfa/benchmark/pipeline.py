"""What the way of images from the store to the device costs a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Protocol

import numpy as np
import torch

from agfa.benchmark.timing import Clock, Figure
from agfa.data.augment import Augmentation, crop_resize, flip_and_color, random_boxes
from agfa.data.batches import Batch, Part, training_batches
from agfa.data.store import MARGIN, Images

AHEAD = 5  # batches that are ready, or being made, when the measurement begins: they are used up first
STEPS = 3  # in a repetition
STORED = 64  # images of each domain


class Planned(Protocol):
    """What is asked of a plan."""

    @property
    def image_size(self) -> int: ...  # noqa: D102
    @property
    def images(self) -> int: ...  # noqa: D102
    @property
    def domains(self) -> int: ...  # noqa: D102
    @property
    def repeats(self) -> int: ...  # noqa: D102
    @property
    def on(self) -> torch.device: ...  # noqa: D102


def stored(plan: Planned) -> list[Part]:
    """Domains as the store holds them from the second epoch on: decoded, photographs of 4:3."""
    height = round(MARGIN * plan.image_size)
    shape = (STORED, height, height * 4 // 3, 3)
    parts = []
    for domain in range(plan.domains):
        pixels = torch.from_numpy(np.random.default_rng(domain).integers(0, 256, shape, dtype=np.uint8))
        images: Images = pixels.permute(0, 3, 1, 2)  # type: ignore[assignment]  # indexed like a Sequence
        parts.append(Part(images, np.arange(STORED) % 7, np.arange(STORED)))
    return parts


def input_share(plan: Planned, step: Callable[[Batch], None], reading: Figure) -> Figure:
    """The share of a step's time that goes into its batch: getting it from the store, with flips and colors.

    On a CPU the threads that read ahead take `reading` seconds from the step's own, at most: they are counted too.
    """
    batches = training_batches(
        stored(plan),
        batch_size=plan.images // plan.domains,
        image_size=plan.image_size,
        augmentation=Augmentation(),
        seed=0,
        first_step=0,
        device=plan.on,
    )
    beside = reading.median if plan.on.type == "cpu" else 0.0
    clock, shares = Clock(plan.on), []
    with closing(batches):
        for number in range(AHEAD + STEPS * plan.repeats):
            clock.mark()
            batch = next(batches)
            clock.mark()
            step(batch)
            clock.mark()
            getting, stepping = clock.seconds()
            if number >= AHEAD:
                shares.append((getting + beside) / (getting + stepping))
    return Figure.of(shares)


def input_seconds(plan: Planned) -> tuple[Figure, Figure]:
    """Seconds to read, crop and resize a batch in one thread, and to flip and color it on the device."""
    images = [image for part in stored(plan) for image in part.images][: plan.images]
    sizes = torch.tensor([image.shape[1:] for image in images])
    generator, clock = torch.Generator().manual_seed(0), Clock(plan.on)
    read, augmented = [], []
    for _ in range(plan.repeats):
        clock.mark()
        pixels = crop_resize(images, random_boxes(sizes, Augmentation(), generator), plan.image_size)
        clock.mark()
        flip_and_color(pixels.to(plan.on), Augmentation(), generator)
        clock.mark()
        first, last = clock.seconds()
        read.append(first)
        augmented.append(last)
    return Figure.of(read), Figure.of(augmented)
