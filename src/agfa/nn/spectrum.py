"""Amplitude and phase of images, and images with another amplitude and the same phase.

Half spectra (`rfft2`, norm="ortho") of real images x of shape (..., H, W): shape (..., H, W//2 + 1).
The phase is held as a unit phasor U = F/|F|, so no angle, cosine or sine is ever taken, and

    irfft2((l·A_G + (1-l)·|F|)·U) = (1-l)·x + l·irfft2(A_G·U):

mixing amplitudes is mixing images, and a generator's gradient flows through the last term alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NEGLIGIBLE = 1e-6  # of a channel's largest amplitude: below it a phase is rounding noise


def decompose(x: Tensor) -> tuple[Tensor, Tensor]:
    """Amplitude |F| and unit phasor U of images, in float32 (or float64, if x is)."""
    spectrum = torch.fft.rfft2(_full_precision(x), norm="ortho")
    amplitude = spectrum.abs()
    largest = amplitude.amax(dim=(-2, -1), keepdim=True)
    audible = amplitude > NEGLIGIBLE * largest
    phasor = torch.where(audible, spectrum / torch.where(audible, amplitude, 1), 1)
    for column in _self_mirrored(x.shape[-1]):
        phasor[..., column] = _hermitian(phasor[..., column])
    return amplitude, phasor


def symmetric(amplitude: Tensor, width: int) -> Tensor:
    """Make a generated half amplitude that of a real image: even in u where a column is its own mirror.

    The image made from it is the same either way, but only so is the amplitude given the amplitude got.
    """
    amplitude = amplitude.clone()
    for column in _self_mirrored(width):
        edge = amplitude[..., column]
        amplitude[..., column] = (edge + edge.flip(-1).roll(1, -1)) / 2
    return amplitude


def recompose(amplitude: Tensor, phasor: Tensor, size: tuple[int, int]) -> Tensor:
    """The images of `size` (H, W) with this amplitude and these phases."""
    images: Tensor = torch.fft.irfft2(_full_precision(amplitude) * phasor, s=size, norm="ortho")
    return images


def mix_amplitude(x: Tensor, generated: Tensor, strength: Tensor | float = 1.0) -> Tensor:
    """Images with amplitude `strength`·generated + (1-strength)·|F(x)| and the phases of x.

    Args:
        x: images (n, C, H, W).
        generated: half amplitudes (n, C, H, W//2 + 1), `symmetric`.
        strength: in [0, 1], one number or one per image (n, 1, 1, 1).
    """
    _, phasor = decompose(x.detach())
    x = _full_precision(x)
    return (1 - strength) * x + strength * recompose(generated, phasor, (x.shape[-2], x.shape[-1]))


def central_window(size: tuple[int, int], ratio: float) -> Tensor:
    """Which of a half spectrum's frequencies lie in a crop around zero, of `ratio` of the full spectrum's area.

    The crop has int(√ratio·H) rows and int(√ratio·W) columns. Where it is even, its rim is 1/2: it reaches one
    frequency further on one side than on the other, and a real image has as much of u as of -u.
    """

    def inside(length: int) -> Tensor:
        crop = int(length * math.sqrt(ratio))
        frequency = (torch.arange(length) + length // 2) % length - length // 2
        return (frequency >= -(crop // 2)) & (frequency < crop - crop // 2)

    full = torch.outer(inside(size[0]), inside(size[1])).float()
    mirrored = full.flip(0, 1).roll((1, 1), (0, 1))
    return ((full + mirrored) / 2)[:, : size[1] // 2 + 1]


def _full_precision(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _self_mirrored(width: int) -> tuple[int, ...]:
    """The columns v of a half spectrum with -v = v: zero and, for even widths, the last."""
    return (0, width // 2) if width % 2 == 0 else (0,)


def _hermitian(column: Tensor) -> Tensor:
    """Make a self-mirrored column of phasors exactly U[-u] = conj(U[u]), real where u = -u."""
    height = column.shape[-1]
    upper = column[..., : height // 2 + 1].clone()
    for u in (0, height // 2) if height % 2 == 0 else (0,):
        upper[..., u] = torch.where(upper[..., u].real < 0, -1.0, 1.0)
    return torch.cat([upper, upper[..., 1 : (height + 1) // 2].flip(-1).conj()], dim=-1)
