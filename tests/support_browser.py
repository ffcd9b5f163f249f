"""A real browser for the pages' tests, where there is one: sizes, themes, what it said and asked for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

webdriver = pytest.importorskip("selenium.webdriver")
axe = pytest.importorskip("axe_core_python.selenium")

from selenium.webdriver.common.by import By  # noqa: E402  # after it is known to be there
from selenium.webdriver.common.keys import Keys  # noqa: E402

__all__ = ["CHROMIUM", "DRIVER", "SIZES", "By", "Keys", "asked", "serious", "started", "visit", "width"]

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
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


def started(profile: Path, *flags: str) -> Iterator[Any]:
    """Chromium, until it is no longer needed."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in [*FLAGS, f"--user-data-dir={profile}", *flags]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def visit(browser: Any, url: str, size: str = "desktop", theme: str = "light") -> None:
    """Open a page in a window of this size and theme."""
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(url)


def width(browser: Any) -> int:
    """Of the page's content."""
    return int(browser.execute_script("return document.documentElement.scrollWidth"))


def serious(browser: Any) -> list[Any]:
    """What axe finds serious or worse."""
    found = axe.Axe().run(browser)
    assert found["passes"]
    return [
        (v["id"], v["help"], v["nodes"][0]["html"])
        for v in found["violations"]
        if v["impact"] in ("serious", "critical")
    ]


def asked(browser: Any) -> list[str]:
    """Every address that the browser asked for since this was last asked."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
