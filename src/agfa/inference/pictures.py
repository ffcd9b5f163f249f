"""From an image in any form that people have it in to the pixels that a model is given."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from agfa.data.augment import crop_resize, whole_boxes
from agfa.data.decode import MODES, decode, normalise
from agfa.data.domains import Pixels
from agfa.data.sources import RemoteFile, Source
from agfa.data.store import shrink

Array = npt.NDArray[Any]
Picture = str | os.PathLike[str] | Source | Image.Image | Array | Tensor
Pictures = Picture | Iterable[Picture]


def one_by_one(images: Pictures) -> Iterator[Picture]:
    """Each image of a list, of a stream, of an array or tensor of four dimensions; one image is one of one."""
    if isinstance(images, np.ndarray | Tensor):
        yield from images if images.ndim == 4 else [images]
    elif isinstance(images, str | os.PathLike | Image.Image) or hasattr(images, "read_bytes"):
        yield images  # type: ignore[misc]  # what has read_bytes is a Source
    else:
        for image in images:
            if isinstance(image, np.ndarray | Tensor):
                yield from one_by_one(image)  # a loader gives batches
            else:
                yield image


def square(picture: Picture, channels: int, image_size: int) -> Tensor:
    """The whole image squashed to the model's size, by the way that evaluated images go: uint8, C x H x W.

    Raises:
        Exception: of any kind that Pillow raises, or a ValueError, where it is no image.
    """
    pixels = _pixels(picture, channels, image_size)
    return crop_resize([pixels], whole_boxes(torch.tensor([pixels.shape[1:]])), image_size)[0]


def called(picture: Picture, number: int) -> str:
    """What to call an image in an error: its file, or its place among those that were given."""
    if isinstance(picture, np.ndarray | Tensor | Image.Image):
        return f"image {number}"
    return str(picture)


def _pixels(picture: Picture, channels: int, image_size: int) -> Tensor:
    """The image as the store of decoded images has it: upright, in the model's channels, shrunk."""
    if isinstance(picture, Tensor):
        picture = _from_tensor(picture)
    if isinstance(picture, np.ndarray):
        picture = _to_bytes(picture)
        if channels not in MODES and picture.ndim == 3 and picture.shape[2] == channels:
            return torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1)
        picture = Image.fromarray(picture)
    if channels not in MODES:
        raise ValueError(f"the model takes images of {channels} channels; give arrays, height x width x {channels}")
    image = normalise(picture, channels) if isinstance(picture, Image.Image) else decode(_source(picture), channels)
    pixels = np.array(shrink(image, image_size))
    return torch.from_numpy(np.atleast_3d(pixels)).permute(2, 0, 1)


def _source(picture: str | os.PathLike[str] | Source) -> Source:
    if isinstance(picture, str) and "://" in picture:
        return RemoteFile(picture)
    return Path(picture) if isinstance(picture, str | os.PathLike) else picture


def _from_tensor(x: Tensor) -> Array:
    """Channels last, where there are channels."""
    x = x.detach().cpu()
    if x.dtype == torch.bfloat16:  # numpy has no such numbers
        x = x.float()
    return (x.permute(1, 2, 0) if x.ndim == 3 else x).numpy()


def _to_bytes(array: Array) -> Pixels:
    """8 bits a number: floats are taken as [0, 1], 16 bits lose their lower half, as in files."""
    shape = " x ".join(map(str, array.shape))
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if not array.size or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (2, 3, 4)):
        raise ValueError(
            f"{shape} is not the shape of an image; it is height x width [x channels], of a tensor "
            "[channels x] height x width, and in both several images have one dimension more"
        )
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype == np.uint16:
        return (array >> 8).astype(np.uint8)
    if array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not (low >= -1e-6 and high <= 1 + 1e-6):  # so that NaN is refused too
            raise ValueError(
                f"its numbers go from {low:.4g} to {high:.4g}; floats are taken as [0, 1], uint8 as 0..255"
            )
        return (array.astype(np.float64) * 255).round().clip(0, 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise ValueError(f"{array.dtype} numbers could mean anything; give uint8, or floats in [0, 1]")
    return array
