"""Tables of made-up runs against what was worked out by hand, in every form that they are written in."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest
from rich.console import Console

from agfa.benchmark import render
from agfa.benchmark.records import read_runs
from agfa.benchmark.selection import Selection, select
from agfa.benchmark.tables import Cell, Line, Table, measured_tables
from support_runs import make_run

# Accuracy of each row on each target, by seed. Seed 2 of CORAL lacks c: its training failed.
ACCURACIES = {
    "erm": {"a": (0.5, 0.6, 0.7), "b": (0.4, 0.4, 0.4), "c": (0.3, 0.2, 0.1)},
    "coral": {"a": (0.6, 0.6, 0.6), "b": (0.4, 0.5, 0.6), "c": (0.1, 0.3)},
}


def made_up(root: Path, data: str = "made up") -> Path:
    for algorithm, by_target in ACCURACIES.items():
        for target, accuracies in by_target.items():
            for seed, accuracy in enumerate(accuracies):
                sources = tuple(set("abc") - {target})
                make_run(
                    root / f"{data}-{algorithm}-{target}-{seed}",
                    data=data,
                    algorithm=algorithm,
                    target=(target,),
                    source=sources,
                    seed=seed,
                    evals={300: {**dict.fromkeys(sources, 0.9), f"{target} test": accuracy, f"{target} oracle": 0.5}},
                )
    make_run(root / f"{data}-failed", data=data, algorithm="coral", target=("c",), source=("a", "b"), failed="no GPU")
    return root


def tables(root: Path, how: Selection = "training-domain") -> list[Table]:
    return measured_tables(select(read_runs([root]), how))


def numbers(line: Line) -> list[tuple[float, float | None, int | None]]:
    return [(c.mean, c.error, c.seeds) for c in line.cells if isinstance(c, Cell)]


@pytest.mark.parametrize("how", ["training-domain", "oracle"])
def test_cells_and_averages_are_those_worked_out_by_hand(tmp_path: Path, how: Selection) -> None:
    (table,) = tables(made_up(tmp_path), how)
    assert table.header == ("Method", "a", "b", "c", "Average")
    erm, coral = table.lines
    deviation = math.sqrt(2 / 3) / 10  # of 0.1, 0.2, 0.3 from their mean, over the population
    assert numbers(erm) == [
        pytest.approx((0.6, deviation / math.sqrt(3), 3)),
        pytest.approx((0.4, 0.0, 3)),
        pytest.approx((0.2, deviation / math.sqrt(3), 3)),
        pytest.approx((0.4, 0.0, 3)),  # each seed's mean over targets is 0.4
    ]
    # seeds 0 and 1 have every target: 1.1 / 3 and 1.4 / 3
    assert numbers(coral) == [
        pytest.approx((0.6, 0.0, 3)),
        pytest.approx((0.5, deviation / math.sqrt(3), 3)),
        pytest.approx((0.2, 0.1 / math.sqrt(2), 2)),
        pytest.approx((2.5 / 6, 0.05 / math.sqrt(2), 2)),
    ]
    assert [table.best(line, i) for line in (erm, coral) for i in range(4)] == [
        *(True, False, True, False),  # where the print is the same, both are the best
        *(True, True, True, True),
    ]


def test_the_main_table_has_a_column_for_each_dataset_and_their_mean(tmp_path: Path) -> None:
    made_up(tmp_path, "one")
    made_up(tmp_path, "two")
    main, *others = tables(tmp_path)
    assert main.header == ("Method", "one", "two", "Average")
    assert [table.header[0] for table in others] == ["Method", "Method"]
    erm, coral = main.lines
    assert [c.mean for c in erm.cells if isinstance(c, Cell)] == pytest.approx([0.4, 0.4, 0.4])
    assert [c.mean for c in coral.cells if isinstance(c, Cell)] == pytest.approx([2.5 / 6] * 3)
    assert [c.seeds for c in coral.cells if isinstance(c, Cell)] == [2, 2, None]


def test_the_papers_numbers_stand_below_ours_and_do_not_compete(tmp_path: Path) -> None:
    domains = ("art_painting", "cartoon", "photo", "sketch")
    for target in domains[:3]:
        sources = tuple(set(domains) - {target})
        evals = {300: {**dict.fromkeys(sources, 0.9), f"{target} test": 0.5, f"{target} oracle": 0.5}}
        make_run(tmp_path / target, data="pacs", backbone="resnet18", target=(target,), source=sources, evals=evals)
    (table,) = tables(tmp_path)
    assert table.header == ("Method", "Art", "Cartoon", "Photo", "Sketch", "Average")
    ours, theirs = table.lines[:2]
    assert (ours.label, theirs.label, theirs.origin) == ("ERM", "ERM, published†", "excerpted")
    assert ours.cells[3] is ours.cells[4] is None  # nobody held Sketch out, so there is no average
    assert [c.shown for c in theirs.cells if isinstance(c, Cell)] == ["77.0", "75.9", "96.0", "69.2", "79.5"]
    assert table.best(ours, 0)
    assert [line.label for line in table.lines if table.best(line, 4)] == ["AGFA, published"]


def test_another_backbone_than_the_papers_is_said(tmp_path: Path) -> None:
    sources = ("cartoon", "photo", "sketch")
    evals = {300: {**dict.fromkeys(sources, 0.9), "art_painting test": 0.5, "art_painting oracle": 0.5}}
    make_run(tmp_path / "r", data="PACS", backbone="vit", target=("art_painting",), source=sources, evals=evals)
    (table,) = tables(tmp_path)
    assert "The paper's numbers are those of resnet50." in table.notes


TABLE = Table(
    "A_b & c|d",
    ("Method", "x_1", "Average"),
    (
        Line("ERM & co", (Cell(0.5, 0.0123, 3), Cell(0.5, 0.01, 2))),
        Line("AGFA", (Cell(0.612, None, 1), None)),
        Line("AGFA, published†", (Cell(0.9, 0.001), Cell(0.8965, None, None, 2)), "excerpted"),
    ),
    ("A note: 5%.",),
)


def test_markdown() -> None:
    assert render.markdown([TABLE]).splitlines()[:7] == [
        "### A\\_b & c\\|d",
        "",
        "| Method | x\\_1 | Average |",
        "| --- | ---: | ---: |",
        "| ERM & co | 50.0 ± 1.2 | **50.0 ± 1.0 (2)** |",
        "| AGFA | **61.2 (1)** | – |",
        "| AGFA, published† | **90.0 ± 0.1** | **89.65** |",
    ]
    assert render.markdown([TABLE], ["a_b"]).endswith("### What is missing\n\n- a\\_b\n")


def test_latex() -> None:
    lines = render.latex([TABLE]).splitlines()
    assert r"ERM \& co & 50.0 $\pm$ 1.2 & \textbf{50.0 $\pm$ 1.0 (2)} \\" in lines
    assert r"AGFA & \textbf{61.2 (1)} & -- \\" in lines
    assert r"AGFA, published$^\dagger$ & \textbf{90.0 $\pm$ 0.1} & \textbf{89.65} \\" in lines
    assert [line for line in lines if line.endswith("rule")] == [r"\toprule", r"\midrule", r"\bottomrule"]
    assert r"\begin{tabular}{lcc}" in lines
    assert any(line.startswith(r"\caption{A\_b \& c|d.") and r"5\%" in line for line in lines)


def test_csv_keeps_every_digit() -> None:
    rows = list(csv.DictReader(io.StringIO(render.comma_separated([TABLE]))))
    assert [(r["row"], r["column"], r["mean"], r["standard_error"], r["seeds"], r["origin"]) for r in rows][::2] == [
        ("ERM & co", "x_1", "0.5", "0.0123", "3", "measured"),
        ("AGFA", "x_1", "0.612", "", "1", "measured"),
        ("AGFA, published†", "x_1", "0.9", "0.001", "", "excerpted"),
    ]
    assert rows[3]["mean"] == rows[3]["text"] == ""  # not measured


def test_a_terminal_shows_the_best_in_bold_and_a_file_has_no_codes() -> None:
    shown = {}
    for terminal in (True, False):
        page = io.StringIO()
        render.terminal([TABLE], ["seed [2] lacks"], Console(file=page, width=100, force_terminal=terminal))
        shown[terminal] = page.getvalue()
    assert "\x1b[1m61.2 (1)" in shown[True]
    assert "\x1b" not in shown[False]
    assert "50.0 ± 1.0 (2)" in shown[False]
    assert "What is missing\n- seed [2] lacks\n" in shown[False]
