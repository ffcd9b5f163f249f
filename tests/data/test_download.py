"""Downloads, against a server on this machine that can be dead, slow, cut, changed, or another altogether."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import multiprocessing
import os
import re
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from agfa.data import catalog, download, fetch
from agfa.data.arrange import LISTED, remove_duplicates
from agfa.data.benchmark import Benchmark, File, Place, Settings, Source
from agfa.data.check import compare_counts
from agfa.data.download import get
from agfa.errors import AgfaError, UsageError
from serving import NOW, Handler, Server, contents
from support import Agfa, fill

DOMAINS = ("ink", "paper", "sky")
REAL = os.environ.get("AGFA_DATA")


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of known datasets."""
    monkeypatch.setenv("AGFA_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def images(per_class: int = 4, size: int = 20_000, seed: int = 0) -> dict[str, bytes]:
    """What lies in the dataset: names ending as images do, contents of random bytes."""
    rng = np.random.default_rng(seed)
    return {f"{d}/{c}/{i}.jpg": rng.bytes(size) for d in DOMAINS for c in ("cat", "dog") for i in range(per_class)}


def zipped(files: dict[str, bytes], top: str = "") -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            archive.writestr(top + name, content)
    return stream.getvalue()


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def benchmark(*sources: Source, per_class: int = 4, **changes: Any) -> Benchmark:
    record = Benchmark(
        name="Pets",
        places=tuple(Place(name, name, (per_class, per_class)) for name in DOMAINS),
        classes=2,
        licence="none",
        citation="nobody",
        settings=Settings(),
        sources=sources,
    )
    return dataclasses.replace(record, **changes)


class Lines(list[str]):
    """What was said."""

    def __call__(self, line: str) -> None:
        self.append(line)

    @property
    def text(self) -> str:
        return "\n".join(self)


def test_downloaded_verified_unpacked_and_nothing_else_left(server: Server, data: Path) -> None:
    archive = server.files["/pets.zip"] = zipped(images(), "pets/")
    said, steps = Lines(), []
    source = Source((File(f"{server.url}/pets.zip", sha256(archive), len(archive), inside="pets"),))
    folder = get(benchmark(source), say=said, progress=lambda *step: steps.append(step), waits=NOW)
    assert folder == data / "Pets"
    assert contents(data / "Pets") == images()
    assert [p.name for p in sorted(data.iterdir())] == [".Pets.lock", "Pets"]
    assert steps[-1] == (len(archive), len(archive))
    assert said == [f"getting {server.url}/pets.zip", "unpacking Pets"]
    server.shutdown()
    assert get(benchmark(source), say=said) == folder  # no server needed


@pytest.mark.parametrize("kind", ["sha256", "sha512", "md5"])
def test_a_wrong_checksum_is_refused_and_the_next_source_tried(kind: str, server: Server, data: Path) -> None:
    good = zipped(images())
    server.files |= {"/evil.zip": zipped(images(seed=1)), "/good.zip": good}
    digest = f"{kind}:{hashlib.new(kind, good).hexdigest()[:52]}"
    said = Lines()
    sources = [Source((File(f"{server.url}/{name}.zip", digest),)) for name in ("evil", "good")]
    get(benchmark(*sources), say=said, waits=NOW)
    assert contents(data / "Pets") == images()
    assert f"evil.zip does not work: its {kind} is " in said.text
    assert server.sent["/evil.zip"] == len(server.files["/evil.zip"])  # once, not again: it came in one piece


def page(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "text/html; charset=utf-8")
    handler.end_headers()
    handler.wfile.write(b"<html>Quota exceeded</html>")


DEAD: dict[str, tuple[Callable[[Handler], None] | None, str]] = {
    "not found": (lambda h: h.send_error(404), "the server answers 404 Not Found"),
    "forbidden": (lambda h: h.send_error(403), "the server answers 403 Forbidden"),
    "busy for ever": (lambda h: h.send_error(503), "the server answers 503"),
    "a web page": (page, "it answers with a web page"),
    "hangs up": (lambda h: h.connection.close(), "the connection broke"),
    "nobody there": (None, "no connection"),
}


@pytest.mark.parametrize("how", DEAD)
def test_a_dead_source_is_named_and_the_next_one_tried(how: str, server: Server, data: Path) -> None:
    answer, reason = DEAD[how]
    good = server.files["/good.zip"] = zipped(images())
    if answer is not None:
        server.odd["/dead.zip"] = answer
    dead = f"{server.url if answer else 'http://127.0.0.1:9'}/dead.zip"
    said = Lines()
    sources = Source((File(dead),)), Source((File(f"{server.url}/good.zip", sha256(good)),))
    get(benchmark(*sources), say=said, waits=NOW)
    assert contents(data / "Pets") == images()
    assert f"{dead} does not work: {reason}" in said.text
    with pytest.raises(
        AgfaError, match=rf"^cannot get Other: {re.escape(dead)} \({re.escape(reason)}.*\); try again later, or put"
    ):
        get(benchmark(sources[0], name="Other"), say=said, waits=NOW)


def test_a_server_that_is_busy_for_a_moment(server: Server, data: Path) -> None:
    server.files["/pets.zip"] = zipped(images())
    busy = [503, 429]

    def answer(handler: Handler) -> None:
        handler.send_error(busy.pop())
        if not busy:
            del server.odd["/pets.zip"]

    server.odd["/pets.zip"] = answer
    get(benchmark(Source((File(f"{server.url}/pets.zip"),))), say=Lines(), waits=NOW)
    assert contents(data / "Pets") == images()


# --- cut and resumed


def test_a_process_that_dies_each_time_is_resumed_by_the_next(server: Server, data: Path) -> None:
    """Ten processes die, as by a signal, at random bytes; the eleventh has the same bits and fetched none twice."""
    archive = server.files["/pets.zip"] = zipped(images(size=40_000))
    record = benchmark(Source((File(f"{server.url}/pets.zip", sha256(archive)),)))
    limits = sorted(np.random.default_rng(0).choice(range(1, len(archive)), 10, replace=False).tolist())
    for limit in limits:
        server.cuts = [limit]
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_get_until_cut, args=(record,))
        process.start()
        process.join()
        assert process.exitcode == 9
        assert not (data / "Pets").exists()
    get(record, say=Lines(), waits=NOW)
    assert contents(data / "Pets") == images(size=40_000)
    assert server.sent["/pets.zip"] == len(archive)


def _get_until_cut(record: Benchmark) -> None:
    """Die without a word where the connection is cut."""
    fetch.time.sleep = lambda _: os._exit(9)  # type: ignore[assignment]
    get(record, say=lambda _: None, waits=NOW)


def test_parts_of_two_files_are_found_out_by_the_checksum(server: Server, data: Path) -> None:
    """Without versions a part is gone on with where a checksum is known; when it tells, all comes anew, once."""
    old, new = zipped(images()), zipped(images(seed=1))
    server.names_versions, server.files["/x"], server.cuts = False, old, [len(old) // 2]

    def change(_: int, __: int) -> None:
        server.files["/x"] = new

    get(benchmark(Source((File(f"{server.url}/x", sha256(new)),))), say=Lines(), progress=change, waits=NOW)
    assert contents(data / "Pets") == images(seed=1)
    assert server.ranges == [None, f"bytes={len(old) // 2}-", None]


# --- several processes, a full disk


def test_processes_at_once_make_one_whole_dataset_of_one_download(server: Server, data: Path) -> None:
    archive = server.files["/pets.zip"] = zipped(images())
    server.pause = 0.02  # so that they meet
    record = benchmark(Source((File(f"{server.url}/pets.zip", sha256(archive)),)))
    context = multiprocessing.get_context("fork")
    said = context.Queue()
    processes = [context.Process(target=get, args=(record,), kwargs={"say": said.put}) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert contents(data / "Pets") == images()
    assert server.sent["/pets.zip"] == len(archive)
    lines = [said.get() for _ in range(4)]
    assert lines.count("another process is getting Pets; waiting for it") == 2
    assert lines.count("unpacking Pets") == 1


@pytest.mark.parametrize("says_length", [True, False])
def test_a_full_disk_keeps_what_came(
    says_length: bool, server: Server, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = small_disk / f"data {says_length}"
    monkeypatch.setenv("AGFA_DATA", str(data))
    archive = server.files["/pets.zip"] = zipped(images(size=300_000))  # 7.2 MB
    server.says_length = says_length
    record = benchmark(Source((File(f"{server.url}/pets.zip", sha256(archive)),)))
    fill(small_disk, leaving=3 << 20)
    with pytest.raises(AgfaError, match=r"^cannot write .*: no space left on the disk.*run the same command again$"):
        get(record, say=Lines(), waits=NOW)
    came = sum(p.stat().st_size for p in data.rglob("*.part"))
    assert came == 0 if says_length else came > 2 << 20  # what is known not to fit is not begun
    fill(small_disk)
    (small_disk / "ballast").unlink()
    server.says_length = True
    fill(small_disk, leaving=(9 << 20) - came)  # for the archive, but not for what is in it
    with pytest.raises(AgfaError, match="no space left"):
        get(record, say=Lines(), waits=NOW)
    assert not (data / "Pets").exists()
    assert not (data / ".Pets.get" / "unpacked").exists()
    (small_disk / "ballast").unlink()
    sent = dict(server.sent)
    get(record, say=Lines(), waits=NOW)
    assert server.sent == sent  # the archive was whole: nothing more to fetch
    assert contents(data / "Pets") == images(size=300_000)


# --- what the archives hold


def hostile() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        link = tarfile.TarInfo("ink/cat/0.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (hostile(), "a symbolic link"),
        (zipped({"../../evil.jpg": b"1"}), "leaves the folder"),
        (zipped(images())[:-500], "damaged"),
        (zipped({n: c for n, c in images().items() if "ink/cat" not in n}), "domain 'ink' has 4 images, not 8"),
        (zipped({n: c for n, c in images().items() if "ink" not in n}), "lacks 'ink' of Pets"),
        (zipped(images() | {"sky/cow/1.jpg": b"moo"}), "3 classes, not 2"),
    ],
)
def test_an_unverified_archive_is_looked_at_before_it_is_believed(
    first: bytes, reason: str, server: Server, data: Path
) -> None:
    server.files |= {"/first": first, "/second": zipped(images())}
    said = Lines()
    sources = [Source((File(f"{server.url}/{name}"),)) for name in ("first", "second")]
    get(benchmark(*sources), say=said, waits=NOW)
    assert re.search(f"first does not work: .*{reason}", said.text)
    assert said.text.count("no checksum is known of 1 of 1 files: their images are counted instead") == 2
    assert contents(data / "Pets") == images()
    assert not list(data.parent.rglob("evil*"))


def test_counts_that_differ_a_little_are_told(server: Server, data: Path) -> None:
    files = images(per_class=20, size=100)
    del files["ink/cat/0.jpg"]
    server.files["/x"] = zipped(files)
    said = Lines()
    get(benchmark(Source((File(f"{server.url}/x"),)), per_class=20), say=said, waits=NOW)
    assert "Pets/ink: class 'cat' has 19 images, 20 are expected" in said
    assert contents(data / "Pets") == files


def test_one_archive_a_domain_and_a_list_of_duplicates(server: Server, data: Path) -> None:
    wanted = images()
    extra = {"ink/cat/twin.jpg": b"1", "sky/dog/twin.jpg": b"2"}
    for domain in DOMAINS:
        mine = {name: content for name, content in (wanted | extra).items() if name.startswith(domain)}
        server.files[f"/{domain}.zip"] = zipped(mine)
    server.files[f"/{LISTED}"] = "\n".join([*extra, "sky/dog/never there.jpg"]).encode()
    archives = [File(f"{server.url}/{domain}.zip", inside=domain, into=domain) for domain in DOMAINS]
    source = Source((*archives, File(f"{server.url}/{LISTED}", kind="file")), remove_duplicates)
    said = Lines()
    get(benchmark(source), say=said, waits=NOW)
    assert contents(data / "Pets") == wanted
    assert f"getting {server.url}/ink.zip (1 of 4)" in said


def test_the_file_that_is_missing_is_named(server: Server, data: Path) -> None:
    server.files["/ink.zip"] = zipped(images())
    files = [File(f"{server.url}/{name}.zip", inside=name, into=name) for name in ("ink", "sky")]
    said = Lines()
    with pytest.raises(AgfaError):
        get(benchmark(Source(tuple(files))), say=said, waits=NOW)
    assert f"{files[0].url} does not work: of {files[1].url}: the server answers 404 Not Found" in said
    assert len(list((data / ".Pets.get").iterdir())) == 1  # what came of it is kept


# --- Drive and the hub


def test_drive(server: Server, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/download?id=ABC&confirm=t"] = zipped(images())
    server.odd["/quota"] = page
    monkeypatch.setattr(download, "DRIVE", server.url + "/download?id={}&confirm=t")
    get(benchmark(Source((File("drive:ABC"),))), say=Lines(), waits=NOW)
    assert contents(data / "Pets") == images()


def table(files: dict[str, bytes], classes: Sequence[str] = ("cat", "dog")) -> bytes:
    rows = [
        {"image": {"bytes": content, "path": name.split("/")[2]}, "domain": name.split("/")[0], "label": label}
        for name, content in files.items()
        for label in [classes.index(name.split("/")[1])]
    ]
    stream = io.BytesIO()
    names = {"info": {"features": {"label": {"names": list(classes), "_type": "ClassLabel"}}}}
    pl.DataFrame(rows).write_parquet(stream, metadata={"huggingface": json.dumps(names)})
    return stream.getvalue()


def hub(server: Server, shards: list[bytes], wrong: bool = False) -> str:
    """A repository of tables on a hub; the address of all of them."""
    listing = [{"type": "file", "path": "README.md", "size": 1, "oid": "0" * 40}]
    for number, content in enumerate(shards):
        path = f"data/train-{number}.parquet"
        server.files[f"/datasets/who/pets/resolve/abc/{path}"] = content
        digest = "0" * 64 if wrong else hashlib.sha256(content).hexdigest()
        lfs = {"oid": digest, "size": len(content), "pointerSize": 1}
        listing.append({"type": "file", "path": path, "size": len(content), "oid": "0" * 40, "lfs": lfs})

    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.end_headers()
        handler.wfile.write(json.dumps(listing).encode())

    server.odd["/api/datasets/who/pets/tree/abc/data"] = answer
    return "hf:who/pets@abc/data/*.parquet"


def test_tables_on_the_hub(server: Server, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    files = list(images().items())
    url = hub(server, [table(dict(files[:10])), table(dict(files[10:]))])
    said = Lines()
    get(benchmark(Source((File(url, kind="parquet"),))), say=said, waits=NOW)
    assert contents(data / "Pets") == images()
    assert "no checksum" not in said.text  # the hub knows them
    one = File("hf:who/pets@abc/data/train-0.parquet", kind="parquet")
    assert [f.url for f in download._resolve(one)] == [
        f"{server.url}/datasets/who/pets/resolve/abc/data/train-0.parquet"
    ]


def test_what_is_wrong_on_the_hub(server: Server, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    url = hub(server, [table(images())], wrong=True)
    for address, reason in (
        (url, "its sha256 is"),
        ("hf:who/pets@abc/data/*.zip", r"the hub has no data/\*.zip in who/pets"),
        ("hf:who/cats@abc/data/*.parquet", "the hub does not list its files"),
    ):
        with pytest.raises(AgfaError, match=f"^cannot get Pets: .*{reason}"):
            get(benchmark(Source((File(address, kind="parquet"),))), say=Lines(), waits=NOW)


@pytest.mark.slow
def test_the_real_pacs_comes_whole_through_a_table(
    server: Server, data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Slow: 190 MB, and it needs the real images. Cut ten times on its way."""
    if REAL is None or not Path(REAL, "PACS").is_dir():
        pytest.skip(f"needs PACS in $AGFA_DATA ({REAL or 'not set'})")
    files, record = contents(Path(REAL, "PACS")), catalog.CATALOG["pacs"]
    classes = sorted({name.split("/")[1] for name in files})
    content = server.files["/datasets/flwrlabs/pacs/resolve/abc/pacs.parquet"] = table(files, classes)
    server.cuts = sorted(np.random.default_rng(0).choice(len(content), 10, replace=False).tolist())
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    file = File("hf:flwrlabs/pacs@abc/pacs.parquet", sha256(content), len(content), "parquet")
    said = Lines()
    get(dataclasses.replace(record, sources=(Source((file,)),)), say=said, waits=NOW)
    assert list(server.sent.values()) == [len(content)]
    assert len(said) == 2  # no difference in any count
    assert contents(data / "PACS") == files
    assert compare_counts(record.load(), record) == []


# --- the catalog's records, and the command


def test_what_is_in_the_way_is_left_alone(data: Path) -> None:
    (data / "Pets" / "ink").mkdir(parents=True)
    (data / "Pets" / "notes.txt").write_text("precious")
    with pytest.raises(UsageError, match=r"no images in .*Pets.*; move .*Pets away to get Pets anew"):
        get(benchmark(), say=Lines())
    assert (data / "Pets" / "notes.txt").read_text() == "precious"


@pytest.mark.parametrize("record", catalog.BENCHMARKS, ids=lambda b: b.name)
def test_the_catalogs_sources_are_well_formed(record: Benchmark) -> None:
    assert bool(record.sources) != record.embedded
    lengths = {"md5": 32, "sha256": 64}
    for source in record.sources:
        places = [file.into for file in source.files if file.kind == "archive"]
        assert len(set(places)) == len(places)
        for file in source.files:
            assert re.match(r"https?://|drive:[\w-]{20,}$|hf:[\w-]+/[\w-]+@[0-9a-f]{40}/.", file.url)
            if file.checksum:
                kind, _, digest = file.checksum.partition(":")
                assert re.fullmatch("[0-9a-f]{50,128}|[0-9a-f]{32}", digest)
                assert len(digest) == lengths.get(kind, len(digest))
    drives = [any(file.url.startswith("drive:") for file in source.files) for source in record.sources]
    assert drives == sorted(drives)  # Drive comes last


def test_the_command(server: Server, data: Path, agfa: Agfa, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = server.files["/good.zip"] = zipped(images(), "pets/")
    sources = (
        Source((File(f"{server.url}/dead.zip", size=10),)),
        Source((File(f"{server.url}/good.zip", sha256(archive), inside="pets"),)),
    )
    record = benchmark(*sources)
    monkeypatch.setitem(catalog.CATALOG, "pets", record)
    monkeypatch.setattr(catalog, "BENCHMARKS", (*catalog.BENCHMARKS, record))
    ended = agfa("data", "get", "pets")
    assert ended.status == 0
    assert ended.out == f"Pets is in {data / 'Pets'}\n"
    assert ended.err.splitlines() == [
        "Pets: nobody; licence: none",
        f"getting {server.url}/dead.zip",
        f"{server.url}/dead.zip does not work: the server answers 404 Not Found",
        f"getting {server.url}/good.zip",
        "unpacking Pets",
    ]
    listed = next(line for line in agfa("data", "list").out.splitlines() if "Pets" in line)
    assert str(data / "Pets") in listed
    assert compare_counts(record.load(), record) == []
    monkeypatch.setitem(catalog.CATALOG, "pets", dataclasses.replace(record, name="Zoo", sources=sources[:1]))
    ended = agfa("data", "get", "PETS")
    assert ended.status == 1
    assert ended.err.splitlines()[-1] == (
        f"agfa: cannot get Zoo: {server.url}/dead.zip (the server answers 404 Not Found); "
        f"try again later, or put it into {data / 'Zoo'} by hand"
    )
    assert agfa("data", "get", "digits").out == "digits is in the package\n"


def test_sizes_of_downloads_are_listed(agfa: Agfa) -> None:
    lines = agfa("data", "list").out.splitlines()
    assert next(line.split()[4:6] for line in lines if "PACS" in line) == ["191", "MB"]
    assert next(line.split()[4] for line in lines if "VLCS" in line) == "unknown"
    assert next(line.split()[4] for line in lines if "digits" in line) == "none"
