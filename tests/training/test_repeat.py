"""`agfa train --from RUN`: any run once more, from its folder alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import Agfa, same


@pytest.mark.parametrize("method", ["agfa", "erm"])
def test_the_same_machine_gives_the_same_bits(method: str, train: Agfa, agfa: Agfa) -> None:
    assert train(target="sky", algorithm=method, out="runs/a", augment=True, seed=3, val_fraction=0.3).status == 0
    ended = agfa("train", "--from", "runs/a")
    assert ended.status == 0
    assert "not as in" not in ended.err
    files = len(list(Path("runs/a").rglob("*.safetensors")))
    assert f"the same bits as in runs/a, in all {files} files of weights" in ended.out.splitlines()
    same(Path("runs/a-again"), Path("runs/a"))


def test_what_is_another_is_said(train: Agfa, agfa: Agfa) -> None:
    assert train(target="sky", algorithm="erm", out="run").status == 0
    file = Path("run/environment.json")
    environment = json.loads(file.read_text())
    environment |= {"commit": "0123", "cores": 999, "versions": {**environment["versions"], "torch": "1.0"}}
    file.write_text(json.dumps(environment))
    ended = agfa("train", "--from", "run", "--out", "other", "--seed", "5")
    assert ended.status == 0
    notes = [line for line in ended.err.splitlines() if line.startswith("not as in run: ")]
    assert len(notes) == 3
    for key, value in (("torch", "1.0"), ("commit", "0123"), ("cores", "999")):
        assert any(f"{key} is {value} there, " in note and note.endswith("here; expect other bits") for note in notes)
    assert "not the same bits as in run: model.safetensors" in ended.out


def test_without_what_it_was_trained_with(train: Agfa, agfa: Agfa) -> None:
    assert train(target="sky", algorithm="erm", out="run").status == 0
    Path("run/environment.json").write_text("{")
    ended = agfa("train", "--from", "run")
    assert "nobody knows what it was trained with" in ended.err
    assert "the same bits as in run" in ended.out


def test_what_cannot_be_repeated(train: Agfa, agfa: Agfa) -> None:
    ended = agfa("train", "--from", "nowhere")
    assert ended.status == 2
    assert "cannot read nowhere/config.yaml" in ended.error
    assert train(target="sky", algorithm="erm", out="run").status == 0
    ended = agfa("train", "--from", "run", "--config", "run/config.yaml")
    assert ended.status == 2
    assert "leave --config away" in ended.error
