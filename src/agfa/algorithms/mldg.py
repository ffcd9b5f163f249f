"""MLDG: Learning to Generalize: Meta-Learning for Domain Generalization (Li, Yang, Song, Hospedales; AAAI 2018).

In every step some sources play the unseen ones. A step down the loss of a meta-train source should also go down that
of a meta-test source:

    min_θ  mean over pairs (i, j) of  F_i(θ) + β·F_j(θ'_i),    θ'_i = θ + (Adam's first step down F_i from θ),

F_d the cross-entropy on source d. As in DomainBed: sources are split at random at each step, `meta_test` of them as
meta-test ones; each meta-train source is paired with one of these, in turns, and takes a virtual step of its own; and
θ'_i - θ is a constant in the gradient (first order), where the paper goes through it, with plain gradient descent.
With three sources and its default of 2 meta-test ones, one pair is made, and one source sits out.

DomainBed cuts both sources of a pair to the same number of images, and divides by the number of sources and not of
pairs; here all images count, and a source is always left to train on. At β = 0 it is ERM on the meta-train sources.
"""

from __future__ import annotations

from itertools import cycle
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from agfa.algorithms.base import Algorithm, Backward, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.algorithms.search import Choice, LogUniform
from agfa.data.batches import Batch


class Hparams(BaseHparams, frozen=True):
    """Defaults and search as DomainBed published them."""

    beta: Annotated[float, LogUniform(1e-1, 1e1)] = Field(1.0, ge=0, description="weight β of the meta-test loss")
    meta_test: Annotated[int, Choice((1, 2))] = Field(2, ge=1, description="sources that play the unseen ones")


class MLDG(Algorithm):
    """Meta-learning for domain generalisation, first order."""

    name = "mldg"
    title = "steps on some sources that must also help on others"
    paper = "Li et al. 2018"
    hparams_type = Hparams
    needs_domains = True
    min_domains = 2

    hparams: Hparams

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of Adam on F_i(θ) + β·F_j(θ'_i), mean over the pairs."""
        sources = batch.by_domain()
        order = torch.randperm(len(sources)).tolist()
        n_train = max(1, len(sources) - self.hparams.meta_test)
        pairs = list(zip(order[:n_train], cycle(order[n_train:]), strict=False))

        theta = dict(self.network.named_parameters())
        losses, train, test = [], [], []
        for i, j in pairs:
            (x_i, y_i), (x_j, y_j) = sources[i], sources[j]
            f_i = F.cross_entropy(self.network(x_i), y_i)
            grads = torch.autograd.grad(f_i, list(theta.values()), allow_unused=True, materialize_grads=True)
            virtual = {name: p + self.first_step(p, g) for (name, p), g in zip(theta.items(), grads, strict=True)}
            f_j = F.cross_entropy(functional_call(self.network, virtual, (x_j,)), y_j)
            # g·θ has the gradient of F_i, and needs no second pass back through it
            linear = torch.stack([(p * g).sum() for p, g in zip(theta.values(), grads, strict=True)]).sum()
            losses.append(linear + self.hparams.beta * f_j)
            train.append(f_i)
            test.append(f_j)
        descend(torch.stack(losses).mean(), backward, self.optimizers["model"])
        return detached(nll=torch.stack(train).mean(), meta_test=torch.stack(test).mean())

    def first_step(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        """What a fresh Adam would add: -lr·g/|g|, its moments being g and g² at first."""
        g = gradient + self.hparams.weight_decay * parameter.detach()
        return -self.hparams.lr * g / (g.abs() + 1e-8)
