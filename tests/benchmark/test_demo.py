"""The demo, with trainings of a few steps: what it prints and the page it writes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from agfa.benchmark import demo
from agfa.training.config import TrainConfig
from support import Agfa


@pytest.mark.slow  # half a minute: measuring, more than training, on 8,800 digits
def test_the_demo_trains_reports_and_goes_on_where_it_stopped(agfa: Agfa, monkeypatch: pytest.MonkeyPatch) -> None:
    few = partial(TrainConfig, steps=2, evaluate_every=1, batch_size=2)
    monkeypatch.setattr(demo, "TrainConfig", few)
    ended = agfa("demo", "--seeds", "1", "--out", "d")
    assert ended.status == 0
    rows = [line.split() for line in ended.out.splitlines()]
    # two trainings, four rows: in the table of results, and in that of source validation and seconds
    assert [row[0] for row in rows if row and row[0] in ("ERM", "SWAD", "AGFA")].count("AGFA") >= 4
    assert f"report: {Path('d', 'report.html').resolve()}" in ended.out
    page = Path("d", "report.html").read_text()
    assert "digits, convnet: accuracy by target" in page
    assert "what AGFA's generator ends with" in page.replace("&#39;", "'")
    assert "Small images, a small network, few seeds" in page
    again = agfa("demo", "--seeds", "1", "--out", "d")
    assert again.status == 0
    assert again.err.count("is finished already") == 2
