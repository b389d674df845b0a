"""The engine over ranks beside a test: rank 0 asks, the others take part."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

import attrs
import purestep as ps
import torch
from kit.rank_collectives import joined
from kit.rank_steps import part_of
from kit.serving import heard
from purestep.serving.asks import Ask, Ended
from purestep.serving.engine import Engine, EngineLimits, EngineStatus
from purestep.serving.rank_engine import RankedEngine, Seat, _exchange, serve_rank
from purestep.serving.rank_values import broadcast_value, gather_values

__all__ = ["LIMITS", "Said", "ask_engine", "lose_a_rank", "pass_values"]

LIMITS = EngineLimits(running=2, waiting=8, tokens=600, context=300, page_size=8, budget=256, points=2)
RATIOS = (0, 4, 128)


@attrs.frozen
class Said:
    """What was heard: per ask the tokens, why it ended, its words, and the prompt tokens taken over."""

    replies: tuple[tuple[tuple[int, ...], str, str | None, int], ...]
    status: EngineStatus


@attrs.frozen
class Only:
    """A mask that allows one token, or fails."""

    token: int | None

    def __call__(self, outputs: tuple[int, ...]) -> torch.Tensor:
        if self.token is None:
            raise ValueError(f"no grammar after {len(outputs)} tokens")
        bits = torch.zeros(2, dtype=torch.int32)
        bits[self.token // 32] = 1 << self.token % 32
        return bits


Asked = tuple[Sequence[int], ps.SamplingParams, int | str | None]
"""(prompt, parameters, the only token allowed, "fails", or None); cancelled after a token where parameters say so."""


def ask_engine(parallel: ps.Parallel, rounds: Sequence[Sequence[Asked]], cancel: bool = False) -> Said | None:
    """Ask an engine round by round; None on every rank but 0."""
    model = part_of(parallel, RATIOS, 0)
    limits = attrs.evolve(LIMITS, checks_invariants=True)
    if model.ranks.world.rank:
        serve_rank(model, limits)
        return None

    async def main() -> Said:
        engine = RankedEngine(model, limits) if model.ranks.world.size > 1 else Engine(model, limits)
        await engine.start()
        try:
            replies = []
            for asked in rounds:
                streams = [engine.submit(_ask(*one)) for one in asked]
                if cancel:
                    streams[0].cancel()
                replies += await asyncio.wait_for(asyncio.gather(*(heard(stream) for stream in streams)), 60)
            await asyncio.sleep(0.3)  # a turn clears away what ended last
            return Said(tuple(map(_said, replies)), engine.status())
        finally:
            await engine.stop()

    return asyncio.run(main())


def _ask(prompt: Sequence[int], params: ps.SamplingParams, only: int | str | None) -> Ask:
    mask = None if only is None else Only(None if isinstance(only, str) else only)
    return Ask(prompt_ids=tuple(prompt), params=params, mask=mask)


def _said(reply: tuple[list[int], Ended]) -> tuple[tuple[int, ...], str, str | None, int]:
    tokens, end = reply
    return tuple(tokens), end.reason, end.error, end.n_cached


def lose_a_rank(parallel: ps.Parallel, prompt: Sequence[int], while_idle: bool) -> tuple[str | None, bool, str] | None:
    """Serve, let the last rank die after some turns, and return (error heard, ready afterwards, failure)."""
    model = part_of(parallel, RATIOS, 0)
    last = model.ranks.world.size - 1
    if model.ranks.world.rank == last:
        seat = Seat(Engine(model, LIMITS))
        for _ in range(4):
            _exchange(seat, model.ranks, None)
        os._exit(0)
    if model.ranks.world.rank:
        serve_rank(model, LIMITS)
        return None

    async def main() -> tuple[str | None, bool, str]:
        engine = RankedEngine(model, LIMITS)
        await engine.start()
        error = None
        if not while_idle:
            params = ps.SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=100)
            _, end = await asyncio.wait_for(heard(engine.submit(_ask(prompt, params, None))), 30)
            error = end.error
        for _ in range(300):
            if engine.status().failure is not None:
                break
            await asyncio.sleep(0.1)
        status = engine.status()
        await engine.stop()
        return error, status.is_ready, str(status.failure)

    return asyncio.run(main())


def pass_values(parallel: ps.Parallel, value: Any) -> tuple[Any, list[Any]]:
    """Take over rank 0's value, and hear everybody's."""
    group = joined(parallel).world
    return broadcast_value(value if group.rank == 0 else None, group), gather_values((group.rank, value), group)
