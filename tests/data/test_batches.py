"""Minibatches are a function of (seed, step), whoever asks, whenever, and with however many processes."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from agfa.data import batches
from agfa.data.augment import Augmentation
from agfa.data.batches import Batch, Part, evaluation_batches, training_batches

CPU = torch.device("cpu")
SIZE = 6


class Named(Sequence[Tensor]):
    """Images that tell which one of which domain they are: every pixel of channel 0 is the index."""

    def __init__(self, n: int, domain: int) -> None:
        self.n, self.domain = n, domain

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: Any) -> Any:
        image = torch.zeros(3, SIZE, SIZE, dtype=torch.uint8)
        image[0], image[1] = i, self.domain
        return image


def parts(*sizes: int) -> list[Part]:
    """Domains of so many images, of which the odd ones are held out; the label is the index modulo 5."""
    return [
        Part(Named(2 * n, d), np.arange(2 * n, dtype=np.int64) % 5, np.arange(0, 2 * n, 2))
        for d, n in enumerate(sizes)
    ]


def endless(of: list[Part], batch_size: int = 4, first_step: int = 0, **options: Any) -> Iterator[Batch]:
    settings: dict[str, Any] = {"image_size": SIZE, "augmentation": None, "seed": 0, "device": CPU, **options}
    return training_batches(of, batch_size=batch_size, first_step=first_step, **settings)


def take(n: int, of: list[Part], **options: Any) -> list[Batch]:
    with closing(endless(of, **options)) as found:
        return list(itertools.islice(found, n))


def names(batch: Batch) -> list[tuple[int, int]]:
    """(domain, index) of each image."""
    assert (batch.images == batch.images[:, :, :1, :1]).all()
    numbers = (batch.images[:, :2, 0, 0] * 255).round().long()
    return [(d, i) for i, d in numbers.tolist()]


def same(one: Sequence[Batch], other: Sequence[Batch]) -> bool:
    return len(one) == len(other) and all(
        x.sizes == y.sizes and all(torch.equal(a, b) for a, b in zip(x[:3], y[:3], strict=True))
        for x, y in zip(one, other, strict=True)
    )


# --- which images


def test_batches_are_balanced_and_whole() -> None:
    of = parts(3, 50, 7)
    for batch in take(30, of, batch_size=4):
        assert batch.images.shape == (12, 3, SIZE, SIZE)
        assert batch.images.dtype == torch.float32
        assert batch.domains.tolist() == [0] * 4 + [1] * 4 + [2] * 4
        assert [d for d, _ in names(batch)] == batch.domains.tolist()
        assert batch.labels.tolist() == [i % 5 for _, i in names(batch)]


def test_only_the_parts_own_images_come_and_all_of_them() -> None:
    of = parts(3, 20)
    seen = [name for batch in take(20, of) for name in names(batch)]
    assert set(seen) == {(0, 0), (0, 2), (0, 4)} | {(1, 2 * i) for i in range(20)}
    assert [i for d, i in seen if d == 1][:20] != sorted(i for d, i in seen if d == 1)[:20]
    for i in range(20):
        assert sum(name == (1, 2 * i) for name in seen) == 4  # 80 images: four epochs


def test_weights_decide_which_images_come() -> None:
    """Of two domains, one with weights: its heavy image comes half the time, its weightless ones never."""
    plain, weighted = parts(6, 6)
    weighted = Part(*weighted[:3], weights=np.array([3.0, 1, 0, 1, 1, 0]))
    seen = [name for batch in take(30, [plain, weighted]) for name in names(batch)]
    assert [sum(name == (0, 2 * i) for name in seen) for i in range(6)] == [20] * 6
    assert [sum(name == (1, 2 * i) for name in seen) for i in range(6)] == [60, 20, 0, 20, 20, 0]
    later = take(10, [plain, weighted], first_step=20)
    assert [name for batch in later for name in names(batch)] == seen[-80:]


# --- the same, however it is come by


@pytest.mark.parametrize("cores", [1, 2, 7])
def test_any_number_of_threads_reads_the_same(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of = parts(5, 9)
    whole = take(8, of, augmentation=Augmentation())
    monkeypatch.setattr(batches.os, "cpu_count", lambda: cores)
    assert same(take(8, of, augmentation=Augmentation()), whole)


@pytest.mark.parametrize("augmentation", [None, Augmentation()])
def test_starting_later_is_the_same(augmentation: Augmentation | None) -> None:
    of = parts(5, 9)
    whole = take(12, of, augmentation=augmentation)
    for first_step in (1, 7, 11):
        assert same(take(12 - first_step, of, augmentation=augmentation, first_step=first_step), whole[first_step:])


def test_the_seed_counts() -> None:
    of = parts(40)
    assert not same(take(1, of, seed=0), take(1, of, seed=1))
    assert same(take(1, of, seed=1), take(1, of, seed=1))


@pytest.mark.parametrize("augmentation", [None, Augmentation()])
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_shares_make_up_the_whole(processes: int, augmentation: Augmentation | None) -> None:
    of = parts(5, 9, 30)
    whole = take(6, of, batch_size=8, augmentation=augmentation)
    shares = [
        take(6, of, batch_size=8, augmentation=augmentation, share=(rank, processes)) for rank in range(processes)
    ]
    for step in range(6):
        assert torch.equal(torch.cat([share[step].images for share in shares]), whole[step].images)
        for share in shares:
            assert len(share[step].images) == 24 // processes
            assert all(torch.equal(*pair) for pair in zip(share[step][1:3], whole[step][1:3], strict=True))
            assert share[step].sizes == whole[step].sizes == (8, 8, 8)


def test_augmentation_differs_by_image_step_and_seed() -> None:
    class Photographs(Named):
        def __getitem__(self, i: Any) -> Any:
            return torch.randint(0, 256, (3, 20, 24), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)

    of = [Part(Photographs(1, 0), np.zeros(1, np.int64), np.arange(1))]
    images = torch.cat([b.images for s in range(2) for b in take(2, of, augmentation=Augmentation(), seed=s)])
    assert len(images.flatten(1).unique(dim=0)) == len(images) == 16
    assert images.min() >= 0
    assert images.max() <= 1
    plain = torch.cat([b.images for b in take(2, of)])
    assert len(plain.flatten(1).unique(dim=0)) == 1


# --- threads


class Broken(Named):
    def __getitem__(self, i: Any) -> Any:
        raise ValueError("this image is gone")


def readers() -> int:
    return threading.active_count()


def test_what_goes_wrong_in_a_thread_comes_through() -> None:
    before = readers()
    broken = Part(Broken(4, 0), np.zeros(4, np.int64), np.arange(4))
    with closing(endless([broken])) as found, pytest.raises(ValueError, match="this image is gone"):
        next(found)
    assert readers() == before


def test_closing_stops_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = readers()
    found = endless(parts(50))
    next(found)
    assert readers() > before
    found.close()
    assert readers() == before


def test_it_reads_ahead_and_not_without_end() -> None:
    made: list[int] = []

    def produce(step: int) -> int:
        made.append(step)
        return step

    ahead = batches._ahead(produce, itertools.count(5))
    assert next(ahead) == 5
    time.sleep(0.3)
    assert 2 <= len(made) <= 6
    assert [next(ahead) for _ in range(10)] == list(range(6, 16))
    ahead.close()
    assert made == list(range(5, 5 + len(made)))


# --- evaluation


def test_evaluation_sees_every_image_once_whole_and_squashed() -> None:
    image = torch.zeros(3, 8, 32, dtype=torch.uint8)
    image[0, :, :16] = 200
    image[1, :4] = 100
    part = Part([image] * 5, np.array([4, 3, 2, 1, 0]), np.array([0, 2, 4]))
    found = list(evaluation_batches(part, batch_size=2, image_size=8, device=CPU))
    assert [len(x) for x, _ in found] == [2, 1]
    assert torch.cat([y for _, y in found]).tolist() == [4, 2, 0]
    x = found[0][0][0]
    assert x.shape == (3, 8, 8)
    assert (x[0, :, :3] * 255).round().eq(200).all()
    assert (x[0, :, 5:] == 0).all()
    assert (x[1, :3] * 255).round().eq(100).all()
    assert (x[1, 5:] == 0).all()


def test_nothing_to_evaluate() -> None:
    part = Part(Named(3, 0), np.zeros(3, np.int64), np.arange(0))
    assert list(evaluation_batches(part, batch_size=2, image_size=8, device=CPU)) == []
