"""AGFA: adversarial generation of Fourier amplitudes (Kim, Li, Hospedales; ICLR 2023).

A worst-case domain T is made of the sources' phases and a generator's amplitudes,

    (x_T, y_T) = (irfft2((l·G_ν(ε) + (1-l)·A_S)·U_S), y_S),    l ~ Uniform(0, α),  ε ~ N(0, I),

and a Bayesian classifier with posterior Q_λ(W), λ = (m, v), learns to agree with itself on it:

    min_θ,λ  -ELBO(λ, θ; S)/N + η·SMCD(θ; T)        (m and v are constants in SMCD)
    max_ν    SMCD(θ; T).

`alternating` takes the two steps one after the other, the second at the new θ (Algorithm 1). `fused` takes both
gradients from one forward and backward pass at the old θ: the generator's is reversed on its way, scaled by 1/η.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from agfa.algorithms.base import Algorithm, Backward, Network, Problem, adam, constant, descend, detached
from agfa.algorithms.base import Hparams as BaseHparams
from agfa.algorithms.search import Choice
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone
from agfa.nn.discrepancy import mcd, smcd
from agfa.nn.generators import AmplitudeGenerator, PixelGenerator, reverse_gradient
from agfa.nn.heads import BayesianLinear
from agfa.nn.spectrum import mix_amplitude

HIDDEN = 100  # units of the mlp generator's hidden layer
EXPLODED = 100.0  # a discrepancy: logits that disagree by so much are no adversary's, but a divergence
COLLAPSED = 1e-3  # of the posterior's initial variance
SATURATED, CONSTANT = 0.99, 1e-6  # of a generator's outputs; how much they differ, relatively


class Hparams(BaseHparams, frozen=True):
    """AGFA's hyperparameters, the paper's values where it gives them.

    Searched are the values of its sensitivity study, but for 0, at which nothing is generated.
    """

    eta: Annotated[float, Choice((0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.5, 1.0))] = Field(
        0.1, ge=0, description="weight of the discrepancy; 0: the Bayesian head alone"
    )
    alpha: Annotated[float, Choice((0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 0.9, 1.0))] = Field(
        1.0, ge=0, le=1, description="largest share of the generated amplitude in the mixture"
    )
    samples: int = Field(50, ge=1, description="Monte Carlo samples of the logits in the ELBO")
    initial_sd: float = Field(0.01, gt=0, description="initial standard deviation of the head's weights")
    mean_lr: float | None = Field(None, gt=0, description="learning rate of m (none: lr)")
    variance_lr: float | None = Field(None, gt=0, description="learning rate of log v (none: lr)")
    generator_lr: float | None = Field(
        None, ge=0, description="learning rate of the generator (none: lr; 0: it stays random)"
    )
    schedule: Literal["fused", "alternating"] = Field("fused", description="one pass for both players, or two")
    discrepancy: Literal["smcd", "mcd"] = Field("smcd", description="with labels, or without (ablation)")
    mix: bool = Field(True, description="mix generated with source amplitudes (ablation: off)")
    target: Literal["amplitude", "pixel"] = Field("amplitude", description="what is generated (ablation: pixel)")
    generator: Literal["linear", "mlp"] = Field("linear", description="none or one hidden layer of 100 units")

    @model_validator(mode="after")
    def _pixels_have_no_labels(self) -> Hparams:
        if self.target == "pixel" and self.discrepancy == "smcd":
            raise ValueError("target pixel makes images without labels: it needs discrepancy mcd")
        return self


class AGFA(Algorithm):
    """Adversarial generation of Fourier amplitudes."""

    name = "agfa"
    title = "a generated worst-case amplitude spectrum, and a Bayesian head that must agree with itself on it"
    paper = "Kim et al. 2023"
    hparams_type = Hparams
    averaging = "swad"

    hparams: Hparams

    def __init__(self, backbone: Backbone, problem: Problem, hparams: Hparams) -> None:
        super().__init__(backbone, problem, hparams)
        channels, height, width = problem.image_shape
        kind = AmplitudeGenerator if hparams.target == "amplitude" else PixelGenerator
        self.generator = kind(channels, (height, width), HIDDEN if hparams.generator == "mlp" else None)
        self.optimizers = {
            "model": adam(
                (backbone.parameters(), hparams.lr),
                ([self.head.mean], hparams.mean_lr or hparams.lr),
                ([self.head.log_variance], hparams.variance_lr or hparams.lr),
                weight_decay=hparams.weight_decay,
            )
        }
        rate = hparams.lr if hparams.generator_lr is None else hparams.generator_lr
        if rate:
            self.optimizers["generator"] = adam((self.generator.parameters(), rate))

    @classmethod
    def make_network(cls, backbone: Backbone, problem: Problem, hparams: Hparams) -> Network:
        """The backbone with a Bayesian head."""
        return Network(backbone, BayesianLinear(backbone.n_features, problem.n_classes, hparams.initial_sd))

    @classmethod
    def passes(cls, hparams: Hparams) -> int:
        """Each image as itself, and generated."""
        return 2 if hparams.eta else 1

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step of both players."""
        x, y, *_ = batch
        eta, phi = self.hparams.eta, self.network.backbone
        model, generator = self.optimizers["model"], self.optimizers.get("generator")
        if eta == 0:
            loss, shown = self.negative_elbo(phi(x), y)
            descend(loss, backward, model)
            return shown

        with torch.set_grad_enabled(generator is not None):
            x_t = self.worst_case(x)
        fused = generator is not None and self.hparams.schedule == "fused"
        played = reverse_gradient(x_t, 1 / eta) if fused else x_t.detach()
        phi_s, phi_t = phi(torch.cat([x, played])).chunk(2)
        loss, shown = self.negative_elbo(phi_s, y)
        discrepancy = self.discrepancy(phi_t, y)
        loss = loss + eta * discrepancy
        if generator is None:
            descend(loss, backward, model)
        elif fused:
            descend(loss, backward, model, generator)
        else:
            descend(loss, backward, model)
            with constant(self.network):
                descend(-self.discrepancy(phi(x_t), y), backward, generator)
        return shown | detached(discrepancy=discrepancy)

    @torch.no_grad()
    def warnings(self, losses: Mapping[str, float]) -> dict[str, str]:
        """An adversary that explodes, saturates or is dead, and a posterior that is none any more."""
        found = {}
        initial, median = self.hparams.initial_sd**2, losses["median_v"]
        if median < COLLAPSED * initial:
            found["collapsed posterior"] = f"the median variance is {median:.2g}; it was {initial:.2g} at first"
        if losses.get("discrepancy", 0) > EXPLODED:
            found["exploding adversary"] = f"the discrepancy is {losses['discrepancy']:.3g}, beyond {EXPLODED:g}"
        if "generator" in self.optimizers and self.hparams.eta:
            share = self.generator.saturation()
            if share > SATURATED:
                found["saturated generator"] = f"{share:.1%} of its outputs no longer answer to its weights"
            moments = [state["exp_avg_sq"] for state in self.optimizers["generator"].state.values()]
            if losses["discrepancy"] == 0:
                found["dead generator"] = "the discrepancy is 0: there is nothing that it could learn"
            elif not any(moment.any() for moment in moments):
                found["dead generator"] = "no gradient has ever reached it"
            elif self.generator.spread() < CONSTANT:
                found["dead generator"] = "it makes the same of all noise"
        return found

    def worst_case(self, x: Tensor) -> Tensor:
        """x_T: the images with generated amplitudes, or generated images (target: pixel)."""
        generated = self.generator(len(x))
        if self.hparams.target == "pixel":
            return generated  # type: ignore[no-any-return]  # nn.Module's call is Any
        strength = torch.rand(len(x), 1, 1, 1, device=x.device) * self.hparams.alpha if self.hparams.mix else 1.0
        return mix_amplitude(x, generated, strength)

    def negative_elbo(self, features: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """-ELBO/N = E_Q[nll] + KL/N, and its parts for the record."""
        nll = self.head.expected_nll(features, labels, self.hparams.samples)
        kl = self.head.kl() / self.problem.n_images
        return nll + kl, detached(nll=nll, kl=kl, median_v=self.head.log_variance.median().exp())

    def discrepancy(self, features: Tensor, labels: Tensor) -> Tensor:
        """SMCD, or MCD, of the posterior on a batch; m and v are constants."""
        mu, sigma = self.head.moments(features, frozen=True)
        return smcd(mu, sigma, labels) if self.hparams.discrepancy == "smcd" else mcd(mu, sigma)

    @property
    def head(self) -> BayesianLinear:
        """The posterior Q(W)."""
        head = self.network.head
        assert isinstance(head, BayesianLinear)
        return head
