"""README and docs: their Python runs, their commands parse, the files they name are there."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from agfa import algorithms
from agfa.cli import app
from support import fenced
from support_methods import SIZES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list:
    """The fenced blocks of one language, those of a page one test parameter."""
    found = [(page, fenced(page.read_text(), language)) for page in PAGES]
    return [pytest.param(blocks, id=page.name) for page, blocks in found if blocks]


def commands() -> list:
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in fenced(text, "") for line in block.splitlines()]
        lines += re.findall(r"`(agfa [^`]+)`", text)
        found += [pytest.param(line, id=f"{page.name}: {line}") for line in lines if line.startswith("agfa ")]
    return found


@pytest.mark.parametrize("page", blocks("python"))
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code in page:  # a later block may use the files of one before, and none of its names
        exec(compile(code, "docs", "exec"), {"__name__": "docs"})


def test_the_method_that_is_added_passes_its_own_tests(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "methods.md").read_text()
    method, tests = (dedent(block) for block in re.findall(r"^   ```python\n(.*?)^   ```", page, re.M | re.S))
    (tmp_path / "focal.py").write_text(method, encoding="utf-8")
    monkeypatch.setattr(algorithms, "__path__", [*algorithms.__path__, str(tmp_path)])
    monkeypatch.setitem(sys.modules, "agfa.algorithms.focal", None)  # so that it is forgotten in the end
    del sys.modules["agfa.algorithms.focal"]
    space: dict = {}
    exec(compile(tests, "docs", "exec"), space)
    for sizes in SIZES:
        space["test_loss_is_that_of_the_equation"](sizes)
    space["test_gradient_agrees_with_finite_differences"]()
    space["test_gamma_zero_is_erm"]()
    assert max(map(len, [*method.splitlines(), *tests.splitlines()])) <= 118


@pytest.mark.parametrize("line", commands())
def test_commands_parse(line):
    words = [word for word in shlex.split(line, comments=True)[1:] if word != "..."]
    if words[-1] in ("--help", "--version"):
        return
    if len(words) == 1:  # a command that is named, not typed
        assert words[0] in app
        return
    app.parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_readme_names_every_make_target_that_it_promises():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", "\n".join(page.read_text() for page in PAGES), re.M):
        assert re.search(rf"^{target}:", makefile, re.M), target


def site(source, out):
    command = [sys.executable, "-m", "sphinx", "-W", "-n", "--keep-going", "-q", source, out]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path):
    built = site(ROOT / "docs", tmp_path / "site")
    assert (built.returncode, built.stderr) == (0, "")
    for page in (tmp_path / "site").glob("*.html"):
        loaded = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"(//|https?:)[^\"]*", page.read_text())
        assert not loaded, page.name
    for style in (tmp_path / "site").rglob("*.css"):
        assert not re.search(r"(url\(|@import)[^;)]*(//|https?:)", style.read_text()), style.name
    assert all((tmp_path / "site" / f"{page.stem}.html").exists() for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("dead", ["[there](nowhere.md)", "[there](guide.md#no-such-heading)"])
def test_a_dead_link_fails_the_site(dead, tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "parts.md").open("a") as page:
        page.write(f"\n{dead}\n")
    built = site(tmp_path / "docs", tmp_path / "site")
    assert built.returncode == 1
    assert "parts.md" in built.stderr
