"""Run folders to one table: what is in it, and what is said of a folder that is not as it should be."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from agfa.benchmark import records
from agfa.benchmark.records import find_runs, read_config, read_runs
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


def test_runs_are_found_at_any_depth_in_order_and_only_when_there_is_something(tmp_path: Path) -> None:
    b = make_run(tmp_path / "sweep" / "b")
    a = make_run(tmp_path / "sweep" / "a")
    (tmp_path / "sweep" / "c").mkdir()
    (tmp_path / "sweep" / "c" / "config.yaml").touch()
    assert find_runs(tmp_path) == [a, b]
    assert find_runs(a) == [a]
    with pytest.raises(UsageError, match="no such folder"):
        find_runs(tmp_path / "nowhere")


def test_a_row_holds_the_run_and_the_record(tmp_path: Path) -> None:
    train = {"kind": "train", "step": 100, "losses": {"nll": 0.5}, "seconds": 12.5, "images_per_second": 3}
    run = make_run(tmp_path / "r", train, record("eval", 0.25, step=100), target=["d", "e"], done=False, seed=7)
    (row,) = read_runs([tmp_path, run]).rows(named=True)  # two roots over one run
    settings = row.pop("settings")
    assert len(settings) == 12
    assert row == {
        **{"run": str(run), "dataset": "digits", "sources": ["a"], "targets": ["d", "e"], "algorithm": "erm"},
        **{"averaging": "none", "backbone": "convnet", "seed": 7, "done": False, "failed": None, "row": "erm"},
        **{"kind": "eval", "model": None, "step": 100, "domain": "d", "role": "target", "split": "test"},
        **{"accuracy": 0.25, "loss": 0.5, "n": 10, "seconds": 12.5},
    }


def test_a_run_that_failed_before_it_measured_anything_is_a_row_with_the_reason(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", done=False)
    (run / "metrics.jsonl").unlink()
    (run / "failed.json").write_text(json.dumps({"reason": "out of\nmemory", "attempts": 3}))
    (row,) = read_runs([tmp_path]).rows(named=True)
    assert (row["failed"], row["kind"], row["accuracy"], row["row"]) == ("out of memory", None, None, "erm")
    (run / "failed.json").write_text("{")
    assert read_runs([tmp_path])["failed"].to_list() == ["failed.json gives no reason"]


def test_no_runs_give_an_empty_table_with_its_columns(tmp_path: Path) -> None:
    assert read_runs([tmp_path]).is_empty()
    assert {"row", "settings", "sources", "accuracy"} <= set(read_runs([tmp_path]).columns)


def test_one_training_gives_a_row_for_its_models_and_one_for_their_average(tmp_path: Path) -> None:
    measured = [record("eval", 0.5), record("final", 0.5, model="best"), record("final", 0.6, model="swad")]
    make_run(tmp_path / "a", *measured, averaging="swad", hparams={"lr": 0.1})
    frame = read_runs([tmp_path])
    assert frame["row"].to_list() == ["erm", "erm", "swad"]
    # the same training without an average: the same models at a step, so the same settings
    make_run(tmp_path / "b", record("eval", 0.5), hparams={"lr": 0.1})
    plain = read_runs([tmp_path / "b"])
    assert plain["settings"][0] == frame["settings"][0] != frame["settings"][2]


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"seed": 3}, True),
        ({"target": ["e"], "source": ["b"]}, True),
        ({"out": "elsewhere", "devices": 2, "data": "/mnt/digits", "selection": "last"}, True),
        ({"hparams": {"lr": 0.2}}, False),
        ({"steps": 7}, False),
        ({"backbone": "resnet18"}, False),
        ({"stop_early": True, "averaging": "swad"}, False),  # then the average decides where the training ends
    ],
)
def test_settings_are_all_that_decides_but_seed_and_domains(
    tmp_path: Path, change: dict[str, Any], same: bool
) -> None:
    base = {"hparams": {"lr": 0.1}, "steps": 5}
    make_run(tmp_path / "a", record("eval", 0.5), **base)
    make_run(tmp_path / "b", record("eval", 0.5), **{**base, **change})
    settings = read_runs([tmp_path])["settings"]
    assert (settings[0] == settings[1]) is same


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


def test_an_odd_log_takes_none_of_its_neighbours_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs are read many at a time, and whatever polars cannot read is read line by line: the same comes out."""
    for i in range(20):
        make_run(tmp_path / f"{i:02}", record("eval", i / 100), record("final", i / 100), seed=i)
    for i, odd in ((3, '{"kind": "ev'), (4, ""), (11, "\n\n"), (12, json.dumps(record("eval", 1, step=400.0)))):
        with (tmp_path / f"{i:02}" / "metrics.jsonl").open("a") as log:
            log.write(odd)
    (tmp_path / "07" / "metrics.jsonl").write_text(json.dumps(record("eval", 0.07, loss=float("nan"))))
    whole = read_runs([tmp_path])
    monkeypatch.setattr(records, "CHUNK", 1)
    assert whole.equals(read_runs([tmp_path]), null_equal=True)
    by_seed = whole.group_by("seed", maintain_order=True).len().sort("seed")["len"].to_list()
    assert by_seed == [2] * 7 + [1] + [2] * 4 + [3] + [2] * 7


def test_a_configuration_is_read_as_the_training_reads_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "r", precision="32", lr=1e-5, swad=None, out="a: b")
    assert read_config(run) == yaml.safe_load((run / "config.yaml").read_text())


def test_a_moved_sweep_reads_the_same(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "r", record("eval", 0.5))
    before = read_runs([tmp_path / "a"]).drop("run")
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert before.equals(read_runs([tmp_path / "b"]).drop("run"))
