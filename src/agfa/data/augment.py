"""Augmentation by the batch, a different draw for every image: DomainBed's, in distribution.

DomainBed draws for one PIL image at a time: RandomResizedCrop, RandomHorizontalFlip, ColorJitter and
RandomGrayscale. Here only the crop goes image by image, since sizes differ; the rest works on whole batches,
wherever they are. Random numbers always come from a generator on the CPU, the same for every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from agfa.errors import UsageError

Map = Callable[[Callable[[int], None], Iterable[int]], Iterable[None]]

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)
TRIES = 10  # crops tried before the central one is taken
IN_CACHE = 2**18  # numbers a CPU works on at a time: beyond its caches all takes twice as long


@dataclass(frozen=True)
class Augmentation:
    """What is drawn from: DomainBed's ranges by default.

    A color range r stands for factors in [1 - r, 1 + r], of hue for turns in [-r, r]; `flip` and `grayscale`
    are probabilities.
    """

    crop_area: tuple[float, float] = (0.7, 1.0)
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    brightness: float = 0.3
    contrast: float = 0.3
    saturation: float = 0.3
    hue: float = 0.3
    grayscale: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.hue <= 0.5:
            raise UsageError(f"hue is {self.hue}; it must be in [0, 0.5], half a turn at most")


def whole_boxes(sizes: Tensor) -> Tensor:
    """The boxes (top, left, height, width) of whole images, of sizes (height, width)."""
    return torch.cat([torch.zeros_like(sizes), sizes], dim=1)


def random_boxes(sizes: Tensor, augmentation: Augmentation, generator: torch.Generator) -> Tensor:
    """One random box (top, left, height, width) in each image, of sizes (height, width), all int64.

    Area and logarithm of the aspect are uniform; of a few tries, the first that fits the image is taken.
    """
    u = torch.rand(len(sizes), TRIES, 4, dtype=torch.float64, generator=generator)
    height, width = sizes.double()[:, None].unbind(2)
    (least, most), (low, high) = augmentation.crop_area, augmentation.crop_aspect
    area = height * width * (least + (most - least) * u[..., 0])
    aspect = low * (high / low) ** u[..., 1]
    h, w = (area / aspect).sqrt().round(), (area * aspect).sqrt().round()
    top, left = (u[..., 2] * (height - h + 1)).floor(), (u[..., 3] * (width - w + 1)).floor()
    fits = (h > 0) & (h <= height) & (w > 0) & (w <= width)
    boxes = torch.stack([top, left, h, w], dim=2)[torch.arange(len(sizes)), fits.int().argmax(dim=1)]
    return torch.where(fits.any(dim=1, keepdim=True), boxes.long(), _central_boxes(sizes, low, high))


def _central_boxes(sizes: Tensor, low: float, high: float) -> Tensor:
    """The largest central boxes whose aspect is in [low, high]."""
    height, width = sizes.double().unbind(1)
    h = torch.minimum(height, (width / low).round())
    w = torch.minimum(width, (height * high).round())
    inner = torch.stack([h, w], dim=1).long()
    return torch.cat([(sizes - inner) // 2, inner], dim=1)


def crop_resize(images: Sequence[Tensor], boxes: Tensor, size: int, map: Map = map) -> Tensor:
    """Cut the box out of each uint8 image (C x H x W, any strides) and resize it to size x size, antialiased.

    An executor's `map` does several images at a time. A box of that size already is copied as it is.
    """
    shape = (len(images), images[0].shape[0], size, size)
    out = torch.empty(shape, dtype=torch.uint8, memory_format=torch.channels_last)  # as decoded images are
    corners = boxes.tolist()

    def fill(index: int) -> None:
        top, left, height, width = corners[index]
        crop = images[index][:, top : top + height, left : left + width]
        if crop.shape[1:] != (size, size):
            packed = crop[None].contiguous(memory_format=torch.channels_last)  # torch is fastest on this
            crop = F.interpolate(packed, (size, size), mode="bilinear", antialias=True)[0]
        out[index] = crop

    for _ in map(fill, range(len(images))):
        pass  # an executor raises what went wrong only when it is asked for the result
    return out


class Draws(NamedTuple):
    """What happens to each of n images; all on the CPU."""

    flip: Tensor  # n, bool
    factors: Tensor  # n x 4: of brightness, contrast, saturation and hue
    order: Tensor  # n x 4: which of these four is first, second, ...
    grayscale: Tensor  # n, bool


def draw(n: int, augmentation: Augmentation, generator: torch.Generator) -> Draws:
    """Draw a flip, the four color factors, their order and a loss of color for each of n images."""
    u = torch.rand(n, 10, generator=generator)
    center = torch.tensor([1.0, 1.0, 1.0, 0.0])
    reach = torch.tensor([getattr(augmentation, k) for k in ("brightness", "contrast", "saturation", "hue")])
    low, high = torch.maximum(center - reach, center - 1), center + reach
    flip, grayscale = u[:, 0] < augmentation.flip, u[:, 9] < augmentation.grayscale
    return Draws(flip, low + (high - low) * u[:, 1:5], u[:, 5:9].argsort(dim=1), grayscale)


@torch.no_grad()
def flip_and_color(
    x: Tensor, augmentation: Augmentation, generator: torch.Generator, share: tuple[int, int] = (0, 1)
) -> Tensor:
    """Flip, and change the colors of, each image of a batch (n x C x H x W) on its device: floats in [0, 1].

    The batch is of such floats, or of uint8. Only images of three channels have colors; others are flipped and no
    more. With `share` = (k, m), x is the k-th of m parts of a batch, and gets what it would in the whole.
    """
    k, m = share
    whole = draw(len(x) * m, augmentation, generator)
    draws = Draws(*(drawn[k * len(x) : (k + 1) * len(x)] for drawn in whole))
    dtype = x.dtype if x.is_floating_point() else torch.float32
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    step = max(1, IN_CACHE // math.prod(x.shape[1:]) if x.device.type == "cpu" else len(x))
    for start in range(0, len(x), step):
        part = slice(start, start + step)
        torch.div(x[part], 1 if x.is_floating_point() else 255, out=out[part])
        apply_(out[part], Draws(*(drawn[part] for drawn in draws)))
    return out


def apply_(x: Tensor, draws: Draws) -> None:
    """Do to the images, in place, what was drawn for them; images that get the same get it together."""
    flips, factors, orders, grays = (drawn.tolist() for drawn in draws)
    _change_(x, [i for i, flip in enumerate(flips) if flip], lambda some: some.copy_(some.flip(3)))
    if x.shape[1] != 3:
        return
    for position in range(4):
        for kind, change in enumerate((_brighten_, _contrast_, _saturate_, _turn_hue_)):
            rows = [i for i, order in enumerate(orders) if order[position] == kind]
            _change_(x, rows, change, [factors[i][kind] for i in rows])
    _change_(x, [i for i, gray in enumerate(grays) if gray], lambda some: some.copy_(_gray(some).expand_as(some)))


def _change_(x: Tensor, rows: list[int], change: Callable[..., object], *factors: list[float]) -> None:
    """Change these images in place, each by its factor; x's device is not waited for."""
    if not rows:
        return
    given = [torch.tensor(of_all).to(x, non_blocking=True).view(-1, 1, 1, 1) for of_all in factors]
    if len(rows) == len(x):
        change(x, *given)
        return
    index = torch.tensor(rows).to(x.device, non_blocking=True)
    some = x.index_select(0, index)
    change(some, *given)
    x.index_copy_(0, index, some)


def _gray(x: Tensor) -> Tensor:
    red, green, blue = x.chunk(3, dim=1)
    return (red * 0.2989).add_(green, alpha=0.587).add_(blue, alpha=0.114)


def _brighten_(x: Tensor, factor: Tensor) -> None:
    x.mul_(factor).clamp_(max=1)


def _contrast_(x: Tensor, factor: Tensor) -> None:
    gray = _gray(x.mean((2, 3), keepdim=True))
    x.mul_(factor).add_(gray.mul_(1 - factor)).clamp_(0, 1)


def _saturate_(x: Tensor, factor: Tensor) -> None:
    gray = _gray(x)
    x.mul_(factor).add_(gray.mul_(1 - factor)).clamp_(0, 1)


def _turn_hue_(x: Tensor, turns: Tensor) -> None:
    """Turn the hue as through HSV, by half a turn at most, without HSV's divisions and cases.

    `hue` is counted from red, in sixths of a turn times the chroma: 3 chromas either way at most, and 6 once
    turned. A channel falls from `high` to `low` between 1 and 2 units away from its primary color. The nested
    absolute values fold the circle: they are how far a hue is from the opposite of a primary color.
    """
    red, green, blue = x.chunk(3, dim=1)
    high = torch.maximum(green, blue)
    torch.maximum(high, red, out=high)
    low = torch.minimum(green, blue)
    torch.minimum(low, red, out=low)
    chroma = high - low
    hue = (green + blue).sub_(red).sub_(low).add_(chroma).copysign_(green - blue).addcmul_(chroma, turns * 6)
    half, top = chroma * 3, torch.add(low, chroma, alpha=2)
    near_red = hue.abs().sub_(half).abs_().sub_(chroma).add_(low)
    torch.clamp(near_red, low, high, out=red)
    for channel, from_opposite in ((green, hue + chroma), (blue, hue - chroma)):
        near = from_opposite.abs_().sub_(half).abs_()
        torch.clamp(torch.sub(top, near, out=near), low, high, out=channel)
