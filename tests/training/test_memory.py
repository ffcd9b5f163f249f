"""The largest batch that fits: found, written down, and the same when the run is resumed."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from agfa.algorithms.base import Algorithm
from agfa.algorithms.erm import ERM
from agfa.data.batches import Batch
from agfa.training import memory
from agfa.training.memory import FINENESS, free_memory, largest
from support import Agfa, records


@given(st.integers(0, 3000), st.integers(1, 12), st.integers(1, 200))
def test_largest_is_an_eighth_from_the_largest_at_most(room: int, unit: int, units: int) -> None:
    most, tried = unit * units, []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= room

    found = largest(fits, unit, most)
    if room < unit:
        assert found is None
        return
    assert found is not None
    assert found % unit == 0
    assert found <= min(room, most)
    assert min(room, most) < found + max(unit, found // FINENESS) + unit
    assert len(tried) == len(set(tried)) <= 2 + most.bit_length() + FINENESS
    assert all(size % unit == 0 and size <= most for size in tried)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine on which no more than 14 images of both domains fit; what was tried."""
    tried: list[int] = []
    update = ERM.update

    def limited(self: Algorithm, batch: Batch, backward: Any) -> Any:
        tried.append(len(batch.images))
        if len(batch.images) > 14:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return update(self, batch, backward)

    monkeypatch.setattr(ERM, "update", limited)
    return tried


def test_auto_backs_off_and_resumes_with_what_it_found(train: Agfa, small: list[int]) -> None:
    settings: dict[str, Any] = {"algorithm": "erm", "target": "sky", "out": "run", "batch_size": "auto"}
    ended = train(**settings, checkpoint_seconds=0)
    assert ended.status == 0, ended.err
    assert "batch size 7: as many images as fit" in ended.err
    assert list(dict.fromkeys(small)) == [2, 4, 8, 16, 12, 14]
    assert yaml.safe_load(Path("run/config.yaml").read_text())["batch_size"] == 7

    small.clear()
    again = train(**settings)  # finished: the configuration in the folder is its own
    assert again.status == 0
    assert (again.out, small) == (ended.out, [])
    fixed = train(**{**settings, "out": "fixed", "batch_size": 7})
    assert fixed.status == 0
    assert records(Path("fixed")) == records(Path("run"))  # trying has left no trace


def test_an_interrupted_run_keeps_its_batch_size(
    train: Agfa, small: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"algorithm": "erm", "target": "sky", "out": "run", "batch_size": "auto"}
    with monkeypatch.context() as patch:
        patch.setattr("agfa.training.trainer._line", lambda step, scores: f"{1 / (4 - step)}")
        assert train(**settings, checkpoint_seconds=0).status == 1
    monkeypatch.setattr(memory, "trial", None)  # nothing is tried again, though there is more room now
    resumed = train(**settings)
    assert resumed.status == 0, resumed.err
    assert "resuming run after step 2" in resumed.err
    assert yaml.safe_load(Path("run/config.yaml").read_text())["batch_size"] == 7


def test_no_image_comes_twice_in_a_step_and_agfa_gets_whole_pairs(train: Agfa) -> None:
    ended = train(target="sky", out="run", batch_size="auto", steps=2)
    assert ended.status == 0, ended.err
    assert (
        yaml.safe_load(Path("run/config.yaml").read_text())["batch_size"] == 48
    )  # of 24 training images, and 24 made


def test_a_cpu_is_not_filled_to_its_end(train: Agfa, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted from the memory of smaller trials, and not tried."""
    seen: list[int] = []

    def trial(config: Any, *_: Any) -> None:
        seen.append(config.batch_size)

    monkeypatch.setattr(memory, "trial", trial)
    monkeypatch.setattr(memory, "_peak", lambda: 50 * seen[-1] if seen else 0)
    monkeypatch.setattr(memory, "free_memory", lambda: 480)
    ended = train(target="sky", out="run", algorithm="erm", batch_size="auto", steps=2)
    assert ended.status == 0, ended.err
    assert "batch size 6: as many" in ended.err  # 7 of 50 bytes each are more than 70% of 480
    assert seen == [1, 2, 4, 6]


def test_when_nothing_fits_it_says_what_would_help(train: Agfa, monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(memory, "trial", trial)
    ended = train(target="sky", out="run", batch_size="auto")
    assert ended.status == 2
    assert "not even --batch-size 2 fits into the memory; try --accumulate" in ended.error
    assert train(target="sky", out="run", batch_size=4, accumulate=2).status == 0  # and the folder is free


def test_other_errors_are_no_lack_of_memory(train: Agfa, monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(*_: Any) -> None:
        raise RuntimeError("shapes differ")

    monkeypatch.setattr(memory, "trial", trial)
    assert "shapes differ" in train(target="sky", out="run", batch_size="auto").error


def test_memory_is_measured() -> None:
    assert free_memory() > 2**20
    memory._peak()
    before = memory._peak()
    size = 50 * 2**20
    with mmap.mmap(-1, size) as block:  # fresh pages, where torch might reuse some
        block.write(b"1" * size)
        assert memory._peak() - before > 0.9 * size
    memory._peak()
    assert memory._peak() < before + 0.5 * size


def test_less_memory_changes_no_result(train: Agfa) -> None:
    """A run that is too large may be resumed in parts: neither flag decides what comes out."""
    settings: dict[str, Any] = {"target": "sky", "backbone": "resnet18", "image_size": 32, "freeze_batchnorm": True}
    assert train(**settings, steps=2, out="plain").status == 0
    assert train(**settings, steps=2, out="blocks", activation_checkpointing=True).status == 0
    assert train(**settings, steps=2, out="parts", accumulate=3).status == 0
    assert records(Path("blocks")) == records(Path("plain"))
    for one, other in zip(records(Path("plain"), "eval"), records(Path("parts"), "eval"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
    refused = train(target="sky", out="none", activation_checkpointing=True)
    assert refused.status == 2
    assert "convnet has no blocks whose activations could be computed twice" in refused.error
