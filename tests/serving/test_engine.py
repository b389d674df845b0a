"""The engine over tiny models: every reply equals its solo run, whatever runs beside it, and nothing is left over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from typing import Any

import attrs
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.models import VOCAB, tiny_model
from kit.steps import examples, ids_of, recompute, run_alone
from purestep.model.loading import build_model
from purestep.serving.asks import Ask, Ended, QueueFullError, Sampled
from purestep.serving.engine import Engine, EngineLimits, Stream

PLAIN = tiny_model((0, 4, 128), window=16)
MODEL = build_model(PLAIN.config, PLAIN.params, numerics=ps.Numerics(invariant=True))
LIMITS = EngineLimits(running=4, waiting=32, tokens=2000, context=400, page_size=8, budget=256, points=3)


def greedy(n_new: int | None = 8, **changes: Any) -> ps.SamplingParams:
    return ps.SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=n_new, **changes)


async def heard(stream: Stream) -> tuple[list[int], Ended]:
    """Listen to a reply to its end: (tokens, end)."""
    items = [item async for item in stream]
    assert isinstance(items[-1], Ended)
    assert all(isinstance(item, Sampled) for item in items[:-1])
    return [item.token_id for item in items[:-1]], items[-1]


def serve(model: ps.Model, limits: EngineLimits, talk: Any) -> Any:
    """Run a coroutine function over a started engine, and see that nothing is left afterwards."""

    async def main() -> Any:
        engine = Engine(model, attrs.evolve(limits, checks_invariants=True))
        await engine.start()
        try:
            return await asyncio.wait_for(talk(engine), 120)
        finally:
            await engine.stop()
            status = engine.status()
            assert (status.running, status.waiting, status.is_ready) == (0, 0, False)

    coroutine: Coroutine[Any, Any, Any] = main()
    return asyncio.run(coroutine)


@examples(5)
@given(
    asked=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from((1, 5, 128, 129, 200, 300)), st.integers(1, 20)),
        min_size=1,
        max_size=7,
    ),
    tokens=st.sampled_from((400, 480, 2000)),
)
def test_every_reply_equals_its_solo_run(asked: list[tuple[int, int, int]], tokens: int) -> None:
    """With and without pressure, reuse and company: greedy replies are those of each prompt alone."""

    async def talk(engine: Engine) -> None:
        prompts = [ids_of(n, VOCAB, seed) for seed, n, _ in asked]
        streams = [
            engine.submit(Ask(prompt_ids=tuple(prompt), params=greedy(n_new)))
            for prompt, (_, _, n_new) in zip(prompts, asked, strict=True)
        ]
        replies = await asyncio.gather(*(heard(stream) for stream in streams))
        for prompt, (_, _, n_new), (said, end) in zip(prompts, asked, replies, strict=True):
            n_said = min(n_new, min(400, tokens) - len(prompt))
            assert end.reason == "length"
            assert said == run_alone(MODEL, prompt, n_said - 1, context=420)[0]

    serve(MODEL, attrs.evolve(LIMITS, tokens=tokens), talk)


def test_a_repeated_prompt_is_cached_and_says_the_same() -> None:
    """PFX-01, PFX-07: the second and third time a prompt comes, its prefix is taken over, and the reply is the same."""

    async def talk(engine: Engine) -> None:
        ask = Ask(prompt_ids=tuple(ids_of(300)), params=greedy(6))
        replies = [await heard(engine.submit(ask)) for _ in range(3)]
        assert [end.n_cached for _, end in replies] == [0, 256, 256]
        assert len({tuple(said) for said, _ in replies}) == 1
        assert engine.status().counters["cached_tokens"] == 512
        said = replies[0][0]
        longer = Ask(prompt_ids=(*ask.prompt_ids, *said, *ids_of(90, seed=3)), params=greedy(2))
        assert (await heard(engine.submit(longer)))[1].n_cached == 256

    serve(MODEL, LIMITS, talk)


def test_reuse_can_be_switched_off() -> None:
    """Without points nothing is taken over, and replies are the same."""

    async def talk(engine: Engine) -> None:
        ask = Ask(prompt_ids=tuple(ids_of(300)), params=greedy(6))
        assert [(await heard(engine.submit(ask)))[1].n_cached for _ in range(2)] == [0, 0]

    serve(MODEL, attrs.evolve(LIMITS, points=0), talk)


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


def test_a_full_queue_and_impossible_requests_are_refused_at_once() -> None:
    """KVA-03: prompts that can never fit name the limit; a burst beyond the queue is refused; others finish."""

    async def talk(engine: Engine) -> None:
        for prompt, kind in (((), ps.RequestError), ((VOCAB,), ps.RequestError), ((1,) * 400, ps.CapacityError)):
            with pytest.raises(kind):
                engine.submit(Ask(prompt_ids=prompt, params=greedy()))
        streams = [engine.submit(Ask(prompt_ids=(1, 2), params=greedy(3))) for _ in range(36)]
        with pytest.raises(QueueFullError, match="36"):
            engine.submit(Ask(prompt_ids=(1, 2), params=greedy(3)))
        replies = await asyncio.gather(*(heard(stream) for stream in streams))
        assert len({tuple(said) for said, _ in replies}) == 1
        assert (await heard(engine.submit(Ask(prompt_ids=(1,) * 399, params=greedy(None)))))[1].reason == "length"

    serve(MODEL, LIMITS, talk)


def test_the_context_is_the_end() -> None:
    """KVA-13, HTP-07: requests without a limit end with "length" at the context; one token short gives one token."""

    async def talk(engine: Engine) -> None:
        prompts = [ids_of(n) for n in (399, 398, 350)]
        streams = [engine.submit(Ask(prompt_ids=tuple(p), params=greedy(None))) for p in prompts]
        replies = await asyncio.gather(*(heard(stream) for stream in streams))
        assert [len(said) for said, _ in replies] == [1, 2, 50]
        assert {end.reason for _, end in replies} == {"length"}

    serve(MODEL, LIMITS, talk)


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


def allowed(ids: Sequence[int]) -> torch.Tensor:
    """Packed bits that allow these ids alone."""
    word = sum(1 << i for i in ids)
    return torch.tensor([word - (1 << 32) if word >= 1 << 31 else word], dtype=torch.int32)


def test_masks_follow_the_outputs() -> None:
    """A constraint sees the outputs so far and decides every token, beside unconstrained rows."""
    plan = [[3], [7, 8], [31]]

    async def talk(engine: Engine) -> None:
        free = engine.submit(Ask(prompt_ids=(1, 2), params=greedy(5)))
        seen: list[tuple[int, ...]] = []

        def mask(outputs: tuple[int, ...]) -> torch.Tensor | None:
            seen.append(outputs)
            return allowed(plan[len(outputs)]) if len(outputs) < len(plan) else None

        said, _ = await heard(engine.submit(Ask(prompt_ids=tuple(ids_of(200)), params=greedy(4), mask=mask)))
        assert said[0] == 3
        assert said[1] in (7, 8)
        assert said[2] == 31
        assert seen == [tuple(said[:n]) for n in range(4)]
        assert (await heard(free))[0] == run_alone(MODEL, [1, 2], 4)[0]

    serve(MODEL, LIMITS, talk)


def test_prompt_logprobs_are_those_of_the_whole_prompt() -> None:
    """Log-probabilities of the prompt are those of one forward, also when it is fed in chunks beside other rows."""
    prompt = ids_of(300)

    async def talk(engine: Engine) -> None:
        await heard(engine.submit(Ask(prompt_ids=tuple(prompt), params=greedy(1))))
        mate = engine.submit(Ask(prompt_ids=(1, 2), params=greedy(9)))
        asked = Ask(prompt_ids=tuple(prompt), params=greedy(2, logprobs=2), prompt_logprobs=3)
        items = [item async for item in engine.submit(asked)]
        await heard(mate)
        found = items[-1].prompt_logprobs
        expected = recompute(PLAIN, prompt).log_softmax(-1)
        assert len(found) == 300
        assert found[0] == (None, ())
        for position in range(1, 300):
            logprob, top = found[position]
            assert logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-4)
            assert len(top) == 3
        assert len(items[0].top) == 2
        assert items[0].logprob == pytest.approx(items[0].top[0][1])

    serve(MODEL, LIMITS, talk)


def test_the_event_loop_stays_responsive() -> None:
    """While long prompts are fed, the event loop answers at once: the steps run in the worker thread."""

    async def talk(engine: Engine) -> None:
        streams = [engine.submit(Ask(prompt_ids=tuple(ids_of(390, seed=i)), params=greedy(2))) for i in range(4)]
        longest = 0.0
        replies = asyncio.gather(*(heard(stream) for stream in streams))
        while not replies.done():
            start = time.monotonic()
            await asyncio.sleep(0)
            assert engine.status().is_ready
            longest = max(longest, time.monotonic() - start)
            await asyncio.sleep(0.001)
        assert longest < 1.0

    serve(MODEL, LIMITS, talk)


def test_stopping_drains_or_cancels() -> None:
    """With a deadline running requests end by themselves; without one they are cancelled; afterwards none is taken."""

    async def main(deadline: float) -> list[str]:
        engine = Engine(MODEL, LIMITS)
        await engine.start()
        streams = [engine.submit(Ask(prompt_ids=(1, i), params=greedy(6))) for i in range(3)]
        replies = asyncio.gather(*(heard(stream) for stream in streams))
        await asyncio.sleep(0)
        await engine.stop(deadline)
        with pytest.raises(QueueFullError):
            engine.submit(Ask(prompt_ids=(1,), params=greedy(1)))
        return [end.reason for _, end in await replies]

    assert asyncio.run(main(60.0)) == ["length"] * 3
    assert asyncio.run(main(0.0)) == ["abort"] * 3
