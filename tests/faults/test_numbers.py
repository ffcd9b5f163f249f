"""Losses and gradients that are no numbers, adversaries and posteriors that come to nothing: seen and recorded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import agfa as package
from agfa import algorithms
from agfa.algorithms.base import Algorithm, Problem, plain_backward
from agfa.algorithms.erm import ERM
from agfa.data.batches import Batch
from agfa.errors import AgfaError, UsageError
from agfa.nn.backbones import build_backbone
from agfa.training import finite, processes, replay
from agfa.training.finite import Watch
from support import Agfa, records, same, weights

ERM_RUN = {
    "target": "sky",
    "algorithm": "erm",
    "averaging": "none",
    "steps": 12,
    "evaluate_every": 4,
    "augment": True,
}


def bad_loss(x: Tensor, network: torch.nn.Module) -> Tensor:
    """Images that are not numbers: neither is the loss."""
    return x * math.nan


class NoGradient(torch.autograd.Function):
    """Its value is 0, its gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * math.inf


def bad_gradient(x: Tensor, network: torch.nn.Module) -> Tensor:
    """The loss is a number; the gradient of the first weights is not."""
    first = next(network.parameters())
    return x + NoGradient.apply(first.sum())


def spoil(patch: pytest.MonkeyPatch, how: Any, *steps: int) -> None:
    """Spoil ERM's updates at these steps, counted from 1."""
    update = ERM.update

    def spoilt(self: ERM, batch: Batch, backward: Any) -> dict[str, Tensor]:
        if self.step + 1 in steps:
            batch = batch._replace(images=how(batch.images, self.network))
        return update(self, batch, backward)

    patch.setattr(ERM, "update", spoilt)


@pytest.mark.parametrize("how", [bad_loss, bad_gradient])
def test_a_run_stops_at_the_step_and_keeps_it(
    how: Any, tiny: Path, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**quick, **ERM_RUN, "data": str(tiny), "checkpoint_seconds": 0}
    package.train(**settings, out="whole")
    package.train(**{**settings, "steps": 5}, selection="last", out="five")
    with monkeypatch.context() as patch:
        spoil(patch, how, 6, 7)
        with pytest.raises(
            AgfaError, match=r"loss or gradient of step 6 is not finite; the step is kept in run/nonf"
        ):
            package.train(**settings, out="run")
        taken = replay.replay("run")
    assert taken.step == 6
    assert "network.backbone.body.0.weight" in taken.bad
    assert math.isfinite(taken.losses["nll"]) == (how is bad_gradient)
    five = safetensors.torch.load_file("five/model.safetensors")
    kept = taken.algorithm.network.state_dict()
    assert all(torch.equal(kept[key], five[key]) for key in five)  # as they were before the step, to the bit
    assert records(Path("run"), "train")[-1]["step"] == 4
    assert not replay.replay("run").bad  # when the reason is gone, so are they
    package.train(**settings, out="run")
    same(Path("run"), Path("whole"))


def test_what_is_replayed_is_the_batch(tiny: Path, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**quick, **ERM_RUN, "data": str(tiny)}
    seen: list[Tensor] = []
    update = ERM.update

    def watched(self: ERM, batch: Batch, backward: Any) -> dict[str, Tensor]:
        seen.append(batch.images)
        return update(self, batch, backward)

    with monkeypatch.context() as patch:
        patch.setattr(ERM, "update", watched)
        spoil(patch, bad_loss, 6)
        with pytest.raises(AgfaError, match="step 6 is not finite"):
            package.train(**settings, out="run")
    taken = replay.replay("run")
    package.train(**settings, out="whole")
    with monkeypatch.context() as patch:
        patch.setattr(ERM, "update", watched)
        seen.clear()
        package.train(**settings, out="again")
    assert torch.equal(taken.batch.images, seen[5])


def test_a_run_that_ended_well_has_nothing_to_replay(tiny: Path, quick: dict[str, Any]) -> None:
    package.train(**{**quick, **ERM_RUN}, data=str(tiny), out="run")
    with pytest.raises(UsageError, match="did not stop at a loss"):
        replay.replay("run")


@pytest.mark.parametrize("how", [bad_loss, bad_gradient])
def test_bad_steps_are_left_out(how: Any, train: Agfa, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they had not been: parameters, moments and the mean losses; and the record says which."""
    update = ERM.update

    def idle(self: ERM, batch: Batch, backward: Any) -> dict[str, Tensor]:
        if self.step + 1 in (6, 7):
            return {"nll": torch.zeros(())}
        return update(self, batch, backward)

    with monkeypatch.context() as patch:
        spoil(patch, how, 6, 7)
        ended = train(**ERM_RUN, out="run", skip_nonfinite=True)
    assert ended.status == 0
    said = "warning: skipped steps, step 8: a loss or gradient was not finite: 6, 7"
    assert said in ended.err.splitlines()
    warning = {"kind": "warning", "step": 8, "warning": "skipped steps"}
    assert records(Path("run"), "warning") == [{**warning, "text": "a loss or gradient was not finite: 6, 7"}]
    monkeypatch.setattr(ERM, "update", idle)
    assert train(**ERM_RUN, out="idle").status == 0
    assert weights(Path("run")) == weights(Path("idle"))
    losses, idle_losses = ([line["losses"]["nll"] for line in records(Path(r), "train")] for r in ("run", "idle"))
    assert losses == [idle_losses[0], pytest.approx(2 * idle_losses[1]), idle_losses[2]]  # two of four counted


def test_when_all_steps_are_bad_it_stops_all_the_same(train: Agfa, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, bad_loss, *range(5, 13))
    ended = train(**ERM_RUN, out="run", skip_nonfinite=True)
    assert ended.status == 1
    assert "loss or gradient of step 5 is not finite" in ended.err.splitlines()[-1]


def test_a_run_that_stopped_may_go_on_without_the_step(train: Agfa, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, bad_loss, 6)
    assert train(**ERM_RUN, out="run", checkpoint_seconds=0).status == 1
    ended = train(**ERM_RUN, out="run", checkpoint_seconds=0, skip_nonfinite=True)
    assert ended.status == 0
    assert "resuming run after step 4" in ended.err
    assert train(**ERM_RUN, out="whole", skip_nonfinite=True).status == 0
    same(Path("run"), Path("whole"))


def test_watching_changes_no_bit(tiny: Path, quick: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**quick, "data": str(tiny), "target": "sky", "augment": True}
    package.train(**settings, out="watched")
    monkeypatch.setattr(Watch, "begin", lambda self: None)
    monkeypatch.setattr(Watch, "look", lambda self, loss, parameters: None)
    monkeypatch.setattr(Watch, "end", lambda self, step, losses: losses)
    package.train(**settings, out="unwatched")
    same(Path("watched"), Path("unwatched"))


# --- every method


def made(name: str, **options: Any) -> tuple[Algorithm, Batch]:
    """A method on a small backbone with batch norm, and a minibatch for it."""
    torch.manual_seed(0)
    recipe = algorithms.get(name)
    backbone = build_backbone("resnet10t", 3, 32, "none", **options)
    problem = Problem(n_classes=3, n_domains=2, n_images=40, image_shape=(3, 32, 32), steps=10)
    images = torch.rand(8, 3, 32, 32)
    batch = Batch(images, torch.arange(8) % 3, torch.arange(2).repeat_interleave(4), (4, 4))
    return recipe.method(backbone, problem, recipe.hparams({})).train(), batch


def take(algorithm: Algorithm, batch: Batch, watch: Watch, step: int) -> None:
    torch.manual_seed(step)
    algorithm.step = step
    watch.begin()
    losses = algorithm.update(batch, processes.joint_backward(processes.Share(), watch.look))
    watch.end(step + 1, losses)


def everything(algorithm: Algorithm) -> dict[str, Tensor]:
    found = {key: value.clone() for key, value in algorithm.state_dict().items()}
    for name, optimizer in algorithm.optimizers.items():
        for number, state in optimizer.state_dict()["state"].items():
            found |= {f"{name} {number} {key}": value.clone() for key, value in state.items()}
    return found


METHODS = [name for name in algorithms.recipes() if algorithms.get(name).method.name == name]
QUICKLY = (
    "erm",
    "agfa",
    "groupdro",
    "mldg",
    "dson",
)  # one pass, two players, another optimiser, inner steps, memories
FOLLOWING = ("teacher.", "momentum_encoder.")  # go on towards a network that has stayed where it was


@pytest.mark.parametrize("name", QUICKLY)
def test_a_bad_step_changes_nothing(name: str) -> None:
    """Parameters, moments, statistics of batch norm that is not frozen, memories; the next step is taken again."""
    bad_step_changes_nothing(name)


@pytest.mark.slow  # half a minute
@pytest.mark.parametrize("name", sorted(set(METHODS) - set(QUICKLY)))
def test_a_bad_step_of_any_method_changes_nothing(name: str) -> None:
    bad_step_changes_nothing(name)


def bad_step_changes_nothing(name: str) -> None:
    algorithm, batch = made(name)
    watch = Watch(algorithm, 10, torch.device("cpu"), skipped=True)
    take(algorithm, batch, watch, 0)
    before = everything(algorithm)
    take(algorithm, batch._replace(images=batch.images * math.nan), watch, 1)
    after = everything(algorithm)
    assert before.keys() <= after.keys()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert [key for key in changed if not key.startswith(FOLLOWING)] == []
    assert all(value.isfinite().all() for value in after.values())
    take(algorithm, batch, watch, 2)
    assert any(not torch.equal(before[key], value) for key, value in everything(algorithm).items() if key in before)
    assert watch.found(3) == [2]
    assert watch.found(3) == []


class NoReading(TorchDispatchMode):
    """Whoever reads a number from the device is found out."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


def test_no_step_waits_for_the_device() -> None:
    algorithm, batch = made("agfa")
    watch = Watch(algorithm, 10, torch.device("cpu"), skipped=False)
    take(algorithm, batch, watch, 0)  # the optimisers are made ready
    watch.begin()
    losses = algorithm.update(batch, plain_backward)
    with NoReading():
        watch.begin()
        watch.look(losses["nll"], [p for p in algorithm.parameters() if p.grad is not None])
        watch.end(2, losses)
    with pytest.raises(AssertionError), NoReading():
        watch.found(2)


def test_gradients_of_all_at_once_are_judged_alike() -> None:
    """As on a GPU: the largest absolute values, by one call."""
    for values, finite_ in (([1.0, -2.0], True), ([1.0, math.nan], False), ([-math.inf, 1.0], False)):
        gradients = [torch.ones(3), torch.tensor(values)]
        sums = torch.stack(finite._sizes(gradients)).isfinite().all()
        largest = torch.stack(torch._foreach_norm(gradients, torch.inf)).isfinite().all()
        assert bool(sums) == bool(largest) == finite_


# --- adversaries and posteriors


SHORT = {"target": "sky", "steps": 12, "evaluate_every": 3, "out": "run"}
AILMENTS: dict[str, dict[str, Any]] = {
    "collapsed posterior": {"hparams": {"lr": 1e-3, "initial_sd": 10, "variance_lr": 10}},
    "exploding adversary": {"hparams": {"lr": 1e-3, "mean_lr": 100}},
    "saturated generator": {"algorithm": "agfa-pixel", "hparams": {"lr": 1e-3, "generator_lr": 100}},
    "dead generator": {"hparams": {"lr": 1e-3, "alpha": 0}},
}


@pytest.mark.parametrize("ailment", AILMENTS)
def test_what_ails_a_run_is_named(
    ailment: str, tiny: Path, quick: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    package.train(**{**quick, **SHORT, **AILMENTS[ailment]}, data=str(tiny), quiet=False)
    found = [line for line in records(Path("run"), "warning") if line["warning"] == ailment]
    said = f"warning: {ailment}, step {found[0]['step']}: {found[0]['text']}"
    assert said in capfd.readouterr().err.splitlines()


def test_a_generator_that_makes_the_same_of_all_noise() -> None:
    algorithm, batch = made("agfa")
    take(algorithm, batch, Watch(algorithm, 10, torch.device("cpu"), skipped=False), 0)
    losses = {"median_v": 1e-4, "discrepancy": 1.0}
    assert algorithm.warnings(losses) == {}
    with torch.no_grad():
        algorithm.generator.layers.weight.zero_()
        algorithm.generator.layers.bias.fill_(0.5)
    assert algorithm.warnings(losses) == {"dead generator": "it makes the same of all noise"}


@pytest.mark.parametrize("algorithm", ["agfa", "agfa-pixel", "agfa-frozen", "agfa-bayes"])
def test_a_healthy_run_has_no_warnings(algorithm: str, tiny: Path, quick: dict[str, Any]) -> None:
    package.train(**{**quick, **SHORT, "hparams": {"lr": 1e-4}}, algorithm=algorithm, data=str(tiny))
    assert records(Path("run"), "warning") == []


def test_a_warning_is_said_once_and_recorded_each_time(train: Agfa) -> None:
    ended = train(**{**SHORT, **AILMENTS["dead generator"]})
    assert ended.err.count("warning: dead generator") == 1
    assert [line["step"] for line in records(Path("run"), "warning")] == [3, 6, 9, 12]
    assert json.loads(Path("run/model.json").read_text())["step"] == 12
