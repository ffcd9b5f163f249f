"""Steps of methods in several processes, beside one process on the joint minibatch: what the tests of it start."""

from __future__ import annotations

import copy
import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.models.resnet import BasicBlock, ResNet
from torch import Tensor, nn
from torch.func import functional_call

from agfa.algorithms import get, names
from agfa.algorithms.base import Algorithm, Backward, Hparams, Problem, descend, detached, plain_backward
from agfa.data.batches import Batch
from agfa.nn.backbones import Backbone, ConvNet
from agfa.nn.exchange import Share
from agfa.nn.recompute import recompute_blocks
from agfa.nn.shares import sharing
from agfa.training.processes import joint_backward

STEPS, CLASSES = 5, 3
SIZES = {"convnet": 8, "resnet": 16}  # pixels; the ResNet's batch norm is not frozen
BATCH_NORM = ("agfa", "arm", "dson", "erm", "mldg", "sagnet")  # tried with batch statistics too
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "agfa, alternating": ("agfa", {"schedule": "alternating"}),
    "agfa, pixels": ("agfa", {"target": "pixel", "discrepancy": "mcd", "generator": "mlp"}),
    "dann, penalty": ("dann", {"gradient_penalty": 1.0, "discriminator_steps": 2}),
    "efdmix, crossdomain": ("efdmix", {"mix": "crossdomain", "p": 1.0}),
    "irm, after its warm-up": ("irm", {"warmup_steps": 2}),
    "mixstyle, always": ("mixstyle", {"p": 1.0}),
    "mldg, two pairs": ("mldg", {"meta_test": 1}),
    "padain, always": ("padain", {"p": 1.0}),
    "rsc, stage 2": ("rsc", {"stage": 2}),
    "sagnet, stage 5": ("sagnet", {"stage": 5}),
}


class Lookahead(Algorithm):
    """The loss after a virtual step of gradient descent, with the gradient through it: one of second order."""

    name, title, paper = "lookahead", "", ""

    def update(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """One step."""
        theta = dict(self.network.named_parameters())
        loss = F.cross_entropy(self.network(batch.images), batch.labels)
        grads = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
        virtual = {key: p - 0.1 * g for (key, p), g in zip(theta.items(), grads, strict=True)}
        after = F.cross_entropy(functional_call(self.network, virtual, (batch.images,)), batch.labels)
        again = torch.autograd.grad(after, list(virtual.values()), create_graph=True)
        descend(after + sum(g.square().sum() for g in again), backward, self.optimizers["model"])
        return detached(nll=after)


class Naive(Share):
    """What gradients averaged over processes, and no more, come to."""


def build(name: str, body: str, **hparams: object) -> Algorithm:
    """The method on a small backbone, in float64."""
    torch.manual_seed(0)
    shape = (1, SIZES[body], SIZES[body])
    if body == "convnet":
        backbone = Backbone(ConvNet(1, widths=(16, 16, 32, 32)), 32, (0.5,), (0.5,), body)
    else:
        resnet = ResNet(BasicBlock, (1, 1, 1, 1), num_classes=0, in_chans=1, channels=(8, 8, 16, 16))
        backbone = Backbone(resnet, 16, (0.5,), (0.5,), body, freeze_batchnorm=False)
    problem = Problem(CLASSES, 3, 40, shape, steps=10)
    if name == "lookahead":
        return Lookahead(backbone, problem, Hparams(lr=1e-3)).double()
    recipe = get(name)
    return recipe.method(backbone, problem, recipe.hparams({"lr": 1e-3, **hparams})).double()


def batch(size: int, seed: int, sizes: tuple[int, ...] = (4, 4, 4)) -> Batch:
    """Noise, darker in each domain than in the one before."""
    n = sum(sizes)
    domains = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    images = torch.rand(n, 1, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return Batch(images / (1 + domains.view(-1, 1, 1, 1)), torch.arange(n) % CLASSES, domains, sizes)


class Rows:
    """Counts the images that go through a network's first convolution."""

    def __init__(self, network: nn.Module) -> None:
        self.n = 0
        first = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
        first.register_forward_pre_hook(self.count)

    def count(self, module: nn.Module, given: tuple[Tensor]) -> None:
        self.n += len(given[0])


def train(algorithm: Algorithm, size: int, sizes: tuple[int, ...], share: Share | None) -> dict[str, list[float]]:
    """Some steps, as the trainer takes them, in this process or as a share; what they showed."""
    shown: dict[str, list[float]] = {}
    algorithm.train()
    for algorithm.step in range(STEPS):
        data = batch(size, algorithm.step, sizes)
        torch.manual_seed(100 + algorithm.step)
        if share is None:
            losses = algorithm.update(data, plain_backward)
        elif isinstance(share, Naive):
            mine = torch.arange(len(data.images)) % share.processes == share.rank
            n = tuple(size // share.processes for size in sizes)
            own = Batch(data.images[mine], data.labels[mine], data.domains[mine], n)
            losses = algorithm.update(own, joint_backward(share))
        else:
            with sharing(share):
                losses = algorithm.update(data, joint_backward(share))
        for key, value in losses.items():
            shown.setdefault(key, []).append(value.item())
    return shown


def compare(
    start: Algorithm, body: str, share: Share, sizes: tuple[int, ...] = (4, 4, 4), recompute: bool = False
) -> dict[str, float]:
    """How far some steps as a share of several processes end from the same in one."""
    one, several = copy.deepcopy(start), copy.deepcopy(start)
    if recompute:
        recompute_blocks(several.network.backbone.body)
    rows = [Rows(one.network.backbone), Rows(several.network.backbone)]
    alone, together = (train(a, SIZES[body], sizes, s) for a, s in ((one, None), (several, share)))
    states = one.state_dict(), several.state_dict()
    return {
        "difference": max((states[0][key] - states[1][key]).abs().max().item() for key in states[0]),
        "moved": max((states[0][k] - v).abs().max().item() for k, v in start.state_dict().items()),
        "shown": max(abs(a - b) for key in alone for a, b in zip(alone[key], together[key], strict=True)),
        "rows": rows[1].n / rows[0].n,
    }


def work(rank: int, processes: int, folder: str) -> None:
    """One of the processes; the first writes what all found."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=processes, timeout=timedelta(seconds=60)
    )
    found: dict[str, dict[str, float]] = {}
    for name in names():
        found[name] = compare(build(name, "convnet"), "convnet", Share(rank, processes))
    for name in BATCH_NORM:
        found[f"{name}, batch norm"] = compare(build(name, "resnet"), "resnet", Share(rank, processes))
    for what, (name, hparams) in VARIANTS.items():
        found[what] = compare(build(name, "convnet", **hparams), "convnet", Share(rank, processes))
    for body in SIZES:
        found[f"second order, {body}"] = compare(build("lookahead", body), body, Share(rank, processes))
        found[f"odd, {body}"] = compare(build("erm", body), body, Share(rank, processes), (4, 4, 3))
    for name in ("erm", "mldg", "sagnet", "dson"):
        found[f"recomputed, {name}"] = compare(
            build(name, "resnet"), "resnet", Share(rank, processes), recompute=True
        )
    found["two passes"] = compare(build("coral", "convnet"), "convnet", Share(rank, processes, passes=2))
    found["naive"] = compare(build("coral", "convnet"), "convnet", Naive(rank, processes))
    ranks: list[Any] = [None] * processes
    dist.all_gather_object(ranks, found)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(ranks))
    dist.destroy_process_group()


if __name__ == "__main__":
    work(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
