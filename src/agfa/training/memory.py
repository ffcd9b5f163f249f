"""The largest minibatch that fits into memory: found by trying, before training."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from lightning_fabric import Fabric
from torch import Tensor

from agfa.data.batches import Batch
from agfa.data.domains import DomainDataset
from agfa.errors import UsageError
from agfa.nn.exchange import Share
from agfa.nn.shares import sharing
from agfa.training.config import CompleteConfig
from agfa.training.processes import joint_backward
from agfa.training.setup import Splits, build, source_batch

SPARE_OF_GPU = 0.05  # kept free, for the gaps between tensors
OF_HOST = 0.7  # of its free memory: with none left, it is others that the system ends
STEPS = 10  # of a trial: players may take turns, and an optimiser's state is made at its first step
FINENESS = 8  # the result is no more than an eighth below what would fit


class Alone(Share):
    """One of several processes that takes its rows for everyone's: what it needs is what it would among them."""

    def gather(self, rows: Tensor) -> Tensor:
        """As many rows."""
        return torch.cat([rows] * self.processes)

    def mean(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors."""
        return list(tensors)


def largest_batch(config: CompleteConfig, dataset: DomainDataset, splits: Splits, fabric: Fabric) -> CompleteConfig:
    """The configuration with the largest batch_size that fits; no image comes twice in one step.

    Raises:
        UsageError: not even the smallest fits.
    """
    passes = config.batch_size // source_batch(config)
    unit = passes * (fabric.world_size // math.gcd(len(splits.train), fabric.world_size))
    most = passes * min(len(part) for part in splits.train.values()) // unit * unit
    limit = math.inf if fabric.device.type == "cuda" else OF_HOST * free_memory() / config.devices
    _peak()  # what this process needed earlier is no part of it
    before = _peak()
    trials: dict[int, float] = {}  # batch_size: bytes that it took

    def fits(size: int) -> bool:
        if trials and size / max(trials) * trials[max(trials)] > limit:
            return False  # by what a smaller one took; nothing is tried
        try:
            trial(config.model_copy(update={"batch_size": size}), dataset, splits, fabric)
        except (torch.OutOfMemoryError, MemoryError):
            return False
        except RuntimeError as error:
            if not any(hint in str(error) for hint in ("not enough memory", "ALLOC_FAILED", "can't allocate")):
                raise
            return False
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        trials[size] = _peak() - before
        return trials[size] <= limit

    found = largest(fits, unit, max(most, unit))
    if found is None:
        raise UsageError(
            f"not even --batch-size {unit} fits into the memory; try --accumulate, --activation-checkpointing, "
            "--precision bf16-mixed, a smaller --image-size or --backbone"
        )
    return config.model_copy(update={"batch_size": found})


def largest(fits: Callable[[int], bool], unit: int, most: int) -> int | None:
    """The largest multiple of `unit` up to `most` that fits, or a little less; None if none does.

    Doubled until it fits no more, then between the last two.
    """
    size = unit
    if not fits(size):
        return None
    while size < most and fits(min(2 * size, most)):
        size = min(2 * size, most)
    above = min(2 * size, most)  # does not fit, or is size itself
    while above - size > max(unit, size // FINENESS):
        middle = (size + above) // 2 // unit * unit
        size, above = (middle, above) if fits(middle) else (size, middle)
    return size


def trial(config: CompleteConfig, dataset: DomainDataset, splits: Splits, fabric: Fabric) -> None:
    """Take some steps on images of noise, as one of the run's processes would."""
    device = fabric.device
    spare = torch.cuda.get_device_properties(device).total_memory * SPARE_OF_GPU if device.type == "cuda" else 0
    ballast = torch.empty(int(spare), dtype=torch.uint8, device=device)
    algorithm = build(config, dataset, splits).to(device).train()
    n, domains = source_batch(config), len(splits.train)
    images = torch.rand(n * domains, config.channels, config.image_size, config.image_size, device=device)
    labels = torch.arange(n * domains, device=device) % len(dataset.classes)
    batch = Batch(images, labels, torch.arange(domains, device=device).repeat_interleave(n), (n,) * domains)
    share = Alone(0, fabric.world_size, config.accumulate)
    averaged = [] if config.averaging == "none" else [t.clone() for t in algorithm.network.state_dict().values()]
    for algorithm.step in range(STEPS):
        with fabric.autocast(), sharing(share):
            algorithm.update(batch, joint_backward(share))
    del averaged, ballast  # only now


def free_memory() -> float:
    """Bytes that the host, and the container that this runs in, have left; infinite where they do not say."""
    free = _bytes("/proc/meminfo", "MemAvailable", math.inf)
    with suppress(OSError, ValueError):  # no container, or one without a limit
        most, used = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, most - used)
    return free


def _bytes(file: str, key: str, default: float) -> float:
    """A number of kB in one of Linux's files of `key: number kB`, as bytes."""
    with suppress(OSError):
        for line in Path(file).read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return default


def _peak() -> float:
    """The most memory that this process has had since it was last asked. Linux knows; elsewhere it is 0."""
    most = _bytes("/proc/self/status", "VmHWM", 0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the mark is put back to where the memory stands
    return most
