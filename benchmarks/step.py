"""What a step of AGFA costs beside one of ERM, for the same number of images through the backbone.

All are timed in one process, interleaved, so that a busy machine slows all alike; ratios of medians are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from agfa import algorithms
from agfa.algorithms.base import Algorithm, Problem, plain_backward
from agfa.data.batches import Batch
from agfa.nn.backbones import build_backbone

METHODS = {
    "erm": ("erm", {}),
    "agfa fused": ("agfa", {"schedule": "fused"}),
    "agfa alternating": ("agfa", {"schedule": "alternating"}),
}


def main() -> None:
    """Time the methods and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backbone", default="convnet")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--images", type=int, default=48, help="through the backbone in a step")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--bf16", action="store_true")
    given = parser.parse_args()

    shape = (3, given.image_size, given.image_size)
    steps = {name: make_step(given, shape, *method) for name, method in METHODS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(given.repeats + 2):  # the first two warm up
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if repeat >= 2:
                seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    precision = "bf16" if given.bf16 else "float32"
    print(f"{given.backbone}, {given.image_size} px, {given.images} images a step, {precision}")
    for name, median in medians.items():
        print(f"{name:18}{1000 * median:8.1f} ms a step{median / medians['erm']:7.2f} x erm")


def make_step(given: argparse.Namespace, shape: tuple[int, int, int], name: str, chosen: dict[str, object]):
    """One training step of a method on random images, as a function of nothing."""
    recipe = algorithms.get(name)
    hparams = recipe.hparams(chosen)
    problem = Problem(n_classes=7, n_domains=3, n_images=1000, image_shape=shape)
    backbone = build_backbone(given.backbone, 3, given.image_size, weights="none")
    algorithm: Algorithm = recipe.method(backbone, problem, hparams).train()
    n = given.images // recipe.method.passes(hparams)
    batch = Batch(torch.rand(n, *shape), torch.arange(n) % 7, torch.zeros(n, dtype=torch.long), (n,))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=given.bf16):
            algorithm.update(batch, plain_backward)

    return step


if __name__ == "__main__":
    main()
