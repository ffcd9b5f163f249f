"""How the cost of a step grows: with image size, classes, domains, Monte Carlo samples, and steps taken before.

python benchmarks/growth.py [--backbone resnet50] [--images 12] [--repeats 3]

Each variant takes turns with the plain one (224 px, 7 classes, 3 domains, 50 samples); printed are the medians of
their ratios, with 90% intervals.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from agfa.benchmark.bench import Plan, method, minibatch, take_step
from agfa.benchmark.timing import Figure, interleave

VARIANTS: list[dict[str, Any]] = [
    *({"image_size": size} for size in (32, 64, 112, 160, 320)),
    *({"classes": classes} for classes in (65, 345)),
    *({"domains": domains} for domains in (1, 2, 6)),
    *({"samples": samples} for samples in (1, 10, 200, 1000)),
]
LATER = 100  # steps


def ratio(name: str, plan: Plan, variant: dict[str, Any], before: int = 0) -> tuple[Figure, Figure]:
    """Seconds of the plain step, and how many times as many the variant takes, having taken some steps before."""
    made = [
        method(p, name, **({"samples": p.samples} if name == "agfa" else {}))
        for p in (plan, replace(plan, **variant))
    ]
    steps = {}
    for what, each, algorithm in zip(("plain", "variant"), (plan, replace(plan, **variant)), made, strict=True):
        batch = minibatch(each, algorithm)
        steps[what] = lambda clock, each=each, algorithm=algorithm, batch=batch: take_step(
            each, algorithm, batch, None
        )
    for _ in range(before):
        steps["variant"](None)
    found = {
        what: [sum(parts) for parts in rows] for what, rows in interleave(steps, plan.on, plan.repeats, 1).items()
    }
    return Figure.of(found["plain"]), Figure.of(
        [b / a for a, b in zip(found["plain"], found["variant"], strict=True)]
    )


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backbone", default="resnet50")
    parser.add_argument("--images", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    plan = Plan(args.backbone, images=args.images, repeats=args.repeats, device=args.device)
    for name in ("erm", "agfa"):
        for variant in VARIANTS:
            if name == "agfa" or "samples" not in variant:
                show(name, ", ".join(f"{key} {value}" for key, value in variant.items()), *ratio(name, plan, variant))
        small = Plan("convnet", image_size=28, images=args.images, repeats=20 * args.repeats, device=args.device)
        show(name, f"after {LATER} steps", *ratio(name, small, {}, before=LATER))


def show(name: str, what: str, plain: Figure, times: Figure) -> None:
    """A line."""
    interval = f"({times.low:.3f} to {times.high:.3f})"
    print(f"{name:5} {what:16} {times.median:6.3f} {interval} of {1000 * plain.median:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
