"""A server for the tests of downloads."""

import threading
from collections.abc import Iterator

import pytest

from serving import Server


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()
