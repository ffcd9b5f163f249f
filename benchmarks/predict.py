"""How fast `agfa predict` is on a folder of small images, and how much memory it takes, process and all.

python benchmarks/predict.py [IMAGES] [--backbone convnet --image-size 32]

The images are made up; of more than 2000, the others are hard links to those. The weights are random.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

DIFFERENT = 2000


def make_images(folder: Path, number: int) -> None:
    """JPEG files of 48 x 40, in one flat folder."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(number):
        file = folder / f"{i:07}.jpg"
        if i < DIFFERENT:
            coarse = Image.fromarray(rng.integers(0, 256, (6, 5, 3), np.uint8))
            coarse.resize((40, 48), Image.Resampling.BICUBIC).save(file, quality=90)
        else:
            file.hardlink_to(folder / f"{i % DIFFERENT:07}.jpg")


def make_model(folder: Path, backbone: str, image_size: int) -> None:
    """An AGFA model of 10 classes."""
    from agfa.nn.backbones import build_backbone
    from agfa.training import model_file
    from agfa.training.model_file import ModelCard

    built = build_backbone(backbone, 3, image_size, weights="none")
    card = ModelCard(
        classes=tuple(f"class{i}" for i in range(10)),
        backbone=built.tag,
        initial_weights="",
        image_size=image_size,
        channels=3,
        mean=tuple(built.mean.flatten().tolist()),
        std=tuple(built.std.flatten().tolist()),
        algorithm="agfa",
        hparams={},
        sources=("made up",),
        targets=(),
        model="last",
        step=0,
    )
    model_file.save(folder / "model", model_file._build(card).state_dict(), card)


def main() -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser()
    parser.add_argument("images", type=int, nargs="?", default=20_000)
    parser.add_argument("--backbone", default="convnet")
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--kinds", nargs="+", default=["csv", "jsonl", "parquet"])
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        make_images(folder / "images", asked.images)
        make_model(folder, asked.backbone, asked.image_size)
        for kind in asked.kinds:
            command = [sys.executable, "-m", "agfa", "predict", str(folder), str(folder / "images")]
            began = time.monotonic()
            process = subprocess.Popen([*command, "--out", str(folder / f"out.{kind}")])
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.monotonic() - began
            if status:
                sys.exit(f"it ended with status {status}")
            peak = usage.ru_maxrss / (1 if sys.platform == "darwin" else 1024) / 1024
            size = (folder / f"out.{kind}").stat().st_size / 1e6
            print(
                f"{kind}: {asked.images} images in {seconds:.1f} s (start included), {asked.images / seconds:.0f}/s, "
                f"{usage.ru_utime + usage.ru_stime:.1f} s of processor, peak {peak:.2f} GiB, {size:.1f} MB written"
            )


if __name__ == "__main__":
    main()
