"""Style: the statistics of each channel of feature maps, and giving maps the style of others.

Maps are (n, C, H, W); `partners` says, for each image, whose style it is given; `share` (n, 1, 1, 1) is how much of
its own it keeps. Statistics are over the positions of one channel of one image, with 1/HW as in the papers, in
float32 at least; maps come back in the precision they came in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def moments(maps: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel of each image, (n, C, 1, 1)."""
    full = maps if maps.dtype == torch.float64 else maps.float()
    variance, mean = torch.var_mean(full, dim=(2, 3), correction=0, keepdim=True)
    return mean, variance


def mix_moments(maps: Tensor, partners: Tensor, share: Tensor, eps: float = 1e-6) -> Tensor:
    """MixStyle: means and deviations between one's own and the partner's; they are constants to the gradient."""
    mean, variance = moments(maps.detach())
    deviation = (variance + eps).sqrt()
    new_mean = share * mean + (1 - share) * mean[partners]
    new_deviation = share * deviation + (1 - share) * deviation[partners]
    return ((maps - mean) / deviation * new_deviation + new_mean).to(maps.dtype)


def mix_values(maps: Tensor, partners: Tensor, share: Tensor) -> Tensor:
    """EFDMix: every value on its way to the partner's value of the same rank, from which it takes gradients too."""
    own = maps.flatten(2)
    values, order = own.sort(dim=-1, stable=True)
    matched = torch.zeros_like(own).scatter(-1, order, values[partners])
    return (own + (1 - share.flatten(1, 2)) * (matched - own.detach())).view_as(maps).to(maps.dtype)


def swap_moments(maps: Tensor, partners: Tensor, eps: float = 1e-5) -> Tensor:
    """AdaIN: the partner's means and deviations, which are constants to the gradient, in place of one's own."""
    mean, variance = moments(maps)
    deviation = (variance + eps).sqrt()
    style = mean[partners].detach(), deviation[partners].detach()
    return ((maps - mean) / deviation * style[1] + style[0]).to(maps.dtype)


def any_partners(sizes: Sequence[int], device: torch.device) -> Tensor:
    """A random permutation of all images."""
    return torch.randperm(sum(sizes), device=device)


def cross_domain_partners(sizes: Sequence[int], device: torch.device) -> Tensor:
    """Random images of another domain: each domain takes after the next but k, with k drawn anew.

    Where domains are of one size this is a permutation, and with two it exchanges them; the images of a smaller
    domain serve more than once.
    """
    starts = [sum(sizes[:d]) for d in range(len(sizes))]
    step = 1 + int(torch.randint(len(sizes) - 1, ()))
    partners = []
    for d, size in enumerate(sizes):
        other = (d + step) % len(sizes)
        shuffled = starts[other] + torch.randperm(sizes[other], device=device)
        partners.append(shuffled.repeat(-(-size // sizes[other]))[:size])
    return torch.cat(partners)


def beta_shares(n: int, alpha: float, device: torch.device) -> Tensor:
    """One draw of Beta(alpha, alpha) for each image, (n, 1, 1, 1)."""
    concentration = torch.full((n, 1, 1, 1), alpha, device=device)
    return torch.distributions.Beta(concentration, concentration, validate_args=False).sample()


def happens(p: float) -> bool:
    """Whether something of probability p happens this time; drawn on the host, so no device is waited for."""
    return bool(torch.rand(()) < p)
