"""Every predicate holds on good states and steps, and finds the fault that was planted for it."""

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
from kit.models import VOCAB, tiny_model
from kit.steps import ENDLESS, examples, fresh, ids_of
from purestep.state.pages import FreeList
from purestep.state.table import write_table

inv = ps.invariants
MODEL = tiny_model()
SIZE = 8
CONTEXT = 320
A, B, C = 0, 1, 2
"""A long request, a short one, and a fork of the long one; they have the rows 1, 2, 3, and row 4 is free."""


@cache
def scene() -> ps.DecodeState:
    """Three requests with evicted pages, a closed C128 group, shared pages, partly filled pages and pending tokens."""
    state = fresh(MODEL, page_size=SIZE, context=CONTEXT)
    for _ in range(2):
        state, _ = ps.open_request(state, ENDLESS)
    state, _ = ps.extend_step(MODEL, state, {A: ids_of(150), B: ids_of(5, seed=1)})
    for _ in range(3):
        state, _ = ps.decode_step(MODEL, state)
    state, _ = ps.fork_request(state, A)
    state, _ = ps.decode_step(MODEL, state, only=[A, B])
    return ps.decode_step(MODEL, state, only=[C], force={C: 7})[0]


def row_of(state: ps.DecodeState, request_id: int) -> int:
    return next(r.row for r in state.requests if r.request_id == request_id)


def slots_of(state: ps.DecodeState, request_id: int) -> np.ndarray[Any, Any]:
    return inv.read_ledger(state).by_id[request_id].slots


# Ways to break a state. All of them make a new one.


def with_table(state: ps.DecodeState, name: str, entry: int, value: int) -> ps.DecodeState:
    """Write one entry of a table buffer."""
    handle = write_table(state.table, [(name, np.array([entry]), value)])
    return attrs.evolve(state, table=attrs.evolve(state.table, handle=handle))


def with_added(state: ps.DecodeState, name: str, entry: int, change: int = 1) -> ps.DecodeState:
    """Add to one entry of a table buffer."""
    old = int(state.table.handle.rows(name, torch.tensor([entry]))[0])
    return with_table(state, name, entry, old + change)


def with_slot(state: ps.DecodeState, request_id: int, position: int, slot: int) -> ps.DecodeState:
    """Let a position name another slot."""
    return with_table(state, "req_to_token", row_of(state, request_id) * CONTEXT + position, slot)


def with_sidecar(state: ps.DecodeState, row: int, column: int, page: int) -> ps.DecodeState:
    return with_table(state, "sidecar", row * state.table.sizes.sidecar_width + column, page)


def with_request(state: ps.DecodeState, request_id: int, **changes: Any) -> ps.DecodeState:
    """Change fields of a record."""
    requests = tuple(attrs.evolve(r, **changes) if r.request_id == request_id else r for r in state.requests)
    return attrs.evolve(state, requests=requests)


def with_list(state: ps.DecodeState, name: str, change: Callable[[FreeList], FreeList]) -> ps.DecodeState:
    """Change a free list."""
    return attrs.evolve(state, table=attrs.evolve(state.table, **{name: change(getattr(state.table, name))}))


def with_relay(state: ps.DecodeState, row: int, token: int) -> ps.DecodeState:
    relay = state.relay.clone()
    relay[row] = token
    return attrs.evolve(state, relay=relay)


def with_cache_row(state: ps.DecodeState, name: str, row: int, value: float) -> ps.DecodeState:
    with state.kv.handle.write({name: torch.tensor([row])}) as write:
        write.tensors[name][row] = value
    return attrs.evolve(state, kv=attrs.evolve(state.kv, handle=write.handle))


def with_sampling(state: ps.DecodeState, request_id: int, **changes: Any) -> ps.DecodeState:
    rows = tuple(attrs.evolve(r, **changes) if r.request_id == request_id else r for r in state.sampling.rows)
    return attrs.evolve(state, sampling=ps.SamplingState(rows=rows))


def lose_one(free: FreeList) -> FreeList:
    """Drop the first page of a list, so that nobody has it."""
    return free.take(1)[0]


def twice(free: FreeList) -> FreeList:
    return attrs.evolve(free, returned=(3, (3, ())), n_returned=2)


def miscounted(free: FreeList) -> FreeList:
    return attrs.evolve(free, n_returned=free.n_returned + 1)


def swapped(free: FreeList) -> FreeList:
    """Exchange the first two pages."""
    rest, (first, second) = free.take(2)
    return attrs.evolve(rest, returned=(second, (first, rest.returned)), n_returned=rest.n_returned + 2)


def launched_short(state: ps.DecodeState) -> ps.DecodeState:
    prepared, _ = ps.prepare_decode(state)
    return with_request(prepared, B, kv_len=3)


def peer_of_previous(state: ps.DecodeState, position: int) -> ps.DecodeState:
    slots = slots_of(state, A)
    peer = int(state.table.handle.rows("full_to_swa", torch.tensor([slots[position - 1]]))[0])
    return with_table(state, "full_to_swa", int(slots[position]), peer)


STATE_FAULTS: dict[str, Callable[[ps.DecodeState], ps.DecodeState]] = {
    "L06": lambda s: with_request(s, A, evicted_len=400),
    "L07": launched_short,
    "L08": lambda s: with_request(s, A, output_positions=s.requests[0].output_positions.replace_last(0)),
    "L10": lambda s: with_relay(s, row_of(s, B), (s.requests[1].tokens[-1] + 1) % VOCAB),
    "A16": lambda s: with_request(s, B, row=row_of(s, A)),
    "B16": lambda s: with_sampling(s, A, params=ps.SamplingParams(max_new_tokens=1)),
    "N04": lambda s: attrs.evolve(s, sampling=ps.SamplingState(rows=s.sampling.rows[1:])),
    "N05": lambda s: attrs.evolve(s, next_id=1),
    "N15": lambda s: with_sampling(
        s, A, output_counts=torch.zeros(VOCAB, dtype=torch.int32), prompt_seen=torch.ones(VOCAB, dtype=torch.bool)
    ),
    "A03": lambda s: with_slot(s, B, 2, 2),
    "A04": lambda s: with_slot(s, B, 2, int(slots_of(s, B)[3])),
    "A05": lambda s: with_slot(s, A, 2, int(slots_of(s, A)[10])),
    "A11": lambda s: with_list(s, "free_pages", lose_one),
    "A12": lambda s: with_list(s, "free_pages", twice),
    "A13": lambda s: with_added(s, "page_refs", int(slots_of(s, B)[-1]) // SIZE),
    "A15": lambda s: with_table(s, "req_to_token", 5, 1),
    "A19": lambda s: with_list(s, "free_c128_pages", miscounted),
    "N01": lambda s: with_added(s, "page_refs", int(slots_of(s, A)[0]) // SIZE),
    "N03": lambda s: with_slot(s, B, 0, int(slots_of(s, A)[0])),
    "W01": lambda s: with_table(s, "full_to_swa", int(slots_of(s, A)[-1]), 0),
    "W02": lambda s: peer_of_previous(s, 150),
    "W03": lambda s: with_added(s, "full_to_swa", int(slots_of(s, A)[-1])),
    "W05": lambda s: with_table(s, "full_to_swa", int(slots_of(s, A)[1]), SIZE + 1),
    "W08": lambda s: with_list(s, "free_swa_pages", lose_one),
    "W09": lambda s: with_table(s, "full_to_swa", (s.table.sizes.pages + 1) * SIZE, 0),
    "N02": lambda s: with_added(s, "swa_refs", 2, -1),
    "C06": lambda s: with_sidecar(s, row_of(s, A), 0, 0),
    "C09": lambda s: with_added(s, "c128_refs", 1),
    "C10": lambda s: with_list(s, "free_c128_pages", lose_one),
    "C12": lambda s: with_sidecar(s, 4, 0, 1),
    "C13": lambda s: with_sidecar(s, row_of(s, C), 0, 1),
    "C14": lambda s: peer_of_previous(s, 150),
    "B14": lambda s: with_list(s, "free_swa_pages", lambda free: free.give([last_window_row(s, B) // SIZE])),
    "C16": lambda s: with_cache_row(s, "c4_state", s.kv.layout.dummy("c4_state"), 1.0),
}


def test_scene_is_rich() -> None:
    """The good state has what the faults need: evicted, shared and partly filled pages, C128 entries, a free row."""
    ledger = inv.read_ledger(scene())
    assert [h.request.evicted_len > 0 for h in ledger.holdings] == [True, False, True]
    assert ledger.page_refs.max() == 2
    assert [h.n_c128 for h in ledger.holdings] == [1, 0, 1]
    assert all(h.request.kv_len % SIZE for h in ledger.holdings)
    assert ledger.free_rows.tolist() == [4]


def test_good_state_passes() -> None:
    """Nothing is found in a good state."""
    assert inv.check(scene()) == ()


@examples(8)
@given(state=ps.strategies.states(MODEL, max_operations=6))
def test_reachable_states_pass(state: ps.DecodeState) -> None:
    """Nothing is found in any state that operations lead to."""
    assert inv.check(state) == ()


@pytest.mark.parametrize("id_", inv.STATE)
def test_state_fault_is_found(id_: str) -> None:
    """A state with a planted fault violates the predicate meant for it; the good one does not."""
    broken = STATE_FAULTS[id_](scene())
    found = inv.check(broken, [id_])
    assert found, id_
    assert {violation.id for violation in found} == {id_}
    assert all(violation.text and violation.where for violation in found)
    assert inv.check(scene(), [id_]) == ()


# Preparation. The extend opens pages for two requests, continues a page, crosses 128 and evicts; the decode opens one.

Prepared = tuple[ps.DecodeState, ps.ScheduleBatch, ps.DecodeState]


@cache
def growing() -> ps.DecodeState:
    """A has 120 positions and fills its pages, B has 5, C is a short third request; windows have moved on."""
    state = fresh(MODEL, page_size=SIZE, context=CONTEXT)
    for _ in range(3):
        state, _ = ps.open_request(state, ENDLESS)
    state, _ = ps.extend_step(MODEL, state, {A: ids_of(60), B: ids_of(4, seed=1), C: ids_of(9)})
    return ps.extend_step(MODEL, state, {A: ids_of(59), B: ()})[0]


@cache
def extended() -> Prepared:
    before = growing()
    after, batch = ps.prepare_extend(before, {A: ids_of(20), B: ids_of(8)})
    return before, batch, after


@cache
def decoded() -> Prepared:
    before = growing()
    after, batch = ps.prepare_decode(before)
    return before, batch, after


@cache
def resumed() -> Prepared:
    """B was retracted and comes back with a few tokens more."""
    before = ps.retract_request(growing(), B)
    after, batch = ps.prepare_extend(before, {C: (), B: ids_of(3)})
    return before, batch, after


def with_batch(prepared: Prepared, **changes: Any) -> Prepared:
    before, batch, after = prepared
    return before, attrs.evolve(batch, **changes), after


def with_after(prepared: Prepared, change: Callable[[ps.DecodeState], ps.DecodeState]) -> Prepared:
    before, batch, after = prepared
    return before, batch, change(after)


def with_before(prepared: Prepared, change: Callable[[ps.DecodeState], ps.DecodeState]) -> Prepared:
    before, batch, after = prepared
    return change(before), batch, after


def with_locs(prepared: Prepared, name: str, change: Callable[[Any], Any]) -> Prepared:
    locs = prepared[1].out_cache_loc_dsv4
    return with_batch(prepared, out_cache_loc_dsv4=attrs.evolve(locs, **{name: change(getattr(locs, name))}))


def with_loc(prepared: Prepared, at: int, slot: int) -> Prepared:
    locs = prepared[1].out_cache_loc.copy()
    locs[at] = slot
    return with_batch(prepared, out_cache_loc=locs)


def written_page(prepared: Prepared) -> int:
    return int(prepared[1].out_cache_loc[-1]) // SIZE


PREPARED_FAULTS: dict[str, Callable[[], Prepared]] = {
    "L01": lambda: with_batch(decoded(), seq_lens=decoded()[1].seq_lens + 1),
    "L04": lambda: with_batch(decoded(), seq_lens_sum=1),
    "L05": lambda: with_after(decoded(), lambda s: with_request(s, A, kv_len=5)),
    "L10": lambda: with_before(decoded(), lambda s: with_relay(s, row_of(s, A), 0)),
    "L11": lambda: with_batch(decoded(), prefix_lens=decoded()[1].prefix_lens - 1),
    "L12": lambda: with_batch(decoded(), req_pool_indices=decoded()[1].req_pool_indices[::-1].copy()),
    "A01": lambda: with_loc(extended(), 3, int(extended()[1].out_cache_loc[4])),
    "A02": lambda: with_loc(extended(), 3, int(slots_of(extended()[0], C)[0])),
    "A03": lambda: with_loc(extended(), 3, 3),
    "A06": lambda: with_loc(extended(), 21, int(extended()[1].out_cache_loc[21]) + 1),
    "A07": lambda: with_before(extended(), lambda s: with_list(s, "free_pages", lose_one)),
    "A08": lambda: with_after(extended(), lambda s: with_list(s, "free_pages", lose_one)),
    "A09": lambda: with_before(extended(), lambda s: with_list(s, "free_pages", swapped)),
    "A10": lambda: with_after(decoded(), lambda s: with_list(s, "free_pages", lose_one)),
    "A13": lambda: with_after(extended(), lambda s: with_added(s, "page_refs", written_page(extended()))),
    "A14": lambda: with_after(extended(), lambda s: with_slot(s, C, 1, 9)),
    "W01": lambda: with_after(extended(), lambda s: with_table(s, "full_to_swa", int(slots_of(s, A)[118]), 0)),
    "W04": lambda: with_locs(extended(), "out_swa_loc", lambda loc: loc + SIZE),
    "W05": lambda: with_after(extended(), lambda s: with_request(s, A, evicted_len=112 + SIZE)),
    "W06": lambda: with_after(extended(), lambda s: with_request(s, A, evicted_len=0)),
    "W07": lambda: with_after(extended(), lambda s: with_added(s, "page_refs", int(slots_of(s, A)[0]) // SIZE)),
    "C01": lambda: with_locs(extended(), "out_c4_loc", lambda loc: loc[1:]),
    "C02": lambda: with_locs(extended(), "out_c128_loc", lambda loc: loc + 1),
    "C07": lambda: with_after(extended(), lambda s: with_sidecar(s, row_of(s, A), 0, 0)),
    "C08": lambda: with_after(extended(), lambda s: with_sidecar(s, row_of(s, C), 0, 1)),
    "C11": lambda: with_after(extended(), lambda s: with_added(s, "c128_refs", 1)),
    "E01": lambda: with_batch(extended(), prefix_lens=extended()[1].seq_lens),
    "E03": lambda: with_batch(extended(), out_cache_loc=extended()[1].out_cache_loc[::-1].copy()),
    "E05": lambda: with_after(extended(), lambda s: with_list(s, "free_c128_pages", lose_one)),
    "N14": lambda: with_after(resumed(), lambda s: with_list(s, "free_rows", lambda free: free.give([2]))),
}


def test_good_preparations_pass() -> None:
    """Nothing is found in a good preparation, and these two open, continue, cross and evict."""
    for prepared in (extended(), decoded(), resumed()):
        assert inv.check_prepared(*prepared) == ()
        assert inv.check(prepared[2]) == ()
    before, batch, after = extended()
    assert batch.out_cache_loc_dsv4.out_c128_loc.size == 1
    assert after.requests[0].evicted_len > before.requests[0].evicted_len > 0
    assert (batch.prefix_lens % SIZE).tolist() == [0, 5]


@pytest.mark.parametrize("id_", inv.PREPARED)
def test_prepared_fault_is_found(id_: str) -> None:
    """A preparation with a planted fault violates the predicate meant for it."""
    assert inv.check_prepared(*PREPARED_FAULTS[id_](), [id_]), id_


# The model's view: one row with one token, one with several.

View = tuple[ps.DecodeState, ps.ScheduleBatch, ps.ForwardBatch]


@cache
def viewed() -> View:
    prepared, batch = ps.prepare_extend(growing(), {A: (), B: ids_of(11), C: ()})
    return prepared, batch, ps.forward_batch(prepared, batch)


@cache
def closing() -> View:
    """A view in which both kinds of groups close: A goes from 120 to 130."""
    prepared, batch = ps.prepare_extend(growing(), {A: ids_of(9), B: ()})
    return prepared, batch, ps.forward_batch(prepared, batch)


@cache
def folding() -> View:
    """A view over online pooling: one request goes on and closes a group, another begins one."""
    state = ps.init_state(MODEL, ps.Capacity(requests=2, tokens=600, context=300), page_size=SIZE, caches="online")
    for _ in range(2):
        state, _ = ps.open_request(state, ENDLESS)
    state, _ = ps.extend_step(MODEL, state, {0: ids_of(120)})
    prepared, batch = ps.prepare_extend(state, {1: ids_of(5), 0: ids_of(20)})
    return prepared, batch, ps.forward_batch(prepared, batch)


def with_view(view: View, **changes: Any) -> View:
    return view[0], view[1], attrs.evolve(view[2], **changes)


def with_metadata(view: View, **changes: Any) -> View:
    return with_view(view, metadata=attrs.evolve(view[2].metadata, **changes))


def with_singles(view: View, **changes: Any) -> View:
    return with_metadata(view, singles=attrs.evolve(view[2].metadata.singles, **changes))


def with_chunk(view: View, **changes: Any) -> View:
    return with_metadata(view, chunks=(attrs.evolve(view[2].metadata.chunks[0], **changes),))


def with_plan(view: View, ratio: int, **changes: Any) -> View:
    plans = view[2].metadata.compressors
    return with_metadata(view, compressors={**plans, ratio: attrs.evolve(plans[ratio], **changes)})


VIEW_FAULTS: dict[str, list[Callable[[], View]]] = {
    "L02": [lambda: with_view(viewed(), seq_lens_cpu=viewed()[2].seq_lens_cpu + 1)],
    "L03": [lambda: with_view(viewed(), positions=viewed()[2].positions + 1)],
    "L04": [lambda: with_view(viewed(), seq_lens_sum=0)],
    "L10": [lambda: with_view(viewed(), input_ids=viewed()[2].input_ids.flip(0) + 1)],
    "L12": [
        lambda: with_view(viewed(), batch_size=1),
        lambda: with_metadata(viewed(), chunks=()),
        lambda: with_metadata(viewed(), singles=None),
    ],
    "E02": [lambda: with_view(viewed(), positions=viewed()[2].positions.flip(0))],
    "T01": [lambda: with_view(viewed(), out_cache_loc=viewed()[2].out_cache_loc + SIZE)],
    "T05": [lambda: (viewed()[0], attrs.evolve(viewed()[1], out_cache_loc=viewed()[1].out_cache_loc + 1), viewed()[2])],
    "H07": [lambda: with_view(viewed(), last_rows=viewed()[2].last_rows.flip(0))],
    "W10": [
        lambda: with_singles(viewed(), window_loc=viewed()[2].metadata.singles.window_loc + SIZE),
        lambda: with_singles(viewed(), window_mask=torch.zeros_like(viewed()[2].metadata.singles.window_mask)),
        lambda: with_chunk(viewed(), window_loc=viewed()[2].metadata.chunks[0].window_loc[1:]),
        lambda: with_metadata(viewed(), swa_loc=viewed()[2].metadata.swa_loc + 1),
    ],
    "C03": [
        lambda: with_singles(viewed(), c4_visible=viewed()[2].metadata.singles.c4_visible - 1),
        lambda: with_singles(viewed(), c4_pages=viewed()[2].metadata.singles.c4_pages.flip(1)),
        lambda: with_chunk(viewed(), c4_loc=viewed()[2].metadata.chunks[0].c4_loc + 1),
    ],
    "C04": [lambda: with_plan(closing(), 4, out_loc=closing()[2].metadata.compressors[4].out_loc + 1)],
    "C05": [
        lambda: with_plan(closing(), 4, first_pos=closing()[2].metadata.compressors[4].first_pos + 3),
        lambda: with_plan(closing(), 128, first_pos=closing()[2].metadata.compressors[128].first_pos + 127),
    ],
    "C06": [lambda: with_chunk(closing(), c128_loc=closing()[2].metadata.chunks[0].c128_loc + 1)],
    "C14": [
        lambda: with_plan(viewed(), 4, state_loc=viewed()[2].metadata.compressors[4].state_loc + 1),
        lambda: with_plan(
            viewed(),
            128,
            keep=viewed()[2].metadata.compressors[128].keep[:-1],
            state_loc=viewed()[2].metadata.compressors[128].state_loc[:-1],
        ),
    ],
    "C15": [
        lambda: with_plan(closing(), 4, history=closing()[2].metadata.compressors[4].history * 0),
        lambda: with_plan(closing(), 128, members=closing()[2].metadata.compressors[128].members.flip(1)),
    ],
    "N16": [
        lambda: with_plan(folding(), 128, history=folding()[2].metadata.compressors[128].history.flip(0)),
        lambda: with_plan(folding(), 128, members=folding()[2].metadata.compressors[128].members.flip(0)),
        lambda: with_plan(folding(), 128, state_loc=folding()[2].metadata.compressors[128].state_loc + 1),
        lambda: with_plan(folding(), 128, keep=folding()[2].metadata.compressors[128].keep - 1),
    ],
}


def test_good_views_pass() -> None:
    """Nothing is found in a good view of single rows, chunks and closing groups, folded ones too."""
    assert inv.check_view(*viewed()) == ()
    assert inv.check_view(*closing()) == ()
    assert inv.check_view(*folding()) == ()


@pytest.mark.parametrize("id_", inv.VIEW)
def test_view_fault_is_found(id_: str) -> None:
    """A view with a planted fault violates the predicate meant for it."""
    for fault in VIEW_FAULTS[id_]:
        assert inv.check_view(*fault(), [id_]), id_


# From the preparation on.

Committed = tuple[ps.DecodeState, ps.StepOutput, ps.DecodeState]


@cache
def committed() -> Committed:
    after, out = ps.decode_step(MODEL, growing())
    return decoded()[2], out, after


def with_out(**changes: Any) -> Committed:
    prepared, out, after = committed()
    return prepared, attrs.evolve(out, **changes), after


def with_end(change: Callable[[ps.DecodeState], ps.DecodeState]) -> Committed:
    prepared, out, after = committed()
    return prepared, out, change(after)


def stopped_early() -> Committed:
    prepared, out, after = committed()
    after = with_sampling(after, A, params=ps.SamplingParams(min_new_tokens=50))
    return prepared, attrs.evolve(out, finished={A: "stop"}), after


COMMITTED_FAULTS: dict[str, Callable[[], Committed]] = {
    "E07": lambda: with_end(lambda s: with_request(s, A, tokens=s.requests[0].tokens.append(1))),
    "H04": lambda: with_out(request_ids=(B, A, C)),
    "H08": lambda: with_out(logits=committed()[1].logits * torch.nan),
    "S01": lambda: with_out(next_token_ids=(VOCAB, 0, 0)),
    "S06": stopped_early,
    "R01": lambda: with_end(lambda s: with_relay(s, 4, 3)),
    "G02": lambda: with_end(lambda s: with_request(s, A, finished="stop")),
    "N07": lambda: with_end(lambda s: with_added(s, "swa_refs", 2)),
}


def test_good_commit_passes() -> None:
    """Nothing is found in a good step."""
    assert inv.check_committed(*committed()) == ()


@pytest.mark.parametrize("id_", inv.COMMITTED)
def test_committed_fault_is_found(id_: str) -> None:
    """A step with a planted fault violates the predicate meant for it."""
    assert inv.check_committed(*COMMITTED_FAULTS[id_](), [id_]), id_


# Closing and forking.


def closed(change: Callable[[ps.DecodeState], ps.DecodeState] = lambda s: s) -> tuple[ps.DecodeState, ps.DecodeState]:
    return scene(), change(ps.close_request(scene(), A))


CLOSED_FAULTS: dict[str, Callable[[], tuple[ps.DecodeState, ps.DecodeState]]] = {
    "A19": lambda: closed(lambda s: with_list(s, "free_pages", lose_one)),
    "C12": lambda: closed(lambda s: with_cache_row(s, "c128_state", 128, 1.0)),
    "N08": lambda: closed(lambda s: with_slot(s, B, 0, int(slots_of(s, C)[0]))),
}


def test_good_close_passes() -> None:
    """Nothing is found when a request that shares pages is closed."""
    assert inv.check_closed(*closed()) == ()


@pytest.mark.parametrize("id_", inv.CLOSED)
def test_closed_fault_is_found(id_: str) -> None:
    """A close with a planted fault violates the predicate meant for it."""
    assert inv.check_closed(*CLOSED_FAULTS[id_](), [id_]), id_


def last_window_row(state: ps.DecodeState, request_id: int) -> int:
    return int(inv.read_ledger(state).by_id[request_id].windows[-1])


def forked(
    change: Callable[[ps.DecodeState, int], ps.DecodeState] = lambda s, i: s, at: int | None = None
) -> tuple[Any, ...]:
    after, fork = ps.fork_request(deep(), A, at=at)
    return deep(), change(after, fork), A, fork, at


@cache
def deep() -> ps.DecodeState:
    """The scene with a request that is cut where it can be reused: page size and window let 128 be a reuse point."""
    model = tiny_model(window=32)
    state = fresh(model, page_size=SIZE, context=CONTEXT)
    for _ in range(2):
        state, _ = ps.open_request(state, ENDLESS)
    state, _ = ps.extend_step(model, state, {A: ids_of(130), B: ids_of(5, seed=1)})
    for _ in range(3):
        state, _ = ps.decode_step(model, state)
    return state


FORKED_FAULTS: dict[str, list[Callable[[], tuple[Any, ...]]]] = {
    "N06": [
        lambda: forked(lambda s, i: with_slot(s, i, 128, int(slots_of(s, A)[128]))),
        lambda: forked(lambda s, i: with_request(s, i, tokens=s.requests[-1].tokens.append(1)), at=129),
        lambda: forked(lambda s, i: with_request(s, i, kv_len=3), at=129),
        lambda: forked(lambda s, i: with_request(s, i, finished="stop")),
    ],
    "N09": [
        lambda: forked(lambda s, i: with_cache_row(s, "swa", last_window_row(s, i), 9.0)),
        lambda: forked(lambda s, i: with_sidecar(s, row_of(s, i), 0, 3), at=129),
    ],
    "N10": [lambda: forked(lambda s, i: with_cache_row(s, "swa", last_window_row(s, B), 9.0), at=129)],
}


def test_good_forks_pass() -> None:
    """Nothing is found in a good fork, whole or at an earlier token, from a reuse point or from nothing."""
    for at in (None, 133, 131, 129, 128, 100, 0):
        assert inv.check_forked(*forked(at=at)) == ()
    assert forked(at=131)[1].requests[-1].kv_len == 128
    assert inv.check_forked(scene(), *reversed_pair(ps.fork_request(scene(), A)), None) == ()


def reversed_pair(pair: tuple[ps.DecodeState, int]) -> tuple[ps.DecodeState, int, int]:
    """Turn what ``fork_request`` returns for A into (after, parent, fork)."""
    return pair[0], A, pair[1]


@pytest.mark.parametrize("id_", inv.FORKED)
def test_forked_fault_is_found(id_: str) -> None:
    """A fork with a planted fault violates the predicate meant for it."""
    for fault in FORKED_FAULTS[id_]:
        assert inv.check_forked(*fault(), [id_]), id_


def rewound(
    change: Callable[[ps.DecodeState], ps.DecodeState] = lambda s: s, n: int = 131
) -> tuple[ps.DecodeState, ps.DecodeState, int, int]:
    """Cut A, which has a fork that reads its pages, so that it must not write them."""
    before, _ = ps.fork_request(deep(), A)
    return before, change(ps.rewind_request(before, A, n)), A, n


REWOUND_FAULTS: dict[str, list[Callable[[], tuple[Any, ...]]]] = {
    "N11": [
        lambda: rewound(lambda s: with_request(s, A, tokens=s.requests[0].tokens.replace_last(31))),
        lambda: rewound(lambda s: with_request(s, A, finished="length")),
        lambda: rewound(lambda s: with_request(s, A, row=4)),
        lambda: rewound(lambda s: with_sampling(s, A, seed=1)),
    ],
    "N12": [
        lambda: rewound(lambda s: with_cache_row(s, "swa", last_window_row(s, A), 9.0)),
        lambda: rewound(lambda s: with_slot(s, A, 0, 9)),
    ],
    "N13": [lambda: rewound(lambda s: with_cache_row(s, "swa", last_window_row(s, 2), 9.0))],
}


def test_good_rewinds_pass() -> None:
    """Nothing is found when a request is cut back to any place, with or without others that read its pages."""
    for n in (134, 133, 131, 128, 127, 8, 0):
        assert inv.check_rewound(*rewound(n=n)) == ()
        assert inv.check_rewound(deep(), ps.rewind_request(deep(), A, n), A, n) == ()


@pytest.mark.parametrize("id_", inv.REWOUND)
def test_rewound_fault_is_found(id_: str) -> None:
    """A rewind with a planted fault violates the predicate meant for it."""
    for fault in REWOUND_FAULTS[id_]:
        assert inv.check_rewound(*fault(), [id_]), id_


def retracted(
    change: Callable[[ps.DecodeState], ps.DecodeState] = lambda s: s,
) -> tuple[ps.DecodeState, ps.DecodeState, int]:
    return scene(), change(ps.retract_request(scene(), A)), A


RETRACTED_FAULTS: dict[str, list[Callable[[], tuple[Any, ...]]]] = {
    "B13": [
        lambda: retracted(lambda s: with_request(s, A, row=1)),
        lambda: retracted(lambda s: with_request(s, A, kv_len=3)),
        lambda: retracted(lambda s: with_request(s, A, tokens=s.requests[0].tokens.append(1))),
        lambda: retracted(lambda s: with_request(s, A, finished="stop")),
        lambda: retracted(lambda s: with_sampling(s, A, n_outputs=0)),
    ],
    "A19": [lambda: retracted(lambda s: with_list(s, "free_pages", lose_one))],
    "C12": [lambda: retracted(lambda s: with_cache_row(s, "c128_state", 128, 1.0))],
    "N08": [lambda: retracted(lambda s: with_cache_row(s, "swa", last_window_row(s, B), 9.0))],
}


def test_good_retraction_passes() -> None:
    """Nothing is found when a request that shares pages is retracted, and when it is retracted again."""
    assert inv.check_retracted(*retracted()) == ()
    assert inv.check_retracted(retracted()[1], ps.retract_request(retracted()[1], A), A) == ()


@pytest.mark.parametrize("id_", inv.RETRACTED)
def test_retracted_fault_is_found(id_: str) -> None:
    """A retraction with a planted fault violates the predicate meant for it."""
    for fault in RETRACTED_FAULTS[id_]:
        assert inv.check_retracted(*fault(), [id_]), id_


def test_predicates_are_callable_alone() -> None:
    """A predicate can be run by itself on a ledger, and an unknown id is refused by name."""
    broken = STATE_FAULTS["A15"](scene())
    assert list(inv.STATE["A15"](inv.read_ledger(broken)))
    with pytest.raises(ps.RequestError, match=r"A15.*got 'Z99'"):
        inv.check(scene(), ["Z99"])


def test_checks_change_nothing() -> None:
    """Checking and digesting leave a state as it was, and a digest tells any two of the states here apart."""
    mark = inv.digest(scene())
    inv.check(scene())
    assert inv.digest(scene()) == mark
    others = [STATE_FAULTS[id_](scene()) for id_ in ("L06", "N05", "A11", "W05", "C09", "L10")]
    assert len({mark, *(inv.digest(state) for state in others)}) == 1 + len(others)
