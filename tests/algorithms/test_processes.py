"""Every method in two processes (gloo): what one process makes of the joint minibatch. All of them at one start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import support_processes
from agfa.algorithms import names
from support_processes import BATCH_NORM, VARIANTS

PROCESSES = 2
ALL = [
    *names(),
    *VARIANTS,
    *(f"{name}, batch norm" for name in BATCH_NORM),
    *("second order, convnet", "second order, resnet", "odd, convnet", "odd, resnet", "two passes"),
    *("recomputed, erm", "recomputed, mldg", "recomputed, sagnet", "recomputed, dson"),
]
Found = list[dict[str, dict[str, float]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each process found."""
    folder = tmp_path_factory.mktemp("processes")
    command = [sys.executable, support_processes.__file__]
    started = [subprocess.Popen([*command, str(rank), str(PROCESSES), str(folder)]) for rank in range(PROCESSES)]
    try:
        assert [process.wait(timeout=400) for process in started] == [0] * PROCESSES
    finally:
        for process in started:
            process.kill()
    return json.loads(Path(folder, "found.json").read_text())  # type: ignore[no-any-return]  # JSON is Any


@pytest.mark.parametrize("what", ALL)
def test_ends_where_one_process_does(what: str, found: Found) -> None:
    first, second = (of_rank[what] for of_rank in found)
    assert first == second  # all processes end alike
    assert first["difference"] <= 1e-6
    assert first["shown"] <= 1e-6
    assert first["moved"] > 1e-3


@pytest.mark.parametrize("what", [what for what in ALL if not what.startswith(("odd", "two passes", "recomputed"))])
def test_the_pass_through_the_backbone_is_shared_out(what: str, found: Found) -> None:
    """Or two processes would be no faster than one: each does half, and SagNet and RSC an image more."""
    assert 0.5 <= found[0][what]["rows"] <= (0.6 if "sagnet" in what or "rsc" in what else 0.5)


def test_an_odd_number_of_images_is_everyones(found: Found) -> None:
    assert found[0]["odd, convnet"]["rows"] == 1
    assert found[0]["odd, resnet"]["rows"] == 1


def test_averaging_gradients_alone_would_not_do(found: Found) -> None:
    """What the comparison would show: CORAL on halves of the domains."""
    assert found[0]["naive"]["difference"] > 1e-3
