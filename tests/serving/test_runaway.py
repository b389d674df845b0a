"""BAT-13: replies that run away into repetition are counted, and nothing else is done about them."""

from __future__ import annotations

import purestep as ps
from hypothesis import given
from hypothesis import strategies as st
from kit.serving import heard, serve
from purestep.serving.asks import Ask
from purestep.serving.engine import Engine, EngineLimits
from purestep.serving.runaway import LEAST_TIMES, LEAST_TOKENS, LONGEST_BLOCK, ends_in_repetition

MODEL = ps.load_model("tiny")


@given(
    before=st.lists(st.integers(0, 9), max_size=40),
    block=st.lists(st.integers(0, 9), min_size=1, max_size=LONGEST_BLOCK),
    cut=st.integers(0, LONGEST_BLOCK),
)
def test_any_block_said_often_enough_is_seen(before: list[int], block: list[int], cut: int) -> None:
    """Whatever came before, and wherever in the block the reply breaks off."""
    times = LEAST_TIMES + 1 + LEAST_TOKENS // len(block)
    assert ends_in_repetition((*before, *(block * times), *block[:cut]))


@given(st.integers(1, LONGEST_BLOCK), st.integers(2, LEAST_TIMES - 1), st.integers(0, 30))
def test_what_differs_or_is_short_is_none(length: int, times: int, more: int) -> None:
    """Tokens that are all different, a block said a few times, and one that ended long ago are no repetition."""
    assert not ends_in_repetition(tuple(range(length * times + more)))
    assert not ends_in_repetition(tuple(range(length)) * times)
    assert not ends_in_repetition((*(7,) * 100, *range(LEAST_TOKENS)))
    assert not ends_in_repetition(())


def test_served_repetition_is_counted_and_left_alone() -> None:
    """A reply that says one token for ever is given in full and counted; one of different tokens is not counted."""

    async def talk(engine: Engine) -> None:
        loop = ps.SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=60, logit_bias={5: 100.0})
        varied = ps.SamplingParams(seed=1, temperature=1.5, ignore_eos=True, max_new_tokens=60)
        replies = [await heard(engine.submit(Ask(prompt_ids=(1, 2, 3), params=one))) for one in (loop, varied)]
        assert [len(ids) for ids, _ in replies] == [60, 60]
        assert set(replies[0][0]) == {5}
        assert {end.reason for _, end in replies} == {"length"}
        assert engine.status().counters["repetitions"] == 1

    serve(MODEL, EngineLimits(running=2, tokens=1024, context=256), talk)
