"""The server: one process that answers over HTTP what the predictor answers, and has a page to try images on."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import FastAPI, File, Request, Response, Security, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from torch import Tensor

from agfa import __version__
from agfa.errors import UsageError
from agfa.inference.batching import Batcher
from agfa.inference.gate import BUSY, Gate, refusal
from agfa.inference.imagine import Imagination, Imagined, imagine
from agfa.inference.limits import Limits, read_image
from agfa.inference.meter import Meter
from agfa.inference.page import page
from agfa.inference.pictures import square
from agfa.inference.predictor import Prediction, Predictor

IMAGINING = 8  # images at a time whose worst case is waited for: each is some forty passes through the network
GUARDED = frozenset({"/predict", "/imagine", "/model", "/metrics"})


@dataclass(frozen=True, kw_only=True)
class Named(Prediction):
    """What the model says of one uploaded image."""

    image: str


class Answers(BaseModel):
    """What the model says of each image, in the order in which they came."""

    predictions: list[Named]


class About(BaseModel):
    """What a client has to know of the model and of what it may send."""

    classes: list[str]
    algorithm: str
    backbone: str
    sources: list[str]
    image_size: int
    imagines: bool
    largest_request: int
    most_images: int


class Refused(BaseModel):
    """One line on what is wrong."""

    error: str


def make_app(
    predictor: Predictor,
    imagination: Imagination | None = None,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    batch_size: int = 64,
) -> FastAPI:
    """The application. `token`: what all but the page itself and /healthz ask for; `batch_size`: of the model."""
    limits = limits or Limits()
    card = predictor.card
    if card.channels not in (1, 3):
        raise UsageError(f"the model takes images of {card.channels} channels, and uploaded ones have 1 or 3")
    meter = Meter()
    readers = ThreadPoolExecutor(os.cpu_count(), "reader")

    def answer(batch: list[Tensor]) -> list[Prediction]:
        meter.batches.observe(len(batch))
        return predictor.answer(torch.stack(batch))

    batcher = Batcher(answer, batch_size)
    inside = 0  # images that are read, wait, or are answered now
    meter.waiting.set_function(lambda: inside)
    imagining = asyncio.Semaphore(IMAGINING)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        batcher.close()
        readers.shutdown()

    app = FastAPI(
        title="agfa",
        summary="Classes of images, how sure the model is, and the worst case it imagined.",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # those pages are fetched from elsewhere
        redoc_url=None,
    )
    app.add_middleware(Gate, limits=limits, token=token, guarded=GUARDED, observe=meter.request)
    _answer_errors(app)
    # The gate asks for the token, before any of a body is read; this says so in the schema.
    asking: dict[str, Any] = {"dependencies": [Security(HTTPBearer(auto_error=False))]} if token else {}
    denied = (401,) if token else ()

    async def read(upload: UploadFile) -> tuple[str, Tensor]:
        """Its name, and its pixels made ready for the model."""
        name = (upload.filename or "image").encode(errors="replace").decode()[-200:]
        content = await upload.read()

        def decode() -> Tensor:
            return square(read_image(content, name, card.channels, limits), card.channels, card.image_size)

        return name, await asyncio.get_running_loop().run_in_executor(readers, decode)

    uploads = (400, *denied, 408, 413, 415, 422, 503, 504)

    @app.post("/predict", responses=_refusals(*uploads), response_model=Answers, **asking)
    async def predict(images: Annotated[list[UploadFile], File(description="image files", min_length=1)]) -> Response:
        """Name the class of each image, with its probability and the posterior's disagreement."""
        nonlocal inside
        n = len(images)
        if n > limits.count:
            raise HTTPException(413, f"{n} images; a request may have {limits.count}")
        if inside + n > limits.waiting:
            raise HTTPException(503, "too many images are waiting; try again in a second", BUSY)
        meter.images.inc(n)
        inside += n
        try:
            ready = await asyncio.gather(*map(read, images))
            predictions = await batcher([pixels for _, pixels in ready])
        finally:
            inside -= n
        named = [{**vars(said), "image": name} for (name, _), said in zip(ready, predictions, strict=True)]
        return JSONResponse({"predictions": named})  # not through Answers, which would check each number again

    @app.post("/imagine", responses=_refusals(404, *uploads), **asking)
    async def worst_case(image: Annotated[UploadFile, File(description="an image file")]) -> Imagined:
        """Imagine the domain in which the decision on this image is hardest to keep."""
        if imagination is None:
            raise HTTPException(
                404, "this model imagines no domain: another method trained it, or its generator is missing"
            )
        if imagining.locked():
            raise HTTPException(503, "too many images are being imagined; try again in a second", BUSY)
        async with imagining:
            _, pixels = await read(image)
            return await batcher.alone(lambda: imagine(predictor, imagination, pixels))

    @app.get("/model", responses=_refusals(*denied), **asking)
    async def model() -> About:
        """What the model is, and what may be sent."""
        return About(
            classes=list(card.classes),
            algorithm=card.algorithm,
            backbone=card.backbone,
            sources=list(card.sources),
            image_size=card.image_size,
            imagines=imagination is not None,
            largest_request=limits.size,
            most_images=limits.count,
        )

    @app.get("/healthz")
    async def health() -> dict[str, str]:
        """Whether the server is there; no token is asked for."""
        return {"status": "ok"}

    text: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @app.get("/metrics", response_class=Response, responses=text | _refusals(*denied), **asking)
    async def metrics() -> Response:
        """Counts and times, as Prometheus reads them."""
        return Response(*meter.page())

    html, policy = page()

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def root() -> HTMLResponse:
        return HTMLResponse(html, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})

    return app


def _refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": Refused} for status in statuses}


def _answer_errors(app: FastAPI) -> None:
    """Every error is one line of JSON."""

    @app.exception_handler(HTTPException)
    async def known(_: Request, error: HTTPException) -> Response:
        return refusal(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            return refusal(415, "images are sent as multipart/form-data: curl -F images=@photo.jpg")
        first = error.errors()[0]
        return refusal(422, f"{'.'.join(map(str, first['loc'][1:]))}: {first['msg']}")

    @app.exception_handler(Exception)
    async def unknown(_: Request, error: Exception) -> Response:
        return refusal(500, f"{type(error).__name__}; the server's log has more")


def run(app: FastAPI, host: str, port: int, started: Callable[[str], None], seconds: float) -> None:
    """Serve until told to stop (SIGTERM, Ctrl-C); what has been accepted by then is answered.

    Args:
        app: what is served.
        host: the address to listen on.
        port: 0 takes a free one.
        started: told the address, once it is listened on.
        seconds: how long to wait for what has been accepted.

    Raises:
        UsageError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with its protocol said, or asyncio does not see that it is TCP, and answers lie 40 ms for want of TCP_NODELAY
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        why = error.strerror or str(error)
        raise UsageError(f"cannot listen on {host}, port {port}: {why}; see --host and --port") from error
    with listener:
        name = f"[{host}]" if ":" in host else host
        started(f"http://{name}:{listener.getsockname()[1]}")
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(seconds) + 5,
        )
        # uvicorn sends itself again the signal that ended it, so as to die of it; here that is the proper end
        before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            uvicorn.Server(config).run(sockets=[listener])
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
