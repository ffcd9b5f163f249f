"""What is wrong with image files: each is read once, its bytes both decoded and hashed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from agfa.data.decode import normalise, reason
from agfa.data.domains import DomainDataset
from agfa.data.sources import Source, printable
from agfa.data.store import Progress

SMALL = 8  # pixels: a shorter side has little left to see
SLENDER = 20  # times as long as wide: next to nothing of it is in a square crop
AT_ONCE = 256  # files handed to the threads together, so that millions do not wait in memory


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. A `fatal` one stops training; the others are remarks."""

    where: str
    what: str
    remedy: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.remedy}"


class _File(NamedTuple):
    source: Source
    domain: str
    label: str

    def __str__(self) -> str:
        return printable(str(self.source))


class _Seen(NamedTuple):
    """What one look at a file gave: why it is unreadable, or a hash of its bytes and what is odd about it."""

    unreadable: str | None = None
    digest: bytes = b""
    remarks: tuple[tuple[str, str], ...] = ()  # (what, remedy)


def inspect_files(dataset: DomainDataset, progress: Progress | None = None) -> list[Problem]:
    """The problems of every image file of the dataset, in order; then the images that are there twice."""
    files = [
        _File(image, domain.name, dataset.classes[label])
        for domain in dataset.domains
        if not isinstance(domain.images, np.ndarray)
        for image, label in zip(domain.images, domain.labels.tolist(), strict=True)
    ]
    problems: list[Problem] = []
    same: dict[bytes, list[_File]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Pillow warns of is either said below or harmless
        for done, (file, seen) in enumerate(zip(files, _look_at_all(files), strict=True), start=1):
            if progress is not None:
                progress(done, len(files))
            if seen.unreadable is not None:
                problems.append(Problem(str(file), seen.unreadable, f"mend it or remove it from {file.domain!r}"))
                continue
            problems += [Problem(str(file), what, remedy, fatal=False) for what, remedy in seen.remarks]
            same.setdefault(seen.digest, []).append(file)
    return problems + [problem for copies in same.values() if len(copies) > 1 for problem in _copies(copies)]


def _copies(files: list[_File]) -> Iterator[Problem]:
    """What is dishonest about files of the same bytes: in two domains, or in two classes of a domain.

    Copies within a class of a domain do no harm, so they pass.
    """
    domains = {file.domain: file for file in reversed(files)}  # the first of each
    first = files[0]
    for domain, file in reversed(domains.items()):
        if domain != first.domain:
            classes = "" if file.label == first.label else f", as {file.label!r} and {first.label!r}"
            yield Problem(
                str(file),
                f"has the same bytes as {first} of another domain{classes}",
                "remove one of them: held out, it would not be unseen",
                fatal=False,
            )
    for domain, file in reversed(domains.items()):
        others = {other.label: other for other in reversed(files) if other.domain == domain}
        for label, other in reversed(others.items()):
            if label != file.label:
                yield Problem(
                    str(other),
                    f"has the same bytes as {file} of another class",
                    f"keep the right one of {label!r} and {file.label!r}",
                    fatal=False,
                )


def _look_at_all(files: list[_File]) -> Iterator[_Seen]:
    """Pillow decodes, and hashlib hashes, outside Python's lock."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(files), AT_ONCE):
            yield from pool.map(_look_at, (file.source for file in files[start : start + AT_ONCE]))


def _look_at(source: Source) -> _Seen:
    try:
        if isinstance(source, Path) and source.exists() and not source.is_file():
            return _Seen("not a file")  # a pipe, say: reading it would wait for ever
        data = source.read_bytes()
        if not data:
            return _Seen("is empty, 0 bytes")
        with Image.open(BytesIO(data)) as opened:
            opened.load()
            remarks = tuple(_remarks(opened, normalise(opened)))  # what training sees of it
    except Exception as error:
        return _Seen((error.strerror if isinstance(error, OSError) else None) or reason(error))
    return _Seen(digest=hashlib.sha256(data).digest()[:16], remarks=remarks)


def _remarks(image: Image.Image, shown: Image.Image) -> Iterator[tuple[str, str]]:
    """(what, remedy) of what is odd about an image, of which training sees what is shown."""
    width, height = image.size
    short, long = sorted(image.size)
    if short < SMALL:
        yield f"is only {width} x {height} pixels", "a larger one would help, if there is one"
    if long > SLENDER * short:
        yield f"is very slender, {width} x {height} pixels", "crop it to what is to be seen"
    if Image.MAX_IMAGE_PIXELS is not None and width * height > Image.MAX_IMAGE_PIXELS:
        yield f"is very large, {width} x {height} pixels", "shrink it; at twice the limit of Pillow it is refused"
    if lost := _lost_in_8_bits(image):
        yield lost, "scale it to 0..255 and save it in 8 bits"
    elif all(low == high for low, high in (channel.getextrema() for channel in shown.split())):
        yield "shows nothing, it is of one colour all over", "replace or remove it"
    with contextlib.suppress(Exception):  # a later frame that is damaged is nobody's concern
        # a camera's MPO is one photograph, with its preview as a second frame
        if getattr(image, "is_animated", False) and image.format != "MPO":
            yield "has several frames", "the first is used; save the one that is wanted alone"


def _lost_in_8_bits(image: Image.Image) -> str | None:
    """Why the pixels of 16 or 32 bits look like nothing once they have 8; None where nothing is lost but depth."""
    bits16 = image.mode == "I" or image.mode.startswith("I;16")
    if not bits16 and image.mode != "F":
        return None
    pixels = np.asarray(image)
    low, high = float(pixels.min()), float(pixels.max())
    least, most = (1 << 12, 65535) if bits16 else (16, 255)  # 16 levels of grey left, at the least
    if low >= 0 and (high == 0 or least <= high <= most):
        return None
    return f"has values {low:g} to {high:g} of 0..{most}, of which 8 bits keep little"
