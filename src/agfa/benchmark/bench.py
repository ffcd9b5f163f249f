"""`agfa bench`: what our steps cost beside plain loops and beside the machine's peak, in one process.

Every step takes its turn in every repetition, so that a busy machine slows all alike; ratios are taken within a
repetition, and their medians and 90% intervals over repetitions are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from agfa import algorithms
from agfa.algorithms.agfa import AGFA
from agfa.algorithms.base import Algorithm, Problem, plain_backward
from agfa.averaging import Swad
from agfa.benchmark import reference
from agfa.benchmark.pipeline import input_seconds, input_share
from agfa.benchmark.timing import Clock, Figure, held_bytes, interleave, product, step_bytes
from agfa.data.batches import Batch
from agfa.nn.backbones import build_backbone
from agfa.nn.fast import quicken
from agfa.training.processes import kernels
from agfa.training.run_folder import environment

BARS = {  # a ratio or a share, whether it is to be large, and its bar
    "reference ERM : ERM": (True, 3.5),
    "ERM, share of the peak": (True, 0.60),
    "AGFA fused : ERM": (False, 1.10),
    "AGFA alternating : ERM": (False, 1.45),
    "reference AGFA : AGFA fused": (True, 4.0),
    "SWAD on : off": (False, 1.02),
    "input, share of the step": (False, 0.03),
    "memory, AGFA fused : ERM": (False, 1.15),
    "head and losses of 345 classes, share of the step": (False, 0.03),
}
DOMAINNET = 345  # classes


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    backbone: str = "resnet50"
    image_size: int = 224
    images: int = 48  # through the backbone in a step
    classes: int = 7
    domains: int = 3
    samples: int = 50
    repeats: int = 5
    bf16: bool = True
    compile: bool = True
    matrix: int = 4096
    device: str = "cpu"

    @property
    def on(self) -> torch.device:
        """The device."""
        return torch.device(self.device)

    def autocast(self) -> torch.autocast:
        """The precision of the networks."""
        return torch.autocast(self.on.type, torch.bfloat16, enabled=self.bf16)


class Bar(NamedTuple):
    """A bar, the figure that it is held against, and whether it is met."""

    name: str
    wanted: str
    found: Figure
    met: bool


@dataclass(frozen=True)
class Bench:
    """What was found: seconds a step and of its stages, ratios, megabytes; all else that the figures depend on."""

    plan: Plan
    seconds: dict[str, Figure]
    stages: dict[str, dict[str, Figure]]
    ratios: dict[str, Figure]
    megabytes: dict[str, float]
    peak: Figure  # operations a second of a large matrix product
    operations: float  # of an ERM step
    machine: dict[str, Any] = field(default_factory=environment)

    def bars(self) -> list[Bar]:
        """Every bar and whether it is met."""
        return [
            Bar(
                name,
                f"{'>=' if large else '<='} {bar:g}",
                self.ratios[name],
                self.ratios[name].median >= bar if large else self.ratios[name].median <= bar,
            )
            for name, (large, bar) in BARS.items()
        ]

    def record(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        bars = [{**bar._asdict(), "found": bar.found._asdict()} for bar in self.bars()]
        return {**asdict(self), "bars": bars}


def bench(plan: Plan, say: Callable[[str], None] = lambda text: None) -> Bench:
    """Measure it all; `say` is told what is going on."""
    with kernels(deterministic=False):
        return _measure(plan, say)


def _measure(plan: Plan, say: Callable[[str], None]) -> Bench:
    torch.manual_seed(0)
    say("building the networks")
    ours = {
        "ERM": method(plan, "erm"),
        "AGFA fused": method(plan, "agfa", schedule="fused", samples=plan.samples),
        "AGFA alternating": method(plan, "agfa", schedule="alternating", samples=plan.samples),
    }
    batches = {name: minibatch(plan, each) for name, each in ours.items()}
    average = Swad(patience=1)
    average.after_evaluation(ours["ERM"].network, 1, 1.0)  # a start: from here every iterate counts
    average.after_step(ours["ERM"].network)

    def erm_and_average(clock: Clock) -> None:
        take_step(plan, ours["ERM"], batches["ERM"], clock)
        clock.mark()
        average.after_step(ours["ERM"].network)

    where = (plan.backbone, plan.image_size, plan.classes, plan.on)
    plain = {
        "reference ERM": (*reference.erm(*where), batches["ERM"]),
        "reference AGFA": (*reference.agfa(*where, plan.samples), batches["AGFA fused"]),
    }
    steps: dict[str, Callable[[Clock], None]] = {
        "ERM": erm_and_average,
        **{
            name: lambda clock, name=name: take_step(plan, ours[name], batches[name], clock)  # type: ignore[misc]
            for name in ("AGFA fused", "AGFA alternating")
        },
        **{
            name: lambda clock, step=step, batch=batch: step(batch.images, batch.labels)  # type: ignore[misc]
            for name, (step, _, batch) in plain.items()
        },
        "product": product(torch.bfloat16 if plan.bf16 else torch.float32, plan.matrix, plan.on),
    }
    fused = ours["AGFA fused"]
    assert isinstance(fused, AGFA)
    steps |= {f"head, {n} classes": _head(plan, fused, n) for n in (plan.classes, DOMAINNET)}
    source = batches["AGFA fused"].images
    steps["generate"] = lambda clock: _alone(plan, fused.worst_case, source)
    images = batches["ERM"].images
    steps["evaluation"] = lambda clock: _alone(plan, ours["ERM"].network, images)

    say(f"{plan.repeats} repetitions of {', '.join(steps)}")
    found = interleave(steps, plan.on, plan.repeats)
    say("the input pipeline")
    erm = lambda batch: take_step(plan, ours["ERM"], batch, None)  # noqa: E731  # one line is clearest
    share = input_share(plan, erm, batches["ERM"])
    read, augmented = input_seconds(plan)
    say("memory")
    megabytes = {name: _bytes(plan, each, batches[name]) / 1e6 for name, each in ours.items()}

    totals = {name: [sum(parts) for parts in rows] for name, rows in found.items()}
    averaging = [parts[-1] for parts in found["ERM"]]
    totals["ERM"] = [total - last for total, last in zip(totals["ERM"], averaging, strict=True)]
    operations = _operations(plan)
    rate = 2.0 * plan.matrix**3
    head, small = (totals[f"head, {n} classes"] for n in (DOMAINNET, plan.classes))
    ratios = {
        "reference ERM : ERM": _ratio(totals["reference ERM"], totals["ERM"]),
        "ERM, share of the peak": Figure.of(
            [operations / step / (rate / p) for step, p in zip(totals["ERM"], totals["product"], strict=True)]
        ),
        "AGFA fused : ERM": _ratio(totals["AGFA fused"], totals["ERM"]),
        "AGFA alternating : ERM": _ratio(totals["AGFA alternating"], totals["ERM"]),
        "reference AGFA : AGFA fused": _ratio(totals["reference AGFA"], totals["AGFA fused"]),
        "SWAD on : off": Figure.of([1 + a / step for a, step in zip(averaging, totals["ERM"], strict=True)]),
        "input, share of the step": share,
        "memory, AGFA fused : ERM": Figure(*[megabytes["AGFA fused"] / megabytes["ERM"]] * 3),
        "head and losses of 345 classes, share of the step": Figure.of(
            [h / (t - s + h) for h, s, t in zip(head, small, totals["AGFA fused"], strict=True)]
        ),
    }
    stages = {name: _stages(found[name]) for name in ours}
    stages["ERM"]["averaging"] = Figure.of(averaging)
    stages["AGFA fused"]["of which generation (FFT)"] = Figure.of(totals["generate"])
    stages["AGFA fused"]["of which head and losses, both ways"] = Figure.of(small)
    stages["ERM"] |= {"evaluation of as many images": Figure.of(totals["evaluation"])}
    stages["input"] = {"read, crop and resize (ahead, in threads)": read, "flip and color": augmented}
    return Bench(
        plan,
        {name: Figure.of(totals[name]) for name in (*ours, *plain)},
        stages,
        ratios,
        megabytes,
        Figure.of([rate / p for p in totals["product"]]),
        operations,
    )


def method(plan: Plan, name: str, **hparams: object) -> Algorithm:
    """The method on its backbone, ready for steps."""
    recipe = algorithms.get(name)
    shape = (3, plan.image_size, plan.image_size)
    problem = Problem(plan.classes, plan.domains, n_images=1000, image_shape=shape)
    backbone = build_backbone(plan.backbone, 3, plan.image_size, weights="none", freeze_batchnorm=True)
    made = recipe.method(backbone, problem, recipe.hparams(hparams)).to(plan.on).train()
    quicken(made, plan.compile and plan.on.type == "cuda")
    return made


def minibatch(plan: Plan, algorithm: Algorithm) -> Batch:
    """Noise, as many images as make the plan's number in the backbone."""
    n = plan.images // algorithm.passes(algorithm.hparams)
    sizes = tuple(len(part) for part in torch.arange(n).tensor_split(plan.domains))
    images = torch.rand(n, 3, plan.image_size, plan.image_size, device=plan.on)
    domains = torch.repeat_interleave(torch.arange(plan.domains), torch.tensor(sizes)).to(plan.on)
    return Batch(images, torch.arange(n, device=plan.on) % plan.classes, domains, sizes)


def take_step(plan: Plan, algorithm: Algorithm, batch: Batch, clock: Clock | None) -> None:
    """One step as the trainer takes it, with a mark before and after each backward pass."""

    def backward(loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
        if clock is not None:
            clock.mark()
        plain_backward(loss, parameters)
        if clock is not None:
            clock.mark()

    with plan.autocast():
        algorithm.update(batch, backward)


def _stages(rows: list[list[float]]) -> dict[str, Figure]:
    """Forward, backward and what follows, from a step's marks; a second pass is named so."""
    names = ["forward and losses", "backward", "optimiser"]
    if len(rows[0]) >= 5:
        names = ["forward and losses", "backward", "optimiser, second forward", "second backward", "second optimiser"]
    return {name: Figure.of([row[i] for row in rows]) for i, name in enumerate(names)}


def _head(plan: Plan, algorithm: AGFA, classes: int) -> Callable[[Clock], None]:
    """The head and the losses of a step alone, forward and backward, at that many classes."""
    n_features = algorithm.network.backbone.n_features
    problem = Problem(classes, plan.domains, n_images=1000, image_shape=(3, 8, 8))
    backbone = build_backbone("convnet", 3, 8, weights="none")
    backbone.n_features = n_features  # only the head of this one is used
    alone = AGFA(backbone, problem, algorithm.hparams).to(plan.on)
    n = plan.images // 2
    features = torch.randn(2 * n, n_features, device=plan.on, requires_grad=True)
    labels = torch.arange(n, device=plan.on) % classes

    def run(clock: Clock) -> None:
        with plan.autocast():
            of_source, of_generated = features.chunk(2)
            loss, _ = alone.negative_elbo(of_source, labels)
            loss = loss + algorithm.hparams.eta * alone.discrepancy(of_generated, labels)
            plain_backward(loss, [features, *alone.head.parameters()])  # type: ignore[list-item]  # a leaf, as they are

    return run


@torch.no_grad()
def _alone(plan: Plan, part: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """A part of a step, without gradients."""
    with plan.autocast():
        part(x)


def _operations(plan: Plan) -> float:
    """Multiplications and additions of an ERM step's matrix products and convolutions, both ways."""
    step, _ = reference.erm(plan.backbone, plan.image_size, plan.classes, torch.device("cpu"))
    x = torch.rand(2, 3, plan.image_size, plan.image_size)
    with FlopCounterMode(display=False) as counter:
        step(x, torch.zeros(2, dtype=torch.long))
    return float(counter.get_total_flops()) * plan.images / 2


def _bytes(plan: Plan, algorithm: Algorithm, batch: Batch) -> int:
    """What the method keeps, and the most that a step needs beside it."""

    def step() -> None:
        take_step(plan, algorithm, batch, None)

    step()
    return held_bytes([algorithm], list(algorithm.optimizers.values())) + step_bytes(step, plan.on)


def _ratio(above: list[float], below: list[float]) -> Figure:
    return Figure.of([a / b for a, b in zip(above, below, strict=True)])
