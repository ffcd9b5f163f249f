"""`agfa evaluate`: the model's predictions, domain by domain, judged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from sklearn.metrics import brier_score_loss, roc_auc_score

import agfa as package
from agfa.inference.evaluation import evaluate, run_of
from agfa.inference.predictor import load
from support import QUICK, Agfa

SETTINGS = {**QUICK, "steps": 12, "evaluate_every": 4, "hparams": {"lr": 3e-4, "initial_sd": 0.1}}


@pytest.fixture(scope="module")
def trained(images_made_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGFA_CACHE", str(folder / "cache"))
        return package.train(**SETTINGS, data=str(images_made_once), target="sky", out=folder / "run").folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_the_figures_are_those_of_the_predictions(run: Path, tiny: Path) -> None:
    model = load(run)
    found = evaluate(model, str(tiny), run)
    assert found.seen == "the sources' validation images"
    files = {name: sorted((tiny / name).rglob("*.*")) for name in ("ink", "paper", "sky")}
    said = {name: model.predict(of, batch_size=256) for name, of in files.items()}
    for name, figures in found.domains.items():
        pairs = list(zip(said[name], files[name], strict=True))
        assert figures.accuracy == sum(s.label == f.parent.name for s, f in pairs) / 30
        # scikit-learn's, one class against the rest, summed
        summed = sum(
            brier_score_loss([f.parent.name == c for _, f in pairs], [s.probabilities[c] for s, _ in pairs])
            for c in model.classes
        )
        assert figures.brier == pytest.approx(summed, abs=1e-6)
    assert {name: f.auroc == f.auroc for name, f in found.domains.items()} == {
        "ink": False,
        "paper": False,
        "sky": True,
    }


def test_without_its_run_a_model_is_held_against_the_sources_that_are_there(run: Path, tiny: Path) -> None:
    model = load(run)
    found = evaluate(model, str(tiny))
    assert found.seen is not None
    assert "mostly training images" in found.seen
    said = {name: model.predict(sorted((tiny / name).rglob("*.*"))) for name in ("ink", "paper", "sky")}
    doubts = [1 - s.probability for name in ("sky", "ink", "paper") for s in said[name]]
    assert found.domains["sky"].auroc == pytest.approx(roc_auc_score([1] * 30 + [0] * 60, doubts), abs=1e-3)
    shutil.rmtree(tiny / "ink")
    shutil.rmtree(tiny / "paper")
    alone = evaluate(model, str(tiny))
    assert alone.seen is None
    assert alone.domains["sky"].auroc != alone.domains["sky"].auroc


def test_the_run_of_a_model(run: Path) -> None:
    assert run_of(run) == run_of(run / "model.safetensors") == run_of(run / "models" / "last.safetensors") == run
    (run / "predictions.parquet").unlink()
    assert run_of(run) is None


def test_the_tables(agfa: Agfa, run: Path, tiny: Path) -> None:
    ended = agfa("evaluate", run, "--data", tiny)
    assert (ended.status, ended.err) == (0, "")
    found = evaluate(load(run), str(tiny), run)
    rows = [line.split() for line in ended.out.splitlines()]
    for name, told in (("ink", ["trained", "on"]), ("paper", ["trained", "on"]), ("sky", ["unseen"])):
        f = found.domains[name]
        numbers = [f"{found.losses[name]:.3f}", f"{f.ece:.3f}", f"{f.brier:.3f}"]
        aurocs = [f"{f.auroc:.3f}", f"{f.auroc_disagreement:.3f}"] if name == "sky" else []
        assert [name, *told, "30", f"{f.accuracy:.1%}", *numbers, *aurocs] in rows
        shares = (1, 0.9, 0.8, 0.7, 0.5)
        assert [name, *(f"{f.coverage.accuracy_at(share):.1%}" for share in shares)] in rows
    assert "trained on ink, paper; temperature" in ended.out


def test_json(agfa: Agfa, run: Path, tiny: Path) -> None:
    ended = agfa("evaluate", run, "--data", tiny, "--format", "json")
    assert (ended.status, ended.err) == (0, "")
    found = json.loads(ended.out)
    assert (found["model"], found["sources"]) == ("swad", ["ink", "paper"])
    assert found["temperature"] == load(run).card.temperature
    sky, ink = found["domains"]["sky"], found["domains"]["ink"]
    assert (sky["trained_on"], ink["trained_on"]) == (False, True)
    assert (sky["images"], ink["auroc"]) == (30, None)
    assert sky["coverage"]["share"][-1] == 1
    assert sky["coverage"]["accuracy"][-1] == pytest.approx(sky["accuracy"])
    assert sum(sky["reliability"]["n"]) == 30


def test_a_class_that_the_model_does_not_know(agfa: Agfa, run: Path, tiny: Path) -> None:
    (tiny / "ink" / "zigzag").mkdir()
    ended = agfa("evaluate", run, "--data", tiny)
    assert ended.status == 2
    assert "does not know: zigzag" in ended.error
