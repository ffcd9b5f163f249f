"""What a stranger's upload may be, and reading it within that: refusals carry an HTTP status and one line."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO

from PIL import Image, UnidentifiedImageError
from starlette.exceptions import HTTPException

from agfa.data.decode import normalise, reason

# What cameras, browsers and scanners write. Of the others some run a program on the file (EPS), or are rarely tried.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and how much may wait."""

    size: int = 32 * 2**20  # bytes of a request
    count: int = 128  # images of a request
    pixels: int = 50_000_000  # of an image, decoded
    seconds: float = 30  # from a request's first byte to its answer
    waiting: int = 1024  # images that are read, wait, or are answered at a time
    uploads: int = 8  # requests of the largest size that are taken in at a time, in bytes


def read_image(content: bytes, name: str, channels: int, limits: Limits) -> Image.Image:
    """An uploaded image, upright and in 8 bits. Its size is looked at before any of its pixels is decoded.

    Raises:
        HTTPException: 415, it is no image; 413, it has too many pixels; 422, it is damaged.
    """
    Image.init()
    known = [name for name in FORMATS if name in Image.OPEN]
    try:
        with Image.open(BytesIO(content), formats=known) as opened:
            if opened.width * opened.height > limits.pixels:
                raise HTTPException(413, f"{name}: {opened.width} x {opened.height} pixels; {_most(limits)}")
            opened.load()
            return normalise(opened, channels)
    except HTTPException:
        raise
    except UnidentifiedImageError as error:
        raise HTTPException(415, f"{name}: not an image that is read here ({', '.join(known)})") from error
    except Image.DecompressionBombError as error:
        raise HTTPException(413, f"{name}: far too many pixels; {_most(limits)}") from error
    except Exception as error:  # Pillow's plugins raise nearly anything on a damaged file
        raise HTTPException(422, f"{name}: a damaged image ({reason(error)})") from error


def _most(limits: Limits) -> str:
    return f"an image may have {limits.pixels / 1e6:g} million"
