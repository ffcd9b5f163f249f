"""What is asked of a request before any of it is kept: the token, the kind, the size; and how long it may take."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agfa.inference.limits import Limits

DRAINED = 16  # times the largest request: what is read and thrown away so that a client hears why it is refused
BUSY = {"Retry-After": "1"}
Observe = Callable[[str, int, float], None]  # (path, status, seconds)


def refusal(status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """What every refused request is answered."""
    return JSONResponse({"error": " ".join(text.split())}, status, headers)


class Gate:
    """Lets requests through to `app`: those to `guarded` paths with the token, within the limits."""

    def __init__(
        self, app: ASGIApp, *, limits: Limits, token: str | None, guarded: frozenset[str], observe: Observe
    ) -> None:
        self.app, self.limits, self.token, self.guarded, self.observe = app, limits, token, guarded, observe
        self.held = 0  # bytes of the requests that are inside, those included that are still to come

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the application answer."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        started, status, arrived, came = time.perf_counter(), 0, 0, False
        size = self._announced(scope)

        async def counted() -> Message:
            nonlocal arrived, came
            message = await receive()
            arrived += len(message.get("body", b""))
            came = came or not message.get("more_body", False)
            if arrived > self.limits.size:  # of a length that was not announced
                if not came:
                    await self._drain(receive)
                raise HTTPException(413, self._too_large())
            return message

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        refused = self._refused(scope, size)
        held = size if refused is None else 0
        self.held += held
        try:
            async with asyncio.timeout(self.limits.seconds) as clock:
                if refused is None:
                    await self.app(scope, counted, noted)
                else:
                    if b"expect" not in dict(scope["headers"]):  # who asks first has sent nothing yet
                        await self._drain(receive)
                    await refused(scope, receive, noted)
        except TimeoutError:
            if not clock.expired():
                raise
            if not status:
                what = "no answer" if came else "the request did not come"
                await refusal(504 if came else 408, f"{what} within {self.limits.seconds:g} s")(scope, receive, noted)
        finally:
            self.held -= held
            self.observe(scope["path"], status or 500, time.perf_counter() - started)

    def _announced(self, scope: Scope) -> int:
        headers = Headers(scope=scope)
        if "transfer-encoding" in headers:
            return self.limits.size
        length = headers.get("content-length", "0")
        return int(length) if length.isdecimal() else 0

    def _refused(self, scope: Scope, size: int) -> JSONResponse | None:
        headers = Headers(scope=scope)
        if scope["path"] in self.guarded and self.token is not None:
            given = headers.get("authorization", "")
            if not secrets.compare_digest(given.encode(), f"Bearer {self.token}".encode()):
                return refusal(
                    401, "a token is asked for: Authorization: Bearer TOKEN", {"WWW-Authenticate": "Bearer"}
                )
        if size > self.limits.size:
            return refusal(413, self._too_large())
        if self.held + size > self.limits.uploads * self.limits.size:
            return refusal(503, "too much is being uploaded; try again in a second", BUSY)
        return None

    async def _drain(self, receive: Receive) -> None:
        """Read to the end what will not be used: a client that is cut off while it sends never sees the answer."""
        left = DRAINED * self.limits.size
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            if not message.get("more_body", False):
                return

    def _too_large(self) -> str:
        return f"the request is larger than {self.limits.size / 2**20:g} MB"
