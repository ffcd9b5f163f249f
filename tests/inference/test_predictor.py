"""A model predicts what its evaluation said, whatever form an image comes in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import agfa as package
from agfa.errors import UsageError
from agfa.inference import predictor as predictor_module
from agfa.inference.predictor import Predictor, load
from agfa.nn.predictive import Predictive, predictive
from agfa.training import evaluate
from support import CLASSES, QUICK, Agfa


def train(images: Path, folder: Path, algorithm: str) -> Path:
    settings = {**QUICK, "steps": 30, "evaluate_every": 10, "algorithm": algorithm}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGFA_CACHE", str(folder / "cache"))
        return package.train(**settings, data=str(images), target="sky", out=folder / algorithm).folder


@pytest.fixture(scope="module")
def run(images_made_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(images_made_once, tmp_path_factory.mktemp("predictor"), "agfa")


@pytest.fixture(scope="module")
def linear(images_made_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    return load(train(images_made_once, tmp_path_factory.mktemp("predictor"), "erm"))


@pytest.fixture
def predictor(run: Path) -> Predictor:
    return load(run)


def test_predictions_agree_with_evaluation_and_with_training(predictor: Predictor, run: Path, tiny: Path) -> None:
    scores = predictor.evaluate(str(tiny))
    assert list(scores) == ["ink", "paper", "sky"]
    for name, score in scores.items():
        files = sorted((tiny / name).rglob("*.*"))
        labels = [prediction.label for prediction in predictor.predict(files, batch_size=7)]
        right = sum(label == file.parent.name for label, file in zip(labels, files, strict=True))
        assert (right / 30, 30) == (score.accuracy, score.n)
    finals = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    unseen = [r for r in finals if r["kind"] == "final" and r["model"] == "swad" and r["domain"] == "sky"]
    assert sum(r["accuracy"] * r["n"] for r in unseen) == pytest.approx(scores["sky"].accuracy * 30)
    assert sum(r["loss"] * r["n"] for r in unseen) == pytest.approx(scores["sky"].loss * 30)


@pytest.mark.parametrize("method", ["agfa", "erm"])
def test_the_same_bits_as_evaluate(
    method: str, run: Path, linear: Predictor, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one device, with the same images in a batch; otherwise within 1e-5."""
    predictor = load(run) if method == "agfa" else linear
    seen: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def noted(mu: torch.Tensor, sigma: torch.Tensor | None, temperature: float) -> Predictive:
        seen.append((mu, sigma))
        return predictive(mu, sigma, temperature)

    monkeypatch.setattr(predictor_module, "predictive", noted)
    monkeypatch.setattr(evaluate, "BATCH", 16)
    for domain, part, evaluated in predictor.ask(str(tiny)):
        order = np.random.default_rng(0).permutation(len(part))  # as images are evaluated
        files = [tiny / domain.name / domain.keys[i] for i in order]
        for batch_size in (16, 1, 7, 64):
            seen.clear()
            said = predictor.predict(files, batch_size) if batch_size != 7 else list(predictor.stream(files, 7))
            for found, want in zip(zip(*seen, strict=True), evaluated[:2], strict=True):
                if want is None:
                    assert set(found) == {None}
                elif batch_size == 16:
                    assert torch.equal(torch.cat(found), want[order])
                else:
                    torch.testing.assert_close(torch.cat(found), want[order], rtol=0, atol=1e-5)
            sigma = None if evaluated.sigma is None else evaluated.sigma[order]
            told = predictive(evaluated.mu[order], sigma, predictor.card.temperature)
            for one, probabilities in zip(said, told.probabilities.tolist(), strict=True):
                assert list(one.probabilities.values()) == pytest.approx(probabilities, abs=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_too(run: Path, predictor: Predictor, tiny: Path) -> None:
    on_gpu = load(run, "cuda")
    files = sorted(tiny.rglob("*.*"))
    for here, there in zip(predictor.predict(files), on_gpu.predict(files), strict=True):
        assert (here.label, there.label) == (there.label, here.label)
        assert there.probabilities == pytest.approx(here.probabilities, abs=1e-5)
    assert on_gpu.evaluate(str(tiny))["sky"].accuracy == predictor.evaluate(str(tiny))["sky"].accuracy


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P", "16 bit", "large"])
def test_files_images_and_arrays_are_the_same(mode: str, predictor: Predictor, tmp_path: Path) -> None:
    color = np.random.default_rng(0).integers(0, 256, (60, 40, 3), np.uint8)
    image = Image.fromarray(color)
    if mode == "large":
        image = image.resize((400, 300))
    elif mode == "16 bit":
        image = Image.fromarray(color[..., 0].astype(np.uint16) << 8)
    elif mode != "RGB":
        image = image.convert(mode)
    image.save(tmp_path / "a.png")
    forms = [tmp_path / "a.png", str(tmp_path / "a.png"), image]
    if mode in ("RGB", "L", "RGBA", "large"):
        forms.append(np.asarray(image))
    one, *others = (predictor.predict([form])[0] for form in forms)
    assert all(other == one for other in others)


def test_an_upright_image_and_its_turned_file_are_the_same(predictor: Predictor, tmp_path: Path) -> None:
    color = np.random.default_rng(0).integers(0, 256, (30, 20, 3), np.uint8)
    turned = Image.fromarray(np.ascontiguousarray(np.rot90(color)))
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "a.png", exif=exif)
    assert predictor.predict([tmp_path / "a.png"]) == predictor.predict([color])


def test_what_a_prediction_says(predictor: Predictor, linear: Predictor, tiny: Path) -> None:
    files = sorted((tiny / "ink").rglob("*.png"))
    for model in (predictor, linear):
        for prediction in model.predict(files):
            assert tuple(prediction.probabilities) == model.classes == CLASSES
            assert sum(prediction.probabilities.values()) == pytest.approx(1, abs=1e-5)
            assert prediction.probability == prediction.probabilities[prediction.label]
            if model is linear:
                assert prediction.disagreement is None
                assert prediction.probability == max(prediction.probabilities.values())
            else:
                assert prediction.disagreement is not None
                assert 0 <= prediction.disagreement <= 1


def test_an_image_is_judged_alone(predictor: Predictor, tiny: Path) -> None:
    files = sorted((tiny / "ink").rglob("*.png"))
    together = predictor.predict(files)
    for file, prediction in zip(files[:5], together, strict=False):
        (alone,) = predictor.predict([file])
        assert alone.label == prediction.label
        assert alone.probability == pytest.approx(prediction.probability, abs=1e-5)
        assert alone.disagreement == pytest.approx(prediction.disagreement, abs=0.02)
    assert predictor.predict(files) == together


def test_the_stream_takes_no_more_than_it_needs(predictor: Predictor, tiny: Path) -> None:
    taken: list[Path] = []

    def files() -> Iterator[Path]:
        for path in sorted((tiny / "ink").rglob("*.png")):
            taken.append(path)
            yield path

    stream = predictor.stream(files(), batch_size=4)
    assert taken == []
    next(stream)
    assert len(taken) == 4
    for _ in range(4):
        next(stream)
    assert len(taken) == 8
    assert len(list(stream)) == 10
    assert predictor.predict([]) == []


def test_an_image_that_cannot_be_read(predictor: Predictor, tiny: Path) -> None:
    good = tiny / "ink" / "top" / "00.jpg"
    bad = tiny / "bad.png"
    bad.write_text("text")
    with pytest.raises(UsageError, match=r"bad\.png: not an image"):
        predictor.predict([good, bad])
    stream = predictor.stream([good, bad], batch_size=2)
    assert next(stream).label in CLASSES
    with pytest.raises(UsageError, match=r"bad\.png"):
        next(stream)
    with pytest.raises(UsageError, match=r"none\.png: .*No such file"):
        predictor.predict([tiny / "none.png"])


def test_other_classes_are_refused_and_fewer_are_not(predictor: Predictor, tiny: Path) -> None:
    all_classes = predictor.evaluate(str(tiny))["sky"]
    for domain in ("ink", "paper", "sky"):
        shutil.rmtree(tiny / domain / "left")
    fewer = predictor.evaluate(str(tiny))["sky"]
    assert (all_classes.n, fewer.n) == (30, 20)
    files = [f for name in ("cross", "top") for f in sorted((tiny / "sky" / name).iterdir())]
    right = sum(p.label == f.parent.name for p, f in zip(predictor.predict(files), files, strict=True))
    assert fewer.accuracy == right / 20
    (tiny / "sky" / "top").rename(tiny / "sky" / "topp")
    with pytest.raises(UsageError, match="tiny has classes that the model does not know: topp; it knows cross, left"):
        predictor.evaluate(str(tiny))


def test_prediction_needs_no_gradient_and_no_training_data(predictor: Predictor) -> None:
    assert not predictor.network.training
    predictor.predict([np.zeros((4, 4, 3), np.uint8)])
    assert all(p.grad is None for p in predictor.network.parameters())
    assert predictor.device == torch.device("cpu")


# --- the command


def test_an_unknown_device(agfa: Agfa, run: Path, tiny: Path) -> None:
    ended = agfa("evaluate", run, "--data", tiny, "--device", "gpu")
    assert ended.status == 2
    assert "gpu" in ended.error
