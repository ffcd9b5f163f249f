"""The worst case of one image: what is sent is what the model was given, and it is the hardest of what was drawn."""

from __future__ import annotations

import base64
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from agfa.benchmark.amplitude import load_generator
from agfa.errors import UsageError
from agfa.inference.imagine import DRAWS, STEPS, Imagination, Levels, imagination, imagine
from agfa.inference.pictures import square
from agfa.inference.predictor import Predictor, load
from agfa.nn.spectrum import mix_amplitude


@pytest.fixture(scope="module")
def predictor(agfa_run: Path) -> Predictor:
    return load(agfa_run)


@pytest.fixture
def pixels(images_made_once: Path) -> Tensor:
    return square(images_made_once / "sky" / "left" / "01.png", 3, 8)


def numbers(levels: Levels, *shape: int) -> Tensor:
    steps = np.frombuffer(base64.b64decode(levels.bytes), np.uint8).reshape(shape)
    return torch.from_numpy(levels.low + (levels.high - levels.low) * steps.astype(np.float64) / 255)


def step(levels: Levels) -> float:
    return (levels.high - levels.low) / 255


def found(run: Path, predictor: Predictor) -> Imagination:
    of_run = imagination(run, predictor.card)
    assert of_run is not None
    return of_run


def test_it_is_the_hardest_domain_and_what_is_sent_makes_the_same_mixtures(
    predictor: Predictor, agfa_run: Path, pixels: Tensor
) -> None:
    said = imagine(predictor, found(agfa_run, predictor), pixels)
    assert (said.trained, said.draws, said.channels, said.size) == (1.0, DRAWS, 3, 8)
    (alone,) = predictor.answer(pixels[None])
    assert said.judged[0].label == alone.label
    assert said.judged[0].probabilities == pytest.approx(alone.probabilities, abs=1e-5)
    assert [judged.strength for judged in said.judged] == [round(i / STEPS, 4) for i in range(STEPS + 1)]

    generator = load_generator(agfa_run)
    torch.manual_seed(0)
    amplitudes = generator(DRAWS).detach()
    x = (pixels[None] / 255).double()
    drawn = predictor.judge(mix_amplitude(x, amplitudes, 1.0).float())
    assert said.holds == sum(each.label == alone.label for each in drawn)
    ended = said.judged[-1]
    changed = [each for each in drawn if each.label != alone.label] or drawn
    least = min(each.probabilities[alone.label] for each in changed)
    assert ended.probabilities[alone.label] == pytest.approx(least, abs=1e-5)
    assert (ended.label != alone.label) == (said.holds < DRAWS)

    original, generated = numbers(said.original, 3, 8, 8), numbers(said.generated, 3, 8, 8)
    assert torch.equal((original * 255).round().byte(), pixels)
    for judged in (said.judged[0], said.judged[7], said.judged[-1]):
        mixed = (1 - judged.strength) * original + judged.strength * generated
        (again,) = predictor.judge(mixed[None].float())
        assert again.probabilities == pytest.approx(judged.probabilities, abs=20 * step(said.generated))
        amplitude = torch.fft.fftshift(torch.fft.fft2(mixed).abs().mean(0))
        shown = (1 - judged.strength) * numbers(said.amplitude, 8, 8).expm1()
        shown = shown + judged.strength * numbers(said.generated_amplitude, 8, 8).expm1()
        assert torch.allclose(shown, amplitude, rtol=2 * step(said.amplitude), atol=64 * step(said.generated))
    phase = torch.fft.fftshift(torch.fft.fft2(generated[0]).angle())
    loud = torch.fft.fftshift(torch.fft.fft2(generated[0]).abs()) > 64 * step(said.generated)
    apart = (numbers(said.phase, 8, 8) - phase + torch.pi).remainder(2 * torch.pi) - torch.pi
    assert loud.sum() > 20
    assert apart[loud].abs().max() < 0.5


def test_it_is_the_same_each_time_and_leaves_randomness_alone(
    predictor: Predictor, agfa_run: Path, pixels: Tensor
) -> None:
    of_run = found(agfa_run, predictor)
    before = torch.random.get_rng_state()
    one = imagine(predictor, of_run, pixels)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.rand(3)
    assert imagine(predictor, of_run, pixels) == one


def test_the_strength_trained_with_chooses_the_domain(predictor: Predictor, agfa_run: Path, pixels: Tensor) -> None:
    generator = found(agfa_run, predictor).generator
    weak = imagine(predictor, Imagination(generator, 0.0), pixels)
    assert weak.holds == DRAWS  # nothing is mixed in


def test_where_there_is_no_generator(predictor: Predictor, agfa_run: Path, erm_run: Path, tmp_path: Path) -> None:
    assert imagination(erm_run, load(erm_run).card) is None
    assert found(agfa_run / "models" / "last.safetensors", predictor).strength == 1.0
    for changed in ({"target": "pixel"}, {"eta": 0.0}, {"generator_lr": 0.0}):
        card = predictor.card.model_copy(update={"hparams": {**predictor.card.hparams, **changed}})
        assert imagination(agfa_run, card) is None
    unmixed = predictor.card.model_copy(update={"hparams": {**predictor.card.hparams, "mix": False, "alpha": 0.2}})
    of_run = imagination(agfa_run, unmixed)
    assert of_run is not None
    assert of_run.strength == 1.0
    for name in ("model.json", "model.safetensors"):
        shutil.copy(agfa_run / name, tmp_path)
    assert imagination(tmp_path, predictor.card) is None
    shutil.copy(agfa_run / "model.safetensors", tmp_path / "players.safetensors")
    with pytest.raises(UsageError, match=r"players\.safetensors does not hold the generator"):
        imagination(tmp_path, predictor.card)
