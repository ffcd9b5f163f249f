"""The server under load, and told to end: nothing is lost, memory is flat, batches pay."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi")

from PIL import Image

from agfa.data import catalog
from agfa.inference.predictor import load
from support_serve import Load, Served, answers, besiege, png, serving, upload

pytestmark = pytest.mark.slow  # processes, and a minute of 64 clients


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """1,000 images of Digits: 250 of each domain."""
    dataset, _ = catalog.load("digits")
    folder, rng = tmp_path_factory.mktemp("digits"), np.random.default_rng(0)
    files = []
    for domain in dataset.domains:
        assert isinstance(domain.images, np.ndarray)
        for i in rng.choice(len(domain), 250, replace=False):
            files.append(folder / f"{domain.name}-{i}.png")
            Image.fromarray(domain.images[i]).save(files[-1])
    return files


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """AGFA on Digits, briefly."""
    import agfa as package

    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AGFA_CACHE", str(folder / "cache"))
        settings = {"data": "digits", "target": "mnist_m", "steps": 100, "evaluate_every": 50}
        return package.train(algorithm="agfa", out=folder / "digits", **settings).folder


def test_it_is_the_predictor_on_a_thousand_digits(run: Path, digits: list[Path]) -> None:
    want = load(run).predict(digits)
    with serving(run) as served:
        requests = [upload([f.read_bytes() for f in digits[i : i + 100]]) for i in range(0, 1000, 100)]
        requests += [upload([f.read_bytes()]) for f in digits]
        said = [each for answer in answers(served.port, requests, 16) for each in answer["predictions"]]
    assert len(said) == 2000
    apart = 0.0
    for one, prediction in zip(said, want * 2, strict=True):
        assert one["label"] == prediction.label
        apart = max(apart, *(abs(one["probabilities"][k] - p) for k, p in prediction.probabilities.items()))
    print(f"largest difference of a probability: {apart:.2g}")
    assert apart < 1e-4


def resident(served: Served) -> int:
    """Megabytes."""
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


@pytest.mark.parametrize("images", [1, 16])
def test_sixty_four_clients(run: Path, digits: list[Path], images: int) -> None:
    """For 60 s with batches; a tenth of it without them, and by a single client in turn, to compare with."""
    contents = [file.read_bytes() for file in digits]
    requests = [upload(contents[i : i + images]) for i in range(0, 1000 - images + 1, images)]
    with serving(run, "--batch-size", 1) as served:
        besiege(served.port, requests, 64, 1)
        unbatched, took_unbatched = besiege(served.port, requests, 64, 6)
        single = [upload([content]) for content in contents]
        loop, took_loop = besiege(served.port, single, 1, 6)
    with serving(run) as served:
        besiege(served.port, requests, 64, 10)
        memory, load, took = [resident(served)], Load(Counter(), []), 0.0
        for _ in range(6):
            part, seconds = besiege(served.port, requests, 64, 10)
            memory.append(resident(served))
            load, took = load + part, took + seconds
    rate, without = load.statuses[200] * images / took, unbatched.statuses[200] * images / took_unbatched
    in_turn = loop.statuses[200] / took_loop
    print(
        f"{images} image(s) a request: {rate:.0f} images/s, p50 {1e3 * load.percentile(0.5):.0f} ms, "
        f"p99 {1e3 * load.percentile(0.99):.0f} ms; batches of one {without:.0f}; one after another {in_turn:.0f}; "
        f"memory {memory} MB; {dict(load.statuses)}, lost {load.lost}"
    )
    assert set(load.statuses) == {200}
    assert load.lost == 0
    assert max(memory) < memory[0] + 50
    assert rate > without
    if images > 1:
        assert rate > 3 * in_turn


def test_sigterm_lets_it_finish_what_it_accepted(run: Path) -> None:
    """Requests that it has, and one whose body is still coming, are answered; then it ends well."""
    large = png((1500, 1500))
    with serving(run, "--batch-size", 1, "--max-megabytes", 64) as served:

        async def play() -> list[int]:
            readers = []
            slow = upload([large])
            for i in range(12):
                reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
                writer.write(slow[:-100] if i == 0 else slow)
                await writer.drain()
                readers.append((reader, writer))
            await asyncio.sleep(0.5)  # they are there: each takes some 100 ms of decoding
            served.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            readers[0][1].write(slow[-100:])
            return [int((await asyncio.wait_for(reader.readline(), 60)).split()[1]) for reader, _ in readers]

        assert asyncio.run(play()) == [200] * 12
        assert served.process.wait(20) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", served.port), timeout=1)
        assert served.process.stderr is not None
        assert "Traceback" not in served.process.stderr.read()


def test_it_ends_although_a_client_never_sends_the_rest(run: Path) -> None:
    with serving(run, "--max-seconds", 2) as served, socket.create_connection(("127.0.0.1", served.port)) as client:
        client.sendall(upload([png()])[:-10])
        time.sleep(0.5)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0
        assert client.recv(100).startswith(b"HTTP/1.1 408")
