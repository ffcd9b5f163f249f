"""`agfa bench`: the speed of a step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from agfa.cli.app import app
from agfa.cli.show import table
from agfa.errors import UsageError


@app.command
def bench(
    *,
    backbone: str = "resnet50",
    image_size: int = 224,
    images: int = 48,
    classes: int = 7,
    domains: int = 3,
    samples: int = 50,
    repeats: int = 5,
    precision: str = "bf16-mixed",
    compile: bool = True,
    matrix: int = 4096,
    device: str = "cpu",
    bars: bool = False,
    out: Annotated[Path | None, Parameter(name="--json")] = None,
) -> None:
    """Time steps of ERM, AGFA and SWAD beside plain reference loops and the machine's peak, in one process.

    Args:
        backbone: its name; weights are random.
        image_size: in pixels.
        images: through the backbone in a step; half of AGFA's are generated.
        classes: of the head.
        domains: that the images come from.
        samples: Monte Carlo samples of the logits.
        repeats: of every step, interleaved.
        precision: 32 or bf16-mixed, of ours; the reference is in full precision.
        compile: torch.compile the backbone, on a GPU.
        matrix: side of the matrices whose product gives the machine's peak.
        device: cpu or cuda.
        bars: print what was promised, and whether it is kept.
        out: a JSON file for all figures.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # torch's profiler, which counts the memory, is talkative
    from agfa.benchmark.bench import Plan
    from agfa.benchmark.bench import bench as measure
    from agfa.files import put
    from agfa.training.progress import Display

    if precision not in ("32", "bf16-mixed"):
        raise UsageError(f"precision is 32 or bf16-mixed, not {precision!r}")
    if images % 2 or images < 2 * domains:
        raise UsageError(f"images is {images}: it must be even, and at least twice the {domains} domains")
    plan = Plan(
        backbone, image_size, images, classes, domains, samples, repeats, precision != "32", compile, matrix, device
    )
    found = measure(plan, Display().say)
    if out is not None:
        text = json.dumps(found.record(), indent=2) + "\n"
        put(out, text.encode())
    print(f"{backbone}, {image_size} px, {images} images a step, {precision}, {device}; medians and 90% intervals")
    table(
        ("step", "ms", "images/s"),
        [(name, _ms(f), f"{images / f.median:.1f}") for name, f in found.seconds.items()],
    )
    table(
        ("stage", "of", "ms"),
        [(stage, name, _ms(f)) for name, stages in found.stages.items() for stage, f in stages.items()],
    )
    print(f"peak: {found.peak.median / 1e12:.2f} TFLOP/s; ERM's step: {found.operations / 1e12:.3f} TFLOP")
    print(f"memory: {', '.join(f'{name} {size:.0f} MB' for name, size in found.megabytes.items())}")
    if bars:
        rows = [(b.name, b.wanted, _figure(*b.found), "pass" if b.met else "FAIL") for b in found.bars()]
        table(("bar", "wanted", "found", ""), rows)
    else:
        table(("ratio or share", "found"), [(name, _figure(*f)) for name, f in found.ratios.items()])


def _ms(figure: tuple[float, float, float]) -> str:
    median, low, high = (1000 * value for value in figure)
    return f"{median:.1f} ({low:.1f} to {high:.1f})"


def _figure(median: float, low: float, high: float) -> str:
    return f"{median:.3f} ({low:.3f} to {high:.3f})"
