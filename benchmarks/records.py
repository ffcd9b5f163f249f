"""How long many run folders take to read: made up, with logs as long as the paper's runs leave them.

python benchmarks/records.py [RUNS]
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from agfa.benchmark.records import read_runs
from agfa.training.config import CompleteConfig, dump

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
EVALUATIONS = 50  # 5000 steps, one every 100
MODELS = ("last", "best", "swad", "oracle")


def make_run(folder: Path, number: int) -> None:
    """One run of 320 records: each evaluation measures four domains, the target's two parts included."""
    target = DOMAINS[number % 4]
    sources = tuple(name for name in DOMAINS if name != target)
    config = CompleteConfig(
        data="PACS",
        target=(target,),
        source=sources,
        algorithm="agfa",
        hparams={"lr": random.uniform(1e-5, 1e-3), "weight_decay": 0.0, "eta": 0.1, "alpha": 1.0, "samples": 50}
        | {"initial_sd": 0.01, "mean_lr": None, "variance_lr": None, "generator_lr": None, "schedule": "fused"}
        | {"discrepancy": "smcd", "mix": True, "target": "amplitude", "generator": "linear"},
        averaging="swad",
        swad_ratio=1.3,
        selection="swad",
        backbone="resnet50",
        freeze_batchnorm=True,
        track_target=True,
        image_size=224,
        channels=3,
        augment=True,
        steps=5000,
        evaluate_every=100,
        batch_size=32,
        seed=number // 4 % 5,
        out=folder,
    )
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump(config))
    (folder / "metrics.jsonl").write_text(make_log(target, sources))
    (folder / "done").touch()


@cache
def make_log(target: str, sources: tuple[str, ...]) -> str:
    """The log of a run; every run with the same target has the same, for they are read alike."""
    places = [(name, "source", "val") for name in sources] + [(target, "target", s) for s in ("test", "oracle")]
    records: list[dict[str, object]] = []
    for step in range(100, 5001, 100):
        losses = {"nll": random.random(), "kl": random.random(), "discrepancy": random.random()}
        told = {"kind": "train", "step": step, "losses": losses, "seconds": step / 3, "images_per_second": 80.5}
        records += [told, *_evaluation(places, kind="eval", step=step)]
    for model in MODELS:
        records += _evaluation(places, kind="final", model=model, step=5000)
    return "".join(json.dumps(record) + "\n" for record in records)


def _evaluation(places: list[tuple[str, str, str]], **common: object) -> list[dict[str, object]]:
    score = {"accuracy": random.random(), "loss": random.random(), "n": 1000}
    return [{**common, "domain": domain, "role": role, "split": split, **score} for domain, role, split in places]


def main() -> None:
    """Make them, read them twice."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as root:
        for number in range(count):
            make_run(Path(root, f"{number:05}"), number)
        for attempt in ("first", "second"):
            began, cpu = time.perf_counter(), time.process_time()
            frame = read_runs([Path(root)])
            seconds, of_cpu = time.perf_counter() - began, time.process_time() - cpu
            found = f"{count:,} runs, {frame.height:,} evaluations"
            print(f"{attempt} reading: {found}, {seconds:.1f} s ({of_cpu:.1f} s of CPU, all cores together)")


if __name__ == "__main__":
    main()
