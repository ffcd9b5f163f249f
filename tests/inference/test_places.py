"""A model is the same wherever it is, whole or not there, and what is wrong is said in one line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest

from agfa.errors import AgfaError, UsageError
from agfa.inference import places
from agfa.inference.places import CARD, FILES, SUMS, WEIGHTS, pull, push
from agfa.inference.predictor import load
from fake_hub import FakeHub
from serving import Server
from support import Agfa
from support_models import make_model

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 20, 24, 3), np.uint8)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "run")


@pytest.fixture
def server() -> Iterator[Server]:
    import threading

    made = Server()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()


@pytest.fixture
def memory() -> Iterator[fsspec.AbstractFileSystem]:
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def same(place: str | Path, model: Path) -> None:
    assert load(place).predict(IMAGES) == load(model).predict(IMAGES)


@pytest.mark.parametrize("place", ["folder", "folder/deep/down", "file://{here}/uri", "memory://bucket/model"])
def test_what_is_pushed_is_there_again(place: str, model: Path, tmp_path: Path, memory: object) -> None:
    place = place.format(here=tmp_path)
    push(model, place)
    same(place, model)
    folder = pull(place, tmp_path / "pulled")
    same(folder, model)
    assert sorted(p.name for p in folder.iterdir()) == sorted(FILES)
    for name in (WEIGHTS, CARD):
        assert (folder / name).read_bytes() == (model / name).read_bytes()
    assert subprocess.run(["sha256sum", "-c", SUMS], cwd=folder, capture_output=True).returncode == 0
    push(folder, "memory://again")
    for name in FILES:
        assert fsspec.filesystem("memory").cat_file(f"/again/{name}") == (folder / name).read_bytes()


def test_a_folder_on_a_web_server(model: Path, server: Server, tmp_path: Path) -> None:
    pushed = tmp_path / "pushed"
    push(model, str(pushed))
    server.files = {f"/models/photo/{name}": (pushed / name).read_bytes() for name in FILES}
    same(f"{server.url}/models/photo", model)
    server.sent.clear()
    same(f"{server.url}/models/photo/", model)
    assert list(server.sent) == [f"/models/photo/{SUMS}"]  # the rest was in the cache
    shutil.rmtree(os.environ["AGFA_CACHE"])
    same(f"{server.url}/models/photo/{WEIGHTS}", model)
    with pytest.raises(UsageError, match="nothing can be written to http"):
        push(model, f"{server.url}/models/other")


def test_a_run_folder_on_a_web_server(model: Path, server: Server) -> None:
    """Without sums: nobody pushed it."""
    server.files = {f"/run/{name}": (model / name).read_bytes() for name in (WEIGHTS, CARD)}
    same(f"{server.url}/run", model)
    server.files = {
        f"/run/models/best{end}": (model / f"model{end}").read_bytes() for end in (".safetensors", ".json")
    }
    same(f"{server.url}/run/models/best.safetensors", model)


def test_a_model_that_changes_is_never_mixed(model: Path, tmp_path: Path, memory: fsspec.AbstractFileSystem) -> None:
    place = "memory://bucket/model"
    other = make_model(tmp_path / "other", seed=1)
    push(model, place)
    same(place, model)
    push(other, place)
    same(place, other)  # and not the cached one
    shutil.rmtree(os.environ["AGFA_CACHE"])
    memory.pipe_file(f"/bucket/model/{WEIGHTS}", (model / WEIGHTS).read_bytes())
    with pytest.raises(AgfaError, match=r"model\.safetensors in memory.* is not the file that its SHA256SUMS"):
        load(place)
    with pytest.raises(AgfaError, match="SHA256SUMS"):
        pull(place, tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert not list(Path(os.environ["AGFA_CACHE"], "models").iterdir())


def test_a_damaged_cache_is_found_out(model: Path, memory: object) -> None:
    push(model, "memory://bucket/model")
    load("memory://bucket/model")
    (kept,) = Path(os.environ["AGFA_CACHE"], "models").iterdir()
    content = bytearray((kept / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (kept / WEIGHTS).write_bytes(content)
    with pytest.raises(AgfaError, match="is not the file that its SHA256SUMS tells of"):
        load("memory://bucket/model")
    with pytest.raises(AgfaError, match="SHA256SUMS"):
        load(kept)


def test_a_push_that_fails_leaves_what_was_there(
    model: Path, tmp_path: Path, memory: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(model, "memory://bucket/model")
    before = dict(memory.store)
    other = make_model(tmp_path / "other", seed=1)
    opened = type(memory).open

    def fails(self: object, path: str, mode: str = "rb", **more: object) -> object:
        if path.endswith(CARD) and "w" in mode:
            raise OSError("the network\nis gone")
        return opened(self, path, mode, **more)

    monkeypatch.setattr(type(memory), "open", fails)
    with pytest.raises(AgfaError, match=r"memory://bucket/model cannot be reached: the network$"):
        push(other, "memory://bucket/model")
    monkeypatch.undo()
    assert memory.store == before
    same("memory://bucket/model", model)


def test_only_what_loads_is_pushed(model: Path, memory: fsspec.AbstractFileSystem) -> None:
    (model / WEIGHTS).write_bytes(b"")
    with pytest.raises(UsageError, match="does not hold the model"):
        push(model, "memory://bucket/model")
    assert not memory.store


def test_one_s_own_readme_is_kept_and_may_be_edited(model: Path, tmp_path: Path) -> None:
    (model / "README.md").write_text("Mine.")
    push(model, "pushed")
    assert Path("pushed/README.md").read_text() == "Mine."
    Path("pushed/README.md").write_text("Mine, edited.")
    assert pull("pushed", tmp_path / "pulled").joinpath("README.md").read_text() == "Mine, edited."


@pytest.mark.parametrize(
    ("place", "said", "status"),
    [
        ("nowhere", "does not exist", 2),
        ("memory://nowhere/at/all", "no memory://nowhere/at/all/model.safetensors", 2),
        ("http://127.0.0.1:9/model", "cannot be reached: ", 1),
        ("s4://bucket/model", "s4", 2),
        ("hf:name", "hf:name is no repository of the hub; it is hf:OWNER/NAME", 2),
        ("hf:owner/name@", "is no repository of the hub", 2),
        ("hf:owner/na me", "hf:owner/na me: ", 2),
    ],
)
def test_there_is_no_model(place: str, said: str, status: int, agfa: Agfa) -> None:
    ended = agfa("pull", place, "pulled")
    assert (ended.status, ended.out) == (status, "")
    assert said in ended.error
    assert not Path("pulled").exists()


def test_a_protocol_whose_package_is_missing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UsageError, match=r"s3://bucket/model: .*s3fs"):
        push(model, "s3://bucket/model")


def test_commands(model: Path, agfa: Agfa, memory: object) -> None:
    ended = agfa("push", model, "memory://bucket/model")
    assert (ended.status, ended.out, ended.err) == (0, f"{model} is at memory://bucket/model\n", "")
    ended = agfa("pull", "memory://bucket/model", "pulled")
    assert (ended.status, ended.out, ended.err) == (0, "model: pulled/model.safetensors\n", "")
    same("pulled", model)
    ended = agfa("pull", "memory://bucket/model", "pulled")
    assert ended.status == 2
    assert "pulled exists; choose another folder" in ended.error


# --- the hub, along the real path: huggingface_hub in processes of its own against a server on this machine


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    made = FakeHub(token="hf_secret")
    yield made
    made.shutdown()


def agfa_process(hub: FakeHub, home: Path, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "agfa", *map(str, arguments)]
    return subprocess.run(
        command, env=os.environ | environment | more, capture_output=True, text=True, check=False, timeout=120
    )


def test_a_repository_of_the_hub(hub: FakeHub, model: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    pushed = agfa_process(hub, home, "push", model, "hf:me/photo")
    assert (pushed.returncode, pushed.stdout) == (0, f"{model} is at hf:me/photo\n"), pushed.stderr
    (commit,) = hub.commits["me/photo"]
    assert sorted(commit) == sorted(FILES)
    assert hub.private == {"me/photo"}
    assert hub.validated == [commit["README.md"].decode()]
    assert commit[WEIGHTS] == (model / WEIGHTS).read_bytes()
    assert hashlib.sha256(commit[WEIGHTS]).hexdigest() in commit[SUMS].decode()
    pulled = agfa_process(hub, home, "pull", "hf:me/photo", "pulled")
    assert pulled.returncode == 0, pulled.stderr
    same("pulled", model)
    again = agfa_process(hub, home, "pull", "hf:me/photo@main", "offline", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    same("offline", model)
    stranger = agfa_process(hub, tmp_path / "other", "pull", "hf:me/photo", "stranger", HF_TOKEN="hf_other")
    assert stranger.returncode == 1
    (line,) = stranger.stderr.splitlines()
    assert line.startswith("agfa: hf:me/photo cannot be had from the hub: ")


def test_the_card_s_json_is_one_of_the_pushed_files(model: Path) -> None:
    push(model, "pushed")
    assert json.loads(Path("pushed", CARD).read_text())["classes"] == ["cross", "left", "top"]
    assert places.FILES[0] == WEIGHTS
