"""Forks at any token, rewinds and retractions: what they cost, what they leave alone, and how the stream goes on."""

from __future__ import annotations

from math import lcm
from typing import Any

import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.models import tiny_model
from kit.steps import ENDLESS, examples, fresh, ids_of, recompute

MODEL = tiny_model()
PAGE_SIZES = (4, 8, 12, 32, 128)


def pages(state: ps.DecodeState) -> tuple[int, int, int]:
    """Free full, window and C128 pages."""
    table = state.table
    return len(table.free_pages), len(table.free_swa_pages), len(table.free_c128_pages)


def sampled(state: ps.DecodeState, request: int, steps: int) -> tuple[ps.DecodeState, list[int]]:
    """Decode one request alone, to its end at most."""
    found: list[int] = []
    for _ in range(steps):
        if ps.find_request(state, request).finished:
            break
        state, out = ps.decode_step(MODEL, state, only=[request])
        found += out.next_token_ids
    return state, found


def talking(page_size: int, n: int, steps: int, params: ps.SamplingParams = ENDLESS) -> tuple[ps.DecodeState, int]:
    """A state in which a request has read ``n`` tokens and said some."""
    state, request = ps.open_request(fresh(MODEL, 4, page_size=page_size, context=500), params)
    state, _ = ps.extend_step(MODEL, state, {request: ids_of(n)})
    return sampled(state, request, steps)[0], request


@examples(8)
@given(
    page_size=st.sampled_from(PAGE_SIZES),
    n=st.sampled_from((3, 126, 129, 258, 300)),
    steps=st.integers(0, 9),
    data=st.data(),
)
def test_forks_say_what_they_recompute(page_size: int, n: int, steps: int, data: st.DataObject) -> None:
    """PFX-05, RES-13: at a reuse point no page is taken; elsewhere the tokens behind the nearest one are fed again."""
    state, parent = talking(page_size, n, steps)
    record, unit = ps.find_request(state, parent), lcm(page_size, 128)
    total = len(record.tokens)
    at = data.draw(st.integers(0, total) | st.sampled_from([i for i in range(0, total + 1, unit)] + [total - 1, total]))
    forked, fork = ps.fork_request(state, parent, at=at)
    found = ps.find_request(forked, fork)
    assert found.tokens.tolist() == record.tokens.tolist()[:at]
    assert ps.invariants.check(forked) == ()
    point = at // unit * unit
    lives = record.evicted_len <= max(0, point - max(MODEL.config.sliding_window - 1, 8))
    expected = record.kv_len if at >= record.kv_len else point if lives else 0
    assert found.kv_len == expected
    assert found.n_unfed == at - expected
    taken = tuple(before - after for before, after in zip(pages(state), pages(forked), strict=True))
    if expected < record.kv_len:
        assert taken[:2] == (0, 0)
        assert taken[2] == int(expected // 128 % 16 > 0)
    else:
        assert taken[0] == taken[1] == int(record.kv_len % page_size > 0)
    # It goes on as a request that was fed these tokens in one piece.
    forked, out = ps.extend_step(MODEL, forked, {fork: [3, 4]}, logits="all")
    whole = recompute(MODEL, [*record.tokens.tolist()[:at], 3, 4])
    torch.testing.assert_close(out.logits, whole[expected:], atol=1e-4, rtol=0)


@st.composite
def params_that_count(draw: st.DrawFn) -> ps.SamplingParams:
    """Sampled parameters, some of which look at what was said before."""
    return ps.SamplingParams(
        temperature=draw(st.sampled_from((0.0, 1.0))),
        seed=draw(st.integers(0, 99)),
        frequency_penalty=draw(st.sampled_from((0.0, 0.7))),
        repetition_penalty=draw(st.sampled_from((1.0, 1.4))),
        max_new_tokens=draw(st.sampled_from((None, 12))),
        ignore_eos=True,
    )


@examples(10)
@given(
    params=params_that_count(), page_size=st.sampled_from(PAGE_SIZES), n=st.sampled_from((5, 125, 300)), data=st.data()
)
def test_going_back_says_the_same_again(params: ps.SamplingParams, page_size: int, n: int, data: st.DataObject) -> None:
    """Rewound, forked or retracted at any sampled token, a request samples the very tokens that it sampled before."""
    start, request = talking(page_size, n, 0, params)
    end, _ = sampled(start, request, 14)
    said = ps.find_request(end, request).tokens.tolist()
    at = data.draw(st.integers(n + 1, len(said)), label="at")
    way = data.draw(st.sampled_from(("rewind", "fork", "retract")))
    if way == "rewind":
        state = ps.rewind_request(end, request, at)
    elif way == "fork":
        state, request = ps.fork_request(end, request, at=at)
    else:
        state, _ = sampled(start, request, at - n - 1)
        state = ps.retract_request(state, request)
        assert ps.find_request(state, request).is_parked
        if at < len(said):
            state, _ = ps.decode_step(MODEL, state, only=[request])
    assert ps.invariants.check(state) == ()
    state, _ = sampled(state, request, len(said) - len(ps.find_request(state, request).tokens))
    assert ps.find_request(state, request).tokens.tolist() == said
    assert ps.find_request(state, request).finished == (None if params.max_new_tokens is None else "length")


@examples(6)
@given(order=st.permutations(range(65)), page_size=st.sampled_from((8, 128)), data=st.data())
def test_sixty_four_forks_cost_what_they_write(order: list[int], page_size: int, data: st.DataObject) -> None:
    """RES-13: 64 forks of a 1,000-token request take one page each; freed in any order, every page is free again."""
    capacity = ps.Capacity(65, 1100 + 65 * 2 * page_size, 1100)
    empty = ps.init_state(MODEL, capacity, page_size=page_size)
    state, root = ps.open_request(empty, ENDLESS)
    state, _ = ps.extend_step(MODEL, state, {root: ids_of(1000)})
    alone, kept = state, ps.invariants.digest(state)
    before, tree = pages(state), [root]
    for i in range(64):
        parent = data.draw(st.sampled_from(tree), label="parent") if i % 16 == 0 else tree[i // 2]
        state, fork = ps.fork_request(state, parent)
        tree.append(fork)
    rest = int(1000 % page_size > 0)
    assert [b - a for b, a in zip(before, pages(state), strict=True)] == [64 * rest, 64 * rest, 64]
    state, out = ps.decode_step(MODEL, state)
    assert len(out.request_ids) == 65
    torch.testing.assert_close(out.logits, out.logits[:1].expand_as(out.logits), atol=1e-4, rtol=0)
    assert ps.invariants.check(state) == ()
    assert ps.invariants.digest(alone) == kept
    for i in order:
        state = ps.close_request(state, tree[i])
    assert ps.invariants.check(state) == ()
    assert pages(state) == pages(empty)


@pytest.mark.parametrize("page_size", [8, 128])
def test_a_fork_counts_only_the_tokens_that_it_has(page_size: int) -> None:
    """Penalties of a fork see its own tokens: none behind ``at``, and none as sampled with ``as_prompt``."""
    params = ps.SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=1.0, ignore_eos=True)
    state, request = talking(page_size, 140, 6, params)
    tokens = ps.find_request(state, request).tokens.tolist()
    for at in (128, 139, 140, 143, 146):
        for as_prompt in (False, True):
            forked, fork = ps.fork_request(state, request, at=at, as_prompt=as_prompt)
            row = next(row for row in forked.sampling.rows if row.request_id == fork)
            n_prompt = at if as_prompt else min(at, 140)
            assert row.n_outputs == ps.find_request(forked, fork).n_outputs == at - n_prompt
            assert row.prompt_seen.nonzero().flatten().tolist() == sorted(set(tokens[:n_prompt]))
            assert row.output_counts.sum() == at - n_prompt
            assert ps.invariants.check(forked) == ()


@examples(6)
@given(
    page_size=st.sampled_from(PAGE_SIZES),
    n=st.sampled_from((1, 2, 127, 128, 129, 256, 300)),
    way=st.sampled_from(("chunk", "fork", "rewind", "prompt")),
    by_extend=st.booleans(),
)
def test_a_request_without_unfed_tokens_can_go_on(page_size: int, n: int, way: str, by_extend: bool) -> None:
    """After an intermediate chunk or a cut at a reuse point, a step that names the request samples what follows."""
    ids = ids_of(300)
    state, request = ps.open_request(fresh(MODEL, 3, page_size=page_size, context=500), ENDLESS)
    if way == "chunk":
        state, _ = ps.extend_step(MODEL, state, {request: ids[:n]}, sample=False)
    else:
        state, _ = ps.extend_step(MODEL, state, {request: ids})
        if way == "rewind":
            state = ps.rewind_request(state, request, n)
        else:
            state, request = ps.fork_request(state, request, at=n, as_prompt=way == "prompt")
    again = [
        ps.extend_step(MODEL, state, {request: ()}) if by_extend else ps.decode_step(MODEL, state, only=[request])
        for _ in range(2)
    ]
    (after, out), (_, same) = again
    assert torch.equal(out.logits, same.logits)
    torch.testing.assert_close(out.logits[0], recompute(MODEL, ids[:n])[-1], atol=1e-4, rtol=0)
    assert ps.invariants.check(after) == ()
    assert ps.find_request(after, request).tokens.tolist() == [*ids[:n], *out.next_token_ids]


def test_finished_request_runs_again_where_it_is_cut() -> None:
    """A finished request that is forked or rewound at an earlier token goes on; forked at its end it stays finished."""
    state, request = talking(8, 20, 9, ps.SamplingParams(temperature=0, max_new_tokens=5, ignore_eos=True))
    assert ps.find_request(state, request).finished == "length"
    _, fork = forked = ps.fork_request(state, request)
    assert ps.find_request(forked[0], fork).finished == "length"
    for cut, one in ((ps.rewind_request(state, request, 22), request), ps.fork_request(state, request, at=22)):
        assert ps.find_request(cut, one).finished is None
        assert sampled(cut, one, 9)[1] == ps.find_request(state, request).tokens.tolist()[22:]


def test_retracted_requests_wait_until_they_are_named() -> None:
    """KVA-05: a retracted request holds nothing, decode leaves it out, and it resumes with its pages taken anew."""
    state, a = talking(8, 50, 3)
    empty = pages(ps.close_request(state, a))
    state, b = ps.open_request(state, ENDLESS)
    state, _ = ps.extend_step(MODEL, state, {b: [1, 2, 3]})
    waiting = ps.retract_request(state, a)
    assert ps.retract_request(waiting, a).requests[0] is not None
    held = ps.find_request(waiting, b)
    assert pages(waiting)[0] == empty[0] - -(-held.kv_len // 8)
    after, out = ps.decode_step(MODEL, waiting)
    assert out.request_ids == (b,)
    after, out = ps.decode_step(MODEL, after, only=[b, a])
    direct, expected = ps.decode_step(MODEL, state, only=[a])
    torch.testing.assert_close(out.logits[1], expected.logits[0], atol=1e-4, rtol=0)
    assert ps.find_request(after, a).tokens == ps.find_request(direct, a).tokens
    assert ps.invariants.check(after) == ()


@pytest.mark.parametrize("n", [127, 128, 129, 7, 8, 9])
def test_retraction_at_page_borders(n: int) -> None:
    """KVA-07: a request that is retracted just before, at and behind a page border resumes correctly."""
    state, request = talking(8, n, 0)
    resumed, out = ps.decode_step(MODEL, ps.retract_request(state, request), only=[request])
    direct, expected = ps.decode_step(MODEL, state)
    torch.testing.assert_close(out.logits, expected.logits, atol=1e-4, rtol=0)
    assert resumed.requests[0].tokens == direct.requests[0].tokens


@pytest.mark.parametrize("n", [1, 2])
def test_resuming_without_a_sampled_token(n: int) -> None:
    """A retracted request whose last token was given, not sampled, is fed that token, not what the relay has left."""
    state, a = ps.open_request(fresh(MODEL, 1), ENDLESS)
    state, _ = ps.extend_step(MODEL, state, {a: [9] * n})
    state, a = ps.open_request(ps.close_request(state, a), ENDLESS)
    state, _ = ps.extend_step(MODEL, state, {a: [5] * n}, sample=False)
    _, out = ps.decode_step(MODEL, ps.retract_request(state, a), only=[a])
    torch.testing.assert_close(out.logits[0], recompute(MODEL, [5] * n)[-1], atol=1e-4, rtol=0)


def test_a_row_is_clean_after_a_rewind() -> None:
    """A request that was rewound to nothing and is then retracted or closed leaves an empty C128 state behind."""
    state, request = talking(8, 140, 2)
    back = ps.rewind_request(state, request, 0)
    for gone in (ps.close_request(back, request), ps.retract_request(back, request)):
        assert ps.invariants.check(gone) == ()
    assert ps.invariants.check_closed(back, ps.close_request(back, request)) == ()


def test_force_never_takes_a_kept_token() -> None:
    """A forced token replaces the sampled one that waits, and is added behind tokens that a cut kept, cached or not."""
    state, request = talking(8, 20, 6)
    tokens = ps.find_request(state, request).tokens.tolist()
    cut = ps.rewind_request(state, request, 24)
    ways = {"cut": cut, "cut and retracted": ps.retract_request(cut, request)}
    for name, before in ways.items():
        after, _ = ps.decode_step(MODEL, before, only=[request], force={request: 9})
        assert ps.find_request(after, request).tokens.tolist()[:-1] == [*tokens[:24], 9], name
    for before in (state, ps.retract_request(state, request)):
        after, _ = ps.decode_step(MODEL, before, only=[request], force={request: 9})
        assert ps.find_request(after, request).tokens.tolist()[:-1] == [*tokens[:-1], 9]


def test_forking_while_others_wait_for_rows() -> None:
    """A resumed request that finds no row is a CapacityError, and the state it came from can still be stepped."""
    state, request = talking(8, 20, 1)
    state = ps.retract_request(state, request)
    for _ in range(4):
        state, _ = ps.open_request(state, ENDLESS)
    with pytest.raises(ps.CapacityError, match="requests"):
        ps.decode_step(MODEL, state, only=[request])
    state = ps.close_request(state, state.requests[-1].request_id)
    assert ps.decode_step(MODEL, state, only=[request])[1].request_ids == (request,)


@pytest.mark.parametrize("n", [-1, 24, 1.5, "x", None, True])
def test_bad_lengths_are_request_errors(n: Any) -> None:
    """A length that the request does not have, or that is no length, is a RequestError that names the limit."""
    state, request = talking(8, 20, 2)
    with pytest.raises(ps.RequestError, match=r"0\.\.23"):
        ps.rewind_request(state, request, n)
    if n is not None:
        with pytest.raises(ps.RequestError, match=r"0\.\.23"):
            ps.fork_request(state, request, at=n)
    for call in (ps.retract_request, lambda s, r: ps.rewind_request(s, r, 1), lambda s, r: ps.fork_request(s, r, at=1)):
        with pytest.raises(ps.RequestError, match="not open"):
            call(state, 77)


@examples(6)
@given(page_size=st.sampled_from((4, 8, 128)), at=st.integers(0, 302))
def test_a_shared_c128_page_is_not_written_after_a_rewind(page_size: int, at: int) -> None:
    """A request that rewinds into a C128 page that its fork reads takes a copy of its own; the fork is unchanged."""
    state, request = talking(page_size, 300, 2)
    state, fork = ps.fork_request(state, request)
    expected, _ = ps.decode_step(MODEL, state, only=[fork])
    back = ps.rewind_request(state, request, at)
    back, _ = ps.extend_step(MODEL, back, {request: ids_of(200, seed=5)}, sample=False)
    assert ps.invariants.check(back) == ()
    after, _ = ps.decode_step(MODEL, back, only=[fork])
    assert ps.find_request(after, fork).tokens == ps.find_request(expected, fork).tokens
    _, one = ps.decode_step(MODEL, after, only=[fork])
    _, two = ps.decode_step(MODEL, expected, only=[fork])
    torch.testing.assert_close(one.logits, two.logits, atol=1e-5, rtol=0)


def test_inputs_stay_as_they_were() -> None:
    """Every operation leaves its input to the bit, and the operation repeated gives the same state."""
    state, request = talking(8, 140, 4)
    mark = ps.invariants.digest(state)
    for change in (
        lambda s: ps.fork_request(s, request, at=130)[0],
        lambda s: ps.rewind_request(s, request, 9),
        lambda s: ps.retract_request(s, request),
        lambda s: ps.import_request(s, ps.export_request(s, request))[0],
    ):
        one, two = change(state), change(state)
        assert ps.invariants.digest(one) == ps.invariants.digest(two) != mark
        assert ps.invariants.digest(state) == mark
