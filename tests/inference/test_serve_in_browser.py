"""The page to try a model on, in a real browser; skipped where there is none."""

from __future__ import annotations

import base64
import json
import os
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from support_browser import CHROMIUM, DRIVER, SIZES, By, Keys, asked, serious, started, visit, width
from support_serve import BOUNDARY, png, serving, upload

# slow: two servers, two browsers, and every rule of axe four times
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]
SHOTS = os.environ.get("AGFA_SHOTS")  # a folder to keep screenshots in, to look at


@pytest.fixture(scope="module")
def url(agfa_run: Path) -> Iterator[str]:
    with serving(agfa_run) as served:
        yield served.url + "/"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser that asks before it gives a camera, and nobody says yes."""
    yield from started(tmp_path_factory.mktemp("profile"))


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    return kept(tmp_path, 3)


def kept(folder: Path, n: int) -> list[Path]:
    files = [folder / f"{i:03}.png" for i in range(n)]
    for i, file in enumerate(files):
        file.write_bytes(png(seed=i))
    return files


def wait(browser: Any, condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, browser.find_element(By.TAG_NAME, "body").text
        time.sleep(0.05)


def find(browser: Any, name: str) -> Any:
    return browser.find_element(By.ID, name)


def choose(browser: Any, files: list[Path]) -> None:
    find(browser, "files").send_keys("\n".join(map(str, files)))


def settled(browser: Any) -> bool:
    """All is answered, and the worst case is drawn or refused."""
    script = """return !document.querySelector("[aria-busy=true]") && (document.getElementById("worst").hidden
        || document.getElementById("survives").textContent !== "Imagining…")"""
    return bool(browser.execute_script(script))


DROP = """
const data = new DataTransfer();
for (const [name, text] of arguments[0]) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  data.items.add(new File([bytes], name, { type: "image/png" }));
}
for (const kind of ["dragenter", "dragover", "drop"]) {
  arguments[1].dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
}
"""


def drop(browser: Any, named: dict[str, bytes], on: str = "drop") -> None:
    files = [[name, base64.b64encode(content).decode()] for name, content in named.items()]
    browser.execute_script(DROP, files, find(browser, on))


def pixels(browser: Any, name: str) -> list[int]:
    """Of a canvas, as numbers."""
    script = """const c = document.getElementById(arguments[0]);
        return [...c.getContext("2d").getImageData(0, 0, c.width, c.height).data]"""
    return list(browser.execute_script(script, name))


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_accessible_fits_and_is_quiet(
    browser: Any, url: str, images: list[Path], size: str, theme: str
) -> None:
    for log in ("performance", "browser"):
        browser.get_log(log)  # what earlier pages said
    visit(browser, url, size, theme)
    wait(browser, lambda: "classes" in find(browser, "about").text)
    assert not (found := serious(browser)), json.dumps(found, indent=1)
    choose(browser, images)
    wait(browser, lambda: settled(browser) and find(browser, "stage").is_displayed())
    assert width(browser) <= SIZES[size][0]
    assert not (found := serious(browser)), json.dumps(found, indent=1)
    assert browser.get_log("browser") == []
    urls = asked(browser)
    assert [each for each in urls if not each.startswith((url, f"blob:{url}", "data:"))] == []
    assert url in urls
    if SHOTS:
        browser.save_screenshot(f"{SHOTS}/{size}-{theme}.png")


def test_a_drop_is_answered_as_the_server_answers(browser: Any, url: str) -> None:
    visit(browser, url)
    wait(browser, lambda: "classes" in find(browser, "about").text)
    drop(browser, {"dropped.png": png()}, on="detail")  # anywhere
    wait(browser, lambda: settled(browser) and find(browser, "stage").is_displayed())
    form = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    body = upload([png()]).partition(b"\r\n\r\n")[2]
    with urllib.request.urlopen(urllib.request.Request(url + "predict", body, form)) as response:
        (said,) = json.load(response)["predictions"]
    assert find(browser, "name").text == "dropped.png"
    assert find(browser, "label").text.startswith(said["label"])
    assert f"{100 * said['probability']:.0f} %" in find(browser, "label").text
    lines = [line.text.split() for line in browser.find_elements(By.CSS_SELECTOR, "#classes li")]
    order = sorted(said["probabilities"], key=lambda name: -said["probabilities"][name])
    assert [line[0] for line in lines] == order
    assert "drawn from its posterior disagree" in find(browser, "doubt").text


def test_keys_alone_choose_and_slide(browser: Any, url: str, images: list[Path]) -> None:
    visit(browser, url)
    wait(browser, lambda: "classes" in find(browser, "about").text)
    choose(browser, images)
    wait(browser, lambda: settled(browser) and find(browser, "stage").is_displayed())
    reached = []
    for _ in range(12):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        focused = browser.switch_to.active_element
        reached.append(focused.get_attribute("id") or focused.text.splitlines()[-1])
        if reached[-1] == "strength":
            break
        if reached[-1] == "000.png":
            for key, name in ((Keys.ARROW_DOWN, "001.png"), (Keys.END, "002.png"), (Keys.ARROW_UP, "001.png")):
                browser.switch_to.active_element.send_keys(key)
                assert find(browser, "name").text == name
            wait(browser, lambda: settled(browser) and find(browser, "stage").is_displayed())
    assert reached == ["choose", "camera", "clear", "000.png", "strength"]
    slider = browser.switch_to.active_element
    slider.send_keys(Keys.HOME)
    assert pixels(browser, "mixed") == pixels(browser, "original")
    assert pixels(browser, "mixed-amplitude") == pixels(browser, "amplitude")
    assert "At 0 %" in find(browser, "now").text
    seen = []
    for _ in range(3):
        slider.send_keys(Keys.ARROW_RIGHT)
        seen.append(pixels(browser, "mixed"))
    assert slider.get_attribute("aria-valuetext").startswith("15\u00a0%: ")
    assert find(browser, "now").text.startswith("At 15 %")
    assert len({tuple(each) for each in seen}) == 3
    slider.send_keys(Keys.END)
    assert pixels(browser, "mixed-amplitude") != pixels(browser, "amplitude")
    assert pixels(browser, "phase") == pixels(browser, "same-phase")
    assert browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_a_camera_that_is_denied(browser: Any, url: str) -> None:
    browser.execute_cdp_cmd(
        "Browser.setPermission", {"permission": {"name": "camera"}, "setting": "denied", "origin": url}
    )
    visit(browser, url)
    find(browser, "camera").click()
    wait(browser, lambda: find(browser, "notice").is_displayed())
    assert "Choose an image instead." in find(browser, "notice").text
    assert not find(browser, "booth").is_displayed()
    assert not serious(browser)
    choose_again = find(browser, "choose")
    assert choose_again.is_enabled()


def test_a_camera_that_works(url: str, tmp_path: Path) -> None:
    flags = ("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
    for browser in started(tmp_path / "profile", *flags):
        visit(browser, url)
        wait(browser, lambda: "classes" in find(browser, "about").text)  # noqa: B023  # called at once
        find(browser, "camera").click()
        wait(browser, lambda: browser.execute_script("return view.videoWidth > 0"))  # noqa: B023
        assert not serious(browser)
        find(browser, "snap").click()
        wait(browser, lambda: settled(browser) and find(browser, "stage").is_displayed())  # noqa: B023
        assert find(browser, "name").text == "camera.png"
        assert not find(browser, "booth").is_displayed()
        live = "return view.srcObject.getTracks().some((track) => track.readyState === 'live')"
        assert browser.execute_script(live) is False


def test_files_that_cannot_be_answered(browser: Any, url: str, images: list[Path], tmp_path: Path) -> None:
    large, text = tmp_path / "large.png", tmp_path / "notes.png"
    large.write_bytes(bytes(50 * 2**20))
    text.write_text("nothing to see")
    visit(browser, url)
    wait(browser, lambda: "classes" in find(browser, "about").text)
    asked(browser)
    choose(browser, [large])
    wait(browser, lambda: find(browser, "list").text != "")
    assert "Larger than 32 MB" in find(browser, "list").text
    assert not [each for each in asked(browser) if each.endswith("predict")]  # it is not even sent
    choose(browser, [text, *images])
    wait(browser, lambda: settled(browser) and find(browser, "stage").is_displayed())
    entries = [entry.text.splitlines() for entry in browser.find_elements(By.CSS_SELECTOR, "#list li")]
    assert entries[1][0].startswith("Not an image that is read here")
    assert entries[1][1] == "notes.png"
    assert find(browser, "progress").text == "5 images, 2 not read"
    assert find(browser, "name").text == "000.png"  # the first that there is something to see of
    browser.find_elements(By.CSS_SELECTOR, "#list button")[1].click()
    assert "Not an image" in find(browser, "label").text
    assert not serious(browser)
    if SHOTS:
        browser.save_screenshot(f"{SHOTS}/failed.png")


def test_a_hundred_at_once_and_none_left(browser: Any, url: str, tmp_path: Path) -> None:
    visit(browser, url)
    wait(browser, lambda: "classes" in find(browser, "about").text)
    choose(browser, kept(tmp_path, 100))
    wait(browser, lambda: settled(browser) and find(browser, "progress").text == "100 images")
    assert len(browser.find_elements(By.CSS_SELECTOR, "#list li:not(.failed)")) == 100
    assert len({b.text for b in browser.find_elements(By.CSS_SELECTOR, "#list .sure")}) > 1
    assert width(browser) <= SIZES["desktop"][0]
    if SHOTS:
        browser.save_screenshot(f"{SHOTS}/hundred.png")
    find(browser, "clear").click()
    assert find(browser, "list").text == ""
    assert not find(browser, "answer").is_displayed()


def test_a_token_and_a_model_without_a_generator(browser: Any, erm_run: Path, images: list[Path]) -> None:
    with serving(erm_run, "--token", "sesame") as served:
        visit(browser, served.url + "/")
        wait(browser, lambda: find(browser, "token").is_displayed())
        choose(browser, images[:1])
        find(browser, "secret").send_keys("open" + Keys.ENTER)
        time.sleep(0.3)
        assert find(browser, "token").is_displayed()
        find(browser, "secret").clear()
        find(browser, "secret").send_keys("sesame" + Keys.ENTER)
        wait(browser, lambda: settled(browser) and find(browser, "survives").is_displayed())
        assert not find(browser, "token").is_displayed()
        assert "This model imagines none" in find(browser, "survives").text
        assert not find(browser, "stage").is_displayed()
        assert find(browser, "doubt").text == ""
        assert not serious(browser)
        served.process.terminate()
        served.process.wait(20)
        choose(browser, images[1:2])
        wait(browser, lambda: "The server does not answer" in find(browser, "list").text)
