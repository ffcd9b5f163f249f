"""What an audit found, in sentences: the page and the terminal say the same."""

from __future__ import annotations

import numpy as np

from agfa.benchmark.audit_findings import Findings, Gain
from agfa.benchmark.audit_interval import OFTEN
from agfa.benchmark.missing import count
from agfa.benchmark.paired import points
from agfa.benchmark.rows import title
from agfa.benchmark.tables import Cell, Line, Table, cell
from agfa.training.calibration import ece


def headline(findings: Findings) -> str:
    """The figure that one came for."""
    e = findings.chosen.expected
    return (
        f"Expect {e.accuracy:.0%} of the images of the next domain to be named rightly; in {OFTEN}, "
        f"between {e.low:.0%} and {e.high:.0%}."
    )


def basis(findings: Findings) -> str:
    """What the figure rests on."""
    domains = findings.plan.dataset.domain_names
    rounds = f" in {count(findings.plan.rounds, 'round')}" if findings.plan.rounds > 1 else ""
    return (
        f"That is {title(findings.chosen.name)}, trained on all of {', '.join(domains)} but one, each left out in "
        f"turn{rounds}, and measured on the one left out. The interval comes from how much these {len(domains)} "
        "differ, so few domains make it wide; it holds for a next domain that is as different from these as they "
        "are from each other. The final model learns from one domain more, which usually helps."
    )


def weakest(findings: Findings) -> str:
    """The domain and the class to worry about."""
    domain, name = findings.weakest_domain, findings.weakest_class
    return (
        f"Weakest domain: {domain}, with {findings.chosen.by_domain[domain]:.1%}. "
        f"Weakest class: {name}, with {findings.by_class[name]:.1%} on average over domains."
    )


def pays(gain: Gain) -> str:
    """Whether one method is worth it over another."""
    if not any(gain.by_domain.values()):
        return f"{title(gain.row)} and {title(gain.other)} are level on every domain."
    wins = sum(value > 0 for value in gain.by_domain.values())
    more = "more" if gain.mean >= 0 else "less"
    text = (
        f"{title(gain.row)} has {100 * abs(gain.mean):.1f} points {more} than {title(gain.other)}, the mean over "
        f"{len(gain.by_domain)} domains; it is ahead on {wins} of them."
    )
    if gain.elsewhere is None:
        return text
    low, high = gain.elsewhere
    between = f"for other domains like these, the mean lies between {points(low)} and {points(high)} (95%)"
    if low > 0:
        return f"{text} It pays here: {between}."
    if high < 0:
        return f"{text} It does not pay here: {between}."
    return f"{text} That settles nothing: {between}."


def calibration(findings: Findings) -> str:
    """Whether its probabilities can be believed."""
    answers = findings.chosen.answers
    stated, true = float(answers["confidence"].to_numpy().mean()), float(answers["right"].to_numpy().mean())
    error = ece(answers["confidence"].to_numpy(), answers["right"].to_numpy())
    lean = "it is too sure of itself" if stated > true + 0.01 else "it is too modest" if stated < true - 0.01 else ""
    return (
        f"On images of domains left out, {title(findings.chosen.name)} states probabilities of {stated:.1%} on "
        f"average, and is right in {true:.1%}{f': {lean}' if lean else ''}. Its expected calibration error is "
        f"{100 * error:.1f} points."
    )


def domains_table(findings: Findings) -> Table:
    """Accuracy by method and held-out domain."""
    names = findings.plan.dataset.domain_names
    lines = []
    for method in findings.methods:
        cells = []
        for name in names:
            rounds = list(method.accuracies[name].values())
            error = float(np.std(rounds) / len(rounds) ** 0.5) if len(rounds) > 1 else None
            cells.append(Cell(float(np.mean(rounds)), error, len(rounds)))
        e = method.expected
        interval = f"{100 * e.low:.0f} to {100 * e.high:.0f}"
        lines.append(Line(title(method.name), (*cells, Cell(e.accuracy, None, len(rounds)), interval)))
    notes = (f"Interval: for the next domain, in {OFTEN}.",)
    return Table("Each domain when it was left out", ("Method", *names, "Mean", "Interval"), tuple(lines), notes)


def gains_table(findings: Findings) -> Table:
    """The differences between methods, in points."""
    names = findings.plan.dataset.domain_names
    lines = tuple(
        Line(
            f"{title(g.row)} − {title(g.other)}",
            (
                *(points(g.by_domain[name]) for name in names),
                points(g.mean),
                "–" if g.elsewhere is None else f"{points(g.elsewhere[0])} to {points(g.elsewhere[1])}",
                "one round" if g.here.t is None else f"{points(g.here.t[0])} to {points(g.here.t[1])}",
            ),
        )
        for g in findings.gains
    )
    notes = (
        "Points of accuracy, paired by domain and round. Both intervals are of the mean, at 95%, by Student's t: "
        "over domains (what other domains would give), and over rounds (what other seeds would give on these).",
    )
    header = ("Difference", *names, "Mean", "Other domains", "Other seeds")
    return Table("Differences", header, lines, notes, compared=False)


def classes_table(findings: Findings) -> Table:
    """Accuracy by class and held-out domain."""
    dataset = findings.plan.dataset
    rows = dict(zip(dataset.classes, findings.classes, strict=True))
    lines = tuple(
        Line(name, tuple(None if np.isnan(share) else f"{100 * share:.1f}" for share in (*rows[name], mean)))
        for name, mean in sorted(findings.by_class.items(), key=lambda item: item[1])
    )
    notes = (f"Accuracy in per cent of {title(findings.chosen.name)}, the weakest class first.",)
    return Table("Each class", ("Class", *dataset.domain_names, "Mean"), lines, notes, compared=False)


def trust_table(findings: Findings) -> Table:
    """How far the probabilities of each method hold on domains left out, means over domains."""
    names = findings.plan.dataset.domain_names
    lines = []
    for method in findings.methods:
        of = method.believed
        values = [of.mean("ece", names), of.mean("brier", names), of.surest(0.8, names), of.surest(0.5, names)]
        lines.append(Line(title(method.name), tuple(map(cell, values))))
    header = ("Method", "ECE", "Brier", "Right in the surest 80%", "in the surest 50%")
    notes = ("Means over domains left out; of ECE (15 bins) and Brier (times 100) less is better.",)
    return Table("Calibration", header, tuple(lines), notes, compared=False)


def thresholds_table(findings: Findings) -> Table:
    """What it answers, and how rightly, when it may leave the rest to a person."""
    lines = tuple(
        Line(f"{share:.0%}", (f"{least:.3f}", f"{100 * right:.1f}"))
        for least, share, right in findings.coverage
        if abs(share * 10 - round(share * 10)) < 0.02
    )
    header = ("Images that it answers", "with a probability of at least", "of them right, per cent")
    notes = ("Held-out domains pooled. `agfa predict --accuracy` takes its threshold from here.",)
    return Table("If it may abstain", header, lines, notes, compared=False)


def summary(findings: Findings) -> list[str]:
    """The page in a few lines."""
    return [headline(findings), weakest(findings), *map(pays, findings.gains), calibration(findings)]
