"""Compiled steps under the engine: the same replies, and the steps that run compiled are those that a bucket holds."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from functools import cache
from typing import Any

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

PLAIN = tiny_model((0, 4, 128), window=16)
MODEL = build_model(PLAIN.config, PLAIN.params, numerics=ps.Numerics(invariant=True))
LIMITS = EngineLimits(running=4, waiting=32, tokens=2000, context=400, page_size=8, budget=256, points=3)


@cache
def _compiled(*buckets: tuple[int, int]) -> Any:
    """Compile for row-independent arithmetic, which generates no code and keeps bits."""
    return ps.compile_step(MODEL, buckets, page_size=LIMITS.page_size)


def _ask(seed: int, n: int, n_new: int) -> Ask:
    return Ask(prompt_ids=tuple(ids_of(n, VOCAB, seed)), params=attrs.evolve(greedy(), max_new_tokens=n_new))


@examples(4)
@given(
    asked=st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from((1, 5, 127, 128, 150)), st.integers(2, 12)), max_size=6
    ),
    tokens=st.sampled_from((400, 2000)),
)
def test_compiled_replies_equal_solo_runs(asked: list[tuple[int, int, int]], tokens: int) -> None:
    """With and without pressure, in whatever company and bucket, a reply is that of its prompt alone."""

    async def talk(engine: Engine) -> None:
        asks = [_ask(*one) for one in asked]
        replies = await asyncio.gather(*(heard(engine.submit(ask)) for ask in asks))
        for ask, (said, _) in zip(asks, replies, strict=True):
            assert (
                said
                == run_alone(MODEL, ask.prompt_ids, (ask.params.max_new_tokens or 0) - 1, ask.params, context=420)[0]
            )

    serve(MODEL, attrs.evolve(LIMITS, tokens=tokens), talk, _compiled((2, 140), (3, 400)))


@pytest.mark.parametrize(("longest", "n_compiled"), [(400, 19), (15, 10), (5, 0)])
def test_steps_run_compiled_where_a_bucket_holds_them(longest: int, n_compiled: int) -> None:
    """Of 19 decodes, from 6 tokens to 24, those run compiled that are no longer than the bucket; prompts never do."""

    async def talk(engine: Engine) -> dict[str, int]:
        await heard(engine.submit(_ask(0, 5, 20)))
        return dict(engine.status().counters)

    counters = serve(MODEL, LIMITS, talk, _compiled((1, longest)))
    assert (counters["steps"], counters["compiled_steps"]) == (20, n_compiled)


def test_another_model_s_compiled_step_ends_requests_and_not_the_engine() -> None:
    """A compiled step that does not fit the engine is an error that each request is told, in words."""
    other = build_model(PLAIN.config, PLAIN.params, numerics=ps.Numerics(invariant=True))

    async def talk(engine: Engine) -> Any:
        return (await heard(engine.submit(_ask(0, 5, 4))))[1]

    end = serve(other, LIMITS, talk, _compiled((1, 400)))
    assert end.reason == "error"
    assert "expected the model that it was compiled for" in (end.error or "")


@pytest.mark.parametrize("given", ["16", "0x128"])
def test_unreadable_buckets_are_refused_before_anything_is_compiled(given: str) -> None:
    """``--compile`` takes ROWSxTOKENS and says so."""
    command = [sys.executable, "-m", "purestep", "serve", "--port", "0", "--compile", given]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode != 0
    assert "expected ROWSxTOKENS" in found.stderr
