"""What tests of the server share: a server in a process of its own, and requests to it without a library's weight."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

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
