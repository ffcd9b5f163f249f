"""Where the bytes of an image are: in a file here, in a file elsewhere, in a row of a Parquet file."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, overload

import numpy as np
import numpy.typing as npt
import polars as pl

BLOCK = 256  # rows of a Parquet file read together
BLOCKS = 4  # read blocks that a file keeps


class Source(Protocol):
    """One image file's bytes, wherever they lie; a Path is one. Errors call it what it is as text."""

    def read_bytes(self) -> bytes:
        """All of them."""


@dataclass(frozen=True)
class RemoteFile:
    """A file at an address that fsspec understands: http, s3, gs, hf, memory, ..."""

    address: str

    def read_bytes(self) -> bytes:
        """Fetch it."""
        import fsspec

        files, path = fsspec.url_to_fs(self.address)
        try:
            content: bytes = files.cat_file(path)
        except FileNotFoundError as error:  # some of fsspec's say no more than the address
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.address) from error
        return content

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True)
class Files(Sequence[Source]):
    """Files by name: relative to a folder, absolute, or an address. Objects are made as asked for, to save memory."""

    folder: Path
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    @overload
    def __getitem__(self, i: int) -> Source: ...
    @overload
    def __getitem__(self, i: slice) -> Files: ...
    def __getitem__(self, i: int | slice) -> Source | Files:
        if isinstance(i, slice):
            return Files(self.folder, self.names[i])
        name = self.names[i]
        return RemoteFile(name) if "://" in name else self.folder / name


@dataclass(frozen=True)
class Shard:
    """A Parquet file whose rows hold image files: binary, or the struct {bytes, path} of Hugging Face.

    Neighbouring rows are read together and kept for a while, as a dataset is read in order.
    """

    path: Path
    column: str
    _blocks: OrderedDict[int, list[bytes | None]] = field(default_factory=OrderedDict, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def image(self, row: int) -> bytes | None:
        """The bytes in a row, if there are any."""
        block, place = divmod(row, BLOCK)
        with self._lock:  # or every thread would read the same block
            if block not in self._blocks:
                self._blocks[block] = self._read(block * BLOCK)
            self._blocks.move_to_end(block)
            if len(self._blocks) > BLOCKS:
                self._blocks.popitem(last=False)
            return self._blocks[block][place]

    def _read(self, start: int) -> list[bytes | None]:
        column = pl.col(self.column)
        table = pl.scan_parquet(self.path, glob=False)
        if table.collect_schema()[self.column] != pl.Binary:
            column = column.struct.field("bytes")
        return table.slice(start, BLOCK).select(column.alias("bytes")).collect()["bytes"].to_list()


@dataclass(frozen=True)
class Row:
    """An image file in a row of a Parquet file, counted from 0."""

    shard: Shard
    row: int

    def read_bytes(self) -> bytes:
        """Read it, and its neighbours with it."""
        content = self.shard.image(self.row)
        if content is None:
            raise ValueError(f"no bytes in its column {self.shard.column!r}")
        return content

    def __str__(self) -> str:
        return f"{self.shard.path}:{self.row}"


@dataclass(frozen=True, eq=False)
class Rows(Sequence[Source]):
    """Image files in rows of Parquet files: of image i, the number of its shard and its row there."""

    shards: tuple[Shard, ...]
    shard: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.row)

    @overload
    def __getitem__(self, i: int) -> Source: ...
    @overload
    def __getitem__(self, i: slice) -> Rows: ...
    def __getitem__(self, i: int | slice) -> Source | Rows:
        if isinstance(i, slice):
            return Rows(self.shards, self.shard[i], self.row[i])
        return Row(self.shards[int(self.shard[i])], int(self.row[i]))


def stamp(source: Source) -> str:
    """What changes when a file on this machine does: its size and time. Of a remote file nothing: it is not asked."""
    path = source.shard.path if isinstance(source, Row) else source
    if not isinstance(path, Path):
        return ""
    try:
        status = path.stat()
    except OSError as error:  # whoever reads it will say so
        return error.strerror or str(error)
    return f"{status.st_size}\0{status.st_mtime_ns}"


def printable(name: str) -> str:
    """A file's name with a mark for each byte that is no text, which no terminal could print."""
    return name.encode(errors="surrogateescape").decode(errors="replace")
