"""One run in several processes: who speaks, what each takes on, and gradients of the joint minibatch."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from agfa.algorithms.base import Backward
from agfa.errors import UsageError
from agfa.training.config import CompleteConfig
from agfa.training.setup import source_batch

logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # what it chose is in the configuration


def is_first_process() -> bool:
    """Whether this process speaks and writes for all; known before they are launched."""
    return getattr(rank_zero_only, "rank", 0) == 0


def prepare(config: CompleteConfig) -> Fabric:
    """The processes of this run, not yet launched; each sees its share of every minibatch."""
    devices, nodes = config.devices, 1
    if TorchElasticEnvironment.detect():  # torchrun has started the processes
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, when it starts
    size = source_batch(config)
    if size % (devices * nodes):
        raise UsageError(
            f"{size} source images per domain and step cannot be shared by {devices * nodes} processes; "
            "make batch_size a multiple"
        )
    try:
        return Fabric(accelerator=config.accelerator, devices=devices, num_nodes=nodes, precision=config.precision)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"accelerator {config.accelerator!r}, {devices} devices: {error}") from error


@contextmanager
def kernels(deterministic: bool) -> Iterator[None]:
    """Take the fastest kernels for as long as the block lasts, or only those that give the same bits each time.

    Where torch has none of these, it says so.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
    )
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, not deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before[2:]


def joint_backward(fabric: Fabric) -> Backward:
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
