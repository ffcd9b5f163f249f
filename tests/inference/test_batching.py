"""Dynamic batching: no item waits for company, none is lost, and whoever gives up is not computed for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from agfa.inference.batching import Batcher


class Model:
    """Doubles numbers, once it is let go, and notes its batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go = threading.Event()
        self.go.set()

    def __call__(self, batch: list[int]) -> list[int]:
        self.batches.append(batch)
        assert self.go.wait(10)
        if -1 in batch:
            raise ValueError("a bad number")
        return [2 * number for number in batch]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_lone_item_is_answered_at_once_and_the_rest_in_batches() -> None:
    async def play() -> None:
        model = Model()
        batcher = Batcher(model, most=4)
        model.go.clear()
        first = asyncio.create_task(batcher([1]))
        await until(lambda: model.batches == [[1]])
        others = [asyncio.create_task(batcher([n, n + 1])) for n in (10, 20, 30)]
        await until(lambda: len(batcher) == 6)
        model.go.set()
        assert await first == [2]
        assert await asyncio.gather(*others) == [[20, 22], [40, 42], [60, 62]]
        assert model.batches == [[1], [10, 11, 20, 21], [30, 31]]
        assert await batcher([5]) == [10]  # it starts again
        assert await batcher([]) == []
        batcher.close()

    asyncio.run(play())


def test_a_failure_is_told_to_those_it_concerns() -> None:
    async def play() -> None:
        model = Model()
        batcher = Batcher(model, most=2)
        with pytest.raises(ValueError, match="a bad number"):
            await batcher([1, -1])
        assert await batcher([3]) == [6]
        batcher.close()

    asyncio.run(play())


def test_nothing_is_computed_for_whoever_gave_up() -> None:
    async def play() -> None:
        model = Model()
        batcher = Batcher(model, most=8)
        model.go.clear()
        first = asyncio.create_task(batcher([1]))
        await until(lambda: model.batches == [[1]])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await batcher([2, 3])
        last = asyncio.create_task(batcher([4]))
        await until(lambda: len(batcher) == 3)
        model.go.set()
        assert [await first, await last] == [[2], [8]]
        assert model.batches == [[1], [4]]
        batcher.close()

    asyncio.run(play())


def test_other_work_takes_its_turn_in_the_same_thread() -> None:
    async def play() -> None:
        batcher = Batcher(lambda batch: [threading.get_ident()] * len(batch), most=8)
        (thread,) = await batcher([1])
        assert await batcher.alone(threading.get_ident) == thread != threading.get_ident()
        batcher.close()

    asyncio.run(play())
