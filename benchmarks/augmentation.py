"""Whether a training notices that images are augmented by the batch, not one by one by torchvision as in DomainBed.

python benchmarks/augmentation.py [SEEDS]     digits; and PACS, where $AGFA_DATA has it

The same images in the same order, the same weights to start from; only the augmentation is drawn by another program.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy import stats
from torchvision import transforms

from agfa import train
from agfa.data.batches import AUGMENTATION, Batch, Part, seed_of
from agfa.data.sampling import sample
from agfa.training import trainer
from agfa.training.evaluate import mean_accuracy

SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"target": "mnist_m", "steps": 450, "evaluate_every": 450},
    "PACS": {"target": "sketch", "backbone": "efficientnet_lite0", "image_size": 96, "batch_size": 8, "steps": 150}
    | {"evaluate_every": 150, "hparams": {"lr": 3e-4}, "precision": "bf16-mixed"},
}


def one_by_one(
    parts: Sequence[Part], *, batch_size: int, image_size: int, seed: int, first_step: int, **_: object
) -> Iterator[Batch]:
    """`training_batches` with DomainBed's pipeline for each image: Pillow, and torchvision's transforms."""
    pipeline = transforms.Compose(
        [
            transforms.RandomResizedCrop(image_size, scale=(0.7, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.ColorJitter(0.3, 0.3, 0.3, 0.3),
            transforms.RandomGrayscale(),
            transforms.ToTensor(),
        ]
    )
    step = first_step
    while True:
        images, labels = [], []
        with torch.random.fork_rng():
            torch.manual_seed(seed_of(seed, step, 0, AUGMENTATION))
            for d, part in enumerate(parts):
                for i in part.indices[sample(len(part), batch_size, step, (seed, d))].tolist():
                    images.append(pipeline(Image.fromarray(part.images[i].permute(1, 2, 0).contiguous().numpy())))
                    labels.append(int(part.labels[i]))
        domains = torch.arange(len(parts)).repeat_interleave(batch_size)
        yield Batch(torch.stack(images), torch.tensor(labels), domains, (batch_size,) * len(parts))
        step += 1


def accuracy(data: str, seed: int, out: Path) -> float:
    """Source validation after the last step of ERM, in percent."""
    settings = {**SETTINGS[data], "data": data, "algorithm": "erm", "averaging": "none", "augment": True}
    run = train(**settings, track_target=False, seed=seed, out=out)
    found = mean_accuracy(run.scores["last"], "val")
    assert found is not None
    return 100 * found


def main() -> None:
    """Train each seed both ways."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    by_batch = trainer.training_batches
    for data in ("digits", *(["PACS"] if Path(os.environ.get("AGFA_DATA", ""), "PACS").is_dir() else [])):
        found: dict[str, list[float]] = {"by the batch": [], "one by one": []}
        with tempfile.TemporaryDirectory() as out:
            for seed in range(seeds):
                for (name, values), batches in zip(found.items(), (by_batch, one_by_one), strict=True):
                    trainer.training_batches = batches  # type: ignore[assignment]  # a generator is an iterator
                    values.append(accuracy(data, seed, Path(out, f"{name} {seed}")))
        a, b = (np.array(values) for values in found.values())
        interval = stats.t.interval(0.95, seeds - 1, (a - b).mean(), stats.sem(a - b))
        for name, values in found.items():
            print(f"{data}, {name}: {np.mean(values):.2f} ± {stats.sem(values):.2f} ({np.round(values, 1).tolist()})")
        print(f"{data}, difference: {(a - b).mean():.2f}, 95% interval {interval[0]:.2f} to {interval[1]:.2f}")


if __name__ == "__main__":
    main()
