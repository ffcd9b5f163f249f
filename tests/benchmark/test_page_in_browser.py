"""Pages in a real browser: two widths, both themes, sorted by mouse and keys; skipped where there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from agfa.benchmark.audit import METHODS, run_audit
from agfa.benchmark.page import write_page
from agfa.benchmark.report import build
from agfa.benchmark.running import Here
from agfa.training.config import TrainConfig
from agfa.training.progress import Display
from support import QUICK, make_images
from support_browser import CHROMIUM, DRIVER, SIZES, By, Keys, asked, serious, started, visit, width
from support_runs import make_paper_sweep

# slow: a browser, and every rule of axe four times
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]

SETTINGS = {key: value for key, value in QUICK.items() if key != "track_target"}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The report of a made-up sweep."""
    root = tmp_path_factory.mktemp("report")
    return write_page(root / "report.html", build([make_paper_sweep(root / "sweep")], "training-domain")).as_uri()


@pytest.fixture(scope="module")
def audit_page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An audit of images that are hardly learnt, so that there are mistakes."""
    root = tmp_path_factory.mktemp("audit")
    given = TrainConfig(data=str(make_images(root / "tiny")), **{**SETTINGS, "steps": 2, "evaluate_every": 1})
    return run_audit(given, METHODS, 1, 1, root / "out", Here(), Display(quiet=True))[1].as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    yield from started(tmp_path_factory.mktemp("profile"))


def column(browser: Any, number: int) -> list[str]:
    """The cells of a column of the first table, as they stand."""
    cells = browser.find_elements(By.CSS_SELECTOR, f"table.sortable tbody tr > :nth-child({number})")
    first = browser.find_element(By.CSS_SELECTOR, "table.sortable")
    rows = len(first.find_elements(By.CSS_SELECTOR, "tbody tr"))
    return [cell.text for cell in cells[:rows]]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("which", ["page", "audit_page"])
def test_it_is_accessible_fits_and_is_quiet(
    request: pytest.FixtureRequest, browser: Any, which: str, size: str, theme: str
) -> None:
    page = request.getfixturevalue(which)
    for log in ("performance", "browser"):
        browser.get_log(log)  # what earlier pages said
    visit(browser, page, size, theme)
    assert width(browser) <= SIZES[size][0]  # tables scroll by themselves, the page does not
    assert not (found := serious(browser)), json.dumps(found, indent=1)
    assert browser.get_log("browser") == []
    urls = asked(browser)
    assert [url for url in urls if not url.startswith(("data:", "file:"))] == []
    assert page in urls


def test_a_click_sorts_and_another_turns_it_round(browser: Any, page: str) -> None:
    visit(browser, page, "phone")
    last = browser.find_elements(By.CSS_SELECTOR, "table.sortable:first-of-type thead th")
    number = [th.text.strip(" ↕") for th in last].index("Average") + 1
    heading = last[number - 1]
    before = column(browser, number)
    heading.find_element(By.TAG_NAME, "button").click()
    assert heading.get_attribute("aria-sort") == "descending"
    values = [float(text.split()[0]) for text in column(browser, number)]
    assert values == sorted(values, reverse=True)
    assert values != [float(text.split()[0]) for text in before]
    heading.find_element(By.TAG_NAME, "button").click()
    assert heading.get_attribute("aria-sort") == "ascending"
    assert [float(text.split()[0]) for text in column(browser, number)] == sorted(values)


def test_keys_alone_sort(browser: Any, page: str) -> None:
    visit(browser, page)
    for _ in range(30):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        focused = browser.switch_to.active_element
        if focused.tag_name == "button" and focused.text.startswith("Art"):
            break
    else:
        pytest.fail("no heading of the first table is reached by Tab")
    focused.send_keys(Keys.ENTER)
    values = [float(text.split()[0]) for text in column(browser, 2)]
    assert values == sorted(values, reverse=True)
    assert browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_it_prints(browser: Any, page: str) -> None:
    visit(browser, page)
    pdf = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})["data"]
    assert len(pdf) > 50_000
