"""Runs on Ray: the cores and GPUs of this machine, or of a cluster whose nodes share their storage.

Plain tasks, not Tune: what Tune would add (trials' states, checkpoints, tables of results, retries) is in the run
folders already, and two truths would have to be kept in step. Ray places runs, and tells when a worker dies.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agfa.benchmark.estimate import Cost, measure
from agfa.benchmark.running import Outcome, attempt
from agfa.errors import UsageError
from agfa.training.config import CompleteConfig
from agfa.training.progress import Display

RUNS_PER_WORKER = 50  # then a fresh process takes its place: whatever leaked is gone
STORE = 100_000_000  # bytes of Ray's shared memory: runs exchange nothing but a few words


class OnRay:
    """Workers on a Ray cluster: so many runs at once as there is room for, and no more than `jobs`."""

    def __init__(self, ray: Any, jobs: int | None, cpus: float, gpus: float) -> None:
        self.ray, self.jobs, self.needs = ray, jobs, {"CPU": cpus, "GPU": gpus}
        self.device = "gpu" if gpus else "cpu"
        needs = {"num_cpus": cpus, "num_gpus": gpus, "max_retries": 0}
        self.train = ray.remote(**needs, max_calls=RUNS_PER_WORKER)(_train)
        self.time = ray.remote(**needs)(_measure)
        self.place = (str(Path.cwd()), {k: v for k, v in os.environ.items() if k.startswith("AGFA_")}, int(cpus) or 1)
        self.running: dict[Any, CompleteConfig] = {}

    def slots(self) -> int:
        """What fits on the nodes that are there now, each run on one of them."""
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        needs = [(name, need) for name, need in self.needs.items() if need]
        room = sum(min(int(node.get(name, 0) / need + 1e-6) for name, need in needs) for node in nodes)
        return min(room, self.jobs or room)

    def start(self, config: CompleteConfig) -> None:
        """Hand it to Ray."""
        self.running[self.train.remote(config, *self.place)] = config

    def wait(self, seconds: float) -> list[tuple[CompleteConfig, Outcome]]:
        """What Ray says has ended."""
        if not self.running:
            time.sleep(seconds)
            return []
        ended, _ = self.ray.wait(list(self.running), timeout=seconds)
        return [(self.running.pop(task), self._outcome(task)) for task in ended]

    def _outcome(self, task: Any) -> Outcome:
        try:
            outcome: Outcome = self.ray.get(task)
            return outcome
        except self.ray.exceptions.RayError as error:  # the worker died, or its node
            return Outcome("failed", f"its worker died ({type(error).__name__})")

    def measure(self, configs: Sequence[CompleteConfig]) -> Iterable[Cost | None]:
        """As many at once as runs would be."""
        for task in [self.time.remote(config, *self.place) for config in configs]:
            try:
                yield self.ray.get(task)
            except self.ray.exceptions.RayError:
                yield None


@contextmanager
def connected(address: str | None, jobs: int | None, cpus: float | None, gpus: float | None) -> Iterator[OnRay]:
    """Ray on this machine, or the cluster at that address. It stops when the block ends, and its runs with it."""
    try:
        import ray
    except ImportError as error:
        raise UsageError("several runs at once need Ray: pip install 'agfa[ray]'; without it, --jobs 1") from error
    cores = os.cpu_count() or 1
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")  # a run that asks for no GPU sees none
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is None:
        share = cpus or max(1, cores // (jobs or cores))
        ray.init(
            "local",
            num_cpus=max(cores, round((jobs or 1) * share)),
            object_store_memory=STORE,
            include_dashboard=False,
            **quiet,
        )
    else:
        share = cpus or 1
        try:
            _knock(address)
            ray.init(address, **quiet)
        except (OSError, RuntimeError, ValueError) as error:
            why = " ".join(str(error).split())
            raise UsageError(
                f"no Ray cluster at {address} ({why}); if it asks for a token: RAY_AUTH_MODE=token"
            ) from error
    try:
        each = gpus if gpus is not None else float(ray.cluster_resources().get("GPU", 0) >= 1)
        workers = OnRay(ray, jobs, share, each)
        if not workers.slots():
            raise UsageError(f"no room for a run of {share:g} cores and {each:g} GPUs; there are {_total(ray)}")
        yield workers
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Fail at once where nobody listens; Ray itself would try for long, and aloud."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def _total(ray: Any) -> str:
    there = ray.cluster_resources()
    return f"{there.get('CPU', 0):g} cores and {there.get('GPU', 0):g} GPUs"


def _settle(folder: str, settings: dict[str, str], threads: int) -> None:
    """Be where the driver is, with its AGFA_ settings: paths then mean the same."""
    import torch

    os.chdir(folder)
    os.environ.update(settings)
    torch.set_num_threads(threads)


def _train(config: CompleteConfig, *place: Any) -> Outcome:
    import ray

    _settle(*place)
    node = f"{ray.util.get_node_ip_address()}-{ray.get_runtime_context().get_node_id()[:8]}"
    return attempt(config, Display(quiet=True), node)


def _measure(config: CompleteConfig, *place: Any) -> Cost | None:
    _settle(*place)
    return measure(config)
