"""One thread that makes calls for an event loop, one after the other.

``run_in_executor`` does the same by way of two futures that watch each other, and each of them takes its own round of
the event loop to be heard of. Here the result goes straight into the future that is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

__all__ = ["Worker"]

_T = TypeVar("_T")


class Worker:
    """A thread that begins with the first call and ends with ``stop``."""

    def __init__(self, name: str) -> None:
        """Prepare the thread.

        Args:
            name: of the thread.
        """
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=_serve, args=(self._calls,), name=name, daemon=True)
        self._is_started = False

    def call(self, function: Callable[..., _T], *args: Any) -> asyncio.Future[_T]:
        """Call a function in the thread, after the calls that came before.

        Args:
            function: what to call.
            args: with what.
        Returns:
            Its result as a future of the running loop. Who stops waiting for it does not stop the call.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()

        def make() -> None:
            try:
                result = function(*args)
            except BaseException as error:
                tell(future.set_exception, error)
            else:
                tell(future.set_result, result)

        def tell(put: Callable[[Any], None], value: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(lambda: None if future.done() else put(value))

        self._calls.put(make)
        if not self._is_started:
            self._thread.start()
            self._is_started = True
        return future

    def stop(self) -> None:
        """End the thread after the calls made so far, and wait for that."""
        if self._is_started:
            self._calls.put(None)
            self._thread.join()


def _serve(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    """Make calls until there is to be none; it knows nothing but them, so a worker that is forgotten can go."""
    while (call := calls.get()) is not None:
        call()
        del call  # what it was given and returned is not kept while nothing is called
