from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torchvision.transforms.v2.functional as V
from scipy import stats
from torch import Tensor
from torchvision.transforms import RandomResizedCrop

from agfa.data import augment
from agfa.data.augment import (
    BRIGHTNESS,
    CONTRAST,
    HUE,
    SATURATION,
    Augmentation,
    Draws,
    apply_,
    crop_resize,
    draw,
    flip_and_color,
    random_boxes,
    whole_boxes,
)
from agfa.errors import UsageError

REFERENCE = {
    BRIGHTNESS: V.adjust_brightness,
    CONTRAST: V.adjust_contrast,
    SATURATION: V.adjust_saturation,
    HUE: V.adjust_hue,
}
NEUTRAL = (1.0, 1.0, 1.0, 0.0)
ORDERS = list(itertools.permutations(range(4)))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures() -> Tensor:
    """Noise, smooth colors, the corners of the color cube, almost gray, gray, black and white."""
    u = torch.rand(3, 3, 24, 20, generator=seeded())
    steps = torch.linspace(0, 1, 24)[:, None].expand(24, 20)
    smooth = torch.stack([steps, steps.flip(0), steps[:, :1].expand(24, 20) ** 2])
    gray = u[2, :1].expand(3, 24, 20)
    almost = (gray * 0.9 + 1e-3 * u[1]).clamp(0, 1)
    ends = [torch.zeros(3, 24, 20), torch.ones(3, 24, 20)]
    return torch.stack([u[0], smooth, (u[1] > 0.5).float(), almost, gray, *ends])


def draws(n: int, factors: Tensor, order: Tensor, flip: bool = False, grayscale: bool = False) -> Draws:
    return Draws(torch.full((n,), flip), factors, order, torch.full((n,), grayscale))


def applied(x: Tensor, what: Draws) -> Tensor:
    out = x.clone()
    apply_(out, what)
    return out


def in_order(image: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    for kind in order.tolist():
        image = REFERENCE[kind](image, factors[kind].item())
    return image


# --- colors


@pytest.mark.parametrize(
    ("kind", "factors"),
    [
        (BRIGHTNESS, [0.0, 0.7, 0.9, 1.0, 1.1, 1.3, 2.0]),
        (CONTRAST, [0.0, 0.7, 0.9, 1.0, 1.1, 1.3, 2.0]),
        (SATURATION, [0.0, 0.7, 0.9, 1.0, 1.1, 1.3, 2.0]),
        (HUE, [-0.5, -0.3, -0.1, 0.0, 0.17, 0.3, 0.5]),
    ],
)
def test_each_color_operation_is_torchvisions(kind: int, factors: list[float]) -> None:
    x = pictures()
    for shift in range(len(x)):  # every image meets every factor
        table = torch.tensor(NEUTRAL).repeat(len(x), 1)
        table[:, kind] = torch.tensor(factors).roll(shift)
        got = applied(x, draws(len(x), table, torch.arange(4).expand(len(x), 4)))
        want = torch.stack([REFERENCE[kind](image, f) for image, f in zip(x, table[:, kind].tolist(), strict=True)])
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4 if kind == HUE else 1e-5)


def test_four_operations_in_every_order_are_torchvisions() -> None:
    x = pictures()
    for image in x:
        batch = image.expand(24, -1, -1, -1)
        what = draw(24, Augmentation(), seeded(1))._replace(order=torch.tensor(ORDERS))
        got = applied(batch, what._replace(flip=torch.zeros(24).bool(), grayscale=torch.zeros(24).bool()))
        want = torch.stack([in_order(image, f, o) for f, o in zip(what.factors, what.order, strict=True)])
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_flip_and_grayscale_are_torchvisions() -> None:
    x = pictures()
    factors, order = torch.tensor(NEUTRAL).repeat(len(x), 1), torch.arange(4).expand(len(x), 4)
    got = applied(x, draws(len(x), factors, order, flip=True, grayscale=True))
    want = V.rgb_to_grayscale(V.horizontal_flip(x), num_output_channels=3)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_the_whole_batch_is_torchvisions_image_by_image(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(40, 3, 16, 12, generator=seeded(3))
    what = draw(40, Augmentation(), seeded(4))
    want = []
    for image, flip, factors, order, grayscale in zip(x, *what, strict=True):
        image = in_order(V.horizontal_flip(image) if flip else image, factors, order)
        want.append(V.rgb_to_grayscale(image, num_output_channels=3) if grayscale else image)
    for in_cache in (1, 3 * 16 * 12 * 7, 2**30):  # one image, seven images, all images at a time
        monkeypatch.setattr(augment, "IN_CACHE", in_cache)
        got = flip_and_color(x, Augmentation(), seeded(4))
        torch.testing.assert_close(got, torch.stack(want), rtol=0, atol=1e-4)
    strided = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(flip_and_color(strided, Augmentation(), seeded(4)), got, rtol=0, atol=0)
    assert got.is_contiguous()


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_of_8_bits_are_as_their_fractions(channels: int) -> None:
    pixels = torch.randint(0, 256, (9, channels, 16, 12), dtype=torch.uint8, generator=seeded())
    want = flip_and_color(pixels / 255, Augmentation(), seeded(1))
    for layout in (torch.contiguous_format, torch.channels_last):
        got = flip_and_color(pixels.contiguous(memory_format=layout), Augmentation(), seeded(1))
        assert torch.equal(got, want)


@pytest.mark.parametrize("channels", [1, 2])
def test_without_colors_images_are_only_flipped(channels: int) -> None:
    x = torch.rand(64, channels, 5, 7, generator=seeded())
    got = flip_and_color(x, Augmentation(grayscale=1.0), seeded())
    flipped = draw(64, Augmentation(), seeded()).flip
    assert 0 < flipped.sum() < 64
    assert torch.equal(got, torch.where(flipped[:, None, None, None], x.flip(3), x))


def test_the_seed_decides_and_images_differ() -> None:
    x = torch.rand(1, 3, 8, 8, generator=seeded()).expand(16, -1, -1, -1).contiguous()
    before = x.clone()
    a, b, c = (flip_and_color(x, Augmentation(), seeded(seed)) for seed in (5, 5, 6))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(x, before)
    assert all(not torch.equal(a[i], a[j]) for i, j in itertools.combinations(range(16), 2))
    generator = seeded(5)
    first, second = (flip_and_color(x, Augmentation(), generator) for _ in range(2))
    assert not torch.equal(first, second)


def test_other_contexts_and_devices() -> None:
    x = torch.rand(6, 3, 8, 8, generator=seeded())
    want = flip_and_color(x, Augmentation(), seeded())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = flip_and_color(x, Augmentation(), seeded())
    assert got.dtype == torch.float32
    assert torch.equal(got, want)
    assert not flip_and_color(x.clone().requires_grad_(), Augmentation(), seeded()).requires_grad
    meta = flip_and_color(x.to("meta"), Augmentation(), seeded())
    assert (meta.device.type, meta.shape, meta.dtype) == ("meta", x.shape, torch.float32)
    assert flip_and_color(x[:0], Augmentation(), seeded()).shape == (0, 3, 8, 8)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_and_is_never_waited_for() -> None:
    x = torch.rand(32, 3, 64, 64, generator=seeded())
    on_gpu = x.cuda()
    flip_and_color(on_gpu, Augmentation(), seeded())
    try:
        torch.cuda.set_sync_debug_mode("error")
        got = flip_and_color(on_gpu, Augmentation(), seeded())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(got.cpu(), flip_and_color(x, Augmentation(), seeded()), rtol=0, atol=1e-5)


def test_no_augmentation_changes_nothing() -> None:
    x = torch.rand(9, 3, 8, 8, generator=seeded())
    none = Augmentation(flip=0, brightness=0, contrast=0, saturation=0, hue=0, grayscale=0)
    torch.testing.assert_close(flip_and_color(x, none, seeded()), x, rtol=0, atol=1e-5)


def test_a_hue_beyond_half_a_turn_is_refused() -> None:
    with pytest.raises(UsageError, match="hue"):
        Augmentation(hue=0.6)


# --- what is drawn


def test_draws_have_torchvisions_distribution() -> None:
    n = 24_000
    what = draw(n, Augmentation(), seeded(7))
    for kind, (low, high) in enumerate([(0.7, 1.3)] * 3 + [(-0.3, 0.3)]):
        values = what.factors[:, kind].numpy()
        assert low <= values.min()
        assert values.max() <= high + 1e-6
        assert stats.kstest(values, stats.uniform(low, high - low).cdf).pvalue > 1e-3
    codes = (what.order @ torch.tensor([64, 16, 4, 1])).numpy()
    kinds, counts = np.unique(codes, return_counts=True)
    assert len(kinds) == 24
    assert stats.chisquare(counts).pvalue > 1e-3
    assert stats.binomtest(int(what.flip.sum()), n, 0.5).pvalue > 1e-3
    assert stats.binomtest(int(what.grayscale.sum()), n, 0.1).pvalue > 1e-3
    columns = torch.column_stack([what.flip, what.factors, what.order[:, 0], what.grayscale]).numpy()
    apart = np.corrcoef(columns.T) - np.eye(7)
    assert np.abs(apart).max() < 4.5 / n**0.5


def test_large_ranges_stop_at_zero() -> None:
    factors = draw(4000, Augmentation(brightness=2.0), seeded()).factors[:, BRIGHTNESS]
    assert stats.kstest(factors.numpy(), stats.uniform(0, 3).cdf).pvalue > 1e-3


@pytest.mark.parametrize(("height", "width"), [(256, 256), (100, 300), (400, 130), (227, 300), (300, 200), (12, 12)])
def test_boxes_have_torchvisions_distribution(height: int, width: int) -> None:
    n = 4000
    got = random_boxes(torch.tensor([[height, width]]).expand(n, 2), Augmentation(), seeded(8)).numpy()
    image = torch.empty(3, height, width, device="meta")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        want = np.array([RandomResizedCrop.get_params(image, [0.7, 1.0], [3 / 4, 4 / 3]) for _ in range(n)])
    top, left, h, w = got.T
    assert min(top.min(), left.min(), h.min() - 1, w.min() - 1) >= 0
    assert (top + h).max() <= height
    assert (left + w).max() <= width
    for measure in (
        area,
        log_aspect,
        lambda b: b[:, 0],
        lambda b: b[:, 1],
        lambda b: b[:, 2],
        lambda b: b[:, 3],
    ):
        assert stats.ks_2samp(measure(got), measure(want)).pvalue > 1e-3


def area(boxes: np.ndarray) -> np.ndarray:
    return boxes[:, 2] * boxes[:, 3]


def log_aspect(boxes: np.ndarray) -> np.ndarray:
    return np.log(boxes[:, 3] / boxes[:, 2])


def test_area_log_aspect_and_position_are_uniform() -> None:
    side, n = 10_000, 20_000  # nearly continuous, and every box fits
    sizes = torch.tensor([[side, side]]).expand(n, 2)
    square = random_boxes(sizes, Augmentation(crop_aspect=(1.0, 1.0)), seeded(1)).numpy()
    small = random_boxes(sizes, Augmentation(crop_area=(0.1, 0.1)), seeded(2)).numpy()
    assert stats.kstest(area(square) / side**2, stats.uniform(0.7, 0.3).cdf).pvalue > 1e-3
    assert stats.kstest(log_aspect(small), stats.uniform(np.log(3 / 4), 2 * np.log(4 / 3)).cdf).pvalue > 1e-3
    for axis in (0, 1):
        assert stats.kstest(small[:, axis] / (side - small[:, axis + 2]), "uniform").pvalue > 1e-3


@pytest.mark.parametrize(("height", "width"), [(20, 200), (200, 20), (1, 1), (3, 7), (1, 9), (10, 10)])
def test_boxes_fall_back_to_the_center_as_torchvisions(height: int, width: int) -> None:
    never = Augmentation(crop_area=(2.0, 3.0))
    image = torch.empty(3, height, width, device="meta")
    want = RandomResizedCrop.get_params(image, [2.0, 3.0], [3 / 4, 4 / 3])
    assert random_boxes(torch.tensor([[height, width]]), never, seeded())[0].tolist() == list(want)


def test_boxes_differ_and_keep_to_their_images() -> None:
    sizes = torch.tensor([[50, 60], [300, 260], [8, 8], [50, 60]] * 50)
    boxes = random_boxes(sizes, Augmentation(), seeded())
    assert boxes.dtype == torch.int64
    assert torch.equal(boxes, random_boxes(sizes, Augmentation(), seeded()))
    assert (boxes[:, :2] + boxes[:, 2:] <= sizes).all()
    assert not torch.equal(boxes[0], boxes[3])
    assert len(boxes[1::4].unique(dim=0)) > 45


# --- crop and resize


def photographs(channels: int = 3) -> list[Tensor]:
    """Views as decoded images are: channels last in memory; one planar."""
    sizes = [(270, 270), (64, 64), (40, 131), (301, 77), (65, 64), (20, 30)]
    rng = np.random.default_rng(0)
    images = [torch.from_numpy(rng.integers(0, 256, (h, w, channels), np.uint8)).permute(2, 0, 1) for h, w in sizes]
    return [*images, images[0].contiguous()]


def sizes_of(images: list[Tensor]) -> Tensor:
    return torch.tensor([image.shape[1:] for image in images])


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_crops_are_torchvisions(channels: int) -> None:
    images = photographs(channels)
    for boxes in (
        random_boxes(sizes_of(images), Augmentation(crop_area=(0.1, 1.0)), seeded(2)),
        whole_boxes(sizes_of(images)),
    ):
        got = crop_resize(images, boxes, 64)
        assert (got.dtype, got.shape) == (torch.uint8, (len(images), channels, 64, 64))
        for out, image, box in zip(got, images, boxes.tolist(), strict=True):
            assert torch.equal(out, V.resized_crop(image, *box, [64, 64], antialias=True))


def test_whole_images_are_squashed_as_torchvisions_resize() -> None:
    images = photographs()
    assert whole_boxes(torch.tensor([[5, 9]])).tolist() == [[0, 0, 5, 9]]
    got = crop_resize(images, whole_boxes(sizes_of(images)), 32)
    want = torch.stack([V.resize(image, [32, 32], antialias=True) for image in images])
    assert torch.equal(got, want)


def test_a_box_of_the_size_is_copied_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(augment.F, "interpolate", None)
    image = photographs()[0]
    got = crop_resize([image, image[:, :64, :64]], torch.tensor([[3, 5, 64, 64], [0, 0, 64, 64]]), 64)
    assert torch.equal(got, torch.stack([image[:, 3:67, 5:69], image[:, :64, :64]]))


def test_threads_give_the_same_and_pass_errors_on() -> None:
    images = photographs()
    boxes = random_boxes(sizes_of(images), Augmentation(), seeded())
    with ThreadPoolExecutor(2) as pool:
        assert torch.equal(crop_resize(images, boxes, 48, map=pool.map), crop_resize(images, boxes, 48))
        with pytest.raises(IndexError):
            crop_resize(images, boxes[:2], 48, map=pool.map)
