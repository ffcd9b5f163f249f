"""One HTML file that says what was measured: no network, no scripts, readable anywhere and in ten years."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agfa.benchmark.figures import unique_ids
from agfa.benchmark.records import is_done, read_config
from agfa.files import replace

ENVIRONMENT = "environment.json"
_NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Row:
    """One method's result. Accuracies are fractions; None is what was not measured."""

    method: str
    mean: float | None
    standard_error: float | None
    seeds: int
    source_accuracy: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class ReportFigure:
    """A figure of `agfa.benchmark.figures` (its SVG is trusted), what it shows in words, and its caption."""

    svg: str
    label: str
    caption: str


def write_report(
    path: Path,
    *,
    title: str,
    runs: list[Path],
    rows: list[Row],
    settings: dict[str, object],
    figures: list[ReportFigure],
    notes: list[str],
) -> Path:
    """Write the report on `runs` to `path`, whole or not at all, and give back the path."""
    template = _templates().get_template("report.html.j2")
    html = template.render(
        title=title,
        statement=_statement(runs, rows),
        rows=rows,
        best=max(filter(_is_number, (row.mean for row in rows)), default=None),
        settings=list(_flat(settings)),
        # numbered, so that no id occurs twice even when one figure is shown twice
        figures=[
            (Markup(unique_ids(figure.svg, f"figure{i}-")), figure.label, figure.caption)
            for i, figure in enumerate(figures, 1)
        ],
        notes=[*_what_is_missing(runs, rows), *notes],
        environment=_environment(runs),
    )
    # "replace": a folder's name on disk may be no valid Unicode, and is still to be reported
    replace(path, lambda file: file.write(html.encode("utf-8", errors="replace")))
    return path


def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("agfa.benchmark", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"percent": _percent, "seconds": _seconds}
    return templates


def _statement(runs: list[Path], rows: list[Row]) -> str:
    configs = [read_config(run) for run in runs]
    datasets = _listed(Path(str(config.get("data"))).name for config in configs)
    targets = _listed(str(name) for config in configs for name in config.get("target") or ())
    what = f"{_count(len(runs), 'training')} of {_count(len(rows), 'method')}"
    what += f" on {datasets}. " if datasets else ". "
    if runs and not targets:
        return what + "No domain was held out, so nothing was measured on one that the models had not seen."
    unseen = f"the target ({targets})" if targets else "the target"
    return what + (
        f"Each model learnt from the source domains alone and was then measured on {unseen}, from which it "
        "had learnt no image. Target accuracy is the share of the target's test images (80% of the domain) "
        "that were given the right class: the mean over seeds, ± its standard error."
    )


def _what_is_missing(runs: list[Path], rows: list[Row]) -> Iterator[str]:
    unfinished = sum(not is_done(run) for run in runs)
    if unfinished:
        yield f"{unfinished} of {_count(len(runs), 'training')} not finished: the result is not final."
    if any(row.seeds == 1 for row in rows):
        yield "One seed gives no standard error: how much chance had to do with that result is not known."
    if len({row.seeds for row in rows}) > 1:
        yield "The methods were not measured with the same number of seeds."


def _environment(runs: list[Path]) -> tuple[list[tuple[str, str]], str]:
    """What the first run recorded of its machine, and what is to be said about it."""
    found = [_read_environment(run) for run in runs]
    if not found or not found[0]:
        return [], "Versions and hardware were not recorded."
    others = sum(other != found[0] for other in found)
    differ = (
        f" {_count(others, 'other training')} ran elsewhere, with other versions, or did not say." if others else ""
    )
    return list(_flat(found[0])), f"As the first training recorded them.{differ}"


def _read_environment(run: Path) -> dict[str, Any]:
    try:
        environment = json.loads((run / ENVIRONMENT).read_bytes())
    except (OSError, ValueError):  # the results do not depend on it; the report says that it is missing
        return {}
    return environment if isinstance(environment, dict) else {}


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name} ")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{name}", ", ".join(map(str, value)) or "none"
        else:
            yield f"{prefix}{name}", "not set" if value is None else str(value)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _percent(value: float | None) -> str:
    return f"{100 * value:.1f}" if _is_number(value) else _NOT_MEASURED


def _seconds(value: float | None) -> str:
    if not _is_number(value):
        return _NOT_MEASURED
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
