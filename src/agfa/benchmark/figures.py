"""Figures as SVG text to stand inside an HTML page: no prolog, no fonts, no ids shared with a neighbour."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray
from PIL import Image

Floats = NDArray[np.floating[Any]]

# Okabe and Ito's colours, without the yellow, which vanishes on white; seven colours and four strokes have no
# common divisor, so 28 methods look different, and neighbours differ in both.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_STROKES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))

_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: smaller, can be searched and read aloud
    "text.parse_math": False,  # a dollar in a name is a dollar
    "svg.hashsalt": "agfa",  # the same figure gives the same bytes
    "font.size": 10,
    "axes.edgecolor": "#6e7781",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": "#24292f",
    "axes.labelcolor": "#24292f",
    "xtick.color": "#24292f",
    "ytick.color": "#24292f",
}
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


def learning_curves(frame: pl.DataFrame, by: Sequence[str] = ("algorithm", "averaging")) -> str:
    """Source-validation and target-test accuracy against the step.

    A line per method, with a band from its lowest seed to its highest. `frame` is what `read_runs` gives; a
    method is a combination of the columns `by` (`none` is left unsaid). Within a seed the mean is taken over
    domains and runs. A step that only some seeds have reached is drawn from those.
    """
    evals = frame.filter(pl.col("kind") == "eval", pl.col("accuracy").is_not_null())
    methods = evals.select(by).unique(maintain_order=True).rows()
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, role, split, title in (
            (left, "source", "val", "Source domains, validation"),
            (right, "target", "test", "Target domain, test"),
        ):
            _curves(axes, evals.filter(pl.col("role") == role, pl.col("split") == split), by, methods)
            axes.set(title=title, xlabel="Training step")
            axes.grid(color="#d0d7de", linewidth=0.6)
        left.set_ylabel("Accuracy")
        left.yaxis.set_major_formatter(PercentFormatter(1.0))
        handles = [Line2D([], [], **_look(i)) for i in range(len(methods))]
        labels = [_label(method) for method in methods]
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, handlelength=3.2)
        return _svg(figure)


def amplitude_figure(views: AmplitudeViews) -> str:
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
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 0.4 + 1.2 * n), layout="constrained")
        grid = figure.subplots(n, 7, squeeze=False)
        for column, (title, panels) in enumerate(columns):
            grid[0, column].set_title(title)
            for row, panel in enumerate(panels):
                # "none": the pixels go in as they are, and the viewer scales them
                grid[row, column].imshow(_shrink(panel, pixels), interpolation="none")
                grid[row, column].set_axis_off()
        return _with_palettes(_svg(figure))


def unique_ids(svg: str, prefix: str) -> str:
    """The same SVG with `prefix` before every id and every reference to one."""
    svg = re.sub(r'(\sid=")', rf"\g<1>{prefix}", svg)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}", svg)


def _curves(axes: Axes, evals: pl.DataFrame, by: Sequence[str], methods: list[tuple[Any, ...]]) -> None:
    if evals.is_empty():
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center")
    seeds = evals.group_by([*by, "seed", "step"]).agg(pl.col("accuracy").mean())
    band = seeds.group_by([*by, "step"]).agg(
        mean=pl.col("accuracy").mean(), low=pl.col("accuracy").min(), high=pl.col("accuracy").max()
    )
    for i, method in enumerate(methods):
        chosen = [pl.col(name).eq_missing(pl.lit(value)) for name, value in zip(by, method, strict=True)]
        line = band.filter(*chosen).sort("step")
        # a dot per point as long as they are few: a run of one evaluation is a point, not an invisible line
        axes.plot(line["step"], line["mean"], **_look(i), marker="." if line.height <= 25 else "")
        axes.fill_between(line["step"], line["low"], line["high"], color=_look(i)["color"], alpha=0.15, lw=0)


def _look(i: int) -> dict[str, Any]:
    return {"color": _COLOURS[i % len(_COLOURS)], "linestyle": _STROKES[i % len(_STROKES)], "linewidth": 1.8}


def _label(method: tuple[Any, ...]) -> str:
    return " + ".join(str(part) for part in method if part not in (None, "none"))


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


def _with_palettes(svg: str) -> str:
    """Every embedded PNG with 256 colours of its own: a third of the size, and the maps have few more."""

    def smaller(match: re.Match[str]) -> str:
        image = Image.open(io.BytesIO(base64.b64decode(match[1]))).convert("RGB").quantize(256)
        file = io.BytesIO()
        image.save(file, "png", optimize=True)
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

    svg = re.sub(r'\sid="\w+-image\w+"', "", svg)  # made of the content: two black panels would share one
    return re.sub(r"data:image/png;base64,\s*([A-Za-z0-9+/=\s]+)", smaller, svg)


def _svg(figure: Figure) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    return unique_ids(svg, f"f{hashlib.sha256(svg.encode()).hexdigest()[:8]}-")
