"""How requests of the engine end: cancelled at any moment, failed, or with the engine; once each, and others go on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import attrs
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.models import tiny_model
from kit.serving import Gate, greedy, heard, serve
from kit.steps import examples, ids_of, run_alone
from purestep.model.loading import build_model
from purestep.serving import engine as engine_module
from purestep.serving.asks import Ask, Ended, QueueFullError, Sampled
from purestep.serving.engine import Engine, EngineLimits

PLAIN = tiny_model((0, 4, 128), window=16)
MODEL = build_model(PLAIN.config, PLAIN.params, numerics=ps.Numerics(invariant=True))
LIMITS = EngineLimits(running=4, waiting=32, tokens=2000, context=400, page_size=8, budget=256, points=3)


def test_cancelled_requests_stop_within_two_steps() -> None:
    """A request that is cancelled after its first token ends with "abort" soon; cancelling again does nothing."""

    async def talk(engine: Engine) -> None:
        stream = engine.submit(Ask(prompt_ids=(1, 2, 3), params=greedy(None)))
        mate = engine.submit(Ask(prompt_ids=(4, 5), params=greedy(12)))
        items = aiter(stream)
        await anext(items)
        steps = engine.status().counters["steps"]
        stream.cancel()
        stream.cancel()
        rest = [item async for item in items]
        assert rest[-1].reason == "abort"
        assert engine.status().counters["steps"] - steps <= 2
        assert (await heard(mate))[0] == run_alone(MODEL, [4, 5], 11)[0]
        waiting = engine.submit(Ask(prompt_ids=(1,), params=greedy(3)))
        waiting.cancel()
        assert (await heard(waiting))[1].reason == "abort"
        assert engine.status().counters["aborts"] == 2

    serve(MODEL, LIMITS, talk)


@examples(4)
@given(
    plans=st.lists(
        st.tuples(st.sampled_from((1, 40, 130, 300)), st.integers(0, 7), st.integers(1, 3)), min_size=1, max_size=10
    ),
    tokens=st.sampled_from((400, 2000)),
)
def test_cancelling_at_any_moment(plans: list[tuple[int, int, int]], tokens: int) -> None:
    """KVA-09: cancelled before, in the very tick of, or after its last token, a request ends once and frees once."""

    async def follow(engine: Engine, n: int, after: int, times: int) -> tuple[list[int], list[Ended]]:
        stream = engine.submit(Ask(prompt_ids=tuple(ids_of(n)), params=greedy(6)))
        said: list[int] = []
        ends: list[Ended] = []
        if after == 0:
            stream.cancel()
        async for item in stream:
            if isinstance(item, Sampled):
                said.append(item.token_id)
            else:
                ends.append(item)
            if len(said) == after or ends:
                for _ in range(times):
                    stream.cancel()
        assert stream._queue.empty()
        return said, ends

    async def talk(engine: Engine) -> None:
        found = await asyncio.gather(*(follow(engine, *plan) for plan in plans))
        for (n, after, _), (said, ends) in zip(plans, found, strict=True):
            assert len(ends) == 1
            assert ends[0].reason == ("length" if len(said) == 6 else "abort")
            assert len(said) <= after + 2
            assert said == run_alone(MODEL, ids_of(n), 5)[0][: len(said)]
        assert len((await heard(engine.submit(Ask(prompt_ids=(1, 2), params=greedy(3)))))[0]) == 3

    serve(MODEL, attrs.evolve(LIMITS, tokens=tokens), talk)


def test_nan_fails_its_request_alone() -> None:
    """RES-07: a request whose logits hold NaN ends with an error that says so; the others are answered as alone."""
    embed = MODEL.params.embed.clone()
    embed[9] = torch.nan
    model = attrs.evolve(MODEL, params=attrs.evolve(MODEL.params, embed=embed))

    async def talk(engine: Engine) -> None:
        asks = [Ask(prompt_ids=prompt, params=greedy(2)) for prompt in ((1, 2), (3, 9), (4, 5, 6))]
        replies = await asyncio.gather(*(heard(engine.submit(ask)) for ask in asks))
        assert [end.reason for _, end in replies] == ["length", "error", "length"]
        assert "NaN" in replies[1][1].error
        for ask, (said, end) in zip(asks, replies, strict=True):
            assert end.reason == "error" or said == run_alone(MODEL, ask.prompt_ids, 1)[0]

    serve(model, LIMITS, talk)


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on() -> None:
    """An operator that raises fails the requests of that step; the next request is served."""
    broken = ps.strategies.interrupted(MODEL, "attend", 7, RuntimeError("no such kernel"))

    async def talk(engine: Engine) -> None:
        said, end = await heard(engine.submit(Ask(prompt_ids=(1, 2), params=greedy(50))))
        assert (end.reason, "no such kernel" in end.error) == ("error", True)
        engine.model = MODEL
        assert (await heard(engine.submit(Ask(prompt_ids=(1, 2), params=greedy(4)))))[0][: len(said)] == said

    serve(broken, LIMITS, talk)


def test_nan_in_scores_of_a_prompt() -> None:
    """RES-07: NaN among the scores of a prompt, though its last token has none, is an error of that request alone."""
    windows = tiny_model((0,), window=16)
    embed = windows.params.embed.clone()
    embed[9] = torch.nan
    model = attrs.evolve(windows, params=attrs.evolve(windows.params, embed=embed))

    async def talk(engine: Engine) -> None:
        mate = engine.submit(Ask(prompt_ids=(4, 5), params=greedy(4)))
        scored = engine.submit(Ask(prompt_ids=(9, *[3] * 60), params=greedy(2), prompt_logprobs=2))
        said, end = await heard(scored)
        assert (said, end.reason) == ([], "error")
        assert "NaN" in (end.error or "")
        assert (await heard(mate))[1].reason == "length"

    serve(model, LIMITS, talk)


def test_a_failing_constraint_ends_its_own_request() -> None:
    """A constraint that raises is an error of the request that it came with; those in the same step go on."""

    async def talk(engine: Engine) -> None:
        def broken(outputs: tuple[int, ...]) -> None:
            if outputs:
                raise ValueError("no such rule")

        mate = engine.submit(Ask(prompt_ids=(4, 5), params=greedy(6)))
        said, end = await heard(engine.submit(Ask(prompt_ids=(1, 2), params=greedy(6), mask=broken)))
        assert (len(said), end.reason) == (1, "error")
        assert "no such rule" in (end.error or "")
        assert (await heard(mate))[0] == run_alone(MODEL, [4, 5], 5)[0]

    serve(MODEL, LIMITS, talk)


@pytest.mark.parametrize("way", ["raises", "is cancelled"])
def test_an_engine_that_is_gone_says_so(way: str) -> None:
    """OBS-01: when the loop itself fails or is taken away, every reply ends, the status names it, none is taken."""

    async def talk(engine: Engine) -> None:
        gate = Gate(engine)
        streams = [engine.submit(Ask(prompt_ids=(1, i), params=greedy(9))) for i in range(3)]
        assert await asyncio.to_thread(gate.entered.wait, 30)
        if way == "raises":
            engine._accept = lambda turn: turn.lost
        else:
            assert engine._task is not None
            engine._task.cancel()
        gate.opened.set()
        replies = await asyncio.gather(*(heard(stream) for stream in streams))
        assert {end.reason for _, end in replies} == {"error"}
        status = engine.status()
        assert (status.running, status.waiting, status.is_ready) == (0, 0, False)
        assert ("lost" if way == "raises" else "Cancelled") in (status.failure or "")
        with pytest.raises(QueueFullError):
            engine.submit(Ask(prompt_ids=(1,), params=greedy(1)))

    serve(MODEL, LIMITS, talk)


def test_silence_is_counted_only_while_there_is_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """OBS-01: neither idle hours nor a prefill of many steps count as silence; one step that does not end does."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def talk(engine: Engine) -> None:
        clock.now += 3600
        assert engine.status().seconds_since_progress is None
        turn, silences = engine._turn, []

        def slow(*arguments: Any) -> Any:
            silences.append(engine.status().seconds_since_progress)
            clock.now += 1
            return turn(*arguments)

        engine._turn = slow
        stream = engine.submit(Ask(prompt_ids=tuple(ids_of(390)), params=greedy(2)))
        assert engine.status().seconds_since_progress == 0
        assert (await heard(stream))[1].reason == "length"
        assert len(silences) >= 4
        assert set(silences) <= {0.0, None}  # the last turn only clears away
        gate = Gate(engine)
        stream = engine.submit(Ask(prompt_ids=(1, 2), params=greedy(2)))
        assert await asyncio.to_thread(gate.entered.wait, 30)
        clock.now += 77
        assert (engine.status().seconds_since_progress or 0) >= 77
        gate.opened.set()
        await heard(stream)
        assert engine.status().seconds_since_progress is None

    serve(MODEL, LIMITS, talk)
