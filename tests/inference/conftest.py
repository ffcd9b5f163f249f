"""Models that the tests of inference share."""

from __future__ import annotations

from pathlib import Path

import pytest

import agfa as package
from support import QUICK


def trained(images: Path, folder: Path, algorithm: str) -> Path:
    """A run of seconds on the tiny dataset."""
    settings = {**QUICK, "steps": 30, "evaluate_every": 10, "algorithm": algorithm}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGFA_CACHE", str(folder / "cache"))
        return package.train(**settings, data=str(images), target="sky", out=folder / algorithm).folder


@pytest.fixture(scope="session")
def agfa_run(images_made_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(images_made_once, tmp_path_factory.mktemp("served"), "agfa")


@pytest.fixture(scope="session")
def erm_run(images_made_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(images_made_once, tmp_path_factory.mktemp("served"), "erm")
