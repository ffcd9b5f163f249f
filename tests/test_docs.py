"""README and docs: their Python runs, their commands parse, the files they name are there."""

import re
import shlex
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from agfa import algorithms
from agfa.cli import app
from support_methods import SIZES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list:
    """Fenced blocks of one language, one test parameter each."""
    return [
        pytest.param(block, id=f"{page.name}-{i}")
        for page in PAGES
        for i, block in enumerate(re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S))
    ]


def commands() -> list:
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
        lines += re.findall(r"`(agfa [^`]+)`", text)
        found += [pytest.param(line, id=f"{page.name}: {line}") for line in lines if line.startswith("agfa ")]
    return found


@pytest.mark.parametrize("code", blocks("python"))
def test_python_runs(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
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
    if words[-1] in ("--help", "--version") or line == "agfa data":
        return
    app.parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_readme_names_every_make_target_that_it_promises():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", " ".join(page.read_text() for page in PAGES)):
        assert re.search(rf"^{target}:", makefile, re.M), target
