"""The MNIST benchmarks: on a small MNIST made here, and (slow) on the real one."""

import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from agfa.data.catalog import CATALOG
from agfa.data.check import compare_counts
from agfa.data.domains import Domain
from agfa.data.mnist import ANGLES, COLOR_FLIPS, FILES, _read_idx, colored_mnist, rotated_mnist
from agfa.errors import UsageError
from support import listing


def idx(array: np.ndarray) -> bytes:
    """An array in MNIST's format."""
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.astype(np.uint8).tobytes()


@pytest.fixture
def small(tmp_path):
    """1,200 images: each pixel of an image holds a number that tells it from the others."""
    rng = np.random.default_rng(0)
    images = rng.integers(1, 255, size=(1200, 28, 28))
    labels = rng.integers(0, 10, size=1200)
    for name, array in zip(FILES, (images[:1000], labels[:1000], images[1000:], labels[1000:]), strict=True):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
    return tmp_path, images, labels


def real() -> Path:
    folder = Path(os.environ.get("AGFA_DATA", "."), "mnist")
    if not folder.is_dir():
        pytest.skip("needs $AGFA_DATA/mnist")
    return folder


def colors_of(domain: Domain) -> np.ndarray:
    return domain.images.any(axis=(1, 2))[:, 1]


def test_every_image_is_in_one_domain_and_keeps_its_digit(small):
    folder, images, labels = small
    dataset = rotated_mnist(folder)
    assert dataset.domain_names == tuple(map(str, ANGLES))
    assert sorted(key for d in dataset.domains for key in d.keys) == [f"{i:05d}" for i in range(1200)]
    upright = dataset["0"]
    places = [int(key) for key in upright.keys]
    np.testing.assert_array_equal(upright.images[..., 0], images[places])
    np.testing.assert_array_equal(upright.labels, labels[places])


def test_a_domain_is_turned_by_its_angle(small):
    folder = small[0]
    turned = rotated_mnist(folder)["45"]
    corner = turned.images[:, :4, :4, 0]
    assert corner.max() == 0  # outside the turned image
    assert (turned.images[:, 14, 14, 0] > 0).all()


def test_colour_is_one_of_two_channels_and_goes_with_the_noisy_label(small):
    folder, images, labels = small
    dataset = colored_mnist(folder)
    for name, flip in COLOR_FLIPS.items():
        domain = dataset[name]
        places = [int(key) for key in domain.keys]
        used = domain.images.any(axis=(1, 2))
        assert (used.sum(axis=1) == 1).all()
        np.testing.assert_array_equal(domain.images.max(axis=3), images[places])
        assert np.mean(used[:, 1] != domain.labels) == pytest.approx(flip, abs=0.06)
        assert np.mean((labels[places] < 5) != domain.labels) == pytest.approx(0.25, abs=0.07)


def test_the_same_every_time(small):
    first, second = colored_mnist(small[0]), colored_mnist(small[0])
    assert listing(first) == listing(second)
    np.testing.assert_array_equal(first["+80%"].images, second["+80%"].images)


def test_missing_or_damaged_files_are_named(small):
    folder = small[0]
    file = folder / f"{FILES[0]}.gz"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(UsageError, match=rf"{FILES[0]}.gz is damaged"):
        rotated_mnist(folder)
    file.unlink()
    with pytest.raises(UsageError, match=rf"no {FILES[0]}\[.gz\] in"):
        rotated_mnist(folder)


@pytest.mark.slow
def test_real_mnist_gives_the_benchmarks_counts_noise_and_colours():
    """Slow: 140,000 images, of which half are turned; it needs the real ones."""
    published = [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
    digits = np.concatenate([_read_idx(real(), FILES[1]), _read_idx(real(), FILES[3])])
    colored, rotated = colored_mnist(real()), rotated_mnist(real())
    assert [len(d) for d in colored.domains] == [23334, 23333, 23333]
    assert [len(d) for d in rotated.domains] == [11667] * 4 + [11666] * 2
    assert rotated.counts().sum(axis=0).tolist() == published
    for name in ("ColoredMNIST", "RotatedMNIST"):
        assert compare_counts(CATALOG[name.lower()].load(), CATALOG[name.lower()]) == []
    for domain, agreement in zip(colored.domains, (0.9, 0.8, 0.1), strict=True):
        agrees = colors_of(domain) == domain.labels
        assert agrees.mean() == pytest.approx(agreement, abs=0.01)
        assert domain.labels.mean() == pytest.approx(0.5, abs=0.01)
        below_five = digits[[int(key) for key in domain.keys]] < 5
        assert (below_five != domain.labels).mean() == pytest.approx(0.25, abs=0.01)  # the labels that are wrong
        assert (below_five == colors_of(domain)).mean() == pytest.approx(0.25 + agreement / 2, abs=0.01)
