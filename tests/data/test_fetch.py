"""One file from a server that is cut, forgets, or changes it: the bits are right, and none is fetched twice."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from agfa.data import fetch
from agfa.data.unpack import UnusableError
from serving import NOW, Server


@pytest.mark.parametrize("knows", ["length", "nothing"])
@pytest.mark.parametrize("seed", range(3))
def test_cut_at_ten_random_bytes_nothing_comes_twice(knows: str, seed: int, server: Server, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    content = server.files["/x"] = rng.bytes(1_000_000)
    server.cuts = cuts = sorted(rng.choice(len(content), 10, replace=False).tolist())
    expected = [None, *(f"bytes={cut}-" for cut in cuts if cut)]
    size = None if knows == "nothing" else len(content)
    fetch.fetch(f"{server.url}/x", tmp_path / "x", fetch.Limits(size, 1 << 20, False), waits=NOW)
    assert (tmp_path / "x").read_bytes() == content
    assert server.ranges == expected
    assert server.sent == {"/x": len(content)}
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("x")] == ["x"]


def test_a_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    content = server.files["/x"] = os.urandom(300_000)
    server.resumes, server.cuts = False, [1, 100_000, 200_000]
    fetch.fetch(f"{server.url}/x", tmp_path / "x", fetch.Limits(None, 1 << 20, False), waits=NOW)
    assert (tmp_path / "x").read_bytes() == content
    server.files["/x"], server.cuts = content, [1000] * 9
    with pytest.raises(UnusableError, match="the connection was cut after 1000 of 300000 bytes"):
        fetch.fetch(f"{server.url}/x", tmp_path / "y", fetch.Limits(None, 1 << 20, False), waits=NOW)


def test_a_file_that_changed_between_tries_is_not_spliced(server: Server, tmp_path: Path) -> None:
    old, new = os.urandom(200_000), os.urandom(200_000)
    limits = fetch.Limits(None, 1 << 20, False)
    for versions in (True, False):  # without versions a part cannot be trusted at all
        server.names_versions = versions
        server.files["/x"], server.cuts = old, [120_000] * 9 if not versions else [120_000]

        def change(_: int, __: int) -> None:
            server.files["/x"] = new

        fetch.fetch(f"{server.url}/x", tmp_path / f"{versions}", limits, progress=change, waits=NOW * 5)
        assert (tmp_path / f"{versions}").read_bytes() == new


def test_a_part_longer_than_the_file_is_dropped(server: Server, tmp_path: Path) -> None:
    content = server.files["/x"] = os.urandom(1000)
    (tmp_path / "x.part").write_bytes(bytes(5000))
    fetch.fetch(f"{server.url}/x", tmp_path / "x", fetch.Limits(None, 1 << 20, True), waits=NOW)
    assert (tmp_path / "x").read_bytes() == content
    assert server.ranges == ["bytes=5000-", None]


def test_no_length_is_said(server: Server, tmp_path: Path) -> None:
    server.says_length = False
    content = server.files["/x"] = os.urandom(300_000)
    fetch.fetch(f"{server.url}/x", tmp_path / "x", fetch.Limits(None, 1 << 20, False), waits=NOW)
    assert (tmp_path / "x").read_bytes() == content


@pytest.mark.parametrize("says_length", [True, False])
def test_sizes_are_bounded(says_length: bool, server: Server, tmp_path: Path) -> None:
    server.says_length = says_length
    server.files["/x"] = bytes(3 << 20)
    with pytest.raises(UnusableError, match="more than the 1048576"):
        fetch.fetch(f"{server.url}/x", tmp_path / "x", fetch.Limits(None, 1 << 20, False), waits=NOW)
    if says_length:
        with pytest.raises(UnusableError, match="it has 3145728 bytes, not 7"):
            fetch.fetch(f"{server.url}/x", tmp_path / "y", fetch.Limits(7, 7, False), waits=NOW)
