"""From an image file of any kind to upright pixels of 8 bits."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageOps, UnidentifiedImageError

from agfa.data.sources import Source

MODES = {1: "L", 3: "RGB"}


def decode(source: Source, channels: int = 3) -> Image.Image:
    """Read an image file upright, in `channels` channels: 16 bit scaled to 8, transparency laid on white.

    Raises:
        OSError, ValueError, SyntaxError, DecompressionBombError: as Pillow does, when it cannot be read whole.
    """
    with Image.open(source if isinstance(source, Path) else BytesIO(source.read_bytes())) as opened:
        opened.load()
        return normalise(opened, channels)


def normalise(image: Image.Image, channels: int = 3) -> Image.Image:
    """An image upright, in 8 bits and `channels` channels. Numbers of 32 bits are taken as 0..255, and cut to it."""
    image = _upright(image)
    if image.mode.startswith("I;16") or image.mode == "I":
        image = Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65535) >> 8).astype(np.uint8))
    if image.mode == "F":
        image = Image.fromarray(np.nan_to_num(np.asarray(image)).clip(0, 255).astype(np.uint8))
    if image.mode == "LAB":
        lab, rgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        image = ImageCms.profileToProfile(image, lab, rgb, outputMode="RGB") or image
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image)
    return image.convert(MODES[channels])


def _upright(image: Image.Image) -> Image.Image:
    """Turned as its camera says, where what it says can be read: damaged notes are no reason to lose the pixels."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:
        return image


def reason(error: Exception) -> str:
    """One line of why an image could not be read; Pillow's plugins raise nearly anything on a damaged file."""
    text = str(error).splitlines()
    if isinstance(error, UnidentifiedImageError) or not text:
        return "not an image" if text else type(error).__name__
    return text[0]
