"""Where models are: a folder or file here, a repository of the Hugging Face hub, any address that fsspec reaches.

A model that was pushed is four files: the weights, the card, README.md, and SHA256SUMS, which tells of the others as
they were pushed together (`sha256sum -c SHA256SUMS` checks them). So whoever reads gets one whole model, or an error.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO

from agfa.data.own import HUB
from agfa.data.store import cache_folder
from agfa.errors import AgfaError, UsageError
from agfa.files import put, replace, settle, writing
from agfa.training import model_file
from agfa.training.model_readme import readme

WEIGHTS, CARD, README, SUMS = FILES = ("model.safetensors", "model.json", "README.md", "SHA256SUMS")
PIECE = 2**20
Progress = Callable[[int, int], None]  # (bytes there, bytes in all; 0 where nobody says)


@contextmanager
def here(place: str | Path, progress: Progress | None = None) -> Iterator[Path]:
    """The model at `place` as a folder, or a .safetensors file, on this machine while it is needed.

    Raises:
        UsageError: there is no model.
        AgfaError: it cannot be had, or is not what was pushed.
    """
    place = os.fspath(place)
    if place.startswith(HUB):
        yield _verified(_from_hub(place), place)
    elif "://" in place:
        with _from_address(place, progress) as folder:
            yield folder
    else:
        yield _verified(Path(place).expanduser(), place)


def pull(source: str | Path, folder: Path, progress: Progress | None = None) -> Path:
    """Bring the model at `source` into `folder`, which is made whole or not at all.

    Raises:
        UsageError: there is no model, or the folder is there already.
    """
    if folder.exists():
        raise UsageError(f"{folder} exists; choose another folder, or delete it")
    with here(source, progress) as model, _made(folder) as draft:
        for name, content in _bundle(model).items():
            put(draft / name, content)
    return folder


def push(model: str | Path, place: str, progress: Progress | None = None) -> None:
    """Put the model at `place`, over one that is there: hf:OWNER/NAME[@BRANCH], an address of fsspec's, or a folder.

    Only what can be loaded is pushed, and it is read again to see that it arrived.

    Raises:
        UsageError: there is no model, or nothing can be written there.
        AgfaError: it did not arrive.
    """
    with here(model) as local:
        files = _bundle(local)
    if place.startswith(HUB):
        _to_hub(files, place)
    elif "://" in place:
        _to_address(files, place, progress)
    else:
        for name, content in files.items():
            put(Path(place).expanduser() / name, content)


def _bundle(model: Path) -> dict[str, bytes]:
    """The files of a model that loads; the sums are last. A README.md of one's own beside it is kept."""
    _, card = model_file.load(model)
    weights = model / WEIGHTS if model.is_dir() else model
    own = weights.with_name(README)
    files = {
        WEIGHTS: weights.read_bytes(),
        CARD: weights.with_suffix(".json").read_bytes(),
        README: own.read_bytes() if weights.name == WEIGHTS and own.is_file() else readme(card, weights).encode(),
    }
    sums = "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in files.items())
    return {**files, SUMS: sums.encode()}


# --- checksums


def _verified(model: Path, place: str) -> Path:
    """The model, after a look at the sums beside it, if there are any."""
    weights = model / WEIGHTS if model.is_dir() else model
    sums = weights.with_name(SUMS)
    if sums.is_file():
        _verify(weights.parent, sums.read_bytes(), (weights.name, weights.with_suffix(".json").name), place)
    return model


def _verify(folder: Path, sums: bytes, names: tuple[str, ...], place: str) -> None:
    """That those of the named files which the sums tell of are what they were. README.md may be edited."""
    expected = _parse(sums)
    for name in names:
        if name not in expected or not (folder / name).is_file():
            continue  # what is missing is said by whoever loads it
        with (folder / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected[name]:
                raise AgfaError(
                    f"{name} in {place} is not the file that its {SUMS} tells of: it is damaged, or just being "
                    "replaced; try again, or push it anew"
                )


def _parse(sums: bytes) -> dict[str, str]:
    lines = (line.split(maxsplit=1) for line in sums.decode(errors="replace").splitlines())
    return {line[1].removeprefix("*"): line[0] for line in lines if len(line) == 2}


# --- addresses


@contextmanager
def _from_address(address: str, progress: Progress | None) -> Iterator[Path]:
    """The model at an address: from the cache if it was pushed with sums and is there, else brought here.

    A cached model is found by its sums, so it is never an old one.
    """
    root, weights = address.rstrip("/"), WEIGHTS
    if root.endswith(".safetensors"):
        root, _, weights = root.rpartition("/")
    card = f"{weights.removesuffix('.safetensors')}.json"
    sums = _read(f"{root}/{SUMS}")
    if sums is None or weights not in _parse(sums):
        with tempfile.TemporaryDirectory() as folder:
            _bring(root, Path(folder), (weights, card), address, progress)
            yield Path(folder, weights)
        return
    kept = cache_folder() / "models" / hashlib.sha256(sums).hexdigest()[:32]
    if not kept.exists():
        with _made(kept) as draft:
            _bring(root, draft, (weights, card, README), address, progress)
            _verify(draft, sums, (weights, card, README), address)
            put(draft / SUMS, sums)
    yield _verified(kept / weights, str(kept)) if weights != WEIGHTS else _verified(kept, str(kept))


def _bring(root: str, folder: Path, names: tuple[str, ...], address: str, progress: Progress | None) -> None:
    for name in names:
        if name != README:
            replace(folder / name, partial(_copy, f"{root}/{name}", progress=progress, address=address))
        elif (text := _read(f"{root}/{name}")) is not None:
            put(folder / name, text)


def _copy(source: str, file: IO[bytes], progress: Progress | None, address: str) -> None:
    """Write what is at an address to a file."""
    import fsspec

    done = 0
    with _plain_errors(address):
        files, path = fsspec.url_to_fs(source)
        try:
            opened = files.open(path, "rb")
        except FileNotFoundError:
            raise UsageError(f"no {source}; a model is its .safetensors and its .json together") from None
        with opened:
            total = getattr(opened, "size", None) or 0
            while piece := opened.read(PIECE):
                file.write(piece)
                done += len(piece)
                if progress is not None:
                    progress(done, total)


def _read(address: str) -> bytes | None:
    """A small file at an address; None if there is none."""
    import fsspec

    with _plain_errors(address):
        try:
            files, path = fsspec.url_to_fs(address)
            content: bytes = files.cat_file(path)
        except FileNotFoundError:
            return None
        return content


def _to_address(files: dict[str, bytes], address: str, progress: Progress | None) -> None:
    """Write all files in one of fsspec's transactions, in which none is there before all are."""
    import fsspec

    total, done = sum(map(len, files.values())), 0
    with _plain_errors(address):
        system, root = fsspec.url_to_fs(address.rstrip("/"))
        if "file" in (system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)):
            for name, content in files.items():  # fsspec's own would go by way of another disk
                put(Path(root) / name, content)
            return
        try:
            system.makedirs(root, exist_ok=True)
            with system.transaction:
                for name, content in files.items():
                    with system.open(f"{root}/{name}", "wb") as file:
                        for start in range(0, len(content), PIECE):
                            file.write(content[start : start + PIECE])
                            done += min(PIECE, len(content) - start)
                            if progress is not None:
                                progress(done, total)
        except NotImplementedError:
            raise UsageError(
                f"nothing can be written to {address}; give a bucket, a folder or hf:OWNER/NAME"
            ) from None
        system.invalidate_cache()
        for name, content in files.items():
            if system.cat_file(f"{root}/{name}") != content:
                raise AgfaError(f"{name} did not arrive whole at {address}; push it again")


@contextmanager
def _plain_errors(address: str) -> Iterator[None]:
    """What fsspec and the libraries below it raise, in one line."""
    try:
        yield
    except AgfaError:
        raise
    except (ImportError, ValueError) as error:  # a protocol that nobody knows, or whose package is not installed
        raise UsageError(f"{address}: {_first_line(error)}") from error
    except Exception as error:
        raise AgfaError(f"{address} cannot be reached: {_first_line(error)}") from error


# --- the hub


def _from_hub(place: str) -> Path:
    """The model's files in the hub's cache, brought there if they are not; without a network, what is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    repository, revision = _repository(place)
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(FILES)))
    except HFValidationError as error:
        raise UsageError(f"{place}: {_first_line(error)}") from error
    except Exception as error:  # the hub's own, httpx's and the disk's
        raise AgfaError(f"{place} cannot be had from the hub: {_first_line(error)}") from error


def _to_hub(files: dict[str, bytes], place: str) -> None:
    """One commit; whoever is logged in must be allowed to make it. A repository that is new is private."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HFValidationError

    repository, branch = _repository(place)
    additions = [CommitOperationAdd(name, content) for name, content in files.items()]
    try:
        hub = HfApi()
        hub.create_repo(repository, private=True, exist_ok=True)
        if branch is not None:
            hub.create_branch(repository, branch=branch, exist_ok=True)
        hub.create_commit(repository, additions, commit_message="Push a model of agfa", revision=branch)
    except HFValidationError as error:
        raise UsageError(f"{place}: {_first_line(error)}") from error
    except Exception as error:
        raise AgfaError(f"{place} did not take the model: {_first_line(error)}") from error


def _repository(place: str) -> tuple[str, str | None]:
    name, mark, revision = place.removeprefix(HUB).partition("@")
    if name.count("/") != 1 or (mark and not revision):
        raise UsageError(f"{place} is no repository of the hub; it is hf:OWNER/NAME, or hf:OWNER/NAME@REVISION")
    return name, revision or None


# --- both


@contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to fill, which is moved there when it is full."""
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield draft
        settle(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
