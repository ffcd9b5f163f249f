"""Fixtures: a cache of one's own, the tiny dataset, and the command line in this process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agfa import cli
from serving import Server
from support import QUICK, Agfa, Ended, flags, make_images
from support_forks import Forks

# One thread, here and in the processes that tests start: on tiny images more of them only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read from or written to where the person who runs the tests works."""
    monkeypatch.setenv("AGFA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def images_made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("shared") / "tiny")


@pytest.fixture
def tiny(images_made_once: Path, tmp_path: Path) -> Path:
    """A folder of 3 domains, 3 classes and 10 images each, that the test may change."""
    return Path(shutil.copytree(images_made_once, tmp_path / "tiny"))


@pytest.fixture
def quick() -> dict[str, Any]:
    """Settings for agfa.train that take a second."""
    return json.loads(json.dumps(QUICK))


@pytest.fixture
def agfa(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Agfa:
    """Run `agfa ARGUMENTS...` in this process; keywords become flags."""

    def run(*arguments: object, **settings: Any) -> Ended:
        monkeypatch.setattr(sys, "argv", ["agfa", *map(str, arguments), *flags(**settings)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        status = ended.value.code
        assert isinstance(status, int)
        return Ended(status, *capfd.readouterr())

    return run


@pytest.fixture
def train(agfa: Agfa, tiny: Path) -> Agfa:
    """Run `agfa train` quickly on the tiny dataset; keywords change the settings."""

    def run(*arguments: object, **settings: Any) -> Ended:
        merged = {"data": tiny, **QUICK, **settings}
        return agfa("train", *arguments, **{k: v for k, v in merged.items() if v is not None})

    return run


@pytest.fixture(scope="module")
def small_disk() -> Iterator[Path]:
    """A disk of 40 MB of its own."""
    folder = Path(tempfile.mkdtemp())
    mounted = (
        sys.platform == "linux"
        and os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", folder], capture_output=True
        ).returncode
        == 0
    )
    if not mounted:
        folder.rmdir()
        pytest.skip("needs a small disk: root, and a mount that works")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)
    folder.rmdir()


@pytest.fixture
def forks() -> Iterator[Forks]:
    """Starts commands in milliseconds, and kills them at a moment."""
    found = Forks()
    yield found
    found.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
