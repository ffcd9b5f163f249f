"""The figures and the page: well-formed, self-contained, escaped, accessible."""

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

from agfa.benchmark.figures import AmplitudeViews, amplitude_figure, learning_curves
from agfa.benchmark.records import read_runs
from agfa.benchmark.report import ReportFigure, Row, write_report
from agfa.errors import AgfaError

EVIL = "<script>alert(1)</script>"


def make_run(run: Path, *, done: bool = True, algorithm: str = "erm", seed: int = 0) -> Path:
    run.mkdir(parents=True)
    config = {"data": "digits", "target": [EVIL], "algorithm": algorithm, "averaging": "none"}
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
def spectra() -> str:
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


def write(tmp_path: Path, **changes: Any) -> str:
    runs = [
        make_run(tmp_path / "runs" / "0"),
        make_run(tmp_path / "runs" / "1", done=False, algorithm="agfa"),
    ]
    curves = learning_curves(read_runs(runs))
    given: dict[str, Any] = {
        "title": f"Digits {EVIL}",
        "runs": runs,
        "rows": [Row(EVIL, 0.6196, 0.0125, 3, 0.95, 81.25), Row("agfa", 0.7, None, 1)],
        "settings": {"source": ["mnist", EVIL], "hparams": {"eta": 0.1}, "weights": None},
        "figures": [
            ReportFigure(curves, f'curves "{EVIL}"', EVIL),
            ReportFigure(spectra(), "spectra", "what is replaced"),
            ReportFigure(curves, "curves once more", "the same"),
        ],
        "notes": [EVIL],
        **changes,
    }
    path = write_report(tmp_path / "out" / "report.html", **given)
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]  # nothing half-written stays
    return path.read_text(encoding="utf-8")


def test_the_page_asks_nothing_of_the_network(tmp_path: Path) -> None:
    html = write(tmp_path)
    for tag, attributes in Page(html).elements:
        assert tag not in ("script", "link", "iframe", "object", "base")
        for name in ("src", "href", "xlink:href", "srcset", "data"):
            value = attributes.get(name)
            assert value is None or value.startswith(("#", "data:image/png;base64,"))
    assert all(reference.startswith("#") for reference in re.findall(r"url\(\s*['\"]?([^)]*)\)", html))
    assert "@import" not in html


def test_what_comes_from_outside_is_escaped(tmp_path: Path) -> None:
    html = write(tmp_path)
    assert "<script" not in html
    # title, heading, statement, row, setting, figure's name and caption, note
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 8
    assert "2.6.0 &lt;cpu&gt;" in html


def test_ids_are_unique_and_every_reference_has_one(tmp_path: Path) -> None:
    html = write(tmp_path)
    ids = Counter(attributes["id"] for _, attributes in Page(html).elements if "id" in attributes)
    assert not [name for name, times in ids.items() if times > 1]
    for reference in re.findall(r'url\(#([^)]*)\)|href="#([^"]*)"', html):
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


def test_numbers_missing_values_and_what_is_unfinished_are_said(tmp_path: Path) -> None:
    html = write(tmp_path)
    text = " ".join(Page(html).text.split())
    assert "62.0 ± 1.2 3 95.0 81.2" in text  # 0.6196 ± 0.0125: a half is rounded to even
    assert "70.0 ± not measured 1 not measured not measured" in text
    assert re.findall("<strong>(.*?)</strong>", html) == ["70.0"]
    assert "1 of 2 trainings not finished" in text
    assert "2 trainings of 2 methods on digits." in text
    assert "hparams eta 0.1" in text
    assert "weights not set" in text
    assert "packages torch 2.6.0 <cpu>" in text


def test_an_empty_report_says_that_it_is_empty(tmp_path: Path) -> None:
    html = write(tmp_path, runs=[], rows=[Row("erm", None, None, 0)], settings={}, figures=[], notes=[])
    assert "<strong>" not in html
    assert "not recorded" in html
    assert "Nothing has been measured" in write(tmp_path / "again", rows=[])


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
        write_report(path, title="t", runs=[], rows=[], settings={}, figures=[], notes=[])
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_learning_curves_are_xml_the_same_every_time_and_name_every_method(tmp_path: Path) -> None:
    for seed in range(2):
        make_run(tmp_path / f"e{seed}", seed=seed)
    make_run(tmp_path / "x", algorithm="a$b & <i>$")
    frame = read_runs([tmp_path])
    svg = learning_curves(frame)
    assert svg.startswith("<svg")
    text = "".join(ET.fromstring(svg).itertext())
    assert "erm" in text
    assert "a$b & <i>$" in text
    assert svg == learning_curves(frame)


def test_learning_curves_without_a_target_or_anything_say_so(tmp_path: Path) -> None:
    make_run(tmp_path / "r")
    frame = read_runs([tmp_path])
    assert learning_curves(frame.filter(pl.col("role") == "source")).count("not measured") == 1
    assert learning_curves(frame.clear()).count("not measured") == 2


@pytest.mark.parametrize("channels", [1, 2, 3])
def test_the_amplitude_figure_is_xml_with_seven_pictures_a_row(channels: int) -> None:
    svg = amplitude_figure(views(channels=channels))
    root = ET.fromstring(svg)
    assert len(root.findall(".//{http://www.w3.org/2000/svg}image")) == 14
    text = " ".join("".join(root.itertext()).split())
    for title in ("original", "phase", "amplitude", "generated", "mixed", "image from"):
        assert title in text


def test_the_amplitude_figure_stays_small_whatever_is_in_it() -> None:
    noise = np.random.default_rng(0).random((6, 224, 224, 3))
    assert len(amplitude_figure(AmplitudeViews(*[noise] * 7))) < 1_000_000
