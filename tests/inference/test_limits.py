"""What strangers upload: read as the predictor reads files, or refused with the right status before it costs much."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from starlette.exceptions import HTTPException

from agfa.data.decode import normalise
from agfa.inference import limits
from agfa.inference.limits import Limits, read_image
from support_serve import png


def saved(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def bomb(width: int, height: int) -> bytes:
    """The head of a PNG that says it is so large."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


@pytest.mark.parametrize("kind", limits.FORMATS)
@pytest.mark.parametrize("channels", [1, 3])
def test_what_is_read(kind: str, channels: int) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (7, 9, 3), np.uint8))
    content = saved(image, kind)
    read = read_image(content, "a", channels, Limits())
    with Image.open(io.BytesIO(content)) as again:
        assert np.array_equal(np.asarray(read), np.asarray(normalise(again, channels)))


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (b"text", 415, "a.png: not an image that is read here"),
        (b"", 415, "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", 415, "not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415, "not an image"),
        (png()[:-40], 422, "a.png: a damaged image (image file is truncated"),
        (bomb(10_001, 5_000), 413, "a.png: 10001 x 5000 pixels; an image may have 50 million"),
        (bomb(60_000, 60_000), 413, "an image may have 50 million"),
    ],
)
def test_what_is_refused(content: bytes, status: int, said: str) -> None:
    with pytest.raises(HTTPException) as refused:
        read_image(content, "a.png", 3, Limits())
    assert refused.value.status_code == status
    assert said in refused.value.detail


def test_the_most_pixels_are_taken() -> None:
    content = png((20, 30))
    assert read_image(content, "a", 3, replace(Limits(), pixels=600)).size == (30, 20)
    with pytest.raises(HTTPException, match="30 x 20 pixels"):
        read_image(content, "a", 3, replace(Limits(), pixels=599))
