"""The pictures of an audit: what to expect, reliability, coverage, mistakes."""

from __future__ import annotations

import base64
import io

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from agfa.benchmark.audit_findings import Findings
from agfa.benchmark.figures import GRID, STYLE, look
from agfa.benchmark.rows import title
from agfa.data.decode import decode, normalise
from agfa.data.domains import DomainDataset

SIDE = 112  # pixels of a thumbnail


def expected_figure(findings: Findings) -> Figure:
    """Each method's accuracy on every held-out domain, and the interval for the next one."""
    methods = findings.methods
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 1.1 + 0.55 * len(methods)), layout="constrained")
        axes = figure.subplots()
        for place, method in enumerate(methods):
            colour = look(place)["color"]
            low, high = 100 * method.expected.low, 100 * method.expected.high
            axes.barh(place, high - low, left=low, height=0.34, color=colour, alpha=0.18)
            axes.plot(100 * method.expected.accuracy, place, marker="|", markersize=19, color=colour, mew=2.4)
            points = [100 * accuracy for accuracy in method.by_domain.values()]
            axes.plot(points, [place] * len(points), "o", color=colour, markersize=6)
            if method is findings.chosen:
                for name, accuracy in method.by_domain.items():
                    axes.annotate(
                        name, (100 * accuracy, place), xytext=(0, 11), textcoords="offset points", ha="center", size=8
                    )
        axes.set_yticks(range(len(methods)), [title(method.name) for method in methods])
        axes.set(xlabel="Accuracy in per cent on a domain that was held out", xlim=(0, 100))
        axes.set_ylim(len(methods) - 0.5, -0.75)
        axes.grid(axis="x", **GRID)
        axes.set_axisbelow(True)
    return figure


def trust_figure(findings: Findings) -> Figure:
    """Accuracy against confidence, and against the share of images that are answered."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        confidence, accuracy, images = (np.array(values) for values in zip(*findings.bins, strict=True))
        left.plot([0, 100], [0, 100], color="#6e7781", linewidth=1, linestyle=(0, (4, 3)))
        left.scatter(
            100 * confidence, 100 * accuracy, s=20 + 180 * images / images.max(), alpha=0.45, color=look(0)["color"]
        )
        left.plot(100 * confidence, 100 * accuracy, color=look(0)["color"], linewidth=1.2)
        left.set(title="Reliability", xlabel="Probability that it states", ylabel="Accuracy in per cent")
        shares = [(100 * share, 100 * right_of) for _, share, right_of in findings.coverage]
        right.plot(*zip(*shares, strict=True), color=look(0)["color"], linewidth=1.8, marker=".")
        right.set(title="Coverage", xlabel="Images that it answers, the surest first", ylabel="Accuracy in per cent")
        for axes in (left, right):
            _square(axes)
    return figure


def thumbnail(dataset: DomainDataset, domain: str, image: int) -> str:
    """An image, as the address of its own pixels."""
    images = dataset[domain].images
    if isinstance(images, np.ndarray):
        picture = normalise(Image.fromarray(images[image].squeeze()))
    else:
        picture = decode(images[image])
    if max(picture.size) < SIDE:  # a digit of 32 pixels stays sharp
        picture = picture.resize(
            [round(side * SIDE / max(picture.size)) for side in picture.size], Image.Resampling.NEAREST
        )
    picture.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    picture.save(file, "jpeg", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def _square(axes: Axes) -> None:
    axes.set(xlim=(0, 102), ylim=(0, 102))
    axes.grid(**GRID)
