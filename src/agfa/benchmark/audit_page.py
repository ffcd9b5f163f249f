"""An audit as one HTML file, in the style of reports."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from agfa.benchmark import audit_words as words
from agfa.benchmark.audit_figures import expected_figure, thumbnail
from agfa.benchmark.audit_findings import Findings
from agfa.benchmark.page import drawn, environment, flat, render
from agfa.benchmark.rows import title
from agfa.benchmark.uncertainty import calibration_figure


def write_page(path: Path, findings: Findings, command: str) -> Path:
    """Write the page to `path`, whole or not at all, and give back the path."""
    dataset, chosen = findings.plan.dataset, findings.chosen
    figures = (
        (
            drawn(expected_figure(findings), 1),
            "; ".join(_said(method.name, method.by_domain) for method in findings.methods),
            "A dot for each domain when it was left out, their mean, and the interval for the next domain.",
        ),
        (
            drawn(calibration_figure({method.name: method.believed for method in findings.methods}), 2),
            f"{words.calibration(findings)} The tables below have the numbers.",
            "Left: accuracy when only the surest images are answered, the mean over domains. Right: accuracy against "
            "the probability that is stated, domains pooled; on the gray line they agree.",
        ),
    )
    mistakes = [
        (domain, [(thumbnail(dataset, domain, m.place), m) for m in of])
        for domain, of in groupby(findings.mistakes, key=lambda mistake: mistake.domain)
    ]
    return render(
        path,
        "audit.html.j2",
        title=f"Audit of {dataset.name}",
        method=title(chosen.name),
        words=words,
        findings=findings,
        tables={
            "domains": words.domains_table(findings),
            "gains": words.gains_table(findings),
            "classes": words.classes_table(findings),
            "trust": words.trust_table(findings),
            "thresholds": words.thresholds_table(findings),
        },
        figures=figures,
        mistakes=mistakes,
        command=command,
        settings=list(flat(findings.plan.settings)),
        environment=environment(tuple(run.out for run in findings.plan.runs)),
    )


def _said(method: str, by_domain: dict[str, float]) -> str:
    return f"{title(method)}: " + ", ".join(f"{name} {100 * accuracy:.1f}" for name, accuracy in by_domain.items())
