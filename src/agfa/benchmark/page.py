"""A report as one HTML file: no network, readable anywhere, printable, and in ten years still."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from agfa.benchmark.figures import to_svg, unique_ids
from agfa.benchmark.missing import count
from agfa.benchmark.render import said, text
from agfa.benchmark.report import Report
from agfa.benchmark.tables import Cell
from agfa.files import put

ENVIRONMENT = "environment.json"


def write_page(path: Path, report: Report) -> Path:
    """Write the report to `path`, whole or not at all, and give back the path."""
    return render(
        path,
        "report.html.j2",
        report=report,
        figures=[
            (drawn(figure.figure, i), figure.label, figure.caption) for i, figure in enumerate(report.figures, 1)
        ],
        settings=list(flat(report.settings)),
        environment=environment(report.runs),
    )


def render(path: Path, template: str, **values: Any) -> Path:
    """Write a page made of that template and the script that sorts tables, whole or not at all."""
    script = (files("agfa.benchmark") / "report.js").read_text(encoding="utf-8")
    # no other script runs, whatever a folder is called
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = _templates().get_template(template).render(**values, script=Markup(script), script_hash=script_hash)
    # "replace": a folder's name on disk may be no valid Unicode, and is still to be reported
    put(path, html.encode("utf-8", errors="replace"))
    return path


def drawn(figure: Figure, number: int) -> Markup:
    """The figure in a page; numbered, so that no id occurs twice even when one figure is shown twice."""
    return Markup(unique_ids(to_svg(figure), f"figure{number}-"))


def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("agfa.benchmark", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals |= {"text": text, "said": said, "sort_key": _sort_key}
    return templates


def _sort_key(cell: Cell | str | None) -> str:
    """What a cell is sorted by; empty: it comes last."""
    if isinstance(cell, Cell):
        return f"{cell.mean:.6f}"
    number = re.match(r"[+-]?[\d,]*\.?\d+", cell or "")
    return number[0].replace(",", "") if number else cell or ""


def environment(runs: tuple[Path, ...]) -> tuple[list[tuple[str, str]], str]:
    """What the first run recorded of its machine, and what is to be said about it."""
    found = [_read_environment(run) for run in runs]
    if not found or not found[0]:
        return [], "Versions and hardware were not recorded."
    others = sum(other != found[0] for other in found)
    differ = (
        f" {count(others, 'other training')} ran elsewhere, with other versions, or did not say." if others else ""
    )
    return list(flat(found[0])), f"As the first training recorded them.{differ}"


def _read_environment(run: Path) -> dict[str, Any]:
    try:
        environment = json.loads((run / ENVIRONMENT).read_bytes())
    except (OSError, ValueError):  # the results do not depend on it; the report says that it is missing
        return {}
    return environment if isinstance(environment, dict) else {}


def flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values as text, those within others by both names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name} ")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{name}", ", ".join(map(str, value)) or "none"
        else:
            yield f"{prefix}{name}", "not set" if value is None else str(value)
