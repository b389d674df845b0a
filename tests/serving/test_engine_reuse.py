"""Prefixes that the engine reuses: exactly, honestly counted, given up under pressure, and never in silence off."""

from __future__ import annotations

import asyncio
from io import StringIO

import attrs
import purestep as ps
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.models import VOCAB, tiny_model
from kit.serving import greedy, heard, serve
from kit.steps import examples, ids_of, run_alone
from purestep.model.loading import build_model
from purestep.serving.asks import Ask
from purestep.serving.engine import Engine, EngineLimits
from purestep.serving.startup import memory_table
from rich.console import Console

PLAIN = tiny_model((0, 4, 128), window=16)
MODEL = build_model(PLAIN.config, PLAIN.params, numerics=ps.Numerics(invariant=True))
LIMITS = EngineLimits(running=4, waiting=32, tokens=2000, context=400, page_size=8, budget=256, points=3)


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


def test_a_common_beginning_is_fed_twice_at_most() -> None:
    """Prompts that part after a common beginning: the second to come leaves a point where they part, others use it."""

    async def talk(engine: Engine) -> None:
        beginning = ids_of(140, seed=1)
        prompts = [(*beginning, *ids_of(140, seed=2 + i)) for i in range(4)]
        replies = [await heard(engine.submit(Ask(prompt_ids=prompt, params=greedy(3)))) for prompt in prompts]
        assert [end.n_cached for _, end in replies] == [0, 0, 128, 128]
        assert [said for said, _ in replies] == [run_alone(MODEL, prompt, 2)[0] for prompt in prompts]

    serve(MODEL, attrs.evolve(LIMITS, points=6), talk)


def test_prompts_that_come_together_wait_for_their_common_beginning() -> None:
    """Of many equal prompts at once one is fed, and of many that begin alike the beginning, once; all say the same."""

    async def talk(engine: Engine) -> None:
        same, beginning = tuple(ids_of(300)), ids_of(130, seed=1)
        alike = [(*beginning, *ids_of(20 + i, seed=2 + i)) for i in range(4)]
        prompts = [*[same] * 5, *alike]
        streams = [engine.submit(Ask(prompt_ids=prompt, params=greedy(3))) for prompt in prompts]
        replies = await asyncio.gather(*map(heard, streams))
        assert [end.n_cached for _, end in replies] == [0, 256, 256, 256, 256, 0, 128, 128, 128]
        assert [said for said, _ in replies] == [run_alone(MODEL, prompt, 2)[0] for prompt in prompts]
        n_fed = engine.status().counters["fed_tokens"]
        assert n_fed == sum(map(len, prompts)) - 4 * 256 - 3 * 128 + 2 * len(prompts)

    serve(MODEL, attrs.evolve(LIMITS, running=9, budget=9 + 512, tokens=4000, points=6), talk)


def test_reuse_can_be_switched_off() -> None:
    """Without points nothing is taken over, and replies are the same."""

    async def talk(engine: Engine) -> None:
        ask = Ask(prompt_ids=tuple(ids_of(300)), params=greedy(6))
        assert [(await heard(engine.submit(ask)))[1].n_cached for _ in range(2)] == [0, 0]

    serve(MODEL, attrs.evolve(LIMITS, points=0), talk)


@examples(1)
@given(data=st.data())
def test_many_requests_over_a_few_prefixes_in_a_small_pool(data: st.DataObject) -> None:
    """PFX-09: 64 requests over 6 shared prefixes in a pool for 5 are answered as alone, and some take prefixes over."""
    prefixes = [ids_of(300, VOCAB, seed) for seed in range(6)]
    prompts = [
        tuple(data.draw(st.sampled_from(prefixes))[: data.draw(st.sampled_from((129, 140)))])
        + tuple(ids_of(data.draw(st.integers(1, 20)), VOCAB, 9))
        for _ in range(64)
    ]

    async def talk(engine: Engine) -> None:
        replies = await asyncio.gather(*(heard(engine.submit(Ask(prompt_ids=p, params=greedy(2)))) for p in prompts))
        alone = {prompt: run_alone(MODEL, prompt, 1)[0] for prompt in set(prompts)}
        assert [said for said, _ in replies] == [alone[prompt] for prompt in prompts]
        assert all(end.n_cached in (0, 128) for _, end in replies)
        assert engine.status().counters["cached_tokens"] == sum(end.n_cached for _, end in replies) > 0

    serve(MODEL, attrs.evolve(LIMITS, running=8, waiting=64, tokens=5 * 160, budget=512, points=6), talk)


@examples(2)
@given(n=st.sampled_from((20, 127, 128, 250)), n_new=st.integers(2, 140))
def test_a_conversation_goes_on_where_it_ended(n: int, n_new: int) -> None:
    """A prompt that begins with an earlier prompt and its reply takes over the last whole unit of both, exactly."""

    async def talk(engine: Engine) -> None:
        prompt = ids_of(n, VOCAB)
        said, _ = await heard(engine.submit(Ask(prompt_ids=tuple(prompt), params=greedy(n_new))))
        following = (*prompt, *said, 7, 8)
        again, end = await heard(engine.submit(Ask(prompt_ids=following, params=greedy(4))))
        assert end.n_cached == (n + n_new - 1) // 128 * 128
        assert again == run_alone(MODEL, following, 3, context=420)[0]

    serve(MODEL, LIMITS, talk)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "reused from 128 tokens on"),
        ({"page_size": 12}, "reused from 384 tokens on"),
        ({"points": 0}, "not reused"),
        ({"page_size": 20}, "Warning: prefixes are never reused: the smallest has 640 tokens"),
        ({"context": 129}, "Warning"),
        ({"tokens": 129}, "a request at most 129"),
    ],
)
def test_the_start_says_what_is_reused(changes: dict[str, int], said: str) -> None:
    """PFX-03, PFX-17: the smallest reusable prefix is shown at the start; where none can be, that is said, and true."""
    limits = attrs.evolve(LIMITS, **changes)
    console = Console(record=True, width=200, file=StringIO())
    console.print(memory_table(MODEL, limits, {"swa": 1000}))
    assert said in " ".join(console.export_text().split())
    longest = min(limits.context, limits.tokens) - 1

    async def talk(engine: Engine) -> None:
        ask = Ask(prompt_ids=tuple(ids_of(longest)), params=greedy(1))
        ends = [(await heard(engine.submit(ask)))[1] for _ in range(2)]
        assert (ends[1].n_cached > 0) == limits.reuses == ("from" in said)

    serve(MODEL, limits, talk)
