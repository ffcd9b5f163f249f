"""The audit: each of one's own domains left out in turn, and in one page what to expect on the next.

An audit is a sweep (audit_plan), and what is read of its runs (audit_findings), written three ways: `audit.json` for
programs, `audit.html` and a summary for people.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agfa import algorithms
from agfa.benchmark.audit_findings import Findings, find
from agfa.benchmark.audit_interval import LEVEL
from agfa.benchmark.audit_page import write_page
from agfa.benchmark.audit_plan import make_plan
from agfa.benchmark.running import Workers, forgive, run_sweep, state
from agfa.data.domains import DomainDataset
from agfa.errors import AgfaError, UsageError
from agfa.files import put
from agfa.training.config import TrainConfig
from agfa.training.model_file import Audit
from agfa.training.progress import Display
from agfa.training.run_folder import RunFolder

FILE = "audit.json"
METHODS = ("erm", "swad", "agfa")  # SWAD costs nothing: it is an average along ERM's trainings
RETRIES = 1


def run_audit(
    given: TrainConfig,
    methods: Sequence[str],
    budget: float,
    rounds: int | None,
    out: Path,
    workers: Workers,
    display: Display,
) -> tuple[Findings, Path]:
    """Plan, train what is not done yet, and write `audit.json` and `audit.html` into `out`; gives the page's path.

    Raises:
        UsageError: the settings or the data do not allow it, or the budget is too small.
        AgfaError: a training failed; the same call tries it again.
    """
    plan = make_plan(given, methods, budget, rounds, out, workers, display)
    forgive(plan.runs)  # whoever asks again wants it tried again
    run_sweep(plan.file, plan.runs, out, workers, RETRIES, display)
    failed = [run for run in plan.runs if state(run) == "failed"]
    if failed:
        why = json.loads(RunFolder(failed[0].out).failed.read_text())["reason"]
        raise AgfaError(f"{len(failed)} of {len(plan.runs)} trainings failed, {failed[0].out.name} with: {why}")
    findings = find(plan)
    command = final_command(findings, given)
    content = json.dumps(contents(findings, command), indent=1).encode()
    put(out / FILE, content + b"\n")
    return findings, write_page(out / "audit.html", findings, command)


def final_command(findings: Findings, given: TrainConfig) -> str:
    """What trains the final model: the chosen method on all domains, with the settings that were audited."""
    settings = {**given.model_dump(mode="json", exclude_unset=True), **findings.plan.settings}
    settings = {key: value for key, value in settings.items() if key not in ("data", "algorithm", "out")}
    words = ["agfa", "train", "--data", str(given.data), "--algorithm", findings.chosen.name]
    for key, value in settings.items():
        flag = "--" + key.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, dict):
            words += [word for k, v in value.items() for word in (f"{flag}.{k.replace('_', '-')}", str(v))]
        else:
            words += [flag, str(value)]
    return shlex.join([*words, "--audit", str(findings.plan.file.parent)])


def contents(findings: Findings, command: str) -> dict[str, Any]:
    """What programs may want to know; `card` is what `agfa train --audit` puts into the final model's card."""
    plan = findings.plan
    return {
        "data": plan.dataset.name,
        "classes": plan.dataset.classes,
        "algorithm": findings.chosen.name,
        "rounds": plan.rounds,
        "steps": plan.settings["steps"],
        "level": LEVEL,
        "card": card_record(findings).model_dump(mode="json"),
        "methods": {m.name: {**m.expected._asdict(), "domains": m.by_domain} for m in findings.methods},
        "gains": [
            {"row": g.row, "other": g.other, "mean": g.mean, "domains": g.by_domain, "interval": g.elsewhere}
            for g in findings.gains
        ],
        "weakest": {"domain": findings.weakest_domain, "class": findings.weakest_class},
        "accuracy_by_class": findings.by_class,
        "mistakes": [mistake._asdict() for mistake in findings.mistakes],
        "train": command,
    }


def card_record(findings: Findings) -> Audit:
    """What the card of the final model says of the audit."""
    chosen = findings.chosen
    return Audit(
        expected=chosen.expected.accuracy,
        low=chosen.expected.low,
        high=chosen.expected.high,
        domains=chosen.by_domain,
        target_images=chosen.images,
        temperature=findings.temperature,
        coverage=findings.coverage,
    )


def record_for(folder: Path, dataset: DomainDataset, algorithm: str) -> Audit:
    """The audit in that folder, for the card of a model of these classes and that method.

    Raises:
        UsageError: there is none, or it is of something else.
    """
    file = folder / FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        classes, method, audit = found["classes"], found["algorithm"], Audit.model_validate(found["card"])
    except FileNotFoundError as error:
        raise UsageError(
            f"no finished audit in {folder}; `agfa audit --data ... --out {folder}` makes one"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{file} is not an audit: {' '.join(str(error).split())}") from error
    if tuple(classes) != dataset.classes:
        differ = sorted(set(classes) ^ set(dataset.classes)) or ["their order"]
        raise UsageError(f"{file} is of other classes than {dataset.name} ({', '.join(differ[:5])}); audit this data")
    if algorithms.get(algorithm).name != algorithms.get(method).name:
        raise UsageError(
            f"{file} speaks for {method}, not {algorithm}; train that, or audit with --methods {algorithm}"
        )
    return audit
