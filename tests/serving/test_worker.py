"""The engine's thread: calls in order, results and errors back in the loop, and an end that waits."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from purestep.serving.worker import Worker


def test_calls_are_made_one_after_the_other_in_one_other_thread() -> None:
    """Calls given at once run in order, none beside another, in a thread that is not the loop's; each gets its own."""

    async def run() -> tuple[list[int], list[int], set[int]]:
        worker, seen, threads, inside = Worker("test"), [], set(), threading.Lock()

        def call(number: int) -> int:
            assert inside.acquire(blocking=False), "two calls at a time"
            seen.append(number)
            threads.add(threading.get_ident())
            time.sleep(0.001)
            inside.release()
            return number * number

        results = await asyncio.gather(*(worker.call(call, number) for number in range(8)))
        worker.stop()
        return seen, results, threads

    seen, results, threads = asyncio.run(run())
    assert seen == list(range(8))
    assert results == [number * number for number in range(8)]
    assert len(threads) == 1
    assert threads.isdisjoint({threading.get_ident()})


class Unusual(BaseException):
    """No ``Exception``."""


@pytest.mark.parametrize("error", [ValueError("no"), Unusual()])
def test_an_error_reaches_who_waits_and_the_thread_goes_on(error: BaseException) -> None:
    """Whatever a call raises is raised where its result is awaited; later calls are made."""

    def fail() -> None:
        raise error

    async def run() -> int:
        worker = Worker("test")
        with pytest.raises(type(error)):
            await worker.call(fail)
        result = await worker.call(lambda: 7)
        worker.stop()
        return result

    assert asyncio.run(run()) == 7


def test_who_stops_waiting_does_not_stop_the_call() -> None:
    """A cancelled wait leaves the call running to its end, and later ones still get their results."""

    async def run() -> tuple[bool, str]:
        worker, begun, ended = Worker("test"), threading.Event(), threading.Event()

        def slow() -> None:
            begun.set()
            time.sleep(0.05)
            ended.set()

        waiting = asyncio.ensure_future(worker.call(slow))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        waiting.cancel()
        said = await worker.call(lambda: "next")
        worker.stop()
        return ended.is_set(), said

    assert asyncio.run(run()) == (True, "next")


def test_stopping_waits_for_the_calls_made_so_far() -> None:
    """After ``stop`` every call has been made and the thread is gone; one that never called has no thread to end."""
    ended = threading.Event()

    async def begin(worker: Worker) -> None:
        worker.call(lambda: (time.sleep(0.05), ended.set()))

    worker = Worker("stopping")
    asyncio.run(begin(worker))  # its loop is closed by the time of the result, which then nobody hears
    worker.stop()
    assert ended.is_set()
    assert all(thread.name != "stopping" for thread in threading.enumerate())
    Worker("unused").stop()
