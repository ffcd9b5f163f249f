"""Networks that turn noise into the worst-case domain: amplitudes (AGFA), or whole images (an ablation)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from agfa.nn.spectrum import symmetric

LOOK, FLAT = 8, 1e-3  # draws from which a generator's health is judged; a slope that is none


class Generator(nn.Module):
    """G(eps), eps ~ N(0, I): linear, or with one hidden layer, to an array of `shape`."""

    def __init__(self, shape: tuple[int, ...], hidden: int | None = None, noise: int = 100) -> None:
        super().__init__()
        self.shape, self.noise = shape, noise
        size = math.prod(shape)
        self.layers: nn.Module = nn.Linear(noise, size)
        if hidden is not None:
            self.layers = nn.Sequential(nn.Linear(noise, hidden), nn.ReLU(), nn.Linear(hidden, size))

    def raw(self, n: int) -> Tensor:
        """n fresh outputs before their range is imposed, in full precision."""
        weight = next(self.parameters())
        eps = torch.randn(n, self.noise, device=weight.device, dtype=weight.dtype)
        with torch.autocast(weight.device.type, enabled=False):
            return self.layers(eps).view(n, *self.shape)  # type: ignore[no-any-return]  # nn.Module's call is Any

    def slope(self, raw: Tensor) -> Tensor:
        """How much outputs change with what they are before their range is imposed, relative to the most they can."""
        raise NotImplementedError

    def saturation(self) -> float:
        """The share of outputs that hardly change any more."""
        return (self.slope(self.raw(LOOK)) < FLAT).float().mean().item()

    def spread(self) -> float:
        """How much what is made depends on the noise: the largest difference, relative to the largest output."""
        raw = self.raw(LOOK)
        return ((raw.amax(0) - raw.amin(0)).max() / raw.abs().max().clamp(min=1e-30)).item()


class AmplitudeGenerator(Generator):
    """Half amplitudes (n, C, H, W//2 + 1) of real images: non-negative, symmetric at their own mirror."""

    def __init__(self, channels: int, size: tuple[int, int], hidden: int | None = None, noise: int = 100) -> None:
        height, self.width = size
        super().__init__((channels, height, self.width // 2 + 1), hidden, noise)

    def forward(self, n: int) -> Tensor:
        """n generated amplitudes."""
        return symmetric(F.softplus(self.raw(n)), self.width)

    def slope(self, raw: Tensor) -> Tensor:
        """Of softplus: small where amplitudes are near zero."""
        return raw.sigmoid()


class PixelGenerator(Generator):
    """Images (n, C, H, W) in [0, 1], without regard to any source image."""

    def __init__(self, channels: int, size: tuple[int, int], hidden: int | None = None, noise: int = 100) -> None:
        super().__init__((channels, *size), hidden, noise)

    def forward(self, n: int) -> Tensor:
        """n generated images."""
        return torch.sigmoid(self.raw(n))

    def slope(self, raw: Tensor) -> Tensor:
        """Of the sigmoid: small where pixels are near black or white."""
        return 4 * raw.sigmoid() * (1 - raw.sigmoid())


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale  # type: ignore[attr-defined]  # torch types ctx as Any
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grads[0], None  # type: ignore[attr-defined]


def reverse_gradient(x: Tensor, scale: float = 1.0) -> Tensor:
    """x itself, whose gradient comes back times -scale: descent on one side is ascent on the other."""
    return _Reverse.apply(x, scale)  # type: ignore[no-any-return]
