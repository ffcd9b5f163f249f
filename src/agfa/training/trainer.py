"""The training loop: any algorithm, any averaging policy, resumable.

Nothing random is kept between steps: batches, augmentation and noise are functions of (seed, step), so a run that
goes on from a checkpoint ends with the same bits as one that was never interrupted.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from lightning_fabric import Fabric
from torch import Tensor

from agfa.algorithms.base import Network
from agfa.averaging import host_state, renew_statistics
from agfa.data.augment import Augmentation
from agfa.data.batches import NOISE, seed_of, training_batches
from agfa.data.check import require_trainable
from agfa.data.domains import DomainDataset
from agfa.data.inventory import changes, inventory
from agfa.data.splits import Roles
from agfa.data.store import open_images
from agfa.errors import UsageError
from agfa.files import put
from agfa.nn.backbones import weights_hash
from agfa.nn.exchange import Share
from agfa.nn.fast import quicken
from agfa.nn.shares import sharing
from agfa.training import checkpoint, model_file, predictions, processes, replay
from agfa.training.config import CompleteConfig, TrainConfig
from agfa.training.evaluate import (
    Answers,
    Kept,
    Place,
    Score,
    Scores,
    answers,
    finals_of,
    mean_accuracy,
    mean_loss,
    totals,
)
from agfa.training.finite import Watch
from agfa.training.memory import largest_batch
from agfa.training.model_file import ModelCard
from agfa.training.model_readme import readme
from agfa.training.progress import Display
from agfa.training.run_folder import RunFolder
from agfa.training.setup import averaging_of, build, complete, source_batch, split
from agfa.training.state import Training
from agfa.training.temperature import source_temperature

STATISTICS = 100  # minibatches from which an average's batch-norm statistics are taken


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


def train(settings: TrainConfig, display: Display | None = None) -> Run:
    """Train as `settings` say: start, go on with the run in its folder, or return what it ended with.

    Raises:
        UsageError: the settings or the data do not allow it.
        AgfaError: it failed on the way; the same call goes on from the last checkpoint.
    """
    display = display or Display(quiet=True)
    config, dataset, roles = complete(settings)
    folder = RunFolder(config.out)
    automatic = settings.batch_size == "auto"
    if automatic and folder.metrics.exists():  # it was found when the run began
        config = config.model_copy(update={"batch_size": folder.batch_size()})
    if not folder.done.exists():
        require_trainable(dataset, roles, config.allow_missing_classes)
        with folder.held() if processes.is_first_process() else nullcontext():
            if not folder.done.exists():  # another process may just have finished it
                return _launch(config, automatic, dataset, roles, folder, display)
    folder.claim(config)
    checkpoint.remove(folder.checkpoint)  # of a process that died between its last two deeds
    display.say(f"{folder.path} is finished already; delete it to train anew")
    return _finished(folder, config)


def _launch(
    config: CompleteConfig, automatic: bool, dataset: DomainDataset, roles: Roles, folder: RunFolder, display: Display
) -> Run:
    """Prepare what one process can for all, then train in every one. The first process holds the folder."""
    fabric = processes.prepare(config)
    writer = processes.is_first_process()
    display = display if writer else Display(quiet=True)
    if not automatic:
        processes.require_even_shares(config, len(roles.sources), fabric.world_size)
    if writer:  # before there are others, who could only wait, or fail with it
        folder.claim(config)
        with display.images() as seen:
            images = open_images(dataset, config.image_size, config.channels, seen, display.say)
        if automatic and not folder.metrics.exists():
            config = largest_batch(config, dataset, split(dataset, images, roles, config), fabric)
            display.say(f"batch size {config.batch_size}: as many images as fit")
            folder.claim(config)
    fabric.launch()
    with processes.ending_together(fabric):
        if automatic:
            config = config.model_copy(update={"batch_size": fabric.broadcast(config.batch_size)})
        return _train(config, dataset, roles, folder, fabric, display)


def _train(
    config: CompleteConfig, dataset: DomainDataset, roles: Roles, folder: RunFolder, fabric: Fabric, display: Display
) -> Run:
    """Train to the end, from the checkpoint if there is one, in this process of one or more."""
    writer = processes.is_first_process()
    fabric.barrier()
    images = open_images(dataset, config.image_size, config.channels)
    splits, holdings = split(dataset, images, roles, config), inventory(dataset, images)
    training = Training(build(config, dataset, splits), averaging_of(config))
    algorithm, averaging, network = training.algorithm, training.averaging, training.algorithm.network
    initial_weights = weights_hash(network.backbone)
    algorithm.to(fabric.device)
    quicken(algorithm, config.compile and fabric.device.type == "cuda", display.say)

    saved = checkpoint.load(folder.checkpoint, display.say)
    if saved is not None:
        if changed := changes(saved["data"], holdings):
            what = f"the images of {dataset.name} are no longer those that {folder.path} was trained on"
            raise UsageError(f"{what}: {'; '.join(changed)}; put them back, or choose another folder with --out")
        training.load_state_dict(saved["training"])
        display.say(f"resuming {folder.path} after step {training.step}")
    if writer:
        folder.rewind(saved["log_size"] if saved else 0)

    def save() -> None:
        state = {"training": training.state_dict(), "data": holdings, "log_size": folder.log_size()}
        checkpoint.save(folder.checkpoint, state)

    kept = Kept(config.image_size)

    def measure(autocast: AbstractContextManager[object], targets: bool = True) -> Scores:
        found = {}
        for place, part in splits.evaluated(targets):
            mine = kept(place, part.share(fabric.global_rank, fabric.world_size))
            counted = totals(network, mine, config.image_size, fabric.device, autocast)
            found[place] = Score.of(fabric.all_reduce(counted, reduce_op="sum"))  # type: ignore[arg-type]  # a tensor in, a tensor out
        return found

    def ask() -> dict[Place, Answers]:
        found = {}
        for place, part in splits.evaluated(targets=True):
            mine = kept(place, part.share(fabric.global_rank, fabric.world_size, even=True))
            found[place] = answers(network, mine, config.image_size, fabric.device).gathered(fabric, len(part))
        return found

    batches_from = partial(
        training_batches,
        list(splits.train.values()),
        batch_size=source_batch(config),
        image_size=config.image_size,
        augmentation=Augmentation() if config.augment else None,
        seed=config.seed,
        device=fabric.device,
        share=(fabric.global_rank, fabric.world_size),
    )
    share = Share(fabric.global_rank, fabric.world_size, config.accumulate)
    images_per_step = config.batch_size * len(splits.train)
    began = recorded_at = saved_at = time.monotonic()
    earlier = training.seconds
    sums: dict[str, Tensor] = {}
    warned: set[str] = set()

    algorithm.train()
    watch = Watch(algorithm, config.evaluate_every, fabric.device, skipped=config.skip_nonfinite)
    backward = processes.joint_backward(share, watch.look)
    with (
        closing(batches_from(first_step=training.step)) as batches,
        processes.kernels(config.deterministic),
        display.training(training.step, config.steps, images_per_step) as advance,
    ):
        while not training.over(config):
            torch.manual_seed(seed_of(config.seed, training.step, 0, NOISE))
            batch, algorithm.step = next(batches), training.step
            batch = batch._replace(images=share.gather(batch.images))
            watch.begin()
            with fabric.autocast(), sharing(share):
                losses = algorithm.update(batch, backward)
            training.step += 1
            losses = watch.end(training.step, losses)
            if averaging is not None:
                averaging.after_step(network)
            sums = {name: sums.get(name, 0) + value for name, value in losses.items()}
            advance(training.step, losses)
            due = training.step % config.evaluate_every == 0
            if not due and not training.over(config):
                continue

            steps = (training.step - 1) % config.evaluate_every + 1  # since the last record
            bad = watch.found(training.step)
            if bad and (len(bad) == steps or not config.skip_nonfinite):
                with closing(batches_from(first_step=bad[0] - 1)) as again:
                    replay.stop(folder.path, bad[0], next(again), algorithm, share, fabric)
            means, sums = {name: float(value) / (steps - len(bad)) for name, value in sums.items()}, {}
            rate = steps * images_per_step / max(1e-9, time.monotonic() - recorded_at)
            warnings = algorithm.warnings(means)
            if bad:
                warnings["skipped steps"] = f"a loss or gradient was not finite: {', '.join(map(str, bad))}"
            scores = measure(fabric.autocast(), targets=config.track_target)
            training.best.offer(mean_accuracy(scores, "val"), training.step, network)
            training.oracle.offer(mean_accuracy(scores, "oracle"), training.step, network)
            if averaging is not None and due:
                averaging.after_evaluation(network, training.step, mean_loss(scores, "val"))
            training.seconds = earlier + time.monotonic() - began
            if writer:
                timing = {"seconds": round(training.seconds, 2), "images_per_second": round(rate, 1)}
                folder.record(kind="train", step=training.step, losses=means, **timing)
                for name, text in warnings.items():
                    folder.record(kind="warning", step=training.step, warning=name, text=text)
                    if name not in warned:
                        display.say(f"warning: {name}, step {training.step}: {text}")
                warned = set(warnings)
                _record(folder, scores, kind="eval", step=training.step)
                display.say(_line(training.step, scores))
                if training.over(config) or time.monotonic() - saved_at >= config.checkpoint_seconds:
                    save()
                    saved_at = time.monotonic()
            recorded_at = time.monotonic()

    if averaging is not None and averaging.average() is None:
        display.say(f"{averaging.name} found no start: its model is the last one; more steps may help")
    card = _card(config, dataset, roles, network, initial_weights)
    finals, told = {}, []
    for name, (step, state) in training.models().items():
        network.load_state_dict(state)
        if averaging is not None and name == averaging.name and averaging.average() is not None:
            with closing(batches_from(first_step=0)) as again, sharing(share):
                first = islice(again, min(STATISTICS, config.steps))
                renew_statistics(network, (share.gather(batch.images) for batch in first))
            state = host_state(network)
        said = ask()
        finals[name] = {place: of.score() for place, of in said.items()}
        if writer:
            _record(folder, finals[name], kind="final", model=name, step=step)
            temperature = source_temperature(said)
            told += predictions.frames(name, dataset, splits, said, temperature)
            named = card.model_copy(update={"model": name, "step": step, "temperature": temperature})
            model_file.save(folder.path / "models" / name, state, named)
            if name == config.chosen:
                put(folder.path / "README.md", readme(named, folder.path / "model.safetensors").encode())
                model_file.save(folder.path / "model", state, named)
    if writer:
        others = {k: v.contiguous() for k, v in algorithm.state_dict().items() if not k.startswith("network.")}
        predictions.write(folder.path, told)
        if others:
            put(folder.players, safetensors.torch.save(others))
        folder.finish()
    fabric.barrier()
    return Run(folder.path, config, finals, training.seconds)


def _card(
    config: CompleteConfig, dataset: DomainDataset, roles: Roles, network: Network, initial_weights: str
) -> ModelCard:
    """What the run's models have in common."""
    backbone = network.backbone
    return ModelCard(
        classes=dataset.classes,
        backbone=backbone.tag,
        initial_weights=initial_weights,
        image_size=config.image_size,
        channels=config.channels,
        mean=tuple(backbone.mean.flatten().tolist()),
        std=tuple(backbone.std.flatten().tolist()),
        algorithm=config.algorithm,
        hparams=config.hparams,
        sources=roles.sources,
        targets=roles.targets,
        model=config.chosen,
        step=config.steps,
    )


def _record(folder: RunFolder, scores: Scores, **common: Any) -> None:
    for (role, domain, part), score in scores.items():
        folder.record(**common, domain=domain, role=role, split=part, **score._asdict())


def _finished(folder: RunFolder, config: CompleteConfig) -> Run:
    """The run that a folder holds, from its records."""
    records = folder.records()
    seconds = [r["seconds"] for r in records if r["kind"] == "train"]
    return Run(folder.path, config, finals_of(records), seconds[-1])


def _line(step: int, scores: Scores) -> str:
    """One evaluation, in a line for people."""
    text = f"step {step}: source validation {mean_accuracy(scores, 'val'):.1%}, loss {mean_loss(scores, 'val'):.3f}"
    unseen = mean_accuracy(scores, "test")
    return text if unseen is None else f"{text}, unseen {unseen:.1%}"
