"""Does an audit's interval, made from three domains of Digits, hold the accuracy then measured on the fourth?

python benchmarks/audit_digits.py OUT [SEEDS [STEPS]]

For each choice of the fourth, three models learn from two domains each and are measured on the third: what
`agfa audit` does with those three domains. The interval comes from these figures alone; then a model learns from all
three and is measured on the fourth. A pair of domains held out serves two choices, so a seed takes ten trainings of a
method. Resumable: the runs are those of a sweep with leave-one-domain-out validation.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import yaml

from agfa.benchmark.audit_interval import Expected, expected
from agfa.benchmark.expansion import expand
from agfa.benchmark.records import read_runs
from agfa.benchmark.running import Here, run_all
from agfa.training.progress import Display

MODELS = {"erm": ("erm", "best"), "swad": ("erm", "swad"), "agfa": ("agfa", "swad")}


def compared(frame: pl.DataFrame, method: str, seed: int) -> Iterator[tuple[str, Expected, float]]:
    """Each choice of the fourth domain whose trainings are done: what the audit says, and what was measured."""
    algorithm, model = MODELS[method]
    rows = frame.filter(pl.col("algorithm") == algorithm, pl.col("model") == model, pl.col("seed") == seed)
    found = {
        (frozenset(targets), domain): (accuracy, n)
        for targets, domain, accuracy, n in rows.select("targets", "domain", "accuracy", "n").rows()
    }
    names = sorted({name for targets, _ in found for name in targets})
    for fourth in names:
        three = [found.get((frozenset({name, fourth}), name)) for name in names if name != fourth]
        held, measured = [of for of in three if of is not None], found.get((frozenset({fourth}), fourth))
        if len(held) == 3 and measured is not None:
            yield fourth, expected([accuracy for accuracy, _ in held], [n for _, n in held]), measured[0]


def report(out: Path) -> None:
    """Print every comparison, and for each method and seed how many hold."""
    frame = read_runs([out]).filter(
        pl.col("done"), pl.col("kind") == "final", pl.col("role") == "target", pl.col("split") == "test"
    )
    for method in MODELS:
        for seed in sorted(frame["seed"].unique().to_list()):
            found = list(compared(frame, method, seed))
            for fourth, e, measured in found:
                print(
                    f"{method}, seed {seed}, {fourth}: expected {e.accuracy:.1%}, {e.low:.1%} to {e.high:.1%}; "
                    f"measured {measured:.1%}{'' if e.low <= measured <= e.high else ', OUTSIDE'}"
                )
            if found:
                held = sum(e.low <= measured <= e.high for _, e, measured in found)
                width = np.mean([e.high - e.low for _, e, _ in found])
                error = np.mean([abs(measured - e.accuracy) for _, e, measured in found])
                print(f"  {held} of {len(found)} held; mean width {width:.1%}, mean error {error:.1%}")


def main(out: Path, seeds: int = 1, steps: int | None = None) -> None:
    """Train what is not done, and report."""
    sweep = {
        "datasets": "digits",
        "methods": ["erm", "agfa"],  # ERM's trainings give SWAD too
        "seeds": seeds,
        "selection": "leave_one_domain_out",
        "settings": {"steps": steps} if steps else {},
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    run_all(expand(out / "sweep.yaml", out), Here(), 1, Display())
    report(out)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
