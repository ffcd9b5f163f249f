"""The worst case of one image: what AGFA's generator makes of it, and whether the decision survives.

The generator is a distribution of domains. Of a few drawn from it, always the same, the one is shown that takes most
of the decision's probability away; mixed in at strengths from 0 to 1, as amplitudes (1-l)·A + l·A_G of the same
phases, which in pixels is (1-l)·x + l·x_G.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import BaseModel, Field
from torch import Tensor

from agfa import algorithms
from agfa.algorithms.agfa import AGFA
from agfa.benchmark.amplitude import read_generator
from agfa.data.batches import to_unit
from agfa.inference.predictor import Predictor
from agfa.nn.generators import AmplitudeGenerator
from agfa.nn.spectrum import decompose, mix_amplitude, recompose
from agfa.training.model_file import ModelCard

DRAWS = 16  # domains drawn from the generator
STEPS = 20  # the strength goes from 0 to 1 in so many


class Levels(BaseModel):
    """Numbers for a picture, in 256 steps: low + (high - low) · byte / 255."""

    low: float
    high: float
    bytes: str = Field(description="base64 of one byte a number, row by row, channel after channel")


class Judged(BaseModel):
    """What the model says at one strength."""

    strength: float
    label: str
    probability: float
    probabilities: dict[str, float]
    disagreement: float | None


class Imagined(BaseModel):
    """The hardest of the domains that were drawn, for one image.

    Amplitudes are log(1 + |fft2|), of the mean over channels, phases those of the first channel; both with the zero
    frequency in the middle.
    """

    trained: float = Field(description="the largest strength that the model was trained with")
    draws: int = Field(description="domains that were drawn")
    holds: int = Field(description="those in which the decision is the same at that strength")
    judged: list[Judged] = Field(description="in the hardest of them, from strength 0 to 1")
    channels: int
    size: int
    original: Levels
    generated: Levels = Field(description="the image with the generated amplitude alone; clip it to [0, 1]")
    amplitude: Levels
    generated_amplitude: Levels
    phase: Levels


@dataclass(frozen=True)
class Imagination:
    """A trained generator, and the largest strength that it was mixed in with."""

    generator: AmplitudeGenerator
    strength: float


def imagination(model: Path, card: ModelCard) -> Imagination | None:
    """That of a model's run; None where none was trained, or it is not beside the model."""
    folder = model if model.is_dir() else model.parent
    players = (folder.parent if folder.name == "models" else folder) / "players.safetensors"
    hparams = card.hparams
    if not players.is_file() or algorithms.get(card.algorithm).method is not AGFA or hparams["target"] != "amplitude":
        return None
    if hparams["eta"] == 0 or hparams["generator_lr"] == 0:  # it is as random as it began
        return None
    generator = read_generator(players, hparams["generator"], card.channels, card.image_size)
    return Imagination(generator, hparams["alpha"] if hparams["mix"] else 1.0)


@torch.inference_mode()
def imagine(predictor: Predictor, imagination: Imagination, pixels: Tensor) -> Imagined:
    """The worst case of one image, made ready for the model: uint8, C x H x W."""
    x = to_unit(pixels[None], torch.device("cpu"))
    size = x.shape[-2:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        amplitudes = imagination.generator(DRAWS)
    (decided,) = predictor.judge(x.to(predictor.device))
    drawn = predictor.judge(mix_amplitude(x, amplitudes, imagination.strength).to(predictor.device))
    worst = min(range(DRAWS), key=lambda i: (drawn[i].label == decided.label, drawn[i].probabilities[decided.label]))
    amplitude = amplitudes[worst : worst + 1]
    strengths = torch.linspace(0, 1, STEPS + 1)
    judged = predictor.judge(mix_amplitude(x, amplitude, strengths.view(-1, 1, 1, 1)).to(predictor.device))
    generated = recompose(amplitude, decompose(x)[1], (size[0], size[1]))
    spectra = torch.fft.fftshift(torch.fft.fft2(torch.cat([x, generated])), dim=(-2, -1))
    logs = spectra.abs().mean(1).log1p()  # of the mean, so that mixtures can be made of them
    span = (logs.min().item(), logs.max().item())
    return Imagined(
        trained=imagination.strength,
        draws=DRAWS,
        holds=sum(said.label == decided.label for said in drawn),
        judged=[
            Judged(
                strength=round(strength, 4),
                label=said.label,
                probability=said.probability,
                probabilities=said.probabilities,
                disagreement=said.disagreement,
            )
            for strength, said in zip(strengths.tolist(), judged, strict=True)
        ],
        channels=len(pixels),
        size=size[0],
        original=_levels(x, (0, 1)),
        generated=_levels(generated, (generated.min().item(), generated.max().item())),
        amplitude=_levels(logs[0], span),
        generated_amplitude=_levels(logs[1], span),
        phase=_levels(spectra[0, 0].angle(), (-torch.pi, torch.pi)),
    )


def _levels(values: Tensor, span: tuple[float, float]) -> Levels:
    low, high = span
    steps = ((values - low) / max(high - low, 1e-12) * 255).round().clamp(0, 255)
    return Levels(low=low, high=high, bytes=base64.b64encode(steps.numpy().astype(np.uint8).tobytes()).decode())
