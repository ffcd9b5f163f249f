"""Dynamic batching: what arrives while the model is at work is its next batch.

No request waits for others to come: a lone one is answered at once, and under load batches grow by themselves.
Everything but the model's own work happens on the event loop, so there is nothing to lock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")
Result = TypeVar("Result")


class Batcher(Generic[Item, Answer]):
    """Items in, their answers out; `answer` is given up to `most` at a time, in a thread of its own."""

    def __init__(self, answer: Callable[[list[Item]], Sequence[Answer]], most: int) -> None:
        self.answer, self.most = answer, most
        self._waiting: deque[tuple[Item, asyncio.Future[Answer]]] = deque()
        self._thread = ThreadPoolExecutor(1, "model")
        self._at_work: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """How many items wait for the model."""
        return len(self._waiting)

    async def __call__(self, items: Sequence[Item]) -> list[Answer]:
        """The answers to all of `items`, in order."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Answer]] = [loop.create_future() for _ in items]
        self._waiting.extend(zip(items, futures, strict=True))
        if self._at_work is None:
            self._at_work = asyncio.create_task(self._work())
        try:
            return list(await asyncio.gather(*futures))
        finally:
            for future in futures:
                future.cancel()  # whoever gave up is not computed for; nothing where all is answered

    async def alone(self, work: Callable[[], Result]) -> Result:
        """Do something else in the model's thread, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _work(self) -> None:
        """Answer until nothing waits."""
        while batch := self._next():
            try:
                answers = await self.alone(partial(self.answer, [item for item, _ in batch]))
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
            else:
                for (_, future), answer in zip(batch, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)
        self._at_work = None

    def _next(self) -> list[tuple[Item, asyncio.Future[Answer]]]:
        batch: list[tuple[Item, asyncio.Future[Answer]]] = []
        while self._waiting and len(batch) < self.most:
            item, future = self._waiting.popleft()
            if not future.done():
                batch.append((item, future))
        return batch

    def close(self) -> None:
        """End the thread, after what it does now."""
        self._thread.shutdown()
