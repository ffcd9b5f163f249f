"""Every image that Pillow reads comes out upright, in 8 bits; what it cannot read is told in one line."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from agfa.data.decode import decode, reason
from support import Agfa

RNG = np.random.default_rng(0)


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    return RNG.integers(0, 256, (height, width, channels), np.uint8)


def read(image: Image.Image, kind: str, channels: int = 3, **options: object) -> np.ndarray:
    """The image written as a file of a kind, and decoded."""
    path = Path(f"image.{kind}")
    image.save(path, **options)
    return np.asarray(decode(path, channels))


def modes() -> dict[str, tuple[Image.Image, np.ndarray]]:
    """Images of every mode, and their pixels in RGB."""
    gray, color, mask = noise(6, 8, 1)[..., 0], noise(6, 8), noise(6, 8, 1)
    on_white = (color * (mask / 255.0) + 255 * (1 - mask / 255.0)).round().astype(int)
    palette = Image.fromarray(color).quantize(16)
    holes = palette.copy()
    holes.info["transparency"] = 3
    through = np.asarray(palette.convert("RGB")).copy()
    through[np.asarray(palette) == 3] = 255
    wide = (gray.astype(np.uint16) << 8) + 77
    bits = Image.fromarray(gray > 127)
    rgb = np.repeat(gray[..., None], 3, axis=2)
    return {
        "L": (Image.fromarray(gray), rgb),
        "RGB": (Image.fromarray(color), color),
        "RGBA": (Image.fromarray(np.concatenate([color, mask], axis=2), "RGBA"), on_white),
        "LA": (Image.fromarray(np.stack([gray, np.full_like(gray, 255)], axis=2), "LA"), rgb),
        "P": (palette, np.asarray(palette.convert("RGB"))),
        "P, transparent": (holes, through),
        "16 bit": (Image.fromarray(wide), rgb),
        "1 bit": (bits, np.repeat((gray > 127)[..., None], 3, axis=2) * 255),
    }


@pytest.mark.parametrize("mode", modes())
def test_modes(mode: str, tmp_path: Path) -> None:
    image, want = modes()[mode]
    keyword = {"transparency": image.info["transparency"]} if "transparency" in image.info else {}
    image.save(tmp_path / "a.png", **keyword)
    got = np.asarray(decode(tmp_path / "a.png")).astype(int)
    assert np.abs(got - want).max() <= 1
    assert np.asarray(decode(tmp_path / "a.png", channels=1)).shape == (6, 8)


def test_other_formats(tmp_path: Path) -> None:
    color = np.kron(noise(3, 4), np.ones((8, 8, 1), np.uint8))
    Image.fromarray(color).convert("CMYK").save(tmp_path / "cmyk.tif")
    np.testing.assert_array_equal(np.asarray(decode(tmp_path / "cmyk.tif")), color)
    Image.fromarray(color).convert("CMYK").save(tmp_path / "cmyk.jpg", quality=100)
    assert np.abs(np.asarray(decode(tmp_path / "cmyk.jpg")).astype(int) - color).mean() < 4
    Image.fromarray(color).save(tmp_path / "a.webp", lossless=True)
    np.testing.assert_array_equal(np.asarray(decode(tmp_path / "a.webp")), color)
    wide = (noise(4, 5, 1)[..., 0].astype(np.int32)) << 8
    Image.fromarray(wide).save(tmp_path / "i.tif")
    np.testing.assert_array_equal(np.asarray(decode(tmp_path / "i.tif", channels=1)), wide >> 8)


def test_exif_turns_the_image_upright(tmp_path: Path) -> None:
    color = np.kron(noise(2, 3), np.ones((16, 16, 1), np.uint8))
    for orientation, turned in ((1, color), (3, np.rot90(color, 2)), (6, np.rot90(color)), (8, np.rot90(color, 3))):
        image = Image.fromarray(np.ascontiguousarray(turned))
        exif = image.getexif()
        exif[0x0112] = orientation
        image.save(tmp_path / f"{orientation}.png", exif=exif)
        np.testing.assert_array_equal(np.asarray(decode(tmp_path / f"{orientation}.png")), color)


def test_animations_give_their_first_frame(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (6, 5), color) for color in ("red", "lime", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert np.asarray(decode(tmp_path / "a.gif"))[2, 2].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    "kind", ["png", "bmp", "tif", "ppm", "webp", "tga", "sgi", "pcx", "jp2", "dds", "ico", "qoi"]
)
def test_every_lossless_format(kind: str) -> None:
    color = noise(16, 16)
    options = {"webp": {"lossless": True}, "ico": {"sizes": [(16, 16)]}}.get(kind, {})
    np.testing.assert_array_equal(read(Image.fromarray(color), kind, **options), color)


def test_numbers_of_32_bits_are_taken_as_0_to_255() -> None:
    values = np.array([[0, 1, 127.6, 255], [-5, 300, np.nan, np.inf]], np.float32)
    got = read(Image.fromarray(values), "tif", channels=1)
    np.testing.assert_array_equal(got, [[0, 1, 127, 255], [0, 255, 0, 255]])


@pytest.mark.parametrize("dtype", ["<u2", ">u2"])
def test_16_bits_of_either_byte_order(dtype: str) -> None:
    values = np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4)
    mode = {"<u2": "I;16", ">u2": "I;16B"}[dtype]
    image = Image.frombytes(mode, (4, 4), values.astype(dtype).tobytes())
    np.testing.assert_array_equal(read(image, "tif", channels=1), values >> 8)


def test_lab() -> None:
    color = np.kron(noise(3, 4), np.ones((4, 4, 1), np.uint8))
    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    lab = ImageCms.profileToProfile(Image.fromarray(color), *profiles, outputMode="LAB")
    back = ImageCms.profileToProfile(lab, *profiles[::-1], outputMode="RGB")
    got = read(lab, "tif")
    np.testing.assert_array_equal(got, np.asarray(back))
    assert np.abs(got.astype(int) - color).mean() < 20  # LAB of 8 bits is coarse


@pytest.mark.parametrize("kind", ["gif", "webp", "png", "tif"])
def test_of_several_frames_the_first(kind: str) -> None:
    frames = [Image.new("RGB", (6, 5), color) for color in ("red", "lime", "blue")]
    options = {"webp": {"lossless": True}}.get(kind, {})
    got = read(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert got[2, 2].tolist() == [255, 0, 0]


def test_a_broken_note_on_orientation_does_not_cost_the_image() -> None:
    color = noise(4, 5)
    for exif in (b"Exif\0\0" + b"\xff" * 40, b"Exif\0\0II*\0" + b"\xff" * 8, b"Exif\0\0"):
        np.testing.assert_array_equal(read(Image.fromarray(color), "png", exif=exif), color)


def png(width: int, height: int) -> bytes:
    """A PNG that says it is of that size, and has next to no data."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def test_a_decompression_bomb_is_refused_in_one_line(agfa: Agfa, train: Agfa, tiny: Path) -> None:
    bomb = tiny / "ink" / "top" / "bomb.png"
    bomb.write_bytes(png(60_000, 60_000))
    with pytest.raises(Image.DecompressionBombError):
        decode(bomb)
    ended = train(target="sky", out="run")
    assert "ink/top/bomb.png (Image size (3600000000 pixels) exceeds limit" in ended.error
    assert ended.status == 2
    ended = agfa("data", "check", tiny)
    assert "decompression bomb" in ended.out
    assert (ended.status, ended.err) == (1, "")


class Bytes:
    """An image that is no file."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def read_bytes(self) -> bytes:
        return self.content


def test_bytes_from_anywhere() -> None:
    color, file = noise(4, 5), io.BytesIO()
    Image.fromarray(color).save(file, "png")
    np.testing.assert_array_equal(np.asarray(decode(Bytes(file.getvalue()))), color)


@pytest.mark.parametrize(
    "content", [b"", b"text\nmore", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"BM" + bytes(20), b"\xff\xd8\xff", png(4, 4)]
)
def test_why_a_file_cannot_be_read_is_one_line(content: bytes) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        decode(Bytes(content))
    assert reason(raised.value)
    assert "\n" not in reason(raised.value)
