"""Runs the real engine beside a test: replies heard to their end, engines that leave nothing over, steps held open."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import attrs
import purestep as ps
from purestep.serving.asks import Ended, Sampled
from purestep.serving.engine import Engine, EngineLimits, Stream

__all__ = ["Gate", "greedy", "heard", "require_only_points", "serve"]


def greedy(n_new: int | None = 8, **changes: Any) -> ps.SamplingParams:
    """Parameters of a greedy reply of so many tokens."""
    return ps.SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=n_new, **changes)


async def heard(stream: Stream) -> tuple[list[int], Ended]:
    """Listen to a reply to its end: (tokens, end)."""
    items = [item async for item in stream]
    assert isinstance(items[-1], Ended)
    assert all(isinstance(item, Sampled) for item in items[:-1])
    return [item.token_id for item in items[:-1]], items[-1]


async def require_only_points(engine: Engine) -> None:
    """Of an idle engine's pools nothing is held but by points of reuse, and without those nothing at all."""
    for _ in range(1000):  # what ended last is cleared away by a turn of its own
        if set(engine._pool.ids) == {point.key for point in engine._scheduler.points}:
            break
        await asyncio.sleep(0.005)
    status, pool = engine.status(), engine._pool
    assert (status.running, status.waiting) == (0, 0)
    assert set(pool.ids) == {point.key for point in engine._scheduler.points}
    for key in tuple(pool.ids):
        pool = pool.close(key)
    assert ps.invariants.check(pool.state) == ()
    table, sizes = pool.state.table, pool.state.table.sizes
    free = [len(one) for one in (table.free_rows, table.free_pages, table.free_swa_pages, table.free_c128_pages)]
    assert free == [sizes.requests, sizes.pages, sizes.swa_pages, sizes.c128_pages]


def serve(model: ps.Model, limits: EngineLimits, talk: Any, compiled: Any = None) -> Any:
    """Run a coroutine function over a started engine whose every state is checked; nothing is left afterwards."""

    async def main() -> Any:
        engine = Engine(model, attrs.evolve(limits, checks_invariants=True), compiled=compiled)
        await engine.start()
        try:
            found = await asyncio.wait_for(talk(engine), 120)
            if engine.status().failure is None:
                await require_only_points(engine)
            return found
        finally:
            await engine.stop()
            assert not engine.status().is_ready

    coroutine: Coroutine[Any, Any, Any] = main()
    return asyncio.run(coroutine)


class Gate:
    """Holds the next turn of an engine in its worker thread until the gate is opened.

    Args:
        engine: whose turns are held.
    """

    def __init__(self, engine: Engine) -> None:
        self.entered = threading.Event()
        self.opened = threading.Event()
        turn = engine._turn

        def held(*arguments: Any) -> Any:
            self.entered.set()
            if not self.opened.wait(30):
                raise RuntimeError("the gate was never opened")
            return turn(*arguments)

        engine._turn = held
