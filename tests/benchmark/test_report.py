"""The report: what it does not leave out. The page: well-formed, self-contained, escaped, accessible."""

import json
import os
import re
import xml.etree.ElementTree as ET
from collections import Counter
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml
from matplotlib.figure import Figure

from agfa.benchmark.figures import learning_curves, to_pdf, to_svg
from agfa.benchmark.page import write_page
from agfa.benchmark.records import read_runs
from agfa.benchmark.report import Report, ReportFigure, build
from agfa.benchmark.spectra import AmplitudeViews, amplitude_figure
from agfa.benchmark.tables import Cell, Line, Table
from agfa.errors import AgfaError, UsageError
from support import Agfa
from support_runs import make_paper_sweep
from support_runs import make_run as make_measured

EVIL = "<script>alert(1)</script>"


def make_run(run: Path, *, done: bool = True, algorithm: str = "erm", seed: int = 0) -> Path:
    run.mkdir(parents=True)
    config = {"data": "digits", "target": [EVIL], "source": ["mnist"], "algorithm": algorithm, "averaging": "none"}
    (run / "config.yaml").write_text(yaml.safe_dump({**config, "backbone": "convnet", "seed": seed}))
    (run / "environment.json").write_text(json.dumps({"packages": {"torch": "2.6.0 <cpu>"}, "argv": ["a", "b"]}))
    places = [("mnist", "source", "val", 0.9), (EVIL, "target", "test", 0.5)]
    lines = [
        {"kind": "eval", "step": step, "domain": domain, "role": role, "split": split, "accuracy": accuracy}
        for step in (100, 200)
        for domain, role, split, accuracy in places
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done:
        (run / "done").touch()
    return run


def views(n: int = 2, size: int = 16, channels: int = 3) -> AmplitudeViews:
    x = np.random.default_rng(0).random((n, size, size + 1, channels))
    spectrum = np.fft.fft2(x, axes=(1, 2), norm="ortho")
    a = np.abs(spectrum)
    return AmplitudeViews(x, np.angle(spectrum), a, np.zeros_like(a), a / 2, 3 * x - 1, x)


@cache
def spectra() -> Figure:
    return amplitude_figure(views())


class Page(HTMLParser):
    """Every element with its attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


TABLE = Table(
    f"Table of {EVIL}",
    ("Method", EVIL, "Average"),
    (
        Line(EVIL, (Cell(0.6196, 0.0125, 3), Cell(0.6, 0.01, 3))),
        Line("AGFA", (Cell(0.7, None, 1), None)),
        Line("AGFA, published", (Cell(0.9), Cell(0.9)), "published"),
    ),
    (EVIL,),
)


def write(tmp_path: Path, **changes: Any) -> str:
    runs = (make_run(tmp_path / "runs" / "0"), make_run(tmp_path / "runs" / "1", done=False, algorithm="agfa"))
    curves = learning_curves(read_runs(runs))
    given: dict[str, Any] = {
        "title": f"Digits {EVIL}",
        "statement": EVIL,
        "tables": (TABLE,),
        "figures": (
            ReportFigure(curves, "a", f'curves "{EVIL}"', EVIL),
            ReportFigure(spectra(), "b", "spectra", "what is replaced"),
            ReportFigure(curves, "c", "curves once more", "the same"),
        ),
        "missing": (EVIL,),
        "notes": (EVIL,),
        "settings": {"source": ["mnist", EVIL], "hparams": {"eta": 0.1}, "weights": None},
        "runs": runs,
        **changes,
    }
    path = write_page(tmp_path / "out" / "report.html", Report(**given))
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]  # nothing half-written stays
    return path.read_text(encoding="utf-8")


def test_the_page_asks_nothing_of_the_network(tmp_path: Path) -> None:
    html = write(tmp_path)
    for tag, attributes in Page(html).elements:
        assert tag not in ("link", "iframe", "object", "base")
        for name in ("src", "href", "xlink:href", "srcset", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:image/png;base64,"))
    assert all(reference.startswith("#") for reference in re.findall(r"url\(\s*['\"]?([^)]*)\)", html))
    assert "@import" not in html


def test_what_comes_from_outside_is_escaped(tmp_path: Path) -> None:
    html = write(tmp_path)
    assert html.count("<script") == 1  # the one that sorts; the policy lets no other run
    assert "script-src 'sha256-" in html
    # title twice, statement, missing, table's name twice, caption, heading, label twice, figure's name and caption,
    # note, setting
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 14
    assert "2.6.0 &lt;cpu&gt;" in html


def test_ids_are_unique_and_every_reference_has_one(tmp_path: Path) -> None:
    html = write(tmp_path, tables=(TABLE, TABLE))
    ids = Counter(attributes["id"] for _, attributes in Page(html).elements if "id" in attributes)
    assert not [name for name, times in ids.items() if times > 1]
    for reference in re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"|aria-labelledby="([^"]*)"', html):
        assert "".join(reference) in ids


def test_the_page_is_accessible(tmp_path: Path) -> None:
    page = Page(write(tmp_path))
    assert page.named("html") == [{"lang": "en"}]
    assert any(meta.get("name") == "viewport" for meta in page.named("meta"))
    images = [a for _, a in page.elements if a.get("role") == "img"]
    assert len(images) == len(page.named("figure")) == len(page.named("figcaption")) == 3
    assert all(image["aria-label"] for image in images)
    assert all(header["scope"] in ("col", "row") for header in page.named("th"))
    assert len(page.named("caption")) == len(page.named("table"))
    scrolling = [a for _, a in page.elements if a.get("class") == "scroll"]
    assert all(a["tabindex"] == "0" and a["role"] == "region" and a["aria-label"] for a in scrolling)


def test_numbers_missing_values_and_settings_are_said(tmp_path: Path) -> None:
    html = write(tmp_path)
    text = " ".join(Page(html).text.split())
    assert "62.0 ± 1.2 60.0 ± 1.0" in text  # 0.6196 ± 0.0125: a half is rounded to even
    assert "AGFA 70.0 (1) –not measured" in text
    # the best of ours in each column, and the best of the paper's
    assert re.findall("<strong>(.*?)</strong>", html) == ["60.0 ± 1.0", "70.0 (1)", "90.0", "90.0"]
    assert "hparams eta 0.1" in text
    assert "weights not set" in text
    assert "packages torch 2.6.0 <cpu>" in text


def test_an_empty_report_says_that_it_is_empty(tmp_path: Path) -> None:
    html = write(tmp_path, runs=(), tables=(), settings={}, figures=(), notes=(), missing=())
    assert "<strong>" not in html
    assert "not recorded" in html
    assert "Nothing has been measured" in html


def test_a_report_that_cannot_be_written_is_one_line_and_the_old_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    path = tmp_path / "out" / "report.html"
    before = path.read_bytes()
    with pytest.raises(AgfaError, match=r"cannot write .*report\.html: no space left"):
        write_page(path, Report("t", "", ()))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    report = build([make_paper_sweep(tmp_path)], "training-domain")
    said = "\n".join(report.missing)
    assert f"1 run failed (out of memory): {tmp_path / 'coral-sketch-1-None'}." in said
    assert f"1 run not finished, and in no table: {tmp_path / 'coral-photo-2-None'}." in said
    assert "CORAL lacks Photo (seed 2); Sketch (seed 1): left out of its average." in said
    assert "settings that differ from the paper's: steps 300 (5000) (ERM, CORAL, SWAD" in said
    assert "eta 0.01 (0.1); steps 300 (5000) (AGFA)" in said
    assert "The amplitude figure of PACS is not here" in said
    names = {figure.name for figure in report.figures}
    assert {"PACS-resnet50-learning", "PACS-agfa-eta", "PACS-resnet50-leave_one_out-ablation"} <= names
    assert {"PACS-resnet50-leave_one_out-cost"} <= names
    titles = [table.title for table in report.tables]
    assert titles[0] == "PACS, resnet50: accuracy by target"
    assert {"PACS, resnet50: AGFA, eta varied", "PACS, resnet50: differences", "Selected by training-domain"} <= set(
        titles
    )
    (selected,) = (table for table in report.tables if table.title.startswith("Selected"))
    of_agfa = [line.cells for line in selected.lines if line.label == "PACS, resnet50: AGFA"]
    assert [(cells[0], cells[1]) for cells in of_agfa] == [
        ("Art (seed 0); Cartoon (seed 0); Photo (seed 0); Sketch (seed 0)", "3"),
        ("Art (seed 1, 2); Cartoon (seed 1, 2); Photo (seed 1, 2); Sketch (seed 1, 2)", "1"),
    ]
    assert "eta=0.01" in str(of_agfa[0][3])


def test_a_selection_without_its_runs_says_so(tmp_path: Path) -> None:
    evals = {100: {"a": 0.5, "b": 0.5, "c test": 0.5, "c oracle": 0.5}}
    make_measured(tmp_path / "r", target=("c",), source=("a", "b"), evals=evals)
    make_measured(tmp_path / "all", target=(), source=("a", "b", "c"), evals={100: {"a": 0.5}})
    report = build([tmp_path], "leave-one-domain-out")
    said = "\n".join(report.missing)
    assert "ERM has no model that leave-one-domain-out selection could choose (it takes runs with a second" in said
    assert "1 run held no domain out" in said


def test_trainings_are_reported_as_they_are(agfa: Agfa, train: Agfa, tmp_path: Path) -> None:
    """Real runs: ERM and SWAD of one training, AGFA with what its generator does."""
    assert train(target="sky", algorithm="erm", averaging="swad", out=tmp_path / "runs" / "erm").status == 0
    assert train(target="sky", out=tmp_path / "runs" / "agfa", steps=8).status == 0
    report = build([tmp_path / "runs"], "oracle")
    assert [line.label for line in report.tables[0].lines] == ["ERM", "SWAD", "AGFA", "AGFA without SWAD"]
    assert all(isinstance(line.cells[0], Cell) for line in report.tables[0].lines)
    assert {figure.name for figure in report.figures} == {
        *("tiny-convnet-learning", "tiny-amplitude", "tiny-convnet-leave_one_out-ablation"),
        *("tiny-convnet-leave_one_out-cost", "tiny-convnet-leave_one_out-calibration"),
    }
    assert report.missing == ("tiny, convnet: one seed gives no standard error; what is chance is not known.",)


def test_the_papers_tables_alone(agfa: Agfa) -> None:
    ended = agfa("report")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.count("(the paper's)") == 16
    assert "98.0 is printed" in ended.out


@pytest.mark.parametrize("format", ["markdown", "latex", "csv", "terminal"])
def test_the_command_prints_or_writes(agfa: Agfa, tmp_path: Path, format: str) -> None:
    evals = {100: {"a": 0.5, "b": 0.5, "c test": 0.25, "c oracle": 0.5}}
    make_measured(tmp_path / "runs" / "r", target=("c",), source=("a", "b"), evals=evals)
    printed = agfa("report", tmp_path / "runs", format=format)
    assert printed.status == 0
    assert "0.25" in printed.out if format == "csv" else "25.0" in printed.out
    # what is missing stands beside tables that a program reads, and among those that a person does
    where = printed.err if format in ("latex", "csv") else printed.out
    assert "one seed gives no standard error" in where
    written = agfa("report", tmp_path / "runs", format=format, out=tmp_path / "new" / "tables")
    assert written.status == 0
    assert ("0.25" if format == "csv" else "25.0") in (tmp_path / "new" / "tables").read_text()


def test_the_command_writes_a_page_and_figures(agfa: Agfa, tmp_path: Path) -> None:
    evals = {step: {"a": 0.5, "b test": 0.5, "b oracle": 0.5} for step in (100, 200)}
    make_measured(tmp_path / "runs" / "r", target=("b",), source=("a",), evals=evals)
    ended = agfa("report", tmp_path / "runs", format="html", out=tmp_path / "r.html", figures=tmp_path / "figures")
    assert ended.status == 0
    assert "made up" in (tmp_path / "r.html").read_text()
    files = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert files == ["made_up-convnet-learning.pdf", "made_up-convnet-learning.svg"]
    assert (tmp_path / "figures" / files[0]).read_bytes().startswith(b"%PDF")


def test_mistakes_are_one_line(agfa: Agfa, tmp_path: Path) -> None:
    assert "no such folder" in agfa("report", tmp_path / "nowhere").error
    assert "no runs in" in agfa("report", tmp_path).error
    assert "is a folder" in agfa("report", out=tmp_path).error
    with pytest.raises(UsageError, match="a run is a folder with"):
        build([tmp_path], "oracle")


def test_learning_curves_are_xml_the_same_every_time_and_name_every_method(tmp_path: Path) -> None:
    for seed in range(2):
        make_run(tmp_path / f"e{seed}", seed=seed)
    make_run(tmp_path / "x", algorithm="a$b & <i>$")
    frame = read_runs([tmp_path])
    svg = to_svg(learning_curves(frame))
    assert svg.startswith("<svg")
    text = "".join(ET.fromstring(svg).itertext())
    assert "ERM" in text
    assert "a$b & <i>$" in text
    assert svg == to_svg(learning_curves(frame))
    assert to_pdf(learning_curves(frame)).startswith(b"%PDF")


@pytest.mark.parametrize("methods", [1, 7, 28])
@pytest.mark.parametrize(
    "name", ["{}", "AGFA, unsupervised MCD, without SWAD {}", "a method with a name so long {}" * 3]
)
def test_the_legend_is_within_the_figure_and_leaves_room_for_the_curves(methods: int, name: str) -> None:
    row = {"kind": "eval", "seed": 0, "step": 1, "role": "source", "split": "val", "accuracy": 0.5}
    frame = pl.DataFrame([{**row, "row": name.format(*[i] * 3)} for i in range(methods)])
    figure = learning_curves(frame)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert len(legend.get_texts()) == methods
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width
    assert box.y0 >= 0
    for axes in figure.axes:
        assert axes.get_window_extent().y0 > box.y1
        assert axes.get_window_extent().height > 1.7 * figure.dpi


def test_learning_curves_without_a_target_or_anything_say_so(tmp_path: Path) -> None:
    make_run(tmp_path / "r")
    frame = read_runs([tmp_path])
    assert to_svg(learning_curves(frame.filter(pl.col("role") == "source"))).count("not measured") == 1
    assert to_svg(learning_curves(frame.clear())).count("not measured") == 2


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_the_amplitude_figure_is_xml_with_seven_pictures_a_row(channels: int) -> None:
    svg = to_svg(amplitude_figure(views(channels=channels)))
    root = ET.fromstring(svg)
    assert len(root.findall(".//{http://www.w3.org/2000/svg}image")) == 14
    text = " ".join("".join(root.itertext()).split())
    for title in ("original", "phase", "amplitude", "generated", "mixed", "image from"):
        assert title in text


def test_the_amplitude_figure_stays_small_whatever_is_in_it() -> None:
    noise = np.random.default_rng(0).random((6, 224, 224, 3))
    assert len(to_svg(amplitude_figure(AmplitudeViews(*[noise] * 7)))) < 1_000_000
