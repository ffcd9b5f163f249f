"""What a trained generator does to images: the paper's amplitude figure, from a run's folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from agfa import algorithms
from agfa.algorithms.agfa import AGFA, HIDDEN
from agfa.benchmark.spectra import AmplitudeViews, Floats
from agfa.data import catalog
from agfa.data.augment import crop_resize, whole_boxes
from agfa.data.batches import to_unit
from agfa.data.domains import Domain
from agfa.data.store import open_images
from agfa.errors import UsageError
from agfa.nn.generators import AmplitudeGenerator
from agfa.nn.spectrum import decompose, mix_amplitude, recompose
from agfa.training import config
from agfa.training.run_folder import RunFolder


def load_generator(run: Path) -> AmplitudeGenerator:
    """The amplitude generator that an AGFA run ended with.

    Raises:
        UsageError: the run is not finished, or trained no such generator.
    """
    folder = RunFolder(run)
    if not folder.players.exists():
        raise UsageError(f"{run} keeps no generator: it takes a finished run of {AGFA.name}")
    settings = config.parse(config.read(run / "config.yaml"), config.CompleteConfig, str(run))
    ours = algorithms.get(settings.algorithm).method is AGFA and settings.hparams["target"] == "amplitude"
    if not ours:
        raise UsageError(f"{run} holds no amplitude generator, but another network beside its model")
    return read_generator(folder.players, settings.hparams["generator"], settings.channels, settings.image_size)


def read_generator(players: Path, kind: str, channels: int, image_size: int) -> AmplitudeGenerator:
    """The generator of a file of players; `kind`: linear or mlp.

    Raises:
        UsageError: the file holds another.
    """
    generator = AmplitudeGenerator(channels, (image_size, image_size), HIDDEN if kind == "mlp" else None)
    try:
        tensors = safetensors.torch.load_file(players)
        generator.load_state_dict({key.removeprefix("generator."): value for key, value in tensors.items()})
    except Exception as error:
        first = str(error).strip().splitlines()[0]
        raise UsageError(f"{players} does not hold the generator that its run is said to have: {first}") from error
    return generator


def example_views(run: Path) -> AmplitudeViews:
    """The views of one image of each source domain of a run.

    Raises:
        UsageError: the run has no generator, or its images are not on this machine.
    """
    generator = load_generator(run)
    settings = config.parse(config.read(run / "config.yaml"), config.CompleteConfig, str(run))
    dataset, _ = catalog.load(settings.data)
    size = settings.image_size
    few = [_only(dataset[name], i) for i, name in enumerate(settings.source)]
    images = open_images(dataclasses.replace(dataset, domains=tuple(few)), size, settings.channels)
    shown = [images[name][0] for name in settings.source]
    boxes = whole_boxes(torch.tensor([image.shape[1:] for image in shown]))
    return amplitude_views(to_unit(crop_resize(shown, boxes, size), torch.device("cpu")), generator)


def _only(domain: Domain, i: int) -> Domain:
    """The domain with one of its images."""
    i %= len(domain)
    images = domain.images[i : i + 1] if isinstance(domain.images, np.ndarray) else [domain.images[i]]
    return Domain(domain.name, domain.keys[i : i + 1], domain.labels[i : i + 1], images)


@torch.no_grad()
def amplitude_views(x: Tensor, generator: AmplitudeGenerator, strength: float = 0.5) -> AmplitudeViews:
    """Every stage of the generation for images x (n, C, H, W), mixed with the given strength."""
    torch.manual_seed(0)
    generated = generator(len(x))
    _, phasor = decompose(x)
    from_generated = recompose(generated, phasor, (x.shape[-2], x.shape[-1]))
    from_mixed = mix_amplitude(x, generated, strength)
    spectra = {
        name: torch.fft.fft2(images, norm="ortho")
        for name, images in (("source", x), ("generated", from_generated), ("mixed", from_mixed))
    }
    return AmplitudeViews(
        original=_pixels_last(x),
        phase=_pixels_last(spectra["source"].angle()),
        amplitude=_pixels_last(spectra["source"].abs()),
        generated=_pixels_last(spectra["generated"].abs()),
        mixed=_pixels_last(spectra["mixed"].abs()),
        from_generated=_pixels_last(from_generated),
        from_mixed=_pixels_last(from_mixed),
    )


def _pixels_last(x: Tensor) -> Floats:
    return np.ascontiguousarray(x.movedim(1, -1).double().numpy())
