"""`agfa bench` times what it says: right clocks, fair yardsticks, bars that can be missed. Never how fast it is."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from agfa.algorithms.base import Hparams, Problem, plain_backward
from agfa.algorithms.erm import ERM
from agfa.benchmark import bench, pipeline, reference
from agfa.benchmark.bench import BARS, Bench, Plan
from agfa.benchmark.timing import Clock, Figure, held_bytes, interleave, product, step_bytes
from agfa.data.batches import Batch
from agfa.nn.backbones import build_backbone
from support import Agfa

CPU = torch.device("cpu")
SMALL = Plan("test_resnet", image_size=32, images=12, repeats=2, matrix=64)


@pytest.fixture(scope="module")
def found() -> Bench:
    return bench.bench(SMALL)


# --- clocks and figures


def test_a_figure_is_the_median_and_an_interval_around_it() -> None:
    values = [float(v) for v in range(1, 101)]
    median, low, high = Figure.of(values)
    assert median == 50.5
    assert 30 < low < median < high < 70
    assert Figure.of([2.0]) == (2.0, 2.0, 2.0)
    assert Figure.of(values) == Figure.of(values)


def test_steps_take_turns_and_the_first_repetitions_do_not_count() -> None:
    order: list[str] = []

    def step(name: str, seconds: float, marks: int) -> Callable[[Clock], None]:
        def run(clock: Clock) -> None:
            order.append(name)
            for _ in range(marks):
                time.sleep(seconds)
                clock.mark()
            time.sleep(seconds)

        return run

    seconds = interleave({"a": step("a", 0.002, 1), "b": step("b", 0.004, 0)}, CPU, repeats=3, warmup=1)
    assert order == ["a", "b"] * 4
    assert [len(parts) for parts in seconds["a"]] == [2] * 3
    assert all(part >= 0.002 for parts in seconds["a"] for part in parts)
    assert all(parts[0] >= 0.004 for parts in seconds["b"])


def test_the_product_is_a_product_of_that_many_operations() -> None:
    with FlopCounterMode(display=False) as counter:
        product(torch.float32, 32, CPU, times=3)(Clock(CPU))
    assert counter.get_total_flops() == 3 * 2 * 32**3


def test_memory_of_a_step_is_the_most_at_once() -> None:
    def step() -> None:
        for _ in range(3):  # one after the other
            one = torch.empty(2**20, dtype=torch.uint8)
            other = one.clone()
            del one, other

    assert 2 * 2**20 <= step_bytes(step, CPU) < 2.2 * 2**20
    layer = nn.Linear(10, 10)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert held_bytes([layer], [optimizer]) == 4 * 3 * 110 + 4 * 2  # parameters, two moments; two counts of steps


# --- the yardsticks


def test_the_reference_is_the_same_step_of_erm() -> None:
    """As ours in double precision: what is compared is time, and nothing else."""
    torch.manual_seed(0)
    step, (features, head) = reference.erm("resnet18", 32, 3, CPU)
    backbone = build_backbone("resnet18", 3, 32, weights="none", freeze_batchnorm=True)
    backbone.body.load_state_dict(features.body.state_dict())
    ours = ERM(backbone, Problem(3, 1, 40, (3, 32, 32)), Hparams(lr=reference.RATE))
    ours.network.head.load_state_dict(head.state_dict())
    features.double()
    head.double()
    ours.double().train()
    for _ in range(2):
        x, y = torch.rand(6, 3, 32, 32, dtype=torch.float64), torch.arange(6) % 3
        step(x, y)
        ours.update(Batch(x, y, torch.zeros(6, dtype=torch.long), (6,)), plain_backward)
    for key, value in features.body.state_dict().items():
        torch.testing.assert_close(backbone.body.state_dict()[key], value, rtol=0, atol=1e-7, check_dtype=False)
    torch.testing.assert_close(ours.network.head.weight, head.weight, rtol=0, atol=1e-7)


def test_the_reference_of_agfa_takes_both_steps_of_algorithm_1() -> None:
    torch.manual_seed(0)
    step, (features, generator) = reference.agfa("resnet18", 32, 3, CPU, samples=5)
    before = [[p.detach().clone() for p in module.parameters()] for module in (features, generator)]
    x, y = torch.rand(4, 3, 32, 32), torch.arange(4) % 3
    with FlopCounterMode(display=False) as counter:
        step(x, y)
    for module, old in zip((features, generator), before, strict=True):
        assert all(not torch.equal(p, q) for p, q in zip(module.parameters(), old, strict=True))
    plain, _ = reference.erm("resnet18", 32, 3, CPU)
    with FlopCounterMode(display=False) as once:
        plain(x, y)
    assert counter.get_total_flops() / once.get_total_flops() == pytest.approx(3, rel=0.05)  # source, T, T again


# --- the whole


def test_every_bar_has_its_figure(found: Bench) -> None:
    assert {bar.name for bar in found.bars()} == set(BARS) == set(found.ratios)
    assert all(low <= median <= high for median, low, high in found.ratios.values())
    assert set(found.stages) == {"ERM", "AGFA fused", "AGFA alternating", "input"}
    assert "second backward" in found.stages["AGFA alternating"]
    assert "second backward" not in found.stages["AGFA fused"]


def test_a_bar_can_be_missed_on_its_own_side(found: Bench) -> None:
    for name, (large, bar) in BARS.items():
        for value in (0.9 * bar, bar, 1.1 * bar):
            ratios = {**found.ratios, name: Figure(value, value, value)}
            changed = Bench(found.plan, {}, {}, ratios, {}, found.peak, found.operations)
            (held,) = [b for b in changed.bars() if b.name == name]
            assert held.met == (value >= bar if large else value <= bar)


def test_operations_are_those_of_the_convolutions() -> None:
    """Of ResNet-50 at 224 px: 4.09 G multiply-adds an image, as published; three passes' worth, less one layer's."""
    plan = Plan(images=1)
    assert bench._operations(plan) == pytest.approx(2 * 3 * 4.09e9, rel=0.03)


def test_the_inputs_share_grows_with_what_the_input_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(image_size=16, images=6, repeats=3)
    step = lambda batch: time.sleep(0.01)  # noqa: E731  # a step that takes as long
    fixed = Batch(torch.empty(0), torch.empty(0), torch.empty(0), ())
    quick = pipeline.input_share(plan, step, fixed).median
    batches = pipeline.training_batches

    def slow(*args, **kwargs):
        for batch in batches(*args, **kwargs):
            time.sleep(0.01)
            yield batch

    monkeypatch.setattr(pipeline, "training_batches", slow)
    assert pipeline.input_share(plan, step, fixed).median == pytest.approx(0.5, abs=0.15)
    assert quick < 0.3


def test_the_command_prints_every_bar_and_writes_json(
    agfa: Agfa, found: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "bench", lambda plan, say: found)
    ended = agfa("bench", "--bars", "--json", "bench.json")
    assert ended.status == 0, ended.err
    assert all(name in " ".join(ended.out.split()) for name in ("AGFA fused : ERM", "SWAD on : off"))
    assert ended.out.count("pass") + ended.out.count("FAIL") == len(BARS)
    record = json.loads(Path("bench.json").read_text())
    assert {bar["name"] for bar in record["bars"]} == set(BARS)
    assert record["plan"]["backbone"] == "test_resnet"
    assert record["machine"]["cores"] > 0
    assert statistics.median(record["seconds"]["ERM"]) > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [(("--images", "7"), "images is 7"), (("--images", "4"), "images is 4"), (("--precision", "16"), "precision is")],
)
def test_what_cannot_be_timed_is_refused(flags: tuple[str, ...], said: str, agfa: Agfa) -> None:
    ended = agfa("bench", *flags)
    assert ended.status == 2
    assert said in ended.error
