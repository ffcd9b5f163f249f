"""The step at which a run stopped because its loss or gradient was not finite: kept, and taken again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from lightning_fabric import Fabric
from torch import nn

from agfa.algorithms.base import Algorithm, plain_backward
from agfa.data.batches import NOISE, Batch, seed_of
from agfa.data.store import open_images
from agfa.errors import AgfaError, UsageError
from agfa.files import replace
from agfa.nn.exchange import Share
from agfa.training.config import CompleteConfig, parse, read
from agfa.training.processes import is_first_process
from agfa.training.setup import build, complete, split

FILE = "nonfinite.pt"


class Replayed(NamedTuple):
    """What a step gave: its losses, the parameters whose gradients are not finite, and all that it was made of."""

    step: int
    losses: dict[str, float]
    bad: list[str]
    batch: Batch
    algorithm: Algorithm


def stop(run: Path, step: int, batch: Batch, algorithm: Algorithm, share: Share, fabric: Fabric) -> NoReturn:
    """End a run at step number `step`: its minibatch, and the algorithm as it was before, are kept.

    Raises:
        AgfaError: what happened, and where the step is.
    """
    batch = batch._replace(images=share.gather(batch.images))
    optimizers = {name: optimizer.state_dict() for name, optimizer in algorithm.optimizers.items()}
    state = {"step": step, "batch": tuple(batch), "algorithm": algorithm.state_dict(), "optimizers": optimizers}
    if is_first_process():
        replace(run / FILE, lambda file: torch.save(state, file))
    fabric.barrier()  # no process ends before it is written
    raise AgfaError(
        f"a loss or gradient of step {step} is not finite; the step is kept in {run / FILE} (docs/reliability.md); "
        "try a lower --hparams.lr, or --skip-nonfinite"
    )


def replay(run: str | Path) -> Replayed:
    """Take the step again, on the CPU: on the same images, from the same parameters, with the same noise.

    Of an algorithm with several players, those that had moved in that step before the bad one have moved already.

    Raises:
        UsageError: no such step was kept.
    """
    path = Path(run) / FILE
    if not path.exists():
        raise UsageError(f"{run} has no {FILE}: it did not stop at a loss or gradient that is not finite")
    saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    file = Path(run) / "config.yaml"
    config, dataset, roles = complete(parse(read(file), CompleteConfig, str(file)))
    images = open_images(dataset, config.image_size, config.channels)
    algorithm = build(config, dataset, split(dataset, images, roles, config)).train()
    algorithm.load_state_dict(saved["algorithm"])
    for name, optimizer in algorithm.optimizers.items():
        optimizer.load_state_dict(saved["optimizers"][name])
        optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]  # look, and leave the parameters alone
    batch, algorithm.step = Batch(*saved["batch"]), saved["step"] - 1
    torch.manual_seed(seed_of(config.seed, algorithm.step, 0, NOISE))
    bad: list[nn.Parameter] = []

    def backward(loss: torch.Tensor, parameters: Any) -> None:
        parameters = list(parameters)
        plain_backward(loss, parameters)
        bad.extend(p for p in parameters if p.grad is not None and not p.grad.isfinite().all())

    losses = algorithm.update(batch, backward)
    names = {id(parameter): name for name, parameter in algorithm.named_parameters()}
    found = list(dict.fromkeys(names[id(parameter)] for parameter in bad))
    return Replayed(saved["step"], {k: float(v) for k, v in losses.items()}, found, batch, algorithm)
