"""The pictures of an audit: what to expect, and images that were named wrongly."""

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
        figure = Figure(figsize=(7.2, 1.1 + 0.7 * len(methods)), layout="constrained")
        axes = figure.subplots()
        for place, method in enumerate(methods):
            colour = look(place)["color"]
            low, high = 100 * method.expected.low, 100 * method.expected.high
            axes.barh(place, high - low, left=low, height=0.3, color=colour, alpha=0.18)
            axes.plot(100 * method.expected.accuracy, place, marker="|", markersize=19, color=colour, mew=2.4)
            points = [100 * accuracy for accuracy in method.by_domain.values()]
            axes.plot(points, [place] * len(points), "o", color=colour, markersize=6)
            if method is findings.chosen:
                _name(axes, place, method.by_domain)
        axes.set_yticks(range(len(methods)), [title(method.name) for method in methods])
        axes.set(xlabel="Accuracy in per cent on a domain that was held out", xlim=(0, 100))
        axes.set_ylim(len(methods) - 0.5, -0.75)
        axes.grid(axis="x", **GRID)
        axes.set_axisbelow(True)
    return figure


def _name(axes: Axes, place: int, by_domain: dict[str, float]) -> None:
    """The domains' names, above and below their dots in turn, so that neighbours do not cover each other."""
    for i, (name, accuracy) in enumerate(sorted(by_domain.items(), key=lambda item: item[1])):
        side = "right" if accuracy > 0.9 else "left" if accuracy < 0.1 else "center"
        down = 12 if i % 2 == 0 else -19
        axes.annotate(name, (100 * accuracy, place), xytext=(0, down), textcoords="offset points", ha=side, size=8)


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
