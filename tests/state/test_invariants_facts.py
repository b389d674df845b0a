"""Predicates over logits, layouts and inner stages: what is right passes, and every planted fault is found."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import attrs
import numpy as np
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.models import VOCAB, tiny_model
from kit.steps import examples, fresh, ids_of
from purestep.ops.experts import experts_sorted
from purestep.ops.noise import gumbel_noise
from purestep.ops.router import route_hash, route_scored
from purestep.ops.streams import mix_weights
from purestep.state.ids import (
    BlockInterleave,
    PageInterleave,
    PlainLayout,
    TokenInterleave,
    UnifiedLayout,
    VirtualLoc,
)
from purestep.state.invariants_sampled import _noise
from torch import Tensor

inv = ps.invariants
MODEL = tiny_model()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# The choice of tokens.

GREEDY, FREE, CUT, STOPS = 0, 1, 2, 3
PARAMS = (
    ps.SamplingParams(temperature=0, repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={3: 2.0}),
    ps.SamplingParams(temperature=1.5, seed=5),
    ps.SamplingParams(temperature=1.0, top_k=4, top_p=0.7, min_p=0.05, seed=2**63 + 1),
    ps.SamplingParams(temperature=0, min_new_tokens=9, stop_token_ids=(2, 4)),
)
ALLOWED = (5, 9, 11)
MASK = {FREE: torch.tensor([sum(1 << token for token in ALLOWED)], dtype=torch.int32)}

Sampled = tuple[ps.DecodeState, Tensor, dict[int, Tensor], ps.StepOutput, ps.DecodeState]


@cache
def sampled() -> Sampled:
    """One step of four requests that are sampled in four ways; one of them is masked."""
    state = fresh(MODEL)
    for params in PARAMS:
        state, _ = ps.open_request(state, params)
    state, _ = ps.extend_step(MODEL, state, {i: ids_of(7, seed=i) for i in range(4)})
    prepared, _ = ps.prepare_decode(state)
    after, out = ps.decode_step(MODEL, state, mask=MASK)
    return prepared, out.logits, MASK, out, after


def with_token(request_id: int, choose: Callable[[inv.Draw], int]) -> Sampled:
    """Let a request have chosen another token."""
    prepared, logits, mask, out, after = sampled()
    draw = inv.read_draws(prepared, logits, mask, out)[request_id]
    tokens = list(out.next_token_ids)
    tokens[request_id] = choose(draw)
    return prepared, logits, mask, attrs.evolve(out, next_token_ids=tuple(tokens)), after


def with_row(request_id: int, **changes: Any) -> Sampled:
    prepared, logits, mask, out, after = sampled()
    rows = tuple(attrs.evolve(r, **changes) if r.request_id == request_id else r for r in after.sampling.rows)
    return prepared, logits, mask, out, attrs.evolve(after, sampling=ps.SamplingState(rows=rows))


SAMPLED_FAULTS: dict[str, list[Callable[[], Sampled]]] = {
    "S02": [lambda: with_token(FREE, lambda draw: 6)],
    "S03": [lambda: with_token(GREEDY, lambda draw: int(draw.adjusted().argsort()[-2]))],
    "S04": [lambda: with_token(CUT, lambda draw: int(draw.probs().argmin()))],
    "S05": [lambda: with_token(FREE, lambda draw: next(t for t in ALLOWED if t != draw.token))],
    "S06": [lambda: with_token(STOPS, lambda draw: 4), lambda: with_token(STOPS, lambda draw: 1)],
    "S09": [
        lambda: with_row(GREEDY, seed=9),
        lambda: with_row(CUT, params=PARAMS[FREE]),
        lambda: with_row(FREE, n_outputs=7),
        lambda: with_row(GREEDY, output_counts=torch.zeros(VOCAB, dtype=torch.int32)),
    ],
}


def test_good_choice_passes() -> None:
    """Nothing is found in a step whose rows are greedy with penalties, masked, truncated, and kept from stopping."""
    assert inv.check_sampled(*sampled()) == ()


@pytest.mark.parametrize("id_", inv.SAMPLED)
def test_sampled_fault_is_found(id_: str) -> None:
    """A choice with a planted fault violates the predicate meant for it."""
    for fault in SAMPLED_FAULTS[id_]:
        assert inv.check_sampled(*fault(), [id_]), id_


@examples(20)
@given(
    params=ps.strategies.sampling_params(VOCAB),
    seed=st.integers(0, 99),
    bits=st.none() | st.integers(1, 2**31 - 1),
)
def test_any_choice_passes(params: ps.SamplingParams, seed: int, bits: int | None) -> None:
    """Nothing is found in what the sampler chooses, whatever the parameters, the prompt and the mask."""
    state, request_id = ps.open_request(fresh(MODEL), params)
    tokens = {request_id: ids_of(5, seed=seed)}
    mask = None if bits is None else {request_id: torch.tensor([bits], dtype=torch.int32)}
    prepared, _ = ps.prepare_extend(state, tokens)
    after, out = ps.extend_step(MODEL, state, tokens, mask=mask)
    assert inv.check_sampled(prepared, out.logits, mask, out, after) == ()


@examples(20)
@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**31))
def test_noise_is_the_same_function(seed: int, position: int) -> None:
    """The noise worked out here and the sampler's agree, so that neither can be wrong alone."""
    signed = torch.tensor([seed - 2**64 if seed >= 2**63 else seed])
    expected = gumbel_noise(signed, torch.tensor([position]), torch.arange(9))[0].double()
    np.testing.assert_allclose(_noise(seed, position, 9), expected.numpy(), rtol=1e-6)


def test_noise_vectors() -> None:
    """The noise of seed 42 at positions 10 and 11 is the recorded one."""
    np.testing.assert_allclose(_noise(42, 10, 4), [-0.343618, 1.652676, 1.911279, 0.218824], atol=1e-6)


# Layouts.

V2P = torch.tensor([0, 3, 1, -1, 2])
UNIFIED = UnifiedLayout(page_size=4, row_blocks=2, v2p=V2P)
WINDOW = UnifiedLayout(page_size=4, row_blocks=1, v2p=torch.tensor([0, 5, 2, -1, 1]))
MOVED = UnifiedLayout(page_size=4, row_blocks=2, v2p=torch.tensor([0, 2, 1, -1, 3]))
LOC = VirtualLoc(ids=torch.tensor([4, 5, 6, 7, 8, 11, 13, 16, 19, 0, -1]))


def contents() -> tuple[Tensor, Tensor]:
    """Rows of a pool before and after pages 2 and 3 changed places."""
    before = random(32, 3)
    after = before.reshape(4, 8, 3)[[0, 1, 3, 2]].reshape(32, 3)
    return before, after


def translation(**changes: Any) -> inv.Translation:
    before, after = contents()
    facts = inv.Translation(
        layout=UNIFIED, loc=LOC, window=WINDOW, moved=MOVED, content=before, moved_content=after, n_pages=4
    )
    return attrs.evolve(facts, **changes)


class Shifted(PlainLayout):
    """A plain layout that is one off."""

    def kernel(self, loc: VirtualLoc) -> Any:
        return super().kernel(VirtualLoc(ids=loc.ids + 1))


class Unsafe(UnifiedLayout):
    """Looks unmapped pages up as they are: -1 is the last one."""

    def _address(self, ids: Tensor, stride: int) -> Tensor:
        return self.v2p[ids // self.page_size].abs() * stride + ids % self.page_size


class Narrow(UnifiedLayout):
    """Forgets how many rows a page has."""

    def kernel(self, loc: VirtualLoc) -> Any:
        return self.physical(loc)


TRANSLATED_FAULTS: dict[str, Callable[[], inv.Translation]] = {
    "T01": lambda: translation(layout=Shifted(page_size=4)),
    "T02": lambda: translation(layout=Narrow(page_size=4, row_blocks=2, v2p=V2P)),
    "T03": lambda: translation(layout=attrs.evolve(UNIFIED, v2p=torch.tensor([0, 3, 3, -1, 2]))),
    "T04": lambda: translation(layout=Unsafe(page_size=4, row_blocks=2, v2p=V2P)),
    "T06": lambda: translation(moved_content=contents()[0]),
    "T10": lambda: translation(n_pages=None, layout=attrs.evolve(UNIFIED, v2p=torch.tensor([0, 3, 3, -1, 2]))),
}


def test_good_layouts_pass() -> None:
    """Nothing is found in a plain layout, and in a unified one with a window side and pages that have moved."""
    assert inv.check_facts(inv.TRANSLATED, translation()) == ()
    assert inv.check_facts(inv.TRANSLATED, inv.Translation(layout=PlainLayout(page_size=4), loc=LOC)) == ()


@pytest.mark.parametrize("id_", inv.TRANSLATED)
def test_translated_fault_is_found(id_: str) -> None:
    """A layout with a planted fault violates the predicate meant for it."""
    assert inv.check_facts(inv.TRANSLATED, TRANSLATED_FAULTS[id_](), ids=[id_]), id_


RANKS = range(3)
IDS = VirtualLoc(ids=torch.arange(24, 24 + 37))
GROUPS = {
    "token": [TokenInterleave(ways=3, rank=k, inner=PlainLayout(page_size=4)) for k in RANKS],
    "block": [BlockInterleave(ways=3, rank=k, block=4) for k in RANKS],
    "page": [PageInterleave(ways=3, rank=k, page_size=4) for k in RANKS],
}


class Greedy(BlockInterleave):
    """A rank that takes every id."""

    def is_mine(self, loc: VirtualLoc) -> Tensor:
        return loc.ids >= 0


class Rounded(BlockInterleave):
    """Counts whole blocks only."""

    def local_len(self, end: int, start: int = 0) -> int:
        return (super().local_len(end, start) // self.block) * self.block


class Folded(BlockInterleave):
    """Puts all blocks in one place."""

    def local_row(self, loc: VirtualLoc) -> Tensor:
        return super().local_row(loc) % self.block


SHARDED_FAULTS = {"T07": [Greedy, Folded], "T08": [Rounded], "T09": [Folded]}


@pytest.mark.parametrize("name", GROUPS)
def test_good_groups_pass(name: str) -> None:
    """Nothing is found in a group of ranks that deal tokens, blocks or pages."""
    assert inv.check_facts(inv.SHARDED, GROUPS[name], IDS) == ()


@pytest.mark.parametrize("id_", inv.SHARDED)
def test_sharded_fault_is_found(id_: str) -> None:
    """A group with a planted fault violates the predicate meant for it."""
    for faulty in SHARDED_FAULTS[id_]:
        group = [faulty(ways=3, rank=k, block=4) for k in RANKS]
        assert inv.check_facts(inv.SHARDED, group, IDS, ids=[id_]), id_


# Inner stages.

T, M, H, E, K = 9, 4, 6, 7, 3


def mix() -> inv.Mix:
    pre, post, comb = mix_weights(
        random(T, M, H),
        random((2 + M) * M, M * H, seed=1),
        random((2 + M) * M, seed=2),
        random(3, seed=3),
        n_iters=20,
        eps=1e-6,
        norm_eps=1e-6,
    )
    return inv.Mix(pre=pre, post=post, comb=comb)


MIX_FAULTS = {
    "M01": [
        lambda: attrs.evolve(mix(), comb=mix().comb.transpose(1, 2) * 1.01),
        lambda: attrs.evolve(mix(), comb=mix().comb - 0.5),
        lambda: attrs.evolve(mix(), comb=torch.eye(M)[[0, 0, 0, 0]].T.expand(T, M, M).flip(1) + 1e-9),
    ],
    "M02": [lambda: attrs.evolve(mix(), post=mix().post + 2), lambda: attrs.evolve(mix(), pre=-mix().pre)],
}


def routing() -> inv.Routing:
    logits, bias = random(T, E), random(E, seed=1)
    ids, weights = route_scored(logits, bias, K, 1.5)
    return inv.Routing(ids=ids, weights=weights, logits=logits, factor=1.5, bias=bias)


def hashed() -> inv.Routing:
    logits, tokens = random(T, E), torch.tensor([3, 1, 3, 0, 1, 1, 2, 3, 0])
    table = torch.stack([torch.arange(K) + token for token in range(4)])
    ids, weights = route_hash(logits, table[tokens], 1.5)
    return inv.Routing(ids=ids, weights=weights, logits=logits, factor=1.5, token_ids=tokens)


def biased_weights() -> inv.Routing:
    facts = routing()
    picked = (facts.scores() + facts.bias).gather(1, facts.ids)
    return attrs.evolve(facts, weights=(picked / picked.sum(1, keepdim=True) * 1.5).float())


ROUTED_FAULTS = {
    "M04": [
        lambda: attrs.evolve(routing(), ids=routing().ids.clone().fill_(2)),
        lambda: attrs.evolve(routing(), ids=routing().ids + E),
        lambda: attrs.evolve(routing(), weights=routing().weights / 1.5),
    ],
    "M05": [biased_weights, lambda: attrs.evolve(routing(), bias=-routing().bias * 9)],
    "M06": [lambda: attrs.evolve(hashed(), token_ids=hashed().token_ids.flip(0))],
}


def dispatched() -> tuple[Tensor, Tensor, Tensor]:
    flat = routing().ids.flatten()
    return routing().ids, flat.argsort(stable=True), torch.bincount(flat, minlength=E)


DISPATCHED_FAULTS = {
    "M07": [
        lambda: (dispatched()[0], dispatched()[1].clone().fill_(0), dispatched()[2]),
        lambda: (dispatched()[0], dispatched()[1].flip(0), dispatched()[2]),
        lambda: (dispatched()[0], dispatched()[1], dispatched()[2].flip(0) + 1),
    ],
}


def combined() -> inv.Combination:
    """Run the sorted experts of this package, and each expert on all rows for comparison."""
    facts, x = routing(), random(T, H, seed=4)
    w13, w2 = random(E, 10, H, seed=5), random(E, H, 5, seed=6)
    routed = experts_sorted(x, facts.ids, facts.weights, w13, w2, 10.0)
    one = torch.ones(T, 1)
    each = torch.stack(
        [experts_sorted(x, facts.ids[:, k : k + 1].contiguous(), one, w13, w2, 10.0) for k in range(K)], dim=1
    )
    shared = random(T, H, seed=7)
    return inv.Combination(weights=facts.weights, outputs=each, routed=routed, shared=shared, total=routed + shared)


COMBINED_FAULTS = {
    "M08": [lambda: attrs.evolve(combined(), routed=combined().routed.flip(0))],
    "M12": [
        lambda: attrs.evolve(combined(), total=combined().routed + 2 * combined().shared),
        lambda: attrs.evolve(combined(), total=combined().routed + 1.5 * combined().shared),
    ],
}

ORDER = torch.tensor([3, 1, 0, 2])


def test_good_stages_pass() -> None:
    """Nothing is found in what this package's operators make of random inputs."""
    assert inv.check_facts(inv.MIXED, mix()) == ()
    assert inv.check_facts(inv.ROUTED, routing()) == ()
    assert inv.check_facts(inv.ROUTED, hashed()) == ()
    assert inv.check_facts(inv.DISPATCHED, *dispatched()) == ()
    assert inv.check_facts(inv.COMBINED, combined()) == ()
    rows = random(4, H)
    assert inv.check_facts(inv.PERMUTED, ORDER, rows.sin(), rows[ORDER].sin()) == ()


FAULTS = {
    "MIXED": MIX_FAULTS,
    "ROUTED": ROUTED_FAULTS,
    "DISPATCHED": DISPATCHED_FAULTS,
    "COMBINED": COMBINED_FAULTS,
    "PERMUTED": {id_: [lambda: (ORDER, random(4, H), random(4, H))] for id_ in ("B04", "M03")},
}


@pytest.mark.parametrize(("name", "id_"), [(name, id_) for name in FAULTS for id_ in getattr(inv, name)])
def test_stage_fault_is_found(name: str, id_: str) -> None:
    """A stage with a planted fault violates the predicate meant for it."""
    for fault in FAULTS[name][id_]:
        facts = fault()
        assert inv.check_facts(getattr(inv, name), *(facts if isinstance(facts, tuple) else (facts,)), ids=[id_]), id_
