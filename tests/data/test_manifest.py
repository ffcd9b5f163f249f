"""A table that names images is the same dataset as the folder they lie in, however it is written and ordered."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agfa.data.catalog import load
from agfa.data.check import check
from agfa.data.decode import decode
from agfa.data.domains import DomainDataset, from_folder
from agfa.data.store import open_images
from agfa.errors import UsageError
from support import Agfa, listing


def table_of(root: Path, prefix: str = "") -> pl.DataFrame:
    """A row for each image of a folder domain/class/image, shuffled."""
    rows = [
        {
            "path": f"{prefix}{path.relative_to(root.parent).as_posix()}",
            "label": path.parts[-2],
            "domain": path.parts[-3],
        }
        for path in sorted(root.rglob("*.*"))
    ]
    return pl.DataFrame(rows).sample(fraction=1, shuffle=True, seed=1)


def read(data: object) -> DomainDataset:
    return load(str(data))[0]


def same_images(one: DomainDataset, other: DomainDataset) -> bool:
    """Whether the domains, classes, labels and pixels are those of the other, image by image."""
    assert (one.classes, one.domain_names) == (other.classes, other.domain_names)
    first, second = open_images(one, 8), open_images(other, 8)
    for a, b in zip(one.domains, other.domains, strict=True):
        np.testing.assert_array_equal(a.labels, b.labels)
        assert all(bool((x == y).all()) for x, y in zip(first[a.name], second[b.name], strict=True))
    return True


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_of_a_folder_is_that_folder(kind: str, tiny: Path) -> None:
    table = table_of(tiny)
    table.write_csv("all.csv") if kind == "csv" else table.write_parquet("all.parquet")
    dataset = read(f"all.{kind}")
    assert dataset.name == "all"
    assert dataset["ink"].keys[0] == "tiny/ink/cross/00.jpg"
    assert same_images(dataset, from_folder(tiny))
    dataset["ink"].labels[0] = 0  # as of a folder: an array of its own


def test_neither_the_order_of_rows_nor_the_place_changes_the_dataset(tiny: Path) -> None:
    table_of(tiny).write_csv("one.csv")
    table_of(tiny).reverse().write_csv("two.csv")
    (tiny.parent / "below").mkdir()
    tiny.rename(tiny.parent / "below" / "tiny")
    table_of(tiny.parent / "below" / "tiny").write_csv("below/one.csv")
    assert len({listing(read(name)) for name in ("one.csv", "two.csv", "below/one.csv")}) == 1


def test_trained_on_checked_and_measured(agfa: Agfa, train: Agfa, tiny: Path) -> None:
    table_of(tiny).write_csv("all.csv")
    ended = agfa("data", "check", "all.csv")
    assert (ended.status, ended.err) == (0, "")
    assert "no problems" in ended.out
    assert train(data="all.csv", target="sky").status == 0
    ended = agfa("evaluate", next(Path("runs/all").iterdir()), "--data", "all.csv")
    assert (ended.status, ended.err) == (0, "")
    assert "sky" in ended.out


# --- columns


def test_usual_names_of_columns(tiny: Path) -> None:
    for path, label, domain in (
        ("file", "class", "env"),
        ("File_Name", " Label", "DOMAIN"),
        ("img", "y", "environment"),
    ):
        table_of(tiny).rename({"path": path, "label": label, "domain": domain}).write_csv("all.csv")
        assert read("all.csv").domain_names == ("ink", "paper", "sky")


def test_other_names_are_said_behind_the_file(tiny: Path) -> None:
    names = {"path": "where", "label": "what is seen", "domain": "hospital"}
    table = table_of(tiny).rename(names).with_columns(pl.lit("x").alias("label"))
    table.write_csv("all.csv")
    said = "all.csv?path=where&label=what is seen&domain=hospital"
    assert same_images(read(said), from_folder(tiny))
    assert same_images(read(said.replace(" ", "%20")), from_folder(tiny))
    (tiny / "metadata.csv").write_text(Path("all.csv").read_text().replace("tiny/", ""))
    assert read("tiny?path=where&label=what+is+seen&domain=hospital").counts().sum() == 90


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("all.csv", r"has no column 'label' \(is it 'labels'\?\); there are: path, file, labels, domain"),
        ("all.csv?label=lables", r"no column 'lables' \(is it 'labels'\?\).* say .* all.csv\?label=COLUMN"),
        ("all.csv?lable=labels", "unknown part of 'all.csv.lable=labels' 'lable'; did you mean 'label'"),
        ("tiny?label=labels", "no table in tiny; label can be said of tables only"),
        ("missing.csv", "no file missing.csv"),
        ("missing.csv?label=x", "no file missing.csv"),
        ("tiny/ink/top/00.jpg", "00.jpg is no table; it should be a .csv or .parquet file"),
    ],
)
def test_columns_that_are_not_there(said: str, error: str, tiny: Path) -> None:
    table = table_of(tiny).select("path", pl.col("path").alias("file"), pl.col("label").alias("labels"), "domain")
    table.write_csv("all.csv")
    with pytest.raises(UsageError, match=error):
        read(said)


def test_two_columns_that_could_be_meant(tiny: Path) -> None:
    table_of(tiny).with_columns(pl.lit("x").alias("file")).write_csv("all.csv")
    assert read("all.csv")["ink"].keys[0].endswith(".jpg")  # exactly the name goes before the others
    table_of(tiny).rename({"path": "img"}).with_columns(pl.lit("x").alias("file")).write_csv("all.csv")
    with pytest.raises(UsageError, match=r"'img' and 'file' could both be the path; say which: all.csv\?path=img"):
        read("all.csv")


def test_names_are_kept_as_written_and_numbers_ordered_as_numbers(tiny: Path) -> None:
    lines = ["path,label,domain", "a.png,10,007", "b.png,9,1e3", "c.png,-1,1.0", 'd.png,10," x, y"', "é.png,9,007"]
    Path("all.csv").write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    dataset = read("all.csv")
    assert dataset.classes == ("-1", "9", "10")
    assert dataset.domain_names == (" x, y", "007", "1.0", "1e3")
    assert dataset["007"].keys == ("é.png", "a.png")
    pl.DataFrame({"path": ["a.png", "b.png"], "label": [10, 9], "domain": [True, False]}).write_parquet("all.parquet")
    assert (read("all.parquet").classes, read("all.parquet").domain_names) == (("9", "10"), ("false", "true"))


# --- what is wrong with a table


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["a.png,x,d", ",x,d", "b.png,,d", "c.png,x, "], "row 3 is wrong, it has no path; so are rows 4, 5; mend"),
        (["a.png,x,d", "b.png,x,d", "a.png,x,d"], "row 4 is wrong, it repeats row 2, a.png; mend"),
        (["a.png,x,d", "a.png,y,d", "a.png,y,e"], "row 3 is wrong, it calls a.png 'y', row 2 calls it 'x'; mend"),
        (["a.png,x,d", *[",,"] * 20], "row 3 .* so are rows 4, 5, 6, 7, 8, 9, 10, 11, 12, 13 and 9 more;"),
        ([], "has no rows"),
        (["a.png,x,d,z"], "cannot be read"),
    ],
)
def test_rows_that_are_wrong(lines: list[str], error: str) -> None:
    Path("all.csv").write_text("\n".join(["path,label,domain", *lines, ""]))
    with pytest.raises(UsageError, match=error):
        read("all.csv")


@pytest.mark.parametrize("name", ["all.csv", "all.parquet"])
@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00\x01,,\n\x80", b"PAR1 no more", b"\n\n"])
def test_files_that_are_no_tables(name: str, content: bytes, agfa: Agfa) -> None:
    Path(name).write_bytes(content)
    assert agfa("data", "check", name).status == 2


def test_an_image_that_is_not_there_is_named(train: Agfa, tiny: Path) -> None:
    table_of(tiny).write_csv("all.csv")
    (tiny / "ink" / "top" / "01.png").unlink()
    assert [p.what for p in check(read("all.csv"))] == ["No such file or directory"]
    ended = train(data="all.csv", target="sky")
    assert "1 of 90 images cannot be read" in ended.error
    assert "ink/top/01.png" in ended.error
    assert ended.status == 2


# --- files elsewhere


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tiny: Path) -> Iterator[str]:
    """The address of a server of what lies beside the folder `tiny`."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=tiny.parent))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


def test_over_http(tiny: Path, server: str) -> None:
    table_of(tiny, server).write_csv("all.csv")
    assert same_images(read("all.csv"), from_folder(tiny))


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_other_schemes(scheme: str, tiny: Path) -> None:
    prefix = "memory://here/" if scheme == "memory" else f"file://{tiny.parent}/"
    if scheme == "memory":
        for path in tiny.rglob("*.*"):
            fsspec.filesystem("memory").pipe(f"/here/{path.relative_to(tiny.parent)}", path.read_bytes())
    table_of(tiny, prefix).write_csv("all.csv")
    assert same_images(read("all.csv"), from_folder(tiny))


def test_what_is_wrong_elsewhere_is_one_line(tiny: Path, server: str) -> None:
    (tiny / "ink" / "top" / "01.png").write_bytes(b"")
    good = table_of(tiny, server).filter(pl.col("path").str.contains("01.png").not_() | pl.col("domain").eq("ink"))
    bad = [f"{server}none.png", "nosuch://a/b.png", "memory://nothing.png"]
    more = pl.DataFrame({"path": bad, "label": ["top"] * 3, "domain": ["ink"] * 3})
    pl.concat([good, more]).write_csv("all.csv")
    found = {p.where.removeprefix(server): p.what for p in check(read("all.csv")) if p.fatal}
    assert found == {
        "tiny/ink/top/01.png": "is empty, 0 bytes",
        "none.png": "No such file or directory",
        "nosuch://a/b.png": "Protocol not known: nosuch",
        "memory://nothing.png": "No such file or directory",
    }


# --- properties

NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=5).filter(lambda s: s.strip())


@given(
    st.lists(st.tuples(NAMES, NAMES, NAMES), min_size=1, max_size=20, unique_by=lambda row: (row[0], row[2])),
    st.randoms(),
)
def test_any_names_come_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str]], rng: object
) -> None:
    folder = tmp_path_factory.mktemp("any")
    fingerprints = set()
    for kind in ("csv", "parquet"):
        rng.shuffle(rows)  # type: ignore[attr-defined]
        table = pl.DataFrame(rows, schema=["path", "label", "domain"], orient="row")
        file = folder / f"all.{kind}"
        table.write_csv(file) if kind == "csv" else table.write_parquet(file)
        dataset = read(file)
        fingerprints.add(listing(dataset))
        assert {
            (key, dataset.classes[label], d.name)
            for d in dataset.domains
            for key, label in zip(d.keys, d.labels, strict=True)
        } == set(rows)
    assert len(fingerprints) == 1


def test_paths_may_be_absolute_and_anything_is_decoded(tiny: Path) -> None:
    table_of(tiny, f"{tiny.parent}/").write_csv("all.csv")
    assert decode(read("all.csv")["ink"].images[0]).size == (24, 20)  # type: ignore[arg-type]


SIZE = 1_000_000


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux, which tells a process's peak")
@pytest.mark.parametrize("kind", ["folder", "csv"])
def test_a_million_images_are_indexed_in_a_minute_and_a_gigabyte(kind: str, tmp_path: Path) -> None:
    """Slow because a million files are made first; memory is that of a whole process, torch in it."""
    folders = [Path(f"many/d{d}/c{c:02}") for d in range(10) for c in range(20)]
    names = [folder / f"{i:04}.jpg" for folder in folders for i in range(SIZE // len(folders))]
    if kind == "folder":
        for folder in folders:
            folder.mkdir(parents=True)
        for name in names:
            name.touch()
    else:
        rows = {
            "path": [str(n) for n in names],
            "label": [n.parts[2] for n in names],
            "domain": [n.parts[1] for n in names],
        }
        pl.DataFrame(rows).write_csv("many.csv")
    code = (
        "import re, sys, time; from pathlib import Path; from agfa.data.catalog import load;"
        "start = time.monotonic();"
        "print(load(sys.argv[1])[0].counts().sum(), time.monotonic() - start,"
        " int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1]) / 2**20)"
    )
    data = "many" if kind == "folder" else "many.csv"
    out = subprocess.run([sys.executable, "-c", code, data], capture_output=True, text=True, check=True).stdout
    count, seconds, gigabytes = (float(number) for number in out.split())
    assert (count, seconds < 60, gigabytes < 1) == (SIZE, True, True), out
