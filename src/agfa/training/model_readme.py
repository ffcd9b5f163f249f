"""A model's README.md, as the Hugging Face hub and people read it: made of its card and its run's records."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from agfa.data.own import HUB
from agfa.errors import AgfaError
from agfa.training import config as configuration
from agfa.training.config import CompleteConfig
from agfa.training.model_file import Audit, ModelCard

Row = dict[str, Any]
NAMES = {"val": "validation", "test": "test", "oracle": "oracle's"}
CLASSES = 50  # named one by one; a README is no list


def readme(card: ModelCard, weights: Path) -> str:
    """The README.md of a model, with what its run measured where the weights are still in the run's folder."""
    run = next((f for f in (weights.parent, weights.parent.parent) if (f / "config.yaml").is_file()), None)
    settings = configuration.parse(configuration.read(run / "config.yaml"), CompleteConfig) if run else None
    measured = _measured(run / "metrics.jsonl", card.model) if run else []
    parts = [
        _front_matter(card, settings, measured),
        f"# {_title(card, settings)}",
        f"An image classifier for {len(card.classes)} classes, trained with [agfa](https://pypi.org/project/agfa/)'s "
        f"`{card.algorithm}` on {_listed(card.sources)}, to hold on domains that it has not seen.",
        USE,
        _about(card, settings, run),
        "## Measured",
        *_accuracies(card, measured),
        *_audit(card.audit),
        "## Limits",
        _limits(card),
    ]
    return "\n\n".join(parts) + "\n"


USE = """## Use it

```python
from agfa import load

model = load("hf:OWNER/NAME")  # or the folder, or the address, where this file is
for answer in model.predict(["photo.jpg"]):
    print(answer.label, answer.probability, answer.disagreement)
```

```
agfa predict hf:OWNER/NAME photo.jpg folder/ --out answers.csv
```"""


def _front_matter(card: ModelCard, settings: CompleteConfig | None, measured: list[Row]) -> str:
    """The YAML that the hub reads, by the hub's own hand."""
    from huggingface_hub import EvalResult, ModelCardData

    data = _data(settings)
    results = [
        EvalResult(
            task_type="image-classification",
            dataset_type=data or "imagefolder",
            dataset_name=f"{data or 'images'}: {row['domain']} ({row['role']})",
            dataset_split=NAMES[row["split"]],
            metric_type="accuracy",
            metric_value=round(row["accuracy"], 4),
        )
        for row in measured
    ]
    about: Row = {"tags": ["agfa", "domain-generalization", card.algorithm]}
    if (
        settings
        and settings.weights == "pretrained"
        and "." in card.backbone
        and not card.backbone.endswith(".wheel")
    ):
        about["base_model"] = f"timm/{card.backbone}"
    if settings and settings.data.startswith(HUB):
        about["datasets"] = [settings.data.removeprefix(HUB).partition("?")[0]]
    if results:
        about |= {"model_name": _title(card, settings), "eval_results": results}
    front = ModelCardData(library_name="agfa", pipeline_tag="image-classification", **about)
    return f"---\n{front.to_yaml()}\n---"


def _title(card: ModelCard, settings: CompleteConfig | None) -> str:
    data = _data(settings)
    return f"{card.algorithm} ({card.model}) on {_plain(data)}" if data else f"{card.algorithm} ({card.model})"


def _data(settings: CompleteConfig | None) -> str:
    """What the data is called, without where it lies on the machine that trained."""
    if settings is None:
        return ""
    place = settings.data.partition("?")[0]
    return place.removeprefix(HUB) if place.startswith(HUB) else Path(place).name


def _about(card: ModelCard, settings: CompleteConfig | None, run: Path | None) -> str:
    more = f" and {len(card.classes) - CLASSES} more (`model.json`)" if len(card.classes) > CLASSES else ""
    hparams = ", ".join(f"{key} {value}" for key, value in card.hparams.items() if value is not None)
    rows = [
        ("classes", _listed(card.classes[:CLASSES]) + more),
        ("trained on the domains", _listed(card.sources)),
        ("held out", _listed(card.targets) if card.targets else "nothing"),
        ("method", f"`{card.algorithm}`: {hparams}"),
        ("which of the run's models", f"`{card.model}`, of step {card.step}"),
        ("backbone", f"`{card.backbone}`, weights at the start {card.initial_weights}"),
        ("images", f"whole, squashed to {card.image_size} x {card.image_size}, {card.channels} channels"),
        ("temperature", f"{card.temperature:.4g}"),
    ]
    if settings is not None:
        rows += [
            ("training", f"{settings.steps} steps of {settings.batch_size} images a domain, seed {settings.seed}"),
            ("held out of each domain trained on, for validation", f"{settings.val_fraction:.0%}"),
        ]
    environment = run / "environment.json" if run else None
    if environment and environment.is_file():
        versions = json.loads(environment.read_text(encoding="utf-8")).get("versions", {})
        rows.append(("versions", ", ".join(f"{name} {value}" for name, value in versions.items() if value)))
    return "## What it is\n\n" + _table(("", ""), rows)


def _measured(log: Path, model: str) -> list[Row]:
    """The last measurements of a model in its run's log, one for each domain and part."""
    found: dict[tuple[str, ...], Row] = {}
    try:
        for line in log.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if row["kind"] == "final" and row["model"] == model:
                found[row["role"], row["domain"], row["split"]] = row
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AgfaError(f"{log} cannot be read: {error}") from error
    return list(found.values())


def _accuracies(card: ModelCard, measured: list[Row]) -> Iterable[str]:
    if not measured:
        yield "The files that this was made of say of no measurement."
        return
    yield _table(
        ("domain", "", "images", "accuracy", "cross-entropy"),
        [
            (
                _plain(row["domain"]),
                f"trained on, {NAMES[row['split']]}" if row["role"] == "source" else f"unseen, {NAMES[row['split']]}",
                row["n"],
                f"{row['accuracy']:.1%}",
                f"{row['loss']:.3f}",
            )
            for row in measured
        ],
    )
    if card.model == "oracle":
        yield "This model was chosen by labels of the unseen domain: its accuracy there is no honest measurement."


def _audit(audit: Audit | None) -> Iterable[str]:
    """What to expect on the next domain, if that was measured."""
    if audit is None:
        return
    yield "## Audit: what to expect on another domain"
    yield (
        f"Accuracy {audit.expected:.1%}, between {audit.low:.1%} and {audit.high:.1%}. "
        "Measured with models trained alike, each domain held out in turn:"
    )
    rows = [(_plain(name), audit.target_images.get(name, ""), f"{a:.1%}") for name, a in audit.domains.items()]
    yield _table(("held out", "images", "accuracy"), rows)
    if audit.coverage:
        yield "Of images answered only from a probability on, on those domains:"
        few = audit.coverage[:: max(1, len(audit.coverage) // 10)]
        yield _table(
            ("probability", "answered", "accuracy"), [(f"{c:.3f}", f"{s:.1%}", f"{a:.1%}") for c, s, a in few]
        )


def _limits(card: ModelCard) -> str:
    limits = [
        "Every image is given one of the classes above, whatever it shows.",
        "Accuracy on validation images of domains that it was trained on tells little of another domain.",
    ]
    if card.audit is None and not card.targets:
        limits.append(
            "No domain was held out and there is no audit: nothing is known of its accuracy on another domain."
        )
    elif card.audit is None:
        limits.append(
            f"Its accuracy on another domain is known from {_listed(card.targets)} alone; there is no audit."
        )
    fitted = "calibrated on" if card.temperature != 1 else "not calibrated beyond training on"
    limits.append(f"Probabilities are {fitted} the domains trained on; elsewhere they may be too sure.")
    limits.append("Images are squashed to a square, so details smaller than a pixel of that are lost.")
    return "\n".join(f"- {limit}" for limit in limits)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(_plain(name) for name in names)


def _table(header: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(str(cell) for cell in line)} |" for line in lines)


def _plain(name: str) -> str:
    """A name of somebody's folder, without what Markdown would make of it."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", " ".join(name.split()))
