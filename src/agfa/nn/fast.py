"""The same networks, faster: `quicken` changes how they compute, not what.

Their parameters, their names and, up to rounding, its features and gradients stay.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from agfa.nn.backbones import Backbone, ConvNet


def quicken(module: nn.Module, compiled: bool = False, say: Callable[[str], None] = lambda text: None) -> None:
    """Lay a module's weights out for the fastest kernels; fold and fuse what its backbones can, and compile if asked.

    Args:
        compiled: let torch.compile fuse the rest. It needs a compiler, minutes at first, and one shape of batches.
        say: told in a line when a backbone could not be compiled; it then runs as it is.
    """
    module.to(memory_format=torch.channels_last)
    for backbone in [part for part in module.modules() if isinstance(part, Backbone)]:
        if not isinstance(backbone.body, ConvNet):  # which has no batch normalisation, and does without timm
            from agfa.nn.fold import fold_normalisations
            from agfa.nn.residual import fuse_blocks

            fold_normalisations(backbone.body)
            fuse_blocks(backbone.body)
        if compiled:
            backbone.compiled = _compiled(backbone, say)


def _compiled(backbone: Backbone, say: Callable[[str], None]) -> Callable[[Tensor], Tensor]:
    """The body through torch.compile; where that fails, the body from then on."""
    body = backbone.body
    fast = torch.compile(body, dynamic=False)

    def run(x: Tensor) -> Tensor:
        try:
            return fast(x)  # type: ignore[no-any-return]
        except Exception as error:
            backbone.compiled = None
            features: Tensor = body(x)  # raises the error again where compiling was not to blame
            say(f"the backbone cannot be compiled and runs as it is: {(str(error) or 'no reason').splitlines()[0]}")
            return features

    return run
