"""Run folders made up, with the accuracies that a test wants."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from agfa import algorithms

Accuracies = Mapping[str, float]  # by place: "d" of a source's validation, "d test" and "d oracle" of a target


def make_run(
    folder: Path,
    *,
    target: tuple[str, ...],
    source: tuple[str, ...],
    evals: Mapping[int, Accuracies] | None = None,
    finals: Mapping[str, Accuracies] | None = None,
    algorithm: str = "erm",
    hparams: Mapping[str, Any] | None = None,
    done: bool = True,
    failed: str | None = None,
    seconds: float = 100.0,
    **settings: Any,
) -> Path:
    """A run: what was measured along the way by step, and of the models it kept."""
    folder.mkdir(parents=True)
    recipe = algorithms.get(algorithm)
    config = {
        **{"data": "made up", "backbone": "convnet", "averaging": "none", "seed": 0, "steps": 300},
        **{"algorithm": algorithm, "hparams": recipe.hparams(dict(hparams or {})).model_dump(mode="json")},
        **{"target": list(target), "source": list(source), "out": str(folder), **settings},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    lines: list[dict[str, Any]] = []
    for step, accuracies in (evals or {}).items():
        lines.append({"kind": "train", "step": step, "losses": {"nll": 0.5}, "seconds": seconds * step / 300})
        lines += [{"kind": "eval", "step": step, **record} for record in _records(accuracies)]
    for model, accuracies in (finals or {}).items():
        lines += [{"kind": "final", "model": model, "step": 300, **record} for record in _records(accuracies)]
    if lines:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if failed is not None:
        (folder / "failed.json").write_text(json.dumps({"reason": failed, "attempts": 3}))
    elif done:
        (folder / "done").touch()
    return folder


def _records(accuracies: Accuracies) -> list[dict[str, Any]]:
    found = []
    for place, accuracy in accuracies.items():
        domain, _, split = place.partition(" ")
        role = "target" if split else "source"
        found.append({"domain": domain, "role": role, "split": split or "val", "accuracy": accuracy, "loss": 0.5})
    return [{**record, "n": 10} for record in found]


def make_paper_sweep(root: Path) -> Path:
    """A sweep like the paper's on PACS, made up: ERM, SWAD, CORAL, AGFA and its ablations; three seeds."""
    domains = ("art_painting", "cartoon", "photo", "sketch")
    level = {"erm": 0.84, "coral": 0.86, "agfa": 0.88, "agfa-mcd": 0.865, "agfa-no-mix": 0.86}
    easy = {"art_painting": 0.0, "cartoon": -0.05, "photo": 0.1, "sketch": -0.06}
    for algorithm, base in level.items():
        averaging = "none" if algorithm == "coral" else "swad"
        for target in domains:
            source = tuple(d for d in domains if d != target)
            for seed in range(3):
                for eta in (0.01, 0.1, 0.5) if algorithm == "agfa" and seed == 0 else (None,):
                    hparams = {} if eta is None else {"eta": eta}
                    shift = -0.02 * abs((eta or 0.1) - 0.1) + 0.004 * (seed - 1) + 0.001 * (len(target) % 3)
                    score = base + easy[target] + shift

                    def measured(gain: float, score: float = score, target: str = target) -> dict[str, float]:
                        of_sources = {name: 0.95 + gain / 2 for name in domains if name != target}
                        return {
                            **of_sources,
                            f"{target} test": score + gain,
                            f"{target} oracle": score + gain - 0.002,
                        }

                    make_run(
                        root / f"{algorithm}-{target}-{seed}-{eta}",
                        target=(target,),
                        source=source,
                        algorithm=algorithm,
                        hparams=hparams,
                        averaging=averaging,
                        seed=seed,
                        data="PACS",
                        backbone="resnet50",
                        evals={100: measured(-0.05), 200: measured(-0.01), 300: measured(-0.02)},
                        finals={"swad": measured(0.015)} if averaging == "swad" else {},
                        seconds=300.0 + 20 * len(algorithm),
                        done=(algorithm, target, seed) != ("coral", "photo", 2),
                        failed="out of memory" if (algorithm, target, seed) == ("coral", "sketch", 1) else None,
                    )
    return root
