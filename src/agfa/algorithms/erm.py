"""Empirical risk minimisation: the sources pooled, cross-entropy, nothing else.

min_θ,W  E_(x,y)~S [ -log softmax(W·phi_θ(x) + b)_y ]
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from agfa.algorithms.base import Algorithm, Backward, descend, detached
from agfa.data.batches import Batch


class ERM(Algorithm):
    """Empirical risk minimisation."""

    name = "erm"
    title = "cross-entropy on all sources together"
    paper = "Vapnik 1998"

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the mean cross-entropy."""
        loss = F.cross_entropy(self.network(batch.images), batch.labels)
        descend(loss, backward, self.optimizers["model"])
        return detached(nll=loss)
