"""Pages in a real browser: two widths, both themes, sorted by mouse and keys; skipped where there is none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agfa.benchmark.audit import METHODS, run_audit
from agfa.benchmark.page import write_page
from agfa.benchmark.report import build
from agfa.benchmark.running import Here
from agfa.training.config import TrainConfig
from agfa.training.progress import Display
from support import QUICK, make_images
from support_runs import make_paper_sweep

webdriver = pytest.importorskip("selenium.webdriver")
axe = pytest.importorskip("axe_core_python.selenium")

from selenium.webdriver.common.by import By  # noqa: E402  # after it is known to be there
from selenium.webdriver.common.keys import Keys  # noqa: E402

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
# slow: a browser, and every rule of axe four times
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]

SETTINGS = {key: value for key, value in QUICK.items() if key != "track_target"}
SIZES = {"phone": (390, 844), "desktop": (1280, 900)}
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a made-up sweep."""
    root = tmp_path_factory.mktemp("report")
    return write_page(root / "report.html", build([make_paper_sweep(root / "sweep")], "training-domain"))


@pytest.fixture(scope="module")
def audit_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An audit of images that are hardly learnt, so that there are mistakes."""
    root = tmp_path_factory.mktemp("audit")
    given = TrainConfig(data=str(make_images(root / "tiny")), **{**SETTINGS, "steps": 2, "evaluate_every": 1})
    return run_audit(given, METHODS, 1, 1, root / "out", Here(), Display(quiet=True))[1]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def visit(browser: Any, page: Path, size: str = "desktop", theme: str = "light") -> None:
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(page.as_uri())


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
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= SIZES[size][0]  # tables scroll by themselves, the page does not
    found = axe.Axe().run(browser)
    serious = [v for v in found["violations"] if v["impact"] in ("serious", "critical")]
    assert not serious, json.dumps([(v["id"], v["help"], v["nodes"][0]["html"]) for v in serious], indent=1)
    assert found["passes"]
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if not url.startswith(("data:", "file:"))] == []
    assert page.as_uri() in asked


def test_a_click_sorts_and_another_turns_it_round(browser: Any, page: Path) -> None:
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


def test_keys_alone_sort(browser: Any, page: Path) -> None:
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


def test_it_prints(browser: Any, page: Path) -> None:
    visit(browser, page)
    pdf = browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": False})["data"]
    assert len(pdf) > 50_000
