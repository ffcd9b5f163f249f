"""The amplitude figure: what AGFA's generator replaces in an image, and what comes out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from agfa.benchmark.figures import STYLE

Floats = NDArray[np.floating[Any]]

_RASTER_BYTES = 600_000  # of all panels together, at one byte a pixel, before base64 adds a third


@dataclass(frozen=True)
class AmplitudeViews:
    """What AGFA does to each of n images; every array is n x H x W x C.

    `original`, `from_generated`, `from_mixed`: images in [0, 1] (the last two may leave it, and are clipped).
    `amplitude`, `generated`, `mixed`: amplitudes >= 0, and `phase`: angles in [-pi, pi], of the full spectrum
    as `fft2(norm="ortho")` gives it. The zero frequency comes first; it is brought to the middle here.
    """

    original: Floats
    phase: Floats
    amplitude: Floats
    generated: Floats
    mixed: Floats
    from_generated: Floats
    from_mixed: Floats


def amplitude_figure(views: AmplitudeViews) -> Figure:
    """One row per image, one column per view: what the generator replaces, and what comes out."""
    n = len(views.original)
    pixels = math.isqrt(_RASTER_BYTES // (7 * n))
    columns = [
        ("original", map(_as_image, views.original)),
        ("phase", map(_as_phase, views.phase)),
        ("amplitude", map(_as_amplitude, views.amplitude)),
        ("generated", map(_as_amplitude, views.generated)),
        ("mixed", map(_as_amplitude, views.mixed)),
        ("image from\ngenerated", map(_as_image, views.from_generated)),
        ("image from\nmixed", map(_as_image, views.from_mixed)),
    ]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 0.4 + 1.2 * n), layout="constrained")
        grid = figure.subplots(n, 7, squeeze=False)
        for column, (title, panels) in enumerate(columns):
            grid[0, column].set_title(title)
            for row, panel in enumerate(panels):
                # "none": the pixels go in as they are, and the viewer scales them
                grid[row, column].imshow(_shrink(panel, pixels), interpolation="none")
                grid[row, column].set_axis_off()
    return figure


def _as_image(image: Floats) -> Floats:
    """Three channels: grey from one, red and green from two (Coloured MNIST), the first three of more."""
    image = np.clip(np.nan_to_num(image), 0, 1)
    if image.shape[-1] == 1:
        return np.repeat(image, 3, axis=-1)
    if image.shape[-1] == 2:
        return np.concatenate([image, np.zeros_like(image[..., :1])], axis=-1)
    return image[..., :3]


def _as_amplitude(amplitude: Floats) -> Floats:
    # of the plain transform: most orthonormal amplitudes are far below 1, where log(1 + A) shows nothing
    plain = np.nan_to_num(amplitude) * math.sqrt(amplitude.shape[0] * amplitude.shape[1])
    log = np.fft.fftshift(np.log1p(plain).mean(axis=-1))
    span = log.max() - log.min()
    # each panel has its own scale: the shape of a spectrum is to be seen, not its size
    return _coloured((log - log.min()) / span if span > 0 else np.zeros_like(log), "viridis")


def _as_phase(phase: Floats) -> Floats:
    # the first channel: angles have no mean; the ends of a cyclic map, -pi and pi, are one colour
    return _coloured(np.fft.fftshift(np.nan_to_num(phase[..., 0])) / (2 * np.pi) + 0.5, "twilight")


def _coloured(values: Floats, name: str) -> Floats:
    coloured: Floats = mpl.colormaps[name](values)[..., :3]
    return coloured


def _shrink(panel: Floats, pixels: int) -> NDArray[np.uint8]:
    image = Image.fromarray(np.round(panel * 255).astype(np.uint8))
    image.thumbnail((pixels, pixels), Image.Resampling.BOX)
    return np.asarray(image)
