"""What tests of the server share: a server in a process of its own, and requests to it without a library's weight."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

BOUNDARY = "an-image-never-holds-this"


@dataclass(frozen=True)
class Served:
    """`agfa serve`, as a person starts it."""

    url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])


@contextmanager
def serving(model: Path, *flags: object) -> Iterator[Served]:
    """A server on a free port of this machine; it is ended in the end, however that is."""
    command = [sys.executable, "-m", "agfa", "serve", str(model), "--port", "0", *map(str, flags)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if " at http" not in line:
            raise AssertionError(f"the server did not start: {line}{process.communicate()[1]}")
        yield Served(line.split(" at ")[1].split()[0], process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def png(size: tuple[int, int] = (24, 20), seed: int = 0) -> bytes:
    """An image file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def upload(contents: list[bytes], path: str = "/predict", field: str = "images") -> bytes:
    """A whole HTTP request with image files in it."""
    parts = b"".join(
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{field}"; filename="{i}.png"\r\n\r\n'.encode()
        + content
        + b"\r\n"
        for i, content in enumerate(contents)
    )
    body = parts + f"--{BOUNDARY}--\r\n".encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary={BOUNDARY}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclass
class Load:
    """What clients saw: when each request was answered, and how long that took."""

    statuses: Counter[int]
    seconds: list[float]
    lost: int = 0

    def __add__(self, more: Load) -> Load:
        return Load(self.statuses + more.statuses, self.seconds + more.seconds, self.lost + more.lost)

    def percentile(self, share: float) -> float:
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(share * len(self.seconds)))]


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return int(head.split(None, 2)[1]), await reader.readexactly(length)


async def _client(port: int, requests: Iterator[bytes], load: Load, until: float) -> None:
    """One request after another on one connection; a request that gets no answer is lost."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.monotonic() < until and (request := next(requests, None)) is not None:
        start = time.monotonic()
        writer.write(request)
        try:
            status, _ = await _answer(reader)
        except (OSError, EOFError):
            load.lost += 1
            break
        load.seconds.append(time.monotonic() - start)
        load.statuses[status] += 1
    writer.close()


def besiege(port: int, requests: list[bytes], clients: int, seconds: float) -> tuple[Load, float]:
    """So many clients for so long, each starting the next request when it has an answer; and how long it took."""

    async def play() -> tuple[Load, float]:
        load, start = Load(Counter(), []), time.monotonic()
        shared = itertools.cycle(requests)
        await asyncio.gather(*(_client(port, shared, load, start + seconds) for _ in range(clients)))
        return load, time.monotonic() - start

    return asyncio.run(play())


def answers(port: int, requests: list[bytes], clients: int) -> list[Any]:
    """What each request is answered, in order; asked by so many clients at a time."""

    async def play() -> list[Any]:
        said: list[Any] = [None] * len(requests)
        numbered = iter(enumerate(requests))

        async def client() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for i, request in numbered:
                writer.write(request)
                status, body = await _answer(reader)
                assert status == 200, body
                said[i] = json.loads(body)
            writer.close()

        await asyncio.gather(*(client() for _ in range(clients)))
        return said

    return asyncio.run(play())
