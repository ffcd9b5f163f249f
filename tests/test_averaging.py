"""SWAD against a plain transcription of the paper's appendix that keeps every iterate; SWA; memory and resuming."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from agfa.averaging import FIELDS, Mean, Swa, Swad

Interval = tuple[int, int | None] | None


class Iterate(nn.Module):
    """A model that says which step it is of: a one-hot vector, so that an average shows all its members."""

    def __init__(self, steps: int = 200) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.zeros(steps + 1, dtype=torch.float64), requires_grad=False)
        self.register_buffer("running_mean", torch.zeros(()))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.long))

    def at(self, step: int) -> Iterate:
        self.head.zero_()
        self.head[step] = 1
        self.running_mean.fill_(step)
        self.num_batches_tracked.fill_(step)
        return self


def run(policy: Swad | Swa, losses: list[float], every: int, extra: int = 0, model: Iterate | None = None):
    """Train with these losses at the steps every, 2·every, ..., and some steps after the last."""
    model = model or Iterate(len(losses) * every + extra)
    for step in range(1, len(losses) * every + extra + 1):
        policy.after_step(model.at(step))
        if step % every == 0 and step // every <= len(losses):
            policy.after_evaluation(model, step, losses[step // every - 1])
    return policy


def members(state: dict[str, Tensor] | None) -> tuple[int, int] | None:
    """First and last step of an average, which must have every step between with the same weight."""
    if state is None:
        return None
    steps = state["head"].nonzero().flatten().tolist()
    assert steps == list(range(steps[0], steps[-1] + 1))
    torch.testing.assert_close(state["head"][steps], torch.full((len(steps),), 1 / len(steps), dtype=torch.float64))
    return steps[0], steps[-1]


def paper(losses: list[float], every: int, n_s: int, n_e: int, r: float) -> Interval:
    """Algorithm 2's procedure and eqs. t_s, l̄, t_e with all iteration numbers multiples of V."""
    val = {k * every: loss for k, loss in enumerate(losses, start=1)}
    entered, t_s, l_bar = False, 0, 0.0
    for t in val:
        if not entered:
            if t - (n_s - 1) * every not in val:
                continue
            window = [val[t - k * every] for k in range(n_s)]
            if all(val[t - (n_s - 1) * every] <= loss for loss in window):
                t_s, l_bar, entered = t - (n_s - 1) * every, math.fsum(window) / n_s, True
        elif t - (n_e - 1) * every in val and r * l_bar < min(val[t - k * every] for k in range(n_e)):
            return t_s, t - n_e * every
    return (t_s, None) if entered else None


def draw_losses(rng: np.random.Generator) -> list[float]:
    """Validation losses of many kinds."""
    n = int(rng.integers(1, 31))
    low = rng.integers(0, n + 1)
    falling = np.abs(np.arange(n) - low) / n + 0.3
    kinds = {
        "overfitting": falling * np.exp(0.2 * rng.standard_normal(n)),
        "smooth": falling,
        "steps": np.round(16 * falling * np.exp(0.3 * rng.standard_normal(n))) / 16,
        "zeros": np.maximum(0, np.round(4 * (falling - 0.3 + 0.2 * rng.standard_normal(n))) / 4),
        "constant": np.full(n, rng.random()),
        "noise": rng.random(n),
        "falling": np.sort(rng.random(n))[::-1],
        "spikes": np.where(rng.random(n) < 0.2, 50.0, falling),
    }
    return [float(v) for v in kinds[str(rng.choice(list(kinds)))]]


def test_swad_is_the_papers_procedure_on_a_thousand_random_runs():
    rng = np.random.default_rng(0)
    seen = {"no start": 0, "no end": 0, "end": 0, "t_e = t_s": 0}
    for _ in range(1000):
        losses, extra = draw_losses(rng), int(rng.integers(0, 3))
        n_s, n_e = int(rng.integers(1, 6)), int(rng.integers(1, 8))
        r, every = float(rng.choice([1.0, 1.05, 1.3, 2])), int(rng.choice([1, 3, 10]))
        extra = min(extra, every - 1)
        policy = run(Swad(n_s, n_e, r), losses, every, extra)
        wanted = paper(losses, every, n_s, n_e, r)
        case = f"{losses}, V={every}, N_s={n_s}, N_e={n_e}, r={r}"
        assert policy.interval == wanted, case
        assert policy.finished == (wanted is not None and wanted[1] is not None), case
        last = len(losses) * every + extra
        assert members(policy.average()) == (wanted and (wanted[0], wanted[1] or last)), case
        kind = "no start" if wanted is None else "no end" if wanted[1] is None else "end"
        seen["t_e = t_s" if kind == "end" and wanted[0] == wanted[1] else kind] += 1
    assert all(count > 30 for count in seen.values()), seen  # every way out was taken


@pytest.mark.parametrize(
    ("losses", "interval"),
    [
        ([5, 4, 3], None),  # still improving
        ([5, 4], None),  # too short
        ([], None),
        ([3, 2, 2.1, 2.2, 2.3, 2.3], (20, None)),
        ([2, 2, 2, 2, 2, 2, 2, 2], (10, None)),  # equal losses: the first is as good as any
        ([0, 0, 0, 0, 0, 0, 0], (10, None)),  # 0 is not above r·0
        ([0, 0, 0, 1, 1], (10, 30)),
        ([3, 2, 2, 2, 9, 9, 9], (20, 40)),
        ([1, 1, 1, 9, 9], (10, 30)),
        ([1, 5, 5, 9, 9], (10, 20)),  # l̄ = 11/3: the third loss, part of l̄, is above 1.3·l̄ itself
        ([1, 5, 5, 4.7, 9, 9], (10, 40)),  # 4.7 < 1.3·11/3
        ([1, 1, 1, 1.3, 1.3, 1.3], (10, None)),  # above is strictly above
        ([1, 1, 1, 9, 1, 9, 9], (10, 50)),  # one good loss starts the count anew
        ([2, 1, 2, 2, 0.1, 0.1], (20, None)),  # later and better losses do not move the start
    ],
)
def test_swad_by_hand(losses, interval):
    policy = run(Swad(patience=3, tolerance=2, ratio=1.3), losses, every=10)
    assert policy.interval == interval
    wanted = interval and (interval[0], interval[1] or 10 * len(losses))
    assert members(policy.average()) == wanted


@pytest.mark.parametrize(("n_s", "n_e"), [(1, 1), (1, 7), (3, 4)])
def test_average_that_ends_at_the_first_chance_is_one_model(n_s, n_e):
    """A start whose later losses are all far above it; with N_e ≥ N_s + 1 the average can shrink to t_s."""
    losses = [1.0] * n_s + [9.0] * 8
    start, end = run(Swad(n_s, n_e, 1.3), losses, every=3).interval
    assert start == 3
    assert end == max(3, 3 * n_s)


def test_end_may_be_the_start_itself():
    policy = run(Swad(patience=2, tolerance=4, ratio=1.0), [1, 1, 9, 9, 9, 9], every=5)
    assert policy.interval == (5, 10)
    policy = run(Swad(patience=2, tolerance=4, ratio=1.0), [1, 1.5, 1.5, 1.5, 9, 9], every=5)
    assert policy.interval == (5, 5)
    assert members(policy.average()) == (5, 5)


@pytest.mark.parametrize("loss", [0.1, 0.7, 1 / 3, 1.9])
@pytest.mark.parametrize("n_s", range(1, 8))
def test_equal_losses_never_exceed_their_own_mean(loss, n_s):
    policy = run(Swad(n_s, tolerance=1, ratio=1.0), [loss] * 20, every=1)
    assert policy.interval == (1, None)


def test_what_comes_after_the_end_changes_nothing():
    losses = [3, 2, 2, 2, 9, 9]
    short = run(Swad(3, 2, 1.3), losses, every=4)
    long = run(Swad(3, 2, 1.3), [*losses, 0.1, 0.1, 0.1, 0.1, 0.1], every=4)
    assert short.interval == long.interval == (8, 16)
    assert members(long.average()) == (8, 16)


def test_steps_after_the_last_evaluation_belong_to_an_average_without_end():
    assert members(run(Swad(3, 2, 1.3), [1, 1, 1, 1], every=10, extra=7).average()) == (10, 47)


@pytest.mark.parametrize(
    ("losses", "interval"),
    [
        ([math.nan] * 6, None),  # a model that is broken is no start
        ([math.inf] * 6, None),
        ([math.nan, math.nan, math.nan, 1, 1, 1], (4, None)),
        ([1, math.nan, 1, 1, 1, 1], (3, None)),  # l ≤ NaN is false
        ([1, 1, 1, math.nan, math.nan], (1, 3)),  # surely overfit
        ([1, 1, 1, math.nan, 1, math.nan, 9], (1, 5)),
    ],
)
def test_nan_loss_starts_nothing_and_counts_as_too_high(losses, interval):
    policy = run(Swad(3, 2, 1.3), losses, every=1)
    assert policy.interval == interval
    assert members(policy.average()) == (interval and (interval[0], interval[1] or len(losses)))


def test_average_may_be_asked_for_at_any_time_and_changes_nothing():
    losses, model = [3, 2, 2, 2, 2, 2.1, 9, 9, 2], Iterate(50)
    policy = Swad(3, 4, 1.3)
    for step in range(1, 46):
        policy.after_step(model.at(step))
        if step % 5 == 0:
            policy.after_evaluation(model, step, losses[step // 5 - 1])
        if (average := members(policy.average())) is not None:
            assert average == (10, step)
    assert members(policy.average()) == (10, 45)


# What is averaged ---------------------------------------------------------------------------------------------------


def test_float_buffers_are_averaged_and_counters_are_those_of_the_latest():
    average = run(Swad(3, 2, 1.3), [3, 2, 2, 2, 9, 9], every=10).average()
    assert average["running_mean"].item() == pytest.approx(np.mean(range(20, 41)))
    assert average["num_batches_tracked"].item() == 40
    assert average["num_batches_tracked"].dtype == torch.long


def test_every_parameter_of_every_head_is_averaged():
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": nn.BatchNorm1d(3), "head": nn.Linear(3, 2), "other": nn.Linear(3, 5)}).double()
    policy, kept = Swad(1, 7, 1.3), []
    for step in range(1, 13):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        model["body"](torch.randn(4, 3, dtype=torch.float64))
        kept.append({key: value.clone() for key, value in model.state_dict().items()})
        policy.after_step(model)
        if step % 3 == 0:
            policy.after_evaluation(model, step, 1.0)
    average = policy.average()
    assert average.keys() == model.state_dict().keys()
    for key, value in average.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, torch.stack([state[key] for state in kept[2:]]).mean(0))
        else:
            assert value == kept[-1][key]
    model.load_state_dict(average)


def test_average_is_not_the_models_own_memory():
    model = Iterate(10)
    for policy in (Swad(1, 1, 1.3), Swa(1)):
        run(policy, [1.0], every=1, model=model)
        before = policy.average()["head"].clone()
        model.at(9)
        assert torch.equal(policy.average()["head"], before)
        policy.average()["head"].fill_(7) if isinstance(policy, Swad) else None
        assert torch.equal(policy.average()["head"], before)


def test_mean_of_means_is_weighted_by_their_counts():
    total, first, second = Mean(), Mean(), Mean()
    for i in range(3):
        first.add({"w": torch.tensor([float(i)])})
    for i in range(10, 17):
        second.add({"w": torch.tensor([float(i)])})
    total.add(first.state, first.count)
    total.add(second.state, second.count)
    assert total.count == 10
    torch.testing.assert_close(total.state["w"], torch.tensor([np.mean([0, 1, 2, *range(10, 17)])]).float())


# Memory and resuming ------------------------------------------------------------------------------------------------


def held(policy: Swad) -> int:
    """Model copies: different memory, each as large as the model."""
    means = (policy.closed, policy.open, *(mean for _, mean in policy.segments))
    return len({mean.state["head"].data_ptr() for mean in means if mean.state})


@pytest.mark.parametrize(("n_s", "n_e"), [(1, 1), (3, 6), (5, 2), (2, 7)])
def test_never_more_than_n_e_plus_two_models_are_held(monkeypatch, n_s, n_e):
    policy, model, most, moved = Swad(n_s, n_e, 2.0), Iterate(200), 0, 0
    rng = np.random.default_rng(n_e)
    original, move = Mean.add, Mean.to_host

    def add(self, state, count=1):
        nonlocal most
        original(self, state, count)
        most = max(most, held(policy) + (self.state["head"].data_ptr() not in pointers()))

    def to_host(self):
        nonlocal moved, most
        moved += 1
        most = max(most, held(policy) + 1)  # on another device it would be a copy
        return move(self)

    def pointers():
        means = (policy.closed, policy.open, *(mean for _, mean in policy.segments))
        return {mean.state["head"].data_ptr() for mean in means if mean.state}

    monkeypatch.setattr(Mean, "add", add)
    monkeypatch.setattr(Mean, "to_host", to_host)
    evaluations = 0
    for step in range(1, 201):
        policy.after_step(model.at(step))
        most = max(most, held(policy))
        if step % 5 == 0:
            evaluations += 1
            policy.after_evaluation(model, step, float(rng.random()) + 1)
            assert policy.open.count == 0  # what is kept from here on was moved to the host
            assert len(policy.segments) <= n_e
            most = max(most, held(policy))
    assert most <= n_e + 2
    assert most >= n_e  # and the count counts
    assert moved >= evaluations / 2


def test_all_but_the_open_segment_go_to_the_host(monkeypatch):
    """`to_host` marks what it moves: the closed ones are made of marked means and of `host_state` alone."""
    marked: set[int] = set()
    move = Mean.to_host

    def to_host(self):
        moved = move(self)
        marked.add(id(moved))
        kept.append(moved)  # so that no id is used twice
        return moved

    kept: list[Mean] = []
    monkeypatch.setattr(Mean, "to_host", to_host)
    policy, model = Swad(3, 4, 1.3), Iterate(100)
    for step in range(1, 101):
        policy.after_step(model.at(step))
        if step % 5 == 0:
            policy.after_evaluation(model, step, 1.0)
        assert all(id(mean) in marked for _, mean in policy.segments)
        assert id(policy.open) not in marked
    assert len(policy.segments) == 3


def saved_and_loaded(state: dict[str, object]) -> dict[str, object]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same_bits(first: object, second: object) -> bool:
    if isinstance(first, Tensor):
        return torch.equal(first, second) and first.dtype == second.dtype
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same_bits(v, second[k]) for k, v in first.items())
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same_bits, first, second))
    return first == second


class Random(nn.Linear):
    def at(self, step: int) -> Random:
        with torch.no_grad():
            self.weight.normal_(generator=torch.Generator().manual_seed(step))
        return self


@pytest.mark.parametrize("seed", range(25))
def test_resuming_at_any_moment_gives_the_same_bits(seed):
    rng = np.random.default_rng(seed)
    losses = (np.abs(np.arange(20) - 8) / 20 + 0.3) * np.exp(0.3 * rng.standard_normal(20))
    stop = int(rng.integers(0, 101))
    settings = int(rng.integers(1, 5)), int(rng.integers(1, 7)), 1.3

    def go(policy, first, last):
        for step in range(first, last + 1):
            policy.after_step(Random(3, 2).at(step))
            if step % 5 == 0:
                policy.after_evaluation(Random(3, 2).at(step), step, float(losses[step // 5 - 1]))
        return policy

    # the bias differs from model to model, unless it is seeded too
    torch.manual_seed(0)
    whole = go(Swad(*settings), 1, 100)
    torch.manual_seed(0)
    part = go(Swad(*settings), 1, stop)
    resumed = Swad(*settings)
    resumed.load_state_dict(saved_and_loaded(part.state_dict()))
    for key in FIELDS:
        assert getattr(resumed, key) == getattr(part, key)
    go(resumed, stop + 1, 100)
    assert same_bits(whole.state_dict(), resumed.state_dict())
    assert same_bits(whole.average(), resumed.average())


def test_state_is_complete_before_the_first_step():
    fresh = Swad()
    fresh.load_state_dict(saved_and_loaded(Swad(3, 6, 1.3).state_dict()))
    assert fresh.interval is None
    assert fresh.average() is None


# SWA ----------------------------------------------------------------------------------------------------------------


def test_swa_is_the_mean_of_the_models_at_the_evaluations_from_its_start_on():
    policy = run(Swa(start=20), [1.0] * 6, every=8, extra=3)  # evaluations at 8, 16, 24, 32, 40, 48
    average = policy.average()
    assert average["head"].nonzero().flatten().tolist() == [24, 32, 40, 48]
    torch.testing.assert_close(average["head"][24], torch.tensor(0.25, dtype=torch.float64))
    assert average["running_mean"].item() == pytest.approx(36)
    assert average["num_batches_tracked"].item() == 48


def test_swa_includes_an_evaluation_at_its_very_start_and_is_none_before():
    assert run(Swa(start=24), [1.0] * 2, every=8).average() is None
    assert members(run(Swa(start=24), [1.0] * 3, every=8).average()) == (24, 24)


def test_swa_resumes_with_the_same_bits():
    whole = run(Swa(10), [1.0] * 9, every=5)
    resumed, model = Swa(10), Iterate(45)
    resumed.load_state_dict(saved_and_loaded(run(Swa(10), [1.0] * 4, every=5, model=model).state_dict()))
    for step in range(25, 46, 5):
        resumed.after_evaluation(model.at(step), step, 1.0)
    assert same_bits(whole.average(), resumed.average())
