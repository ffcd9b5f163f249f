"""Run folders to tables, against means and standard errors worked out by hand."""

import json
import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

from agfa.benchmark.records import find_runs, read_losses, read_runs, summarise
from agfa.errors import AgfaError, UsageError


def record(kind: str, accuracy: float, **more: Any) -> dict[str, Any]:
    base = {"kind": kind, "step": 300, "domain": "d", "role": "target", "split": "test"}
    model = {"model": "last"} if kind == "final" else {}
    return {**base, **model, "accuracy": accuracy, "loss": 0.5, "n": 10, "seconds": 0.1, **more}


def make_run(run: Path, *records: dict[str, Any], done: bool = True, tail: str = "", **config: Any) -> Path:
    run.mkdir(parents=True)
    names = {"data": "digits", "algorithm": "erm", "averaging": "none", "backbone": "convnet"}
    settings = {**names, "target": ["d"], "source": ["a"], "seed": 0, **config}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records) + tail)
    if done:
        (run / "done").touch()
    return run


def test_runs_are_found_at_any_depth_in_order_and_only_when_whole(tmp_path: Path) -> None:
    b = make_run(tmp_path / "sweep" / "b")
    a = make_run(tmp_path / "sweep" / "a")
    (tmp_path / "sweep" / "c").mkdir()
    (tmp_path / "sweep" / "c" / "config.yaml").touch()
    assert find_runs(tmp_path) == [a, b]
    assert find_runs(a) == [a]
    with pytest.raises(UsageError, match="no such folder"):
        find_runs(tmp_path / "nowhere")


def test_a_row_holds_the_run_and_the_record(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", record("eval", 0.25, step=100), target=["d", "e"], done=False, seed=7)
    (row,) = read_runs([tmp_path, run]).rows(named=True)  # two roots over one run
    assert row == {
        **{"run": str(run), "dataset": "digits", "target": "d+e", "algorithm": "erm", "averaging": "none"},
        **{"backbone": "convnet", "seed": 7, "done": False, "kind": "eval", "model": None, "step": 100},
        **{"domain": "d", "role": "target", "split": "test", "accuracy": 0.25, "loss": 0.5, "n": 10},
        **{"seconds": 0.1},
    }


def test_no_runs_give_an_empty_table_with_its_columns(tmp_path: Path) -> None:
    frame = read_runs([tmp_path])
    assert frame.is_empty()
    assert summarise(frame, ["algorithm"]).is_empty()


def test_mean_and_standard_error_over_seeds(tmp_path: Path) -> None:
    for seed, accuracy in enumerate([0.5, 0.6, 0.7]):
        make_run(tmp_path / f"erm{seed}", record("final", accuracy), seed=seed)
    # seed 1 of agfa was never started; seed 2 has evaluations, but no final one yet
    make_run(tmp_path / "agfa0", record("final", 0.9), algorithm="agfa")
    make_run(tmp_path / "agfa2", record("eval", 0.1), algorithm="agfa", seed=2, done=False)
    agfa, erm = summarise(read_runs([tmp_path]), ["algorithm"]).rows(named=True)
    assert (erm["mean"], erm["seeds"]) == (pytest.approx(0.6), 3)
    assert erm["standard_error"] == pytest.approx(0.1 / math.sqrt(3))
    assert (agfa["mean"], agfa["standard_error"], agfa["seeds"]) == (0.9, None, 1)


@pytest.mark.parametrize("together", [True, False], ids=["two targets of one run", "a run per target"])
def test_the_mean_over_targets_comes_before_that_over_seeds(tmp_path: Path, together: bool) -> None:
    for seed, (d, e) in enumerate([(0.2, 0.4), (0.5, 0.9)]):
        of_d, of_e = record("final", d), record("final", e, domain="e")
        if together:
            make_run(tmp_path / f"r{seed}", of_d, of_e, seed=seed, target=["d", "e"])
        else:
            make_run(tmp_path / f"d{seed}", of_d, seed=seed)
            make_run(tmp_path / f"e{seed}", of_e, seed=seed, target=["e"])
    (row,) = summarise(read_runs([tmp_path]), ["dataset", "algorithm"]).rows(named=True)
    assert (row["mean"], row["seeds"], row["targets"]) == (pytest.approx(0.5), 2, 2)  # of 0.3 and 0.7
    assert row["standard_error"] == pytest.approx(0.2)
    per_domain = summarise(read_runs([tmp_path]), ["algorithm", "domain"])
    assert per_domain["mean"].to_list() == pytest.approx([0.35, 0.65])


def test_a_seed_that_lacks_a_target_is_left_out_and_counted(tmp_path: Path) -> None:
    make_run(tmp_path / "d0", record("final", 0.2))
    make_run(tmp_path / "e0", record("final", 0.4, domain="e"), target=["e"])
    make_run(tmp_path / "d1", record("final", 0.99), seed=1)
    (row,) = summarise(read_runs([tmp_path]), ["algorithm"]).rows(named=True)
    assert (row["mean"], row["seeds"], row["incomplete"]) == (pytest.approx(0.3), 1, 1)


def test_only_the_target_test_split_of_final_models_counts(tmp_path: Path) -> None:
    others = [
        record("final", 1.0, split="oracle"),
        record("final", 1.0, role="source", split="val", domain="a"),
    ]
    make_run(tmp_path / "r", record("eval", 1.0), *others, record("final", 0.5))
    assert summarise(read_runs([tmp_path]), ["algorithm"])["mean"].to_list() == [0.5]


def test_models_and_settings_are_never_mixed(tmp_path: Path) -> None:
    make_run(tmp_path / "r", record("final", 0.5), record("final", 0.6, model="swad"))
    frame = read_runs([tmp_path])
    with pytest.raises(AgfaError, match="models: last, swad"):
        summarise(frame, ["algorithm"])
    assert summarise(frame, ["algorithm", "model"])["mean"].to_list() == [0.5, 0.6]
    assert summarise(frame.filter(pl.col("model") == "swad"), ["algorithm"])["mean"].to_list() == [0.6]


def test_a_resumed_run_counts_its_later_record(tmp_path: Path) -> None:
    make_run(tmp_path / "r", record("final", 0.5), record("final", 0.6))
    assert read_runs([tmp_path])["accuracy"].to_list() == [0.6]


@pytest.mark.parametrize("torn", ['{"kind": "ev', '{"kind": "ev\n', '{"domain": "\udcc3'])
def test_a_torn_last_line_is_ignored(tmp_path: Path, torn: str) -> None:
    run = make_run(tmp_path / "r", record("eval", 0.5))
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(torn.encode("utf-8", "surrogateescape"))
    assert read_runs([tmp_path]).height == 1


@pytest.mark.parametrize("line", ['{"kind": "ev', "[1]", '{"kind": "eval", "accuracy": "high"}'])
def test_a_corrupt_earlier_line_is_named(tmp_path: Path, line: str) -> None:
    good = json.dumps(record("eval", 0.5))
    run = make_run(tmp_path / "r", tail=f"{good}\n{line}\n{good}\n")
    with pytest.raises(AgfaError, match=r"metrics\.jsonl, line 2: "):
        read_runs([run])


def test_a_config_that_lacks_something_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", record("eval", 0.5))
    for text, what in [("data: x\ntarget: [d]\n", "algorithm"), ("{", "not YAML"), ("", "no settings")]:
        (run / "config.yaml").write_text(text)
        with pytest.raises(AgfaError, match=rf"config\.yaml .*{what}"):
            read_runs([run])


def test_losses_have_a_column_each(tmp_path: Path) -> None:
    train = {"kind": "train", "seconds": 1.5, "images_per_second": 400}
    first = {**train, "step": 100, "losses": {"nll": 0.5}}
    second = {**train, "step": 200, "losses": {"nll": 0.25, "smcd": 2}}
    run = make_run(tmp_path / "r", first, record("eval", 0.5), second)
    frame = read_losses(run)
    assert frame.columns == ["step", "seconds", "images_per_second", "loss_nll", "loss_smcd"]
    assert frame["loss_nll"].to_list() == [0.5, 0.25]
    assert frame["loss_smcd"].to_list() == [None, 2.0]
