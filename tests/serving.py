"""A server on this machine that can be cut, forgetful, changed, or another altogether."""

from __future__ import annotations

import hashlib
import http.server
import re
import time
from collections.abc import Callable
from pathlib import Path

NOW = (0.0, 0.0)  # no waiting before new tries


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; what it sent of each, and which requests it saw, is counted.

    `cuts` are the byte positions at which it breaks the connection, once each; `odd` answers a path in another way.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cuts: list[int] = []
        self.odd: dict[str, Callable[[Handler], None]] = {}
        self.sent: dict[str, int] = {}
        self.ranges: list[str | None] = []
        self.resumes = self.names_versions = self.says_length = True
        self.pause = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_: object) -> None:
        """Clients that go away are expected."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        server.ranges.append(self.headers.get("Range"))
        path = self.path.partition("?")[0]
        if path in server.odd:
            return server.odd[path](self)
        if self.path not in server.files:
            return self.send_error(404)
        content = server.files[self.path]
        etag = f'"{hashlib.sha256(content).hexdigest()[:10]}"'
        start, wanted = 0, re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if wanted and server.resumes and self.headers.get("If-Range", etag) == etag:
            start = int(wanted[1])
            if start >= len(content):
                return self.send_error(416)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        if server.says_length:
            self.send_header("Content-Length", str(len(content) - start))
        if server.names_versions:
            self.send_header("ETag", etag)
        self.send_header("Content-Type", "application/octet-stream")
        self.end_headers()
        end = next((cut for cut in server.cuts if cut > start), len(content))
        if end in server.cuts:
            server.cuts.remove(end)
        for place in range(start, end, 1 << 14):
            piece = content[place : min(end, place + (1 << 14))]
            self.wfile.write(piece)
            server.sent[self.path] = server.sent.get(self.path, 0) + len(piece)
            time.sleep(server.pause)

    def log_message(self, *_: object) -> None:
        pass


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
