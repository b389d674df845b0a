"""Prefix reuse by forking, and other faults of comparable engines that branching, caches and records can have.

Ids in docstrings are rows of the field-case sheet.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

import attrs
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.models import tiny_model
from kit.steps import ENDLESS, examples, fresh, ids_of, run_alone
from purestep.model import paged, reading
from purestep.model.loading import build_model
from purestep.state.capacity import PoolSizes

PLAIN = tiny_model((0, 4, 128), window=16)
MODEL = build_model(PLAIN.config, PLAIN.params, numerics=ps.Numerics(invariant=True))
PAGE = 8
UNIT = lcm(PAGE, 128)
"""Smallest prefix that can be taken over."""


class Cache:
    """The least that a server needs to reuse prefixes: forks held at reuse points, found by token ids alone."""

    def __init__(self, requests: int = 40, tokens: int = 40 * 1100) -> None:
        self.state = ps.init_state(MODEL, ps.Capacity(requests, tokens, 1100), page_size=PAGE)
        self.points: dict[tuple[int, ...], int] = {}

    def answer(self, prompt: Sequence[int], steps: int) -> tuple[int, list[int]]:
        """Continue a prompt greedily: (tokens taken over, tokens said)."""
        known = [ids for ids in self.points if len(ids) < len(prompt) and tuple(prompt[: len(ids)]) == ids]
        start = max(known, key=len, default=())
        if start:
            self.state, request = ps.fork_request(self.state, self.points[start], sampling=ENDLESS)
        else:
            self.state, request = ps.open_request(self.state, ENDLESS)
        last = (len(prompt) - 1) // UNIT * UNIT
        if last > len(start):
            self.state, _ = ps.extend_step(MODEL, self.state, {request: prompt[len(start) : last]}, sample=False)
            self.state, self.points[tuple(prompt[:last])] = ps.fork_request(self.state, request)
        done = ps.find_request(self.state, request).kv_len
        self.state, out = ps.extend_step(MODEL, self.state, {request: prompt[done:]})
        said = [*out.next_token_ids]
        for _ in range(steps):
            self.state, out = ps.decode_step(MODEL, self.state, only=[request])
            said += out.next_token_ids
        self.state = ps.close_request(self.state, request)
        return len(start), said


@examples(4)
@given(n=st.sampled_from((800, 129, 128, 127, 600, 5)), seed=st.integers(0, 9))
def test_the_same_prompt_again(n: int, seed: int) -> None:
    """PFX-01, PFX-03, PFX-07: a repeated prompt takes over whole units, says so, and is answered as the first time."""
    prompt, cache = ids_of(n, seed=seed), Cache()
    answers = [cache.answer(prompt, 6) for _ in range(3)]
    assert [taken for taken, _ in answers] == [0, (n - 1) // UNIT * UNIT, (n - 1) // UNIT * UNIT]
    assert {tuple(said) for _, said in answers} == {tuple(run_alone(MODEL, prompt, 6, page_size=PAGE, context=1100)[0])}


@examples(2)
@given(data=st.data())
def test_shared_prefixes_in_a_small_pool(data: st.DataObject) -> None:
    """PFX-09: many requests over a few prefixes, with points given up when pages run short, are answered as alone."""
    prefixes = [ids_of(300, seed=seed) for seed in range(3)]
    cache = Cache(requests=8, tokens=1400)
    for _ in range(10):
        prefix = data.draw(st.sampled_from(prefixes))
        prompt = [
            *prefix[: data.draw(st.sampled_from((140, 260, 300)))],
            *ids_of(data.draw(st.integers(1, 30)), seed=7),
        ]
        while len(cache.state.table.free_pages) * PAGE < len(prompt) + 16:
            ids, point = next(iter(cache.points.items()))
            cache.state = ps.close_request(cache.state, point)
            del cache.points[ids]
        _, said = cache.answer(prompt, 3)
        assert ps.invariants.check(cache.state) == ()
        assert said == run_alone(MODEL, prompt, 3, page_size=PAGE, context=1100)[0]


def test_a_point_pins_its_window() -> None:
    """SWA-03: a fork held at a reuse point keeps its window while the parent goes far beyond, and continues exactly."""
    ids = ids_of(700)
    state, parent = ps.open_request(fresh(MODEL, 3, page_size=PAGE, context=800), ENDLESS)
    state, _ = ps.extend_step(MODEL, state, {parent: ids[:256]}, sample=False)
    state, point = ps.fork_request(state, parent)
    for chunk in (ids[256:500], ids[500:]):
        state, _ = ps.extend_step(MODEL, state, {parent: chunk}, sample=False)
    assert ps.find_request(ps.fork_request(state, parent, at=256)[0], 2).n_unfed == 256
    _, out = ps.extend_step(MODEL, state, {point: ids[256:300]}, sample=False, logits="all")
    cold, request = ps.open_request(fresh(MODEL, 1, page_size=128, context=800), ENDLESS)
    _, expected = ps.extend_step(MODEL, cold, {request: ids[:300]}, sample=False, logits="all")
    assert torch.equal(out.logits, expected.logits[256:])


def test_ids_alone_are_the_key() -> None:
    """PFX-15: one text of ids is one history, however its ids were given; another id is another history."""
    prompt = ids_of(140)
    cache = Cache()
    cache.answer(prompt, 1)
    assert cache.answer(tuple(torch.tensor(prompt).tolist()), 1)[0] == 128
    assert cache.answer([(prompt[0] + 1) % 32, *prompt[1:]], 1)[0] == 0


def test_closing_twice_frees_once() -> None:
    """KVA-09: a request that ends and is closed in any order gives its pages back once; the second close is refused."""
    params = ps.SamplingParams(temperature=0, max_new_tokens=3, ignore_eos=True)
    state, request = ps.open_request(fresh(MODEL, 2, page_size=PAGE), params)
    empty = state.table
    state, _ = ps.extend_step(MODEL, state, {request: [1, 2, 3]})
    while not ps.find_request(state, request).finished:
        state, _ = ps.decode_step(MODEL, state)
    closed = ps.close_request(state, request)
    assert len(closed.table.free_pages) == len(empty.free_pages)
    for name in (request, request):
        with pytest.raises(ps.RequestError, match="not open"):
            ps.close_request(closed, name)
    assert ps.invariants.check(closed) == ()
    retracted = ps.close_request(ps.retract_request(state, request), request)
    assert len(retracted.table.free_pages) == len(empty.free_pages)
    assert ps.invariants.check(retracted) == ()


@examples(5)
@given(n=st.integers(150, 300), budget=st.sampled_from((1, 1000, 20000)))
def test_scratch_is_tiled(n: int, budget: int) -> None:
    """KVA-11: with a smaller scratch budget the rows are tiled, and the result is the same."""
    model = tiny_model((4, 128), window=16, index_topk=8)
    prompts, found = {0: ids_of(n), 1: ids_of(5), 2: [7]}, []
    for limits in ({}, {"SCORE_BUDGET": budget, "GATHER_BUDGET": budget, "MIN_BLOCK": 1}):
        with pytest.MonkeyPatch.context() as patch:
            for module in (paged, reading):
                for name, limit in limits.items():
                    patch.setattr(module, name, limit)
            state = fresh(model, 3)
            for _ in range(3):
                state, _ = ps.open_request(state, ENDLESS)
            state, out = ps.extend_step(model, state, prompts)
            found.append(torch.cat((out.logits, ps.decode_step(model, state)[1].logits)))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0)


@pytest.mark.parametrize("ratios", [(0,), (4,), (128,), (0, 4, 128)])
def test_bytes_are_those_of_the_buffers(ratios: tuple[int, ...]) -> None:
    """OBS-05: the size that a state reports is the sum of all its window, C4, C128, indexer and state buffers."""
    model = tiny_model(ratios)
    capacity = ps.Capacity(3, 1000, 300)
    state = ps.init_state(model, capacity, page_size=PAGE)
    sizes, config = PoolSizes.of(capacity, PAGE), model.config
    n4, n128, width = ratios.count(4), ratios.count(128), 4
    expected = len(ratios) * (sizes.swa_pages + 1) * PAGE * config.head_dim * width
    expected += n4 * (sizes.pages + 1) * (PAGE // 4) * (config.head_dim + config.index_head_dim) * width
    expected += n128 * (sizes.c128_pages + 1) * 16 * config.head_dim * width
    rings = -(-(sizes.swa_pages * 8 + 9) // 8) * 8 * n4 * 4 * (config.head_dim + config.index_head_dim) * width
    banks = -(-(sizes.requests * 128 + 129) // 128) * 128 * n128 * 2 * config.head_dim * width
    assert state.kv.handle.nbytes == expected + rings + banks


def test_nan_is_an_error_of_its_request() -> None:
    """RES-07: a request whose logits hold NaN is named in an error, nothing has changed, and the others can go on."""
    embed = MODEL.params.embed.clone()
    embed[9] = torch.nan
    model = attrs.evolve(MODEL, params=attrs.evolve(MODEL.params, embed=embed))
    params = ps.SamplingParams(temperature=1.0, seed=3, frequency_penalty=0.5, logprobs=2, ignore_eos=True)
    state = fresh(MODEL, 3)
    for one in (ENDLESS, params, ENDLESS):
        state, _ = ps.open_request(state, one)
    mark = ps.invariants.digest(state)
    with pytest.raises(ps.RequestError, match="NaN") as caught:
        ps.extend_step(model, state, {0: [1, 2], 1: [3, 9], 2: [4]})
    assert caught.value.got == [1]
    assert ps.invariants.digest(state) == mark
    state, out = ps.extend_step(model, state, {0: [1, 2], 2: [4]})
    assert bool(out.logits.isfinite().all())


def test_the_ids_of_every_step_are_the_text() -> None:
    """RES-05: the ids that the steps gave, joined, are the request's outputs."""
    state, request = ps.open_request(fresh(MODEL, 1), ps.SamplingParams(seed=4, ignore_eos=True))
    state, out = ps.extend_step(MODEL, state, {request: ids_of(20)})
    said = [*out.next_token_ids]
    for _ in range(12):
        state, out = ps.decode_step(MODEL, state)
        said += out.next_token_ids
    assert ps.find_request(state, request).outputs.tolist() == said
    assert ps.find_request(state, request).tokens.tolist() == [*ids_of(20), *said]
