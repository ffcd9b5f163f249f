"""Invariant risk minimization (Arjovsky, Bottou, Gulrajani, Lopez-Paz; 2019), in its form IRMv1.

One classifier should be the best for every domain at once: no domain's risk R_d would fall if all logits f were
scaled by another w than 1,

    min_θ  R + λ·mean_d D_d,    D_d = (∂/∂w R_d(w·f) at w = 1)²,

where R is ERM's risk and the derivative of an image's cross-entropy is s = Σ_c softmax(f)_c·f_c - f_y. The square
is estimated without bias (the paper's appendix D) by the product of the means of s over two halves of a domain's
images, the even and the odd ones. In the first `warmup_steps` steps the weight is no more than 1; then it is λ, and
Adam starts anew, because the gradients change their size at once.

The mean of D over domains, weight, warm-up and restart of Adam are those of DomainBed; the paper sums risks and D
over domains. DomainBed's weight is 1 during the warm-up even where λ is less.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from agfa.algorithms.base import Algorithm, Backward, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.algorithms.search import LogUniform
from agfa.data.batches import Batch


class Hparams(BaseHparams, frozen=True):
    """IRM's hyperparameters, defaults and searches as in DomainBed's settings."""

    penalty_weight: Annotated[float, LogUniform(1e-1, 1e5)] = Field(
        100.0, ge=0, description="λ, weight of the penalty; 0: ERM"
    )
    warmup_steps: Annotated[int, LogUniform(1, 1e4, whole=True)] = Field(
        500, ge=0, description="steps in which the penalty weighs no more than 1"
    )


class IRM(Algorithm):
    """Invariant risk minimization."""

    name = "irm"
    title = "a penalty where rescaling the logits would lower a domain's risk"
    paper = "Arjovsky et al. 2019"
    hparams_type = Hparams
    needs_domains = True

    hparams: Hparams

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on the risk and the penalty."""
        weight, warmup = self.hparams.penalty_weight, self.hparams.warmup_steps
        logits = self.network(batch.images)
        nll = F.cross_entropy(logits, batch.labels)
        slopes = scale_derivative(logits, batch.labels).split_with_sizes(batch.sizes)
        penalty = torch.stack([squared_mean(domain) for domain in slopes]).mean()
        if self.step == warmup:
            self.optimizers["model"].state.clear()
        loss = nll + (weight if self.step >= warmup else min(weight, 1.0)) * penalty
        descend(loss, backward, self.optimizers["model"])
        return detached(nll=nll, penalty=penalty)


def scale_derivative(logits: Tensor, labels: Tensor) -> Tensor:
    """∂/∂w CE(w·logits, label) at w = 1, for each image."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    expected = (logits.softmax(-1) * logits).sum(-1)
    return expected - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def squared_mean(values: Tensor) -> Tensor:
    """An unbiased estimate of the square of the mean, from two halves; a single value is both."""
    return values[::2].mean() * (values[1::2] if len(values) > 1 else values).mean()
