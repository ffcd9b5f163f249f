"""Unpack an archive from the internet: plain files and folders alone, inside, only so much, whole or not at all."""

from __future__ import annotations

import bz2
import fnmatch
import gzip
import lzma
import os
import re
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from agfa.errors import AgfaError
from agfa.files import writing

PIECE = 1 << 20
MAX_FILES = 2_000_000
TAR_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a pipe",
}
COMPRESSED: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
}
DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    struct.error,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
    zipfile.BadZipFile,
)


class UnusableError(AgfaError):
    """What a source gives is of no use; another source may be better."""


class Member(NamedTuple):
    """One entry of an archive. `odd` says what it is where it is neither a file nor a folder that can be read."""

    name: str
    is_folder: bool
    odd: str
    pieces: Callable[[], Iterator[bytes]]


def unpack(archive: Path, folder: Path, *, inside: str = "", max_bytes: int, max_files: int = MAX_FILES) -> None:
    """Make `folder` from what lies under `inside` in a zip or tar; its name does not matter, its first bytes do.

    Nothing that the archive says is believed: bytes are counted as they are written, and every member is checked,
    also those that are not under `inside`.

    Raises:
        UnusableError: it is damaged, or holds what no dataset has; then nothing is left behind.
        AgfaError: it cannot be written; likewise.
    """
    draft = folder.with_name(f".{folder.name}.unpacking")
    shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
    try:
        with writing(folder):
            draft.mkdir(parents=True)
        _fill(draft, _members(archive, max_bytes + 2048 * max_files), inside, max_bytes, max_files)
        with writing(folder):
            draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _fill(draft: Path, members: Iterator[Member], inside: str, max_bytes: int, max_files: int) -> None:
    wanted = [part for part in inside.split("/") if part]
    written = files = 0
    for count, member in enumerate(members, start=1):
        if count > max_files:
            raise UnusableError(f"it has more than {max_files} members")
        parts = plain_parts(member.name)
        if member.odd:
            raise UnusableError(f"its member {member.name!r} is {member.odd}")
        below = parts[len(wanted) :]
        is_wanted = all(fnmatch.fnmatchcase(part, want) for part, want in zip(parts, wanted, strict=False))
        if not is_wanted or not below or parts[0] == "__MACOSX":
            continue
        path = draft.joinpath(*below)
        with writing(path):
            if os.path.lexists(path) and not (member.is_folder and path.is_dir()):
                raise UnusableError(f"its member {member.name!r} is there twice")
            try:
                (path if member.is_folder else path.parent).mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError) as error:
                raise UnusableError(f"its member {member.name!r} lies in a file") from error
            if member.is_folder:
                continue
            with path.open("xb") as file:
                for piece in member.pieces():
                    written += len(piece)
                    if written > max_bytes:
                        raise UnusableError(f"its member {member.name!r} goes beyond the {max_bytes} bytes expected")
                    file.write(piece)
        files += 1
    if not files:
        raise UnusableError(f"it has no files in {inside!r}" if inside else "it has no files")


def plain_parts(name: str) -> tuple[str, ...]:
    """The parts of a member's name, where it is one that stays in its folder on every system."""
    parts = tuple(name.removeprefix("./").removesuffix("/").split("/"))
    if parts in ((".",), ("",)) and name in (".", "./"):
        return ()
    for part in parts:
        if part in ("", ".", "..") or "\\" in part or re.match("[A-Za-z]:", part):
            raise UnusableError(f"its member {name!r} leaves the folder, or has no plain name")
        if re.search("[\0-\x1f\x7f]", part):
            raise UnusableError(f"its member {name!r} has control characters in its name")
    if len(parts) > 32 or len(name) > 1024 or any(len(os.fsencode(part)) > 255 for part in parts):
        raise UnusableError(f"its member {name[:60] + '...'!r} has too long a name")
    return parts


@contextmanager
def _reading() -> Iterator[None]:
    """Turn what the readers of zip and tar raise on a damaged archive into one line."""
    try:
        yield
    except DAMAGE as error:
        raise UnusableError(f"it is damaged ({(str(error).splitlines() or [type(error).__name__])[0]})") from error


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    with _reading(), file:
        while piece := file.read(PIECE):
            yield piece


def _members(archive: Path, max_stream: int) -> Iterator[Member]:
    """What is in an archive, in order; a member is read before the next is asked for."""
    with _reading(), archive.open("rb") as file:
        start = file.read(512)
        file.seek(0)
        if start.startswith((b"PK\3\4", b"PK\5\6")):
            yield from _zip_members(file)
        elif opener := next((opener for first, opener in COMPRESSED.items() if start.startswith(first)), None):
            with opener(file) as stream:
                yield from _tar_members(stream, max_stream)
        elif start[257:262] == b"ustar":
            yield from _tar_members(file, max_stream)
        else:
            raise UnusableError("it is neither a zip nor a tar")


def _zip_members(file: IO[bytes]) -> Iterator[Member]:
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            kind = stat.S_IFMT(info.external_attr >> 16)
            odd = ""
            if info.flag_bits & 0x41:
                odd = "encrypted"
            elif kind == stat.S_IFLNK:
                odd = "a symbolic link"
            elif kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                odd = "a device or a pipe"

            def pieces(info: zipfile.ZipInfo = info) -> Iterator[bytes]:
                with _reading():
                    content = archive.open(info)
                return _pieces(content)

            yield Member(info.orig_filename, info.orig_filename.endswith("/"), odd, pieces)


def _tar_members(stream: IO[bytes], max_stream: int) -> Iterator[Member]:
    bounded = _Bounded(stream, max_stream)
    with tarfile.open(fileobj=cast("IO[bytes]", bounded), mode="r:") as archive:
        for info in archive:
            odd = ""
            if not (info.isreg() or info.isdir()) or info.issparse():
                odd = TAR_KINDS.get(info.type, "of a kind that no dataset needs")

            def pieces(info: tarfile.TarInfo = info) -> Iterator[bytes]:
                content = archive.extractfile(info)
                assert content is not None
                return _pieces(content)

            yield Member(info.name, info.isdir(), odd, pieces)
    if bounded.last != bytes(512):  # a damaged header ends tarfile's loop as the end does
        raise UnusableError("it is damaged (it does not end as a tar does)")
    while bounded.read(PIECE):  # the checksum of what was compressed comes last
        pass


class _Bounded:
    """A tar's bytes up to a limit, in reads that fit in memory: a header may claim any length for the next one."""

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self.stream, self.limit, self.last = stream, limit, b""

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= 4 * PIECE:
            raise UnusableError("a header in it is longer than any should be")
        self.last = self.stream.read(size)
        self.seek(self.stream.tell())
        return self.last

    def seek(self, position: int) -> int:
        if position > self.limit:
            raise UnusableError("it goes beyond the size expected")
        return position if position == self.stream.tell() else self.stream.seek(position)

    def tell(self) -> int:
        return self.stream.tell()
