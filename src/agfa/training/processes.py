"""One run in several processes: who speaks and writes, how they end, and gradients of the joint minibatch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning_fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from agfa import errors
from agfa.algorithms.base import Backward
from agfa.errors import UsageError
from agfa.nn.exchange import Share
from agfa.training.config import CompleteConfig
from agfa.training.setup import source_batch

Look = Callable[[Tensor, Sequence[nn.Parameter]], None]  # at a loss and at the parameters that have its gradient

logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # what it chose is in the configuration


def is_first_process() -> bool:
    """Whether this process speaks and writes for all; known before they are launched."""
    return getattr(rank_zero_only, "rank", 0) == 0


def prepare(config: CompleteConfig) -> Fabric:
    """The processes of this run, not yet launched."""
    devices, nodes = config.devices, 1
    if TorchElasticEnvironment.detect():  # torchrun has started the processes
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it once, when it starts
    try:
        return Fabric(accelerator=config.accelerator, devices=devices, num_nodes=nodes, precision=config.precision)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"accelerator {config.accelerator!r}, {devices} devices: {error}") from error


def require_even_shares(config: CompleteConfig, n_sources: int, processes: int) -> None:
    """See that every process gets as many images of a minibatch.

    Raises:
        UsageError: they do not come out even.
    """
    images = source_batch(config) * n_sources
    if images % processes:
        raise UsageError(
            f"{images} source images a step cannot be shared by {processes} processes; make batch_size a multiple"
        )


@contextmanager
def ending_together(fabric: Fabric) -> Iterator[None]:
    """When one process fails, all end, with its exit status; it alone says why."""
    try:
        yield
    except Exception as error:
        if fabric.world_size == 1:
            raise
        ours = getattr(error, "exit_status", 1)
        first = f"{ours} {fabric.global_rank}"
        with suppress(Exception):  # the process that keeps the store may have been the first to end
            store = dist.distributed_c10d._get_default_store()
            first = store.compare_set("agfa/failed", "", first).decode()
        status, rank = first.split()
        errors.speaks = int(rank) == fabric.global_rank
        launcher = fabric.strategy.launcher
        if isinstance(launcher, _SubprocessScriptLauncher):
            for process in launcher.procs:  # they may wait for this one, and for long
                process.terminate()
        if errors.speaks:
            raise
        raise SystemExit(int(status)) from error


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


def joint_backward(share: Share, look: Look = lambda loss, parameters: None) -> Backward:
    """Gradients of `parameters` alone, averaged over processes. `look` is shown them then.

    Averaged here, once, and not by a wrapper around each network: it is right for any number of players and passes.
    """

    def backward(loss: Tensor, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        share.later = True
        try:
            torch.autograd.backward(loss, inputs=parameters)
        finally:
            share.later = False
        if share.processes > 1:
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_copy_(gradients, share.mean(gradients))
        look(loss, parameters)

    return backward
