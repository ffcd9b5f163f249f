"""The training loop: any algorithm, any averaging policy, resumable.

Nothing random is kept between steps: batches, augmentation and noise are functions of (seed, step), so a run that
goes on from a checkpoint ends with the same bits as one that was never interrupted.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from agfa import algorithms
from agfa.algorithms.base import Algorithm, Backward
from agfa.averaging import Averaging, State, Swa, Swad, host_state
from agfa.data.augment import Augmentation
from agfa.data.batches import Part, seed_of, training_batches
from agfa.data.check import require_trainable
from agfa.data.store import open_images
from agfa.errors import AgfaError, UsageError
from agfa.files import replace
from agfa.nn.backbones import weights_hash
from agfa.nn.heads import BayesianLinear
from agfa.training import checkpoint, model_file
from agfa.training.config import CompleteConfig, TrainConfig
from agfa.training.evaluate import Score, totals
from agfa.training.model_file import ModelCard
from agfa.training.progress import Display
from agfa.training.run_folder import RunFolder
from agfa.training.setup import build, complete, split

Scores = dict[tuple[str, str, str], Score]  # of (role, domain, split)
logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # what it chose is in the configuration
NOISE = 0  # keeps the training step's randomness apart from the augmentation's


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, its configuration, and the scores of each model kept from it.

    The models are "last", "best" (by source validation), the average ("swad" or "swa") and "oracle".
    """

    folder: Path
    config: CompleteConfig
    scores: dict[str, Scores]
    seconds: float

    @property
    def accuracy(self) -> float | None:
        """The selected model's accuracy on domains it has never seen, mean over them; None when there are none."""
        return mean_accuracy(self.scores[self.config.chosen], "test")


@dataclass
class Best:
    """The model with the highest score so far, in host memory."""

    score: float = -1.0
    step: int = 0
    state: State = field(default_factory=dict)

    def offer(self, score: float | None, step: int, network: nn.Module) -> None:
        """Keep this model if its score is higher than any before."""
        if score is not None and score > self.score:
            self.score, self.step, self.state = score, step, _copy(network)


@dataclass
class Training:
    """All that changes as a run goes on, and so all that a checkpoint holds."""

    algorithm: Algorithm
    averaging: Averaging | None
    best: Best = field(default_factory=Best)
    oracle: Best = field(default_factory=Best)
    step: int = 0
    seconds: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain values and tensors."""
        return {
            "algorithm": self.algorithm.state_dict(),
            "optimizers": {name: o.state_dict() for name, o in self.algorithm.optimizers.items()},
            "averaging": self.averaging.state_dict() if self.averaging is not None else None,
            "best": vars(self.best),
            "oracle": vars(self.oracle),
            "step": self.step,
            "seconds": self.seconds,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.algorithm.load_state_dict(state["algorithm"])
        for name, optimizer in self.algorithm.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        if self.averaging is not None:
            self.averaging.load_state_dict(state["averaging"])
        self.best, self.oracle = Best(**state["best"]), Best(**state["oracle"])
        self.step, self.seconds = state["step"], state["seconds"]

    def over(self, config: CompleteConfig) -> bool:
        """Whether there is nothing left to train."""
        stopped = config.stop_early and isinstance(self.averaging, Swad) and self.averaging.finished
        return stopped or self.step >= config.steps

    def models(self, display: Display) -> dict[str, tuple[int, State]]:
        """(step, state) of every model that this training gives."""
        last = _copy(self.algorithm.network)
        found = {"last": (self.step, last), "best": (self.best.step, self.best.state)}
        if self.averaging is not None:
            average = self.averaging.average()
            if average is None:
                display.say(f"{self.averaging.name} found no start: its model is the last one")
            found[self.averaging.name] = (self.step, average or last)
        if self.oracle.state:
            found["oracle"] = (self.oracle.step, self.oracle.state)
        return found


def train(settings: TrainConfig, display: Display | None = None) -> Run:
    """Train as `settings` say: start, go on with the run in its folder, or return what it ended with.

    Raises:
        UsageError: the settings or the data do not allow it.
        AgfaError: it failed on the way; the same call goes on from the last checkpoint.
    """
    display = display or Display(quiet=True)
    config, dataset, roles = complete(settings)
    folder = RunFolder(config.out)
    if folder.done.exists():
        folder.claim(config)
        display.say(f"{folder.path} is finished already; delete it to train anew")
        return _finished(folder, config)
    require_trainable(dataset, roles, config.allow_missing_classes)

    fabric = _fabric(config)
    writer = is_first_process()
    display = display if writer else Display(quiet=True)
    if writer:  # before there are others, who could only wait, or fail with it
        folder.claim(config)
        with display.images() as seen:
            open_images(dataset, config.image_size, config.channels, seen)
    fabric.launch()
    fabric.barrier()
    splits = split(dataset, open_images(dataset, config.image_size, config.channels), roles, config)
    training = Training(build(config, dataset, splits), _averaging(config))
    algorithm, averaging, network = training.algorithm, training.averaging, training.algorithm.network
    initial_weights = weights_hash(network.backbone)
    algorithm.to(fabric.device)

    saved = checkpoint.load(folder.checkpoint)
    if saved is not None:
        if saved["data"] != dataset.fingerprint():
            raise UsageError(f"the images of {dataset.name} are no longer those that {folder.path} was trained on")
        training.load_state_dict(saved["training"])
        display.say(f"resuming {folder.path} after step {training.step}")
    if writer:
        folder.rewind(saved["log_size"] if saved else 0)

    def save() -> None:
        log_size = folder.metrics.stat().st_size
        state = {"training": training.state_dict(), "data": dataset.fingerprint(), "log_size": log_size}
        checkpoint.save(folder.checkpoint, state)

    def measure(autocast: AbstractContextManager[object], targets: bool = True) -> Scores:
        found = {}
        for role, name, part_name, part in splits.evaluated(targets):
            mine = Part(part.images, part.labels, part.indices[fabric.global_rank :: fabric.world_size])
            counted = totals(network, mine, config.image_size, fabric.device, autocast)
            found[role, name, part_name] = Score.of(fabric.all_reduce(counted, reduce_op="sum"))  # type: ignore[arg-type]  # a tensor in, a tensor out
        return found

    batches = training_batches(
        list(splits.train.values()),
        batch_size=config.batch_size // algorithm.passes,
        image_size=config.image_size,
        augmentation=Augmentation() if config.augment else None,
        seed=config.seed,
        first_step=training.step,
        device=fabric.device,
        share=(fabric.global_rank, fabric.world_size),
    )
    backward = _backward(fabric)
    images_per_step = config.batch_size * len(splits.train)
    began = recorded_at = saved_at = time.monotonic()
    earlier = training.seconds
    sums: dict[str, Tensor] = {}

    algorithm.train()
    with closing(batches), display.training(training.step, config.steps, images_per_step) as advance:
        while not training.over(config):
            torch.manual_seed(seed_of(config.seed, training.step, fabric.global_rank, NOISE))
            batch = next(batches)
            with fabric.autocast():
                losses = algorithm.update(batch, backward)
            training.step += 1
            if averaging is not None:
                averaging.after_step(network)
            sums = {name: sums.get(name, 0) + value for name, value in losses.items()}
            advance(training.step, losses)
            due = training.step % config.evaluate_every == 0
            if not due and not training.over(config):
                continue

            steps = (training.step - 1) % config.evaluate_every + 1  # since the last record
            means, sums = {name: float(value) / steps for name, value in sums.items()}, {}
            rate = steps * images_per_step / (time.monotonic() - recorded_at)
            if not all(math.isfinite(value) for value in means.values()):
                raise AgfaError(f"a loss is not finite by step {training.step}: {means}; try a lower --hparams.lr")
            scores = measure(fabric.autocast(), targets=config.track_target)
            training.best.offer(mean_accuracy(scores, "val"), training.step, network)
            training.oracle.offer(mean_accuracy(scores, "oracle"), training.step, network)
            if averaging is not None and due:
                averaging.after_evaluation(network, training.step, mean_loss(scores, "val"))
            training.seconds = earlier + time.monotonic() - began
            if writer:
                timing = {"seconds": round(training.seconds, 2), "images_per_second": round(rate, 1)}
                folder.record(kind="train", step=training.step, losses=means, **timing)
                _record(folder, scores, kind="eval", step=training.step)
                display.say(_line(training.step, scores))
                if training.over(config) or time.monotonic() - saved_at >= config.checkpoint_seconds:
                    save()
                    saved_at = time.monotonic()
            recorded_at = time.monotonic()

    card = ModelCard(
        classes=dataset.classes,
        backbone=network.backbone.tag,
        initial_weights=initial_weights,
        head="bayesian" if isinstance(network.head, BayesianLinear) else "linear",
        image_size=config.image_size,
        channels=config.channels,
        mean=tuple(network.backbone.mean.flatten().tolist()),
        std=tuple(network.backbone.std.flatten().tolist()),
        algorithm=config.algorithm,
        sources=roles.sources,
        targets=roles.targets,
        model="last",
        step=training.step,
    )
    finals = {}
    for name, (step, state) in training.models(display).items():
        network.load_state_dict(state)
        finals[name] = measure(nullcontext())
        if writer:
            _record(folder, finals[name], kind="final", model=name, step=step)
            named = card.model_copy(update={"model": name, "step": step})
            model_file.save(folder.path / "models" / name, state, named)
            if name == config.chosen:
                model_file.save(folder.path / "model", state, named)
    if writer:
        others = {k: v for k, v in algorithm.state_dict().items() if not k.startswith("network.")}
        if others:
            replace(folder.players, lambda f: f.write(safetensors.torch.save(others)))
        folder.finish()
    fabric.barrier()
    return Run(folder.path, config, finals, training.seconds)


def mean_accuracy(scores: Scores, split: str) -> float | None:
    """Mean over domains of their accuracy on `split`; None where none has it."""
    found = [score.accuracy for (_, _, name), score in scores.items() if name == split]
    return sum(found) / len(found) if found else None


def mean_loss(scores: Scores, split: str) -> float:
    """Mean over domains of their mean loss on `split`."""
    found = [score.loss for (_, _, name), score in scores.items() if name == split]
    return sum(found) / len(found)


def _copy(network: nn.Module) -> State:
    """A network's state in host memory, on its own."""
    return {key: value.clone() for key, value in host_state(network).items()}


def _averaging(config: CompleteConfig) -> Averaging | None:
    """The run's averaging policy."""
    if config.averaging == "swa":
        return Swa(start=config.steps // 2)
    if config.averaging == "swad":
        return Swad(config.swad_patience, config.swad_tolerance, config.swad_ratio)
    return None


def is_first_process() -> bool:
    """Whether this process speaks and writes for all; known before they are launched."""
    return getattr(rank_zero_only, "rank", 0) == 0


def _fabric(config: CompleteConfig) -> Fabric:
    """The processes of this run, not yet launched; each sees its share of every minibatch."""
    devices, nodes = config.devices, 1
    if TorchElasticEnvironment.detect():  # torchrun has started the processes
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
    size = config.batch_size // algorithms.get(config.algorithm).passes
    if size % (devices * nodes):
        raise UsageError(
            f"{size} source images per domain and step cannot be shared by {devices * nodes} processes; "
            "make batch_size a multiple"
        )
    try:
        return Fabric(accelerator=config.accelerator, devices=devices, num_nodes=nodes, precision=config.precision)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"accelerator {config.accelerator!r}, {devices} devices: {error}") from error


def _backward(fabric: Fabric) -> Backward:
    """Gradients of `parameters` alone, averaged over processes.

    Averaged here and not by a wrapper around each network: it is right for any number of players and passes.
    """

    def backward(loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        torch.autograd.backward(loss, inputs=parameters)
        if fabric.world_size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        joint = torch.cat([g.flatten() for g in gradients])
        joint = fabric.all_reduce(joint, reduce_op="mean")  # type: ignore[assignment]  # a tensor in, a tensor out
        for gradient, averaged in zip(gradients, torch.split(joint, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(averaged.view_as(gradient))

    return backward


def _record(folder: RunFolder, scores: Scores, **common: Any) -> None:
    for (role, domain, part), score in scores.items():
        folder.record(**common, domain=domain, role=role, split=part, **score._asdict())


def _finished(folder: RunFolder, config: CompleteConfig) -> Run:
    """The run that a folder holds, from its records."""
    scores: dict[str, Scores] = {}
    seconds = 0.0
    for r in folder.records():
        if r["kind"] == "final":
            score = Score(r["accuracy"], r["loss"], r["n"])
            scores.setdefault(r["model"], {})[r["role"], r["domain"], r["split"]] = score
        elif r["kind"] == "train":
            seconds = r["seconds"]
    return Run(folder.path, config, scores, seconds)


def _line(step: int, scores: Scores) -> str:
    """One evaluation, in a line for people."""
    text = f"step {step}: source validation {mean_accuracy(scores, 'val'):.1%}, loss {mean_loss(scores, 'val'):.3f}"
    unseen = mean_accuracy(scores, "test")
    return text if unseen is None else f"{text}, unseen {unseen:.1%}"
