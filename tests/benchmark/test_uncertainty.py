"""The report's section on calibration, from predictions made up so that its figures are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import roc_auc_score

from agfa.benchmark.report import build
from agfa.benchmark.tables import Cell, Line, Table
from agfa.training import predictions
from support_runs import make_run

DOMAINS = ("a", "b", "c")


def answers(rng: np.random.Generator, n: int, accuracy: float, sure: float, posterior: bool) -> pl.DataFrame:
    """n answers of two classes at a confidence around `sure`, the first of them right."""
    confidence = np.clip(rng.normal(sure, 0.05, n), 0.51, 0.99)
    predicted, label = np.zeros(n, int), (np.arange(n) >= accuracy * n).astype(int)
    return pl.DataFrame(
        {
            "index": np.arange(n),
            "key": [str(i) for i in range(n)],
            "label": label,
            "predicted": predicted,
            "probabilities": pl.Series(np.stack([confidence, 1 - confidence], 1), dtype=pl.Array(pl.Float32, 2)),
            "temperature": np.full(n, 1.0 + sure),
            "disagreement": pl.Series(rng.random(n) if posterior else [None] * n, dtype=pl.Float32),
        }
    )


def make(root: Path, algorithm: str, target: str, seed: int, told: bool = True) -> Path:
    """A run whose best model is the one at step 200, and an average."""
    source = tuple(d for d in DOMAINS if d != target)
    good, better = 0.5 + 0.1 * DOMAINS.index(target), 0.7 + 0.1 * DOMAINS.index(target)
    scores = dict.fromkeys(source, 0.9) | {f"{target} test": good}
    run = make_run(
        root / f"{algorithm}-{target}-{seed}",
        target=(target,),
        source=source,
        algorithm=algorithm,
        averaging="swad",
        seed=seed,
        evals={100: {**scores, source[0]: 0.8}, 200: scores, 300: {**scores, source[1]: 0.8}},
        finals={"swad": {**scores, f"{target} test": better}},
    )
    log = run / "metrics.jsonl"
    finals = "".join(
        f'{{"kind": "final", "model": "{model}", "step": {step}, "domain": "{target}", "role": "target", '
        f'"split": "test", "accuracy": {good}, "loss": 0.5, "n": 50}}\n'
        for model, step in (("last", 300), ("best", 200))
    )
    log.write_text(log.read_text() + finals)
    if told:
        rng = np.random.default_rng(seed)
        frames = []
        for model, accuracy, sure in (("last", 0.1, 0.6), ("best", good, 0.8), ("swad", better, 0.7)):
            for domain, role, split, share in (
                (source[0], "source", "val", 0.9),
                (target, "target", "test", accuracy),
            ):
                rows = answers(rng, 50, share, sure, algorithm == "agfa")
                whose = {"model": model, "domain": domain, "role": role, "split": split}
                frames.append(rows.select(*(pl.lit(v).alias(k) for k, v in whose.items()), pl.all()))
        predictions.write(run, frames)
    return run


def calibration(tables: tuple[Table, ...]) -> Table:
    (found,) = [table for table in tables if "calibration" in table.title]
    return found


def cells(line: Line, table: Table) -> dict[str, Cell | str | None]:
    return dict(zip(table.header[1:], line.cells, strict=True))


def test_a_line_for_each_row_of_the_models_in_the_tables(tmp_path: Path) -> None:
    runs = [make(tmp_path, a, t, s) for a in ("erm", "agfa") for t in DOMAINS for s in (0, 1)]
    report = build([tmp_path], "training-domain")
    table = calibration(report.tables)
    assert [line.label for line in table.lines] == ["ERM", "SWAD", "AGFA without SWAD", "AGFA"]
    for line, algorithm, model, accuracy in zip(
        table.lines, ("erm", "erm", "agfa", "agfa"), ("best", "swad") * 2, (0.6, 0.8) * 2, strict=True
    ):
        found = cells(line, table)
        by_seed: dict[str, list[float]] = {"ECE": [], "AUROC, confidence": []}
        for seed in (0, 1):
            values: dict[str, list[float]] = {"ECE": [], "AUROC, confidence": []}
            for run in runs:
                if run.name.startswith(algorithm) and run.name.endswith(str(seed)):
                    rows = pl.read_parquet(run / predictions.FILE).filter(pl.col("model") == model)
                    sure = rows["probabilities"].arr.get(0).to_numpy()
                    test = (rows["split"] == "test").to_numpy()
                    right = (rows["label"] == 0).to_numpy()[test]
                    bins = np.ceil(sure[test] * 15)
                    gaps = [abs(sure[test][bins == b].sum() - right[bins == b].sum()) for b in set(bins)]
                    values["ECE"].append(sum(gaps) / 50)
                    values["AUROC, confidence"].append(roc_auc_score(test, -sure))
            for name, each in values.items():
                by_seed[name].append(float(np.mean(each)))
        assert isinstance(found["Accuracy"], Cell)
        assert (found["Accuracy"].mean, found["Accuracy"].seeds) == (pytest.approx(accuracy), 2)
        for name, each in by_seed.items():
            assert isinstance(found[name], Cell)
            assert found[name].mean == pytest.approx(np.mean(each), abs=1e-6)
        assert (found["AUROC, disagreement"] is None) == (algorithm == "erm")
        assert found["Temperature"] == ("1.80" if model == "best" else "1.70")
    assert not any("no predictions" in note for note in table.notes)


def test_the_figure_has_a_curve_for_each_row(tmp_path: Path) -> None:
    for algorithm in ("erm", "agfa"):
        make(tmp_path, algorithm, "a", 0)
    (figure,) = [f for f in build([tmp_path], "training-domain").figures if f.name.endswith("calibration")]
    left, right = figure.figure.axes
    assert len(left.lines) == 4
    assert len(right.lines) == 1 + 4  # and the diagonal
    for line in left.lines:
        assert line.get_xdata()[-1] == 1
    assert left.lines[0].get_ydata()[-1] == pytest.approx(0.5)


def test_runs_without_predictions_are_counted_and_alone_have_no_table(tmp_path: Path) -> None:
    make(tmp_path / "old", "erm", "a", 0, told=False)
    report = build([tmp_path], "training-domain")
    assert not any("calibration" in table.title for table in report.tables)
    assert not any(figure.name.endswith("calibration") for figure in report.figures)
    make(tmp_path / "new", "agfa", "a", 0)
    table = calibration(build([tmp_path], "training-domain").tables)
    assert "2 of 4 models left no predictions, and are not here." in table.notes
