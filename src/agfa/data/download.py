"""Bring a known dataset from the internet: from whichever source works, verified, by one process at a time."""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from agfa.data.benchmark import Benchmark, File, Source
from agfa.data.check import compare_counts
from agfa.data.fetch import WAITS, Limits, Progress, fetch
from agfa.data.unpack import UnusableError, unpack
from agfa.data.unpack_parquet import unpack_parquet
from agfa.errors import AgfaError, UsageError
from agfa.files import alone, writing

DRIVE = "https://drive.usercontent.google.com/download?id={}&export=download&confirm=t"  # skips the question
BYTES_AN_IMAGE = 1_000_000  # on average, at most: what goes beyond is no dataset but a bomb
TOLERANCE = 0.05  # of a domain's images: copies of a benchmark differ by a few

Say = Callable[[str], None]


def get(
    benchmark: Benchmark, *, say: Say, progress: Progress | None = None, waits: Sequence[float] = WAITS
) -> Path | None:
    """Make the benchmark's folder from the first of its sources that works; None if it needs none.

    The folder is there whole or not at all. What was downloaded stays in a hidden folder beside it until then: the
    next call goes on from there.

    Args:
        say: called with each line that a person should read.
        progress: called with the bytes of a file that are there, and all its bytes.
        waits: seconds before each new try of an address that brought nothing.

    Raises:
        UsageError: what is in its place is not the benchmark.
        AgfaError: no source works, or the disk is full.
    """
    if benchmark.embedded:
        return None
    home = benchmark.home
    with writing(home):
        home.parent.mkdir(parents=True, exist_ok=True)
    lock = home.with_name(f".{home.name}.lock")
    with alone(lock, lambda: say(f"another process is getting {benchmark.name}; waiting for it")):
        found = benchmark.find()
        if found is not None and any(found.iterdir()):
            try:
                benchmark.load_from(found)
            except UsageError as error:
                raise UsageError(f"{error}; move {found} away to get {benchmark.name} anew") from error
            shutil.rmtree(_work(home), ignore_errors=True)  # of a process that died when all was done
            return found
        reasons = []
        for source in benchmark.sources:
            try:
                return _get_from(source, benchmark, say, progress, waits)
            except UnusableError as error:
                reasons.append(f"{source.files[0].url} ({error})")
                say(f"{source.files[0].url} does not work: {error}")
    tried = "; ".join(reasons) or "no source of it is known"
    raise AgfaError(f"cannot get {benchmark.name}: {tried}; try again later, or put it into {home} by hand")


def _get_from(
    source: Source, benchmark: Benchmark, say: Say, progress: Progress | None, waits: Sequence[float]
) -> Path:
    home = benchmark.home
    work = _work(home)
    draft = work / "unpacked"
    most = benchmark.images * BYTES_AN_IMAGE
    files = [resolved for file in source.files for resolved in _resolve(file)]
    with writing(work):
        work.mkdir(exist_ok=True)
    paths = []
    for number, file in enumerate(files, start=1):
        say(f"getting {file.url}" + (f" ({number} of {len(files)})" if len(files) > 1 else ""))
        path = work / hashlib.sha256(file.url.encode()).hexdigest()[:16]
        with _naming(file, number):
            _bring(file, path, most, progress, waits)
        paths.append(path)
    unverified = [file for file in files if file.checksum is None]
    if unverified:
        say(f"no checksum is known of {len(unverified)} of {len(files)} files: their images are counted instead")
    try:
        shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
        say(f"unpacking {benchmark.name}")
        for number, (file, path) in enumerate(zip(files, paths, strict=True), start=1):
            with _naming(file, number):
                _place(file, path, draft, most)
        if source.arrange is not None:
            source.arrange(draft)
        for line in _differences(benchmark, draft):
            say(line)
        with writing(home):
            draft.replace(home)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    shutil.rmtree(work, ignore_errors=True)
    return home


def _work(home: Path) -> Path:
    """Where what is downloaded lies until the dataset is whole."""
    return home.with_name(f".{home.name}.get")


@contextmanager
def _naming(file: File, number: int) -> Iterator[None]:
    """Say of which file it is that something is wrong; a source goes by its first."""
    try:
        yield
    except UnusableError as error:
        if number == 1:
            raise
        raise UnusableError(f"of {file.url}: {error}") from error


def _resolve(file: File) -> list[File]:
    """The files that an address stands for, each with an address that a browser would understand."""
    if file.url.startswith("drive:"):
        return [replace(file, url=DRIVE.format(file.url.removeprefix("drive:")))]
    hub = re.fullmatch("hf:([^/]+/[^/@]+)@([^/]+)/(.+)", file.url)
    if hub is None:
        return [file]
    from huggingface_hub import HfApi, hf_hub_url
    from huggingface_hub.hf_api import RepoFile

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of each of its own new tries

    (repository, revision, wanted), endpoint = hub.groups(), os.environ.get("HF_ENDPOINT")

    def url(path: str) -> str:
        return hf_hub_url(repository, path, repo_type="dataset", revision=revision, endpoint=endpoint)

    if "*" not in wanted:
        return [replace(file, url=url(wanted))]
    try:
        tree = HfApi(endpoint, token=False).list_repo_tree(
            repository,
            wanted.rpartition("/")[0] or None,
            repo_type="dataset",
            revision=revision,
        )
        listed = [entry for entry in tree if isinstance(entry, RepoFile) and fnmatch.fnmatch(entry.path, wanted)]
    except Exception as error:  # of the HTTP library that this version of the hub's uses
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnusableError(f"the hub does not list its files ({reason})") from error
    if not listed:
        raise UnusableError(f"the hub has no {wanted} in {repository}")
    return [
        replace(
            file, url=url(entry.path), size=entry.size, checksum=f"sha256:{entry.lfs.sha256}" if entry.lfs else None
        )
        for entry in sorted(listed, key=lambda entry: entry.path)
    ]


def _bring(file: File, path: Path, most: int, progress: Progress | None, waits: Sequence[float]) -> None:
    """Make `path` the file, as its checksum wants it; where one put together from parts is wrong, once anew."""
    limits = Limits(file.size, file.size or most, file.checksum is not None)
    for last in (False, True):
        in_parts = path.exists() or fetch(file.url, path, limits, progress=progress, waits=waits)
        wrong = _wrong(path, file)
        if not wrong:
            return
        path.unlink()
        if last or not in_parts:
            raise UnusableError(wrong)


def _wrong(path: Path, file: File) -> str:
    """How the file differs from what it should be."""
    if file.size is not None and path.stat().st_size != file.size:
        return f"it has {path.stat().st_size} bytes, not {file.size}"
    if file.checksum is None:
        return ""
    kind, _, wanted = file.checksum.partition(":")
    with path.open("rb") as content:
        digest = hashlib.file_digest(content, kind).hexdigest()
    return "" if digest.startswith(wanted) else f"its {kind} is {digest[:12]}..., not {wanted[:12]}..."


def _place(file: File, path: Path, draft: Path, most: int) -> None:
    """Put what was downloaded into the dataset's folder."""
    folder = draft / file.into
    if file.kind == "archive":
        unpack(path, folder, inside=file.inside, max_bytes=most)
    elif file.kind == "parquet":
        unpack_parquet(path, folder, max_bytes=most)
    else:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / file.url.rsplit("/", 1)[-1])


def _differences(benchmark: Benchmark, folder: Path) -> list[str]:
    """Where the images are not quite as many as the catalog says.

    Raises:
        UnusableError: it is another dataset, or a part of it.
    """
    try:
        dataset = benchmark.load_from(folder)
    except UsageError as error:
        raise UnusableError(str(error)) from error
    if len(dataset.classes) != benchmark.classes:
        raise UnusableError(f"it has {len(dataset.classes)} classes, not {benchmark.classes}")
    for place, domain in zip(benchmark.places, dataset.domains, strict=True):
        if abs(len(domain) - place.total) > TOLERANCE * place.total:
            raise UnusableError(f"its domain {place.name!r} has {len(domain)} images, not {place.total}")
    return [f"{p.where}: {p.what}" for p in compare_counts(dataset, benchmark)]
