"""The server: it answers what the predictor answers, and refuses the rest in one line with the right status."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

fastapi = pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

from PIL import Image  # noqa: E402  # after they are known to be there

from agfa.errors import UsageError  # noqa: E402
from agfa.inference.imagine import imagination  # noqa: E402
from agfa.inference.limits import Limits  # noqa: E402
from agfa.inference.predictor import Prediction, Predictor, load  # noqa: E402
from agfa.inference.serve import make_app, run  # noqa: E402
from support import CLASSES, Agfa  # noqa: E402
from support_serve import png, upload  # noqa: E402


@pytest.fixture(scope="module")
def predictor(agfa_run: Path) -> Predictor:
    return load(agfa_run)


class Client:
    """Requests to an application, in this process."""

    def __init__(self, app: Any) -> None:
        self.app = app

    def __call__(self, method: str, path: str, **how: Any) -> httpx.Response:
        (response,) = self.together([(method, path, how)])
        return response

    def predict(self, *contents: bytes, **how: Any) -> httpx.Response:
        return self("POST", "/predict", files=[("images", (f"{i}.png", c)) for i, c in enumerate(contents)], **how)

    def together(self, requests: list[tuple[str, str, dict[str, Any]]]) -> list[httpx.Response]:
        async def ask() -> list[httpx.Response]:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await asyncio.gather(*(client.request(method, path, **how) for method, path, how in requests))

        return asyncio.run(ask())


@pytest.fixture(scope="module")
def client(predictor: Predictor, agfa_run: Path) -> Client:
    return Client(make_app(predictor, imagination(agfa_run, predictor.card)))


def small(predictor: Predictor, token: str | None = None, **limits: Any) -> Client:
    return Client(make_app(predictor, limits=replace(Limits(), **limits), token=token))


def error(response: httpx.Response, status: int) -> str:
    """The one line of a refusal."""
    assert response.status_code == status, response.text
    said = response.json()
    assert list(said) == ["error"]
    assert "\n" not in said["error"]
    return str(said["error"])


# --- what it answers


def test_it_answers_what_the_predictor_does(client: Client, predictor: Predictor, images_made_once: Path) -> None:
    files = sorted((images_made_once / "sky").rglob("*.*"))
    want = predictor.predict(files)
    response = client("POST", "/predict", files=[("images", (f.name, f.read_bytes())) for f in files])
    assert response.status_code == 200
    answers = response.json()["predictions"]
    assert [answer["image"] for answer in answers] == [f.name for f in files]
    for said, prediction in zip(answers, want, strict=True):
        assert said["label"] == prediction.label
        assert said["probabilities"] == pytest.approx(prediction.probabilities, abs=1e-5)  # batches differ
        assert said["disagreement"] == pytest.approx(prediction.disagreement, abs=0.02)
        assert tuple(said["probabilities"]) == CLASSES
    singly = client.together([("POST", "/predict", {"files": {"images": f.read_bytes()}}) for f in files])
    for response, prediction in zip(singly, want, strict=True):
        (said,) = response.json()["predictions"]
        assert said["label"] == prediction.label
        assert said["probabilities"] == pytest.approx(prediction.probabilities, abs=1e-5)


def test_the_answer_is_what_its_schema_says(client: Client) -> None:
    schema = client("GET", "/openapi.json").json()
    named = schema["components"]["schemas"]["Named"]
    (said,) = client.predict(png()).json()["predictions"]
    assert set(said) == set(named["properties"]) == {*Prediction.__dataclass_fields__, "image"}
    imagined = client("POST", "/imagine", files={"image": png()})
    assert set(imagined.json()) == set(schema["components"]["schemas"]["Imagined"]["properties"])
    assert set(schema["paths"]) == {"/predict", "/imagine", "/model", "/healthz", "/metrics"}


def test_the_worst_case_starts_at_the_decision(client: Client) -> None:
    said = client("POST", "/imagine", files={"image": png()}).json()
    (alone,) = client.predict(png()).json()["predictions"]
    assert said["judged"][0]["label"] == alone["label"]
    assert len(said["judged"]) == 21


def test_models_without_a_generator_say_so(erm_run: Path) -> None:
    predictor = load(erm_run)
    client = Client(make_app(predictor, imagination(erm_run, predictor.card)))
    assert client("GET", "/model").json()["imagines"] is False
    assert "this model imagines no domain" in error(client("POST", "/imagine", files={"image": png()}), 404)
    (said,) = client.predict(png()).json()["predictions"]
    assert said["disagreement"] is None


def test_a_name_may_be_anything(client: Client) -> None:
    body = upload([png()])
    body = body.partition(b"\r\n\r\n")[2].replace(b'"0.png"', b'"\\ud800 \xff\r.png"')
    for charset in ("utf-8", "raw_unicode_escape", "no-such", "utf-16"):
        kind = f"multipart/form-data; boundary=an-image-never-holds-this; charset={charset}"
        response = client("POST", "/predict", content=body, headers={"Content-Type": kind})
        assert response.status_code in (200, 400, 422), response.text


def test_it_counts(predictor: Predictor) -> None:
    client = small(predictor)
    client.predict(png(), png())
    client.predict(b"text")
    client("GET", "/anything")
    response = client("GET", "/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    for line in (
        'agfa_requests_total{path="/predict",status="200"} 1.0',
        'agfa_requests_total{path="/predict",status="415"} 1.0',
        'agfa_requests_total{path="other",status="404"} 1.0',
        "agfa_images_total 3.0",
        "agfa_batch_images_sum 2.0",
        "agfa_waiting_images 0.0",
    ):
        assert line in lines
    assert client("GET", "/healthz").json() == {"status": "ok"}


def test_the_page_is_whole_and_held_to_this_server(client: Client) -> None:
    response = client("GET", "/")
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'self'" in policy
    assert "{{" not in response.text
    assert "https://" not in response.text


# --- what it refuses


def test_bad_requests(client: Client) -> None:
    assert "0.png: not an image that is read here" in error(client.predict(b"text"), 415)
    assert "1.png: a damaged image" in error(client.predict(png(), png()[:-30]), 422)
    assert "curl -F images=@photo.jpg" in error(client("POST", "/predict", json={"images": "a"}), 415)
    assert "curl -F" in error(client("POST", "/predict"), 415)
    assert "images: Field required" in error(client("POST", "/predict", files={"other": png()}), 422)
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    error(client("POST", "/predict", content=upload([png()]).partition(b"\r\n\r\n")[2], headers=form), 400)
    error(client("GET", "/predict"), 405)
    error(client("GET", "/nothing"), 404)


def test_limits(predictor: Predictor) -> None:
    client = small(predictor, size=10_000, count=3, pixels=24 * 20)
    assert client.predict(png(), png(), png()).status_code == 200
    assert "4 images; a request may have 3" in error(client.predict(*[png()] * 4), 413)
    assert "0.png: 20 x 25 pixels" in error(client.predict(png((25, 20))), 413)
    assert "larger than 0.00953674 MB" in error(client.predict(bytes(20_000)), 413)

    async def endless() -> Any:  # of a length that is not announced
        yield upload([bytes(9_000)]).partition(b"\r\n\r\n")[2][:-40]
        for _ in range(10):
            yield bytes(1_000)

    form = {"Content-Type": "multipart/form-data; boundary=an-image-never-holds-this"}
    assert "larger than" in error(client("POST", "/predict", content=endless(), headers=form), 413)
    assert client.predict(png()).status_code == 200


def test_the_token(predictor: Predictor) -> None:
    client = small(predictor, token="sesame")
    for method, path in (("POST", "/predict"), ("POST", "/imagine"), ("GET", "/model"), ("GET", "/metrics")):
        for given in ({}, {"Authorization": "Bearer open"}, {"Authorization": "Basic sesame"}):
            response = client(method, path, headers=given)
            assert "Authorization: Bearer TOKEN" in error(response, 401)
            assert response.headers["www-authenticate"] == "Bearer"
    assert client.predict(png(), headers={"Authorization": "Bearer sesame"}).status_code == 200
    assert client("GET", "/").status_code == client("GET", "/healthz").status_code == 200
    assert "HTTPBearer" in client("GET", "/openapi.json").text


def test_a_crowd_is_told_to_come_back_and_a_slow_model_is_not_waited_for(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = predictor.answer

    def slow(pixels: Any) -> list[Prediction]:
        time.sleep(0.5)
        return answer(pixels)

    monkeypatch.setattr(predictor, "answer", slow)
    request = ("POST", "/predict", {"files": {"images": png()}})
    responses = small(predictor, waiting=2).together([request] * 8)
    statuses = sorted(response.status_code for response in responses)
    assert statuses == [200] * 2 + [503] * 6
    refused = next(response for response in responses if response.status_code == 503)
    assert "too many images are waiting" in error(refused, 503)
    assert refused.headers["retry-after"] == "1"
    assert "no answer within 0.2 s" in error(small(predictor, seconds=0.2).predict(png()), 504)


def test_uploads_are_bounded_together(predictor: Predictor) -> None:
    client = small(predictor, size=2_000, uploads=1)
    request = ("POST", "/predict", {"files": {"images": png()}})
    responses = client.together([request] * 6)
    assert {response.status_code for response in responses} == {200, 503}
    assert client.predict(png()).status_code == 200  # what was held is given back
    too_large = ("POST", "/predict", {"files": {"images": bytes(9_000)}})
    responses = client.together([too_large, too_large, request, too_large])  # these hold nothing
    assert [response.status_code for response in responses] == [413, 413, 200, 413]


def test_a_broken_model_is_a_500_in_one_line(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> list[Prediction]:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(predictor, "answer", broken)
    client = small(predictor)
    assert "RuntimeError; the server's log has more" in error(client.predict(png()), 500)
    monkeypatch.undo()
    assert client.predict(png()).status_code == 200


def test_channels_that_no_file_has(predictor: Predictor) -> None:
    odd = Predictor(predictor.network, predictor.card.model_copy(update={"channels": 2}))
    with pytest.raises(UsageError, match="images of 2 channels"):
        make_app(odd)


# --- as a process


@pytest.fixture
def listening(predictor: Predictor, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server in this process, in a thread; it stops in the end."""
    import uvicorn

    servers: list[uvicorn.Server] = []
    made = uvicorn.Server.__init__

    def noted(self: uvicorn.Server, *arguments: Any) -> None:
        made(self, *arguments)
        servers.append(self)

    monkeypatch.setattr(uvicorn.Server, "__init__", noted)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # threads have none
    told: list[str] = []
    app = make_app(predictor, limits=replace(Limits(), size=50_000, seconds=1))
    thread = threading.Thread(target=run, args=(app, "127.0.0.1", 0, told.append, 1))
    thread.start()
    deadline = time.monotonic() + 20
    while not (servers and servers[0].started):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield int(told[0].rsplit(":", 1)[1])
    servers[0].should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def exchange(port: int, *pieces: bytes) -> tuple[int, dict[str, Any]]:
    """Send as it is, and read one answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        for piece in pieces:
            connection.sendall(piece)
        answer = connection.makefile("rb")
        status = int(answer.readline().split()[1])
        headers = {}
        while line := answer.readline().strip():
            key, _, value = line.decode().partition(": ")
            headers[key.lower()] = value
        return status, json.loads(answer.read(int(headers["content-length"])))


def test_on_a_real_connection(listening: int) -> None:
    assert exchange(listening, upload([png()]))[0] == 200
    # whoever sends far too much hears why, and is not cut off while sending
    status, said = exchange(listening, upload([bytes(600_000)]))
    assert (status, said["error"]) == (413, "the request is larger than 0.0476837 MB")
    head, _, body = upload([bytes(600_000)]).partition(b"\r\n\r\n")
    unannounced = head.rpartition(b"\r\n")[0] + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    status, said = exchange(listening, unannounced, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    assert (status, said["error"]) == (413, "the request is larger than 0.0476837 MB")
    # who asks first is told before
    head = upload([bytes(600_000)]).partition(b"\r\n\r\n")[0] + b"\r\nExpect: 100-continue\r\n\r\n"
    assert exchange(listening, head)[0] == 413
    # who never sends the rest is not waited for
    status, said = exchange(listening, upload([png()])[:-10])
    assert (status, said["error"]) == (408, "the request did not come within 1 s")
    assert exchange(listening, upload([png()]))[0] == 200


def test_an_answer_does_not_lie_waiting(listening: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TCP_NODELAY, a second answer on a connection comes after 40 ms."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    seen: list[int] = []
    made = H11Protocol.connection_made

    def noted(self: Any, transport: Any) -> None:
        seen.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    monkeypatch.setattr(H11Protocol, "connection_made", noted)
    assert exchange(listening, upload([png()]))[0] == 200
    assert len(seen) == 1
    assert seen[0] != 0


def test_the_command_says_what_is_wrong(agfa: Agfa, agfa_run: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = agfa("serve", agfa_run, "--port", port)
    assert (ended.status, ended.out) == (2, "")
    assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in ended.error
    assert agfa("serve", tmp_path / "none").status == 2
    ended = agfa("serve", agfa_run, "--max-images", 0)
    assert ended.status == 2
    assert "must be above 0" in ended.error


def test_large_photographs_are_not_kept_while_they_wait(predictor: Predictor) -> None:
    """A narrow strip of millions of pixels compresses to little; it waits as what the model sees of it."""
    buffer = io.BytesIO()
    Image.new("RGB", (1, 5_000_000)).save(buffer, "PNG")
    assert len(buffer.getvalue()) < 50_000
    (said,) = small(predictor).predict(buffer.getvalue()).json()["predictions"]
    assert said["label"] in CLASSES
