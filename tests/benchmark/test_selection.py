"""What each selection chooses of made-up runs, against what was worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

import polars as pl
import pytest

from agfa.benchmark.records import read_runs
from agfa.benchmark.selection import LEAVE_ONE_OUT, SELECTIONS, SINGLE_SOURCE, Selection, over_seeds, select
from support_runs import make_run

HIGH, LOW = {"lr": 1e-3}, {"lr": 1e-4}


def made_up(root: Path) -> Path:
    """Target c of the domains a, b, c: two draws and two seeds; in seed 1 the second draw failed.

    Worked out by hand, as score (accuracy):
                                      seed 0                                seed 1
                              step 100     step 200                 step 100     step 200
    training-domain  HIGH    .85 (.50)    .85 (.60)  a tie         .60 (.70)    .60 (.80)  a tie
                     LOW     .70 (.55)    .84 (.65)                failed
    oracle           HIGH                 .70 (.60)                             .20 (.80)
                     LOW                  .65 (.65)
    leave-one-       HIGH    .40 (.50)    .50 (.60)                one of two held-out runs is there
    domain-out       LOW     .55 (.55)    .20 (.65)
    """
    sources, c = ("a", "b"), ("c",)
    make_run(
        root / "high0",
        target=c,
        source=sources,
        hparams=HIGH,
        evals={
            100: {"a": 0.8, "b": 0.9, "c test": 0.5, "c oracle": 0.4},
            200: {"a": 0.9, "b": 0.8, "c test": 0.6, "c oracle": 0.7},
        },
    )
    make_run(
        root / "low0",
        target=c,
        source=sources,
        hparams=LOW,
        evals={
            100: {"a": 0.7, "b": 0.7, "c test": 0.55, "c oracle": 0.9},
            200: {"a": 0.84, "b": 0.84, "c test": 0.65, "c oracle": 0.65},
        },
    )
    make_run(
        root / "high1",
        target=c,
        source=sources,
        hparams=HIGH,
        seed=1,
        evals={
            100: {"a": 0.6, "b": 0.6, "c test": 0.7, "c oracle": 0.1},
            200: {"a": 0.7, "b": 0.5, "c test": 0.8, "c oracle": 0.2},
        },
    )
    make_run(
        root / "low1",
        target=c,
        source=sources,
        hparams=LOW,
        seed=1,
        failed="cuda: out of memory",
        evals={100: {"a": 0.99, "b": 0.99, "c test": 0.99, "c oracle": 0.99}},
    )
    held_out = {  # the accuracy on the second domain held out, by step
        ("high0", "a"): (0.3, 0.4),
        ("high0", "b"): (0.5, 0.6),
        ("low0", "a"): (0.6, 0.2),
        ("low0", "b"): (0.5, 0.2),
        ("high1", "a"): (0.9, 0.9),
    }
    for (run, second), accuracies in held_out.items():
        (left,) = set("ab") - {second}
        make_run(
            root / f"{run}-{second}",
            target=(second, "c"),
            source=(left,),
            hparams=HIGH if run.startswith("high") else LOW,
            seed=int(run[-1]),
            evals={
                step: {left: 0.5, f"{second} test": accuracy, f"{second} oracle": 0, "c test": 0.1, "c oracle": 0.1}
                for step, accuracy in zip((100, 200), accuracies, strict=True)
            },
        )
    return root


def chosen(root: Path, how: Selection, **only: object) -> list[dict[str, object]]:
    frame = select(read_runs([root]), how)
    return frame.filter(*(pl.col(key) == value for key, value in {"protocol": LEAVE_ONE_OUT, **only}.items())).rows(
        named=True
    )


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("training-domain", {0: (0.5, 0.85, 100, 2), 1: (0.7, 0.6, 100, 1)}),
        ("oracle", {0: (0.6, 0.7, 200, 2), 1: (0.8, 0.2, 200, 1)}),
        ("leave-one-domain-out", {0: (0.55, 0.55, 100, 2)}),
    ],
)
def test_draws_ties_failures_and_missing_runs(
    tmp_path: Path, how: Selection, expected: dict[int, tuple[float, ...]]
) -> None:
    rows = chosen(made_up(tmp_path), how)
    assert {row["column"] for row in rows} == {"c"}
    found = {row["seed"]: (row["accuracy"], row["score"], row["step"], row["tried"]) for row in rows}
    assert found == {seed: pytest.approx(values) for seed, values in expected.items()}


def test_mean_and_standard_error_are_domainbeds() -> None:
    assert over_seeds([0.5, 0.7]) == (pytest.approx(0.6), pytest.approx(0.1 / math.sqrt(2)))
    assert over_seeds([0.5]) == (0.5, None)


def test_settings_that_score_the_same_go_to_the_last_digest(tmp_path: Path) -> None:
    for number in range(4):
        evals = {100: {"a": 0.5, "b test": number / 10, "b oracle": 0.5}}
        make_run(tmp_path / str(number), target=("b",), source=("a",), hparams={"lr": 1e-3 + number}, evals=evals)
    frame = read_runs([tmp_path])
    last = frame.filter(pl.col("settings") == frame["settings"].max(), pl.col("split") == "test")["accuracy"].item()
    for how in ("training-domain", "oracle"):
        (row,) = chosen(tmp_path, how)
        assert (row["accuracy"], row["tried"]) == (last, 4)


def test_what_was_seen_along_the_way_decides_and_what_was_measured_at_the_end_is_reported(tmp_path: Path) -> None:
    """In half precision step 200 was best; measured again in full, it is no longer, and its accuracy is another."""
    make_run(
        tmp_path / "r",
        target=("b",),
        source=("a",),
        evals={100: {"a": 0.80, "b test": 0.4, "b oracle": 0.4}, 300: {"a": 0.81, "b test": 0.5, "b oracle": 0.5}},
        finals={"best": {"a": 0.79, "b test": 0.52, "b oracle": 0.51}},
    )
    (row,) = chosen(tmp_path, "training-domain")
    assert (row["step"], row["accuracy"], row["score"]) == (300, 0.52, 0.81)
    (row,) = chosen(tmp_path, "oracle")
    assert (row["step"], row["accuracy"], row["score"]) == (300, 0.52, 0.51)


def test_a_target_that_was_not_watched_is_measured_on_the_models_kept(tmp_path: Path) -> None:
    make_run(
        tmp_path / "r",
        target=("b",),
        source=("a",),
        evals={100: {"a": 0.9}, 300: {"a": 0.8}},
        finals={"last": {"a": 0.8, "b test": 0.5, "b oracle": 0.4}},
    )
    for how in ("training-domain", "oracle"):
        (row,) = chosen(tmp_path, how)
        assert (row["step"], row["accuracy"]) == (300, 0.5)


def test_an_average_competes_with_averages_of_other_settings_alone(tmp_path: Path) -> None:
    for name, hparams, val in (("high", HIGH, 0.7), ("low", LOW, 0.8)):
        make_run(
            tmp_path / name,
            target=("b",),
            source=("a",),
            hparams=hparams,
            averaging="swad",
            evals={100: {"a": 0.99 - val / 10, "b test": 0.1, "b oracle": 0.1}},
            finals={"swad": {"a": val, "b test": val / 2, "b oracle": 1 - val}},
        )
    swad = chosen(tmp_path, "training-domain", row="swad")
    assert [(row["accuracy"], row["step"], row["tried"]) for row in swad] == [(0.4, 0, 2)]
    assert [row["accuracy"] for row in chosen(tmp_path, "oracle", row="swad")] == [0.35]
    assert [row["accuracy"] for row in chosen(tmp_path, "oracle", row="erm")] == [0.1]


def test_the_same_training_twice_is_one(tmp_path: Path) -> None:
    evals = {100: {"a": 0.5, "b test": 0.5, "b oracle": 0.5}}
    for averaging in ("none", "swad"):
        make_run(tmp_path / averaging, target=("b",), source=("a",), averaging=averaging, evals=evals)
    for how in ("training-domain", "oracle"):
        (row,) = chosen(tmp_path, how, row="erm")
        assert (row["tried"], Path(str(row["run"])).name) == (1, "none")


def test_a_single_source_is_measured_on_the_mean_over_all_others(tmp_path: Path) -> None:
    evals = {
        100: {"a": 0.5, "b test": 0.2, "b oracle": 0.1, "c test": 0.4, "c oracle": 0.3},
        200: {"a": 0.4, "b test": 0.9, "b oracle": 0.9, "c test": 0.9, "c oracle": 0.7},
    }
    make_run(tmp_path / "r", source=("a",), target=("b", "c"), evals=evals)
    frame = select(read_runs([tmp_path]), "training-domain")
    assert frame.select("protocol", "column", "accuracy").rows() == [(SINGLE_SOURCE, "a", pytest.approx(0.3))]
    (row,) = select(read_runs([tmp_path]), "oracle").rows(named=True)
    assert (row["accuracy"], row["score"]) == (pytest.approx(0.9), pytest.approx(0.8))


def test_a_run_that_leaves_a_domain_out_altogether_stands_beside_no_other(tmp_path: Path) -> None:
    evals = {100: {"a": 0.5, "c test": 0.9, "c oracle": 0.9}}
    make_run(tmp_path / "partial", target=("c",), source=("a",), evals=evals)
    make_run(tmp_path / "whole", target=("c",), source=("a", "b"), evals={100: {**evals[100], "b": 0.1}})
    assert [Path(str(row["run"])).name for row in chosen(tmp_path, "training-domain")] == ["whole"]


@pytest.mark.parametrize("how", SELECTIONS)
def test_nothing_is_chosen_of_nothing(tmp_path: Path, how: Selection) -> None:
    assert select(read_runs([tmp_path]), how).is_empty()
    make_run(tmp_path / "r", target=(), source=("a",), evals={100: {"a": 0.5}})
    assert select(read_runs([tmp_path]), how).is_empty()
