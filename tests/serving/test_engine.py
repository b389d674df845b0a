"""The engine over tiny models: every reply equals its solo run, whatever runs beside it, and nothing is left over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import attrs
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.models import VOCAB, tiny_model
from kit.serving import Gate, greedy, heard, serve
from kit.steps import examples, ids_of, recompute, run_alone
from purestep.model.loading import build_model
from purestep.serving.asks import Ask, QueueFullError
from purestep.serving.engine import Engine, EngineLimits

PLAIN = tiny_model((0, 4, 128), window=16)
MODEL = build_model(PLAIN.config, PLAIN.params, numerics=ps.Numerics(invariant=True))
LIMITS = EngineLimits(running=4, waiting=32, tokens=2000, context=400, page_size=8, budget=256, points=3)


SAMPLED = (
    greedy(),
    greedy(repetition_penalty=1.3, logit_bias={5: 100.0, 6: -100.0}),
    ps.SamplingParams(temperature=1.0, seed=7, ignore_eos=True),
    ps.SamplingParams(temperature=0.7, top_k=5, seed=8, frequency_penalty=0.8, ignore_eos=True),
    ps.SamplingParams(temperature=100.0, top_k=10**9, top_p=0.9, min_p=0.01, seed=7, presence_penalty=1.0),
    ps.SamplingParams(temperature=1e-8, seed=3, min_new_tokens=5),
)
"""Ways to sample that share a batch in tests."""


@examples(4)
@given(
    asked=st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from((1, 5, 128, 129, 200, 300)),
            st.integers(5, 20),
            st.sampled_from(SAMPLED),
        ),
        min_size=1,
        max_size=7,
    ),
    tokens=st.sampled_from((400, 480, 2000)),
)
def test_every_reply_equals_its_solo_run(asked: list[tuple[int, int, int, ps.SamplingParams]], tokens: int) -> None:
    """SMP-01, 07, 11, KVA-05: with and without pressure, reuse and company, a reply is that of its prompt alone."""

    async def talk(engine: Engine) -> None:
        asks = [
            Ask(
                prompt_ids=tuple(ids_of(n, VOCAB, seed)),
                params=attrs.evolve(params, max_new_tokens=min(n_new, min(400, tokens) - n)),
            )
            for seed, n, n_new, params in asked
        ]
        replies = await asyncio.gather(*(heard(engine.submit(ask)) for ask in asks))
        for ask, (said, end) in zip(asks, replies, strict=True):
            assert end.reason == ("length" if len(said) == ask.params.max_new_tokens else "stop")
            n_new = ask.params.max_new_tokens or 0
            assert said == run_alone(MODEL, ask.prompt_ids, n_new - 1, ask.params, context=420)[0]

    serve(MODEL, attrs.evolve(LIMITS, tokens=tokens), talk)


@pytest.mark.parametrize("points", [0, 2])
def test_requests_give_way_and_come_back(points: int) -> None:
    """KVA-05: of three long requests in pools for two one is retracted, and each says what it says without pressure."""

    async def talk(engine: Engine) -> None:
        prompts = [ids_of(100, seed=seed) for seed in range(3)]
        streams = [engine.submit(Ask(prompt_ids=tuple(prompt), params=greedy(30))) for prompt in prompts]
        replies = await asyncio.gather(*(heard(stream) for stream in streams))
        assert engine.status().counters["retractions"] > 0
        assert [said for said, _ in replies] == [run_alone(MODEL, prompt, 29)[0] for prompt in prompts]

    serve(MODEL, attrs.evolve(LIMITS, tokens=320, points=points), talk)


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


@examples(4)
@given(n=st.integers(64, 150))
def test_prompts_larger_than_the_pools_are_refused_by_their_size(n: int) -> None:
    """KVA-03: in pools of 64 tokens a longer prompt is an error that says 64, and the next small one is served."""

    async def talk(engine: Engine) -> None:
        with pytest.raises(ps.CapacityError, match="pools hold 64") as caught:
            engine.submit(Ask(prompt_ids=(1,) * n, params=greedy()))
        assert caught.value.got == n
        said, end = await heard(engine.submit(Ask(prompt_ids=(1,) * 63, params=greedy(None))))
        assert (len(said), end.reason) == (1, "length")

    serve(MODEL, attrs.evolve(LIMITS, tokens=64, context=200), talk)


def test_what_no_token_can_honour_is_refused_at_once() -> None:
    """Parameters that hold every token back are refused when they come, and the engine goes on."""

    async def talk(engine: Engine) -> None:
        others = tuple(i for i in range(VOCAB) if i not in MODEL.config.eos_token_id)
        for params in (greedy(stop_token_ids=others, min_new_tokens=1), greedy(logit_bias={VOCAB: 1.0})):
            with pytest.raises(ps.RequestError):
                engine.submit(Ask(prompt_ids=(1,), params=params))
        assert (await heard(engine.submit(Ask(prompt_ids=(1,), params=greedy(2)))))[1].reason == "length"

    serve(MODEL, LIMITS, talk)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(({"running": n, "budget": n + 127}, "budget") for n in (1, 8)),
        *(({name: wrong}, name) for name, wrong in (("running", 0), ("waiting", -1), ("points", -1), ("tokens", 1))),
        *(({"page_size": n}, "page_size") for n in (0, 7, -4)),
        ({"context": 9000, "tokens": 9000}, "context"),
    ],
)
def test_limits_that_cannot_work_are_refused(changes: dict[str, int], field: str) -> None:
    """PFX-17: what cannot be honoured together is an error that names the field before anything is served."""
    with pytest.raises(ps.ConfigError) as caught:
        Engine(MODEL, attrs.evolve(LIMITS, **changes))
    assert caught.value.field == field


def test_the_context_is_the_end() -> None:
    """KVA-13, HTP-07: requests without a limit end with "length" at the context; one token short gives one token."""

    async def talk(engine: Engine) -> None:
        prompts = [ids_of(n) for n in (399, 398, 395, 395, 395, 395, 395, 390)]
        streams = [engine.submit(Ask(prompt_ids=tuple(p), params=greedy(None))) for p in prompts]
        replies = await asyncio.gather(*(heard(stream) for stream in streams))
        assert [len(said) for said, _ in replies] == [1, 2, 5, 5, 5, 5, 5, 10]
        assert {end.reason for _, end in replies} == {"length"}

    serve(MODEL, attrs.evolve(LIMITS, running=8, tokens=3200), talk)


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


def test_the_event_loop_goes_on_during_a_step() -> None:
    """While one step is held in the worker thread, the event loop runs, answers, and takes requests and refusals in."""

    async def talk(engine: Engine) -> None:
        gate = Gate(engine)
        streams = [engine.submit(Ask(prompt_ids=tuple(ids_of(300)), params=greedy(2)))]
        assert await asyncio.to_thread(gate.entered.wait, 30)
        for turn in range(100):
            await asyncio.sleep(0)
            assert engine.status().counters["steps"] == 0
            assert engine.status().is_ready
            if turn < 5:
                streams.append(engine.submit(Ask(prompt_ids=(1, turn), params=greedy(2))))
        streams[1].cancel()
        gate.opened.set()
        replies = await asyncio.gather(*(heard(stream) for stream in streams))
        assert [end.reason for _, end in replies] == ["length", "abort", *["length"] * 4]

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
