"""`agfa data clean` frees what can be made again, and nothing that somebody is at work on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from agfa.data.domains import from_folder
from agfa.data.store import lock_of, open_images
from agfa.files import alone
from support import Agfa

STORES = Path("cache/store")


def test_stores_and_what_killed_processes_left_are_removed(agfa: Agfa, tiny: Path) -> None:
    before = open_images(from_folder(tiny), 8)["ink"][3].clone()
    reading = open_images(from_folder(tiny), 8)["ink"]
    open_images(from_folder(tiny), 12)
    stores = sorted(path.name for path in STORES.iterdir())
    size = sum(path.stat().st_size for path in STORES.rglob("*") if path.is_file())
    draft = STORES / ".tiny-8-0123456789abcdef.x1y2"
    shutil.copytree(STORES / stores[0], draft)
    lock_of(STORES / "tiny-8-0123456789abcdef").touch()
    Path("cache/data/PACS").mkdir(parents=True)
    ended = agfa("data", "clean")
    assert (ended.status, ended.err) == (0, "")
    for name in (*stores, "tiny-8-0123456789abcdef"):
        assert name in ended.out
    assert f"GB freed in {STORES.absolute()}" in ended.out
    assert size > 80_000
    assert list(STORES.iterdir()) == []
    assert Path("cache/data/PACS").exists()  # a dataset is no copy
    assert reading[3].equal(before)  # who was reading reads on
    assert open_images(from_folder(tiny), 8)["ink"][3].equal(before)


def test_what_is_being_built_stays(agfa: Agfa, tiny: Path) -> None:
    open_images(from_folder(tiny), 8)
    (store,) = STORES.iterdir()
    draft = STORES / f".{store.name}.x1y2"
    store.rename(draft)
    with alone(lock_of(store), lambda: pytest.fail("nobody else is there")):
        assert "0.00 GB freed" in agfa("data", "clean").out
        assert draft.exists()
        assert lock_of(store).exists()
    assert store.name in agfa("data", "clean").out
    assert not draft.exists()


def test_nothing_to_remove(agfa: Agfa) -> None:
    ended = agfa("data", "clean")
    assert (ended.status, ended.err) == (0, "")
    assert ended.out.startswith("0.00 GB freed in ")
