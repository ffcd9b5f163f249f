"""How figures look and are written (SVG that may stand inside an HTML page, PDF), and the learning curves."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter
from PIL import Image

from agfa.benchmark.rows import title as name_of

# Okabe and Ito's colours, without the yellow, which vanishes on white; seven colours and four strokes have no
# common divisor, so 28 methods look different, and neighbours differ in both.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_STROKES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)))

STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: smaller, can be searched and read aloud
    "text.parse_math": False,  # a dollar in a name is a dollar
    "pdf.fonttype": 42,  # letters stay letters there too
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
ACROSS, BESIDE = 108, 11  # letters that the learning curves are wide; that a line of the legend needs beside its name
GRID: Any = {"color": "#d0d7de", "linewidth": 0.6}


def learning_curves(frame: pl.DataFrame) -> Figure:
    """Source-validation and target-test accuracy against the step.

    A line per row of the tables, with a band from its lowest seed to its highest. `frame` is what `read_runs` gives.
    Within a seed the mean is taken over domains and runs. A step that only some seeds have reached is drawn from
    those.
    """
    evals = frame.filter(pl.col("kind") == "eval", pl.col("accuracy").is_not_null())
    rows = evals["row"].unique(maintain_order=True).to_list()
    labels = [name_of(row) for row in rows]
    columns = max(1, min(4, ACROSS // (max(map(len, labels), default=0) + BESIDE)))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.2 + 0.2 * -(-len(rows) // columns)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, role, split, title in (
            (left, "source", "val", "Source domains, validation"),
            (right, "target", "test", "Target domain, test"),
        ):
            _curves(axes, evals.filter(pl.col("role") == role, pl.col("split") == split), rows)
            axes.set(title=title, xlabel="Training step")
            axes.grid(**GRID)
        left.set_ylabel("Accuracy")
        left.yaxis.set_major_formatter(PercentFormatter(1.0))
        handles = [Line2D([], [], **look(i)) for i in range(len(rows))]
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=3.2)
    return figure


def to_svg(figure: Figure) -> str:
    """The figure to stand inside an HTML page: no prolog, no fonts, no ids shared with a neighbour."""
    file = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg = file.getvalue()
    svg = _with_palettes(svg[svg.index("<svg") :])
    return unique_ids(svg, f"f{hashlib.sha256(svg.encode()).hexdigest()[:8]}-")


def to_pdf(figure: Figure) -> bytes:
    """The figure to stand in a paper."""
    file = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(file, format="pdf", metadata={"CreationDate": None})
    return file.getvalue()


def unique_ids(svg: str, prefix: str) -> str:
    """The same SVG with `prefix` before every id and every reference to one."""
    svg = re.sub(r'(\sid=")', rf"\g<1>{prefix}", svg)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}", svg)


def look(i: int) -> dict[str, Any]:
    """How the i-th line of a figure is drawn."""
    return {"color": _COLOURS[i % len(_COLOURS)], "linestyle": _STROKES[i % len(_STROKES)], "linewidth": 1.8}


def _curves(axes: Axes, evals: pl.DataFrame, rows: Sequence[str]) -> None:
    if evals.is_empty():
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center")
    seeds = evals.group_by("row", "seed", "step").agg(pl.col("accuracy").mean())
    band = seeds.group_by("row", "step").agg(
        mean=pl.col("accuracy").mean(), low=pl.col("accuracy").min(), high=pl.col("accuracy").max()
    )
    for i, row in enumerate(rows):
        line = band.filter(pl.col("row") == row).sort("step")
        # a dot per point as long as they are few: a run of one evaluation is a point, not an invisible line
        axes.plot(line["step"], line["mean"], **look(i), marker="." if line.height <= 25 else "")
        axes.fill_between(line["step"], line["low"], line["high"], color=look(i)["color"], alpha=0.15, lw=0)


def _with_palettes(svg: str) -> str:
    """Every embedded PNG with 256 colours of its own: a third of the size, and the maps have few more."""

    def smaller(match: re.Match[str]) -> str:
        image = Image.open(io.BytesIO(base64.b64decode(match[1]))).convert("RGB").quantize(256)
        file = io.BytesIO()
        image.save(file, "png", optimize=True)
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()

    svg = re.sub(r'\sid="image\w+"', "", svg)  # made of the content: two black panels would share one
    return re.sub(r"data:image/png;base64,\s*([A-Za-z0-9+/=\s]+)", smaller, svg)
