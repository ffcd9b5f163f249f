"""EFDMix: Exact Feature Distribution Matching for Arbitrary Style Transfer and Domain Generalization
(Zhang, Li, Li, Jia, Zhang; CVPR 2022).

As MixStyle, but what is mixed is the whole distribution of a channel's values, and not its mean and deviation alone.
With x_τ1 <= x_τ2 <= ... the sorted values of a channel of x, and x~_κ1 <= x~_κ2 <= ... those of another image x~,

    EFDMix(x)_τi = x_τi + (1-λ)·x~_κi - (1-λ)·<x_τi>,    λ ~ Beta(α, α), one per image

where <.> is a constant to the gradient. Values that are equal (most are 0 after a ReLU) are ranked by their place, in
every run alike.

The hyperparameters are MixStyle's, with the same values, as in the paper; no search was published. The authors' runs
mix with another domain where there are several sources (`mix: crossdomain`), after stages 1 to 3 of a ResNet-18 and 1
and 2 of a ResNet-50; here the default is what works with one source too. With p = 0 this is ERM.
"""

from __future__ import annotations

from torch import Tensor

from agfa.algorithms.mixstyle import MixStyle
from agfa.nn import style


class EFDMix(MixStyle):
    """Cross-entropy on images of mixed feature distributions."""

    name = "efdmix"
    title = "the sorted feature values of an image are mixed with those of another"
    paper = "Zhang et al. 2022"

    def mixed(self, maps: Tensor, partners: Tensor, share: Tensor) -> Tensor:
        """EFDMix(x)."""
        return style.mix_values(maps, partners, share)
