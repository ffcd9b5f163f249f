"""Our three selections on DomainBed's own test sweep, beside what its code chooses and what its results.txt prints.

python benchmarks/domainbed_selection.py DOMAINBED

DOMAINBED is a checkout of DomainBed (2024-12). Needs tqdm, which its code imports.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import polars as pl

from agfa.benchmark.selection import LEAVE_ONE_OUT, SELECTIONS, Selection, select
from agfa.benchmark.tables import accuracies, cell, seed_means

DOMAINS = ("C", "L", "S", "V")
CLASSES = {
    "training-domain": "IIDAccuracySelectionMethod",
    "leave-one-domain-out": "LeaveOneOutSelectionMethod",
    "oracle": "OracleSelectionMethod",
}


def records(sweep: Path) -> pl.DataFrame:
    """The sweep's records in the columns of `read_runs`: "in" are a domain's 80%, "out" its 20%."""
    rows = []
    for file in sorted(sweep.glob("*/results.jsonl")):
        for line in file.read_text().splitlines():
            record = json.loads(line)
            args = record["args"]
            held_out = {DOMAINS[i] for i in args["test_envs"]}
            run = {
                **{"run": file.parent.name, "dataset": args["dataset"], "backbone": "resnet50", "row": "erm"},
                **{"sources": [d for d in DOMAINS if d not in held_out], "targets": sorted(held_out)},
                # the order of digests is that of its hparams seeds: ties go as they go there
                **{"settings": f"{args['hparams_seed']:06}", "seed": args["trial_seed"], "done": True},
                **{"kind": "eval", "model": None, "step": record["step"], "seconds": None},
            }
            for i, domain in enumerate(DOMAINS):
                parts = (("in", "test"), ("out", "oracle")) if domain in held_out else (("out", "val"),)
                rows += [
                    {**run, "domain": domain, "split": split, "accuracy": record[f"env{i}_{part}_acc"]}
                    for part, split in parts
                ]
    schema = {"model": pl.String, "seconds": pl.Float64}
    return pl.DataFrame(rows, schema_overrides=schema, infer_schema_length=None)


def theirs(sweep: Path, how: Selection) -> dict[tuple[int, str], float]:
    """What DomainBed's code chooses: accuracy by seed and domain."""
    from domainbed import model_selection
    from domainbed.lib import reporting

    method: Any = getattr(model_selection, CLASSES[how])
    groups = reporting.get_grouped_records(reporting.load_records(str(sweep)))
    found = {(g["trial_seed"], DOMAINS[g["test_env"]]): method.sweep_acc(g["records"]) for g in groups}
    return {key: accuracy for key, accuracy in found.items() if accuracy is not None}


def main() -> None:
    """Compare every cell."""
    root = Path(sys.argv[1])
    sys.path.insert(0, str(root))
    sweep = root / "domainbed" / "misc" / "test_sweep_data"
    frame = records(sweep)
    printed = (sweep / "results.txt").read_text().split("-------- Dataset: ")[1:]
    for how, block in zip(SELECTIONS, printed, strict=True):
        chosen = select(frame, how).filter(pl.col("protocol") == LEAVE_ONE_OUT)
        ours = {(seed, column): a for seed, column, a in chosen.select("seed", "column", "accuracy").rows()}
        other = theirs(sweep, how)
        assert ours.keys() == other.keys()
        apart = max(abs(ours[key] - other[key]) for key in ours)

        rows = accuracies(chosen)["erm"]
        cells = [cell(rows[domain]) for domain in DOMAINS] + [cell(seed_means(rows, DOMAINS))]
        shown = [f"{c.shown} +/- {100 * (c.error or 0):.1f}" for c in cells if c is not None]
        average = shown[-1].split()[0]
        row = [*shown[:-1], average, shown[-1], average]
        same = row == re.findall(r"\d+\.\d \+/- \d+\.\d|\d+\.\d(?! \+)", block)
        verdict = "the same" if same else "DIFFERENT"
        print(f"{how}: {len(ours)} chosen accuracies, largest difference {apart:g}; {len(row)} cells: {verdict}")


if __name__ == "__main__":
    main()
