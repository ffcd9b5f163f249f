"""A model's README.md says what its card and its records say, in the form that the hub reads."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard as HubCard

import agfa as package
from agfa.errors import AgfaError
from agfa.training.model_file import load
from agfa.training.model_readme import readme
from support import CLASSES
from support_models import AUDIT, make_card


@pytest.fixture(scope="module")
def run(images_made_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support import QUICK

    folder = tmp_path_factory.mktemp("readme")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGFA_CACHE", str(folder / "cache"))
        return package.train(**QUICK, data=str(images_made_once), target="sky", out=folder / "run").folder


def parse(text: str) -> HubCard:
    """As the hub's client reads it; strict about evaluation results, and YAML that is read by others too."""
    card = HubCard(text, ignore_metadata_errors=False)
    assert yaml.safe_load(text.split("---")[1]).keys() == card.data.to_dict().keys() - {
        "model_name",
        "eval_results",
    } | ({"model-index"} if card.data.eval_results else set())
    return card


def finals(run: Path, model: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [r for r in records if r["kind"] == "final" and r["model"] == model]


def test_a_run_leaves_one_that_the_hub_can_read(run: Path) -> None:
    text = (run / "README.md").read_text()
    hub = parse(text)
    assert hub.data.library_name == "agfa"
    assert hub.data.pipeline_tag == "image-classification"
    assert hub.data.model_name == "agfa (swad) on tiny"
    measured = finals(run, "swad")
    assert len(measured) == len(hub.data.eval_results) == 4
    for row, result in zip(measured, hub.data.eval_results, strict=True):
        assert math.isclose(result.metric_value, row["accuracy"], abs_tol=5e-5)
        assert f"| {row['domain']} | " in text
        assert f"| {row['n']} | {row['accuracy']:.1%} | {row['loss']:.3f} |" in text
    assert all(name in text for name in (*CLASSES, "ink", "paper", "sky", "convnet", "8 x 8", "6 steps of 4 images"))
    assert "Its accuracy on another domain is known from sky alone; there is no audit." in text
    assert str(run.parent) not in text


def test_every_model_of_a_run_has_its_own_figures(run: Path) -> None:
    for name in ("last", "best", "oracle"):
        weights = run / "models" / f"{name}.safetensors"
        text = readme(load(weights)[1], weights)
        for row, result in zip(finals(run, name), parse(text).data.eval_results, strict=True):
            assert math.isclose(result.metric_value, row["accuracy"], abs_tol=5e-5)
        assert ("no honest measurement" in text) == (name == "oracle")


def test_an_audit_is_told(tmp_path: Path) -> None:
    text = readme(make_card(audit=AUDIT, temperature=1.7), tmp_path / "model.safetensors")
    parse(text)
    assert "Accuracy 71.0%, between 62.0% and 80.0%." in text
    assert "| ink | 24 | 64.0% |" in text
    assert "| 0.500 | 60.0% | 96.0% |" in text
    assert "| temperature | 1.7 |" in text
    assert "there is no audit" not in text.lower()
    assert "say of no measurement" in text


def test_without_an_audit_nothing_is_promised(tmp_path: Path) -> None:
    text = readme(make_card(targets=()), tmp_path / "model.safetensors")
    assert "nothing is known of its accuracy on another domain" in text
    assert "Audit:" not in text


def test_names_are_no_markup(tmp_path: Path) -> None:
    odd = ("a|b", "<script>x</script>", "c\nd", "*e*", "---")
    text = readme(make_card(classes=odd, sources=("`x`", "#y")), tmp_path / "model.safetensors")
    parse(text)
    assert "<script" not in text.replace(r"\<", "")
    assert r"a\|b, \<script\>x\</script\>, c d, \*e\*" in text
    assert len({line.replace(r"\|", "").count("|") for line in text.splitlines() if line.startswith("|")}) == 1


def test_many_classes_are_not_listed(tmp_path: Path) -> None:
    text = readme(make_card(classes=tuple(f"class{i}" for i in range(345))), tmp_path / "model.safetensors")
    assert "class49 and 295 more (`model.json`)" in text
    assert "class50" not in text


def test_damaged_records(run: Path, tmp_path: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).write_text((run / name).read_text() + ("{" if name == "metrics.jsonl" else ""))
    with pytest.raises(AgfaError, match=r"metrics\.jsonl cannot be read") as error:
        readme(make_card(), tmp_path / "model.safetensors")
    assert "\n" not in str(error.value)
