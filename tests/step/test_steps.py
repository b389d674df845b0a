"""The steps against the worked numbers of the decode-path sheet, and their purity, whatever happens inside."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import attrs
import numpy as np
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.models import VOCAB, tiny_model
from kit.steps import ENDLESS, bookkeep_decode, bookkeep_extend, examples, fresh, ids_of
from purestep.model.forward import embed_tokens
from purestep.model.layer import head_logits
from purestep.state.kv import KVLayout
from purestep.state.table import write_table
from purestep.step.allocate import eviction_end
from purestep.step.metadata import c4_state_loc

inv = ps.invariants
MODEL = tiny_model()
WIDE = tiny_model(window=128)


def opened(state: ps.DecodeState, count: int, params: ps.SamplingParams = ENDLESS) -> ps.DecodeState:
    for _ in range(count):
        state, _ = ps.open_request(state, params)
    return state


def free_pages(state: ps.DecodeState) -> list[int]:
    return list(state.table.free_pages)


def table_row(state: ps.DecodeState, request_id: int) -> list[int]:
    return inv.read_ledger(state).by_id[request_id].slots.tolist()


# Worked numbers.


def test_three_requests() -> None:
    """Sheet 1.2: pages of 4, lengths 10, 7, 20; the decode writes slots 14, 23, 44."""
    state = opened(ps.init_state(MODEL, ps.Capacity(3, 64, 64), page_size=4), 3)
    state, _ = bookkeep_extend(state, {0: ids_of(10), 1: ids_of(7), 2: ids_of(20)})
    assert free_pages(state) == [11, 12, 13, 14, 15, 16]
    assert [table_row(state, i)[-1] for i in range(3)] == [13, 22, 43]
    after, batch = ps.prepare_decode(state)
    view = ps.forward_batch(after, batch)
    assert batch.out_cache_loc.tolist() == [14, 23, 44]
    assert [table_row(after, i)[n] for i, n in enumerate((10, 7, 20))] == [14, 23, 44]
    assert batch.seq_lens.tolist() == view.seq_lens.tolist() == [11, 8, 21]
    assert batch.seq_lens_sum == view.seq_lens_sum == 40
    assert view.positions.tolist() == [10, 7, 20]
    assert batch.req_pool_indices.tolist() == [1, 2, 3]
    assert free_pages(after) == [12, 13, 14, 15, 16]
    for field in (view.input_ids, view.positions, view.out_cache_loc):
        assert field.shape == (3,)
    assert view.input_ids.tolist() == [5, 5, 5]


def test_extend_over_page_borders() -> None:
    """Sheet 1.3: prefix 6 to 13 after slot 21 takes the page's tail, a whole page and the head of another."""
    state = opened(ps.init_state(MODEL, ps.Capacity(3, 64, 64), page_size=4), 3)
    for request_id, n in ((0, 12), (1, 6), (2, 12)):
        state, _ = ps.extend_step(MODEL, state, {request_id: ids_of(n)}, sample=False)
    assert table_row(state, 1)[-1] == 21
    assert free_pages(state)[:3] == [9, 10, 11]
    _, batch = ps.prepare_extend(state, {1: ids_of(7)})
    assert batch.out_cache_loc.tolist() == [22, 23, 36, 37, 38, 39, 40]


def test_extend_of_two_requests() -> None:
    """Sheet 1.3: pages go to rows in batch order, (0 to 6) and then (8 to 13) after slot 27."""
    state = opened(ps.init_state(MODEL, ps.Capacity(4, 48, 48), page_size=4), 4)
    for request_id, n in ((0, 16), (1, 8), (2, 8)):
        state, _ = ps.extend_step(MODEL, state, {request_id: ids_of(n)}, sample=False)
    assert table_row(state, 1)[-1] == 27
    assert free_pages(state) == [9, 10, 11, 12]
    after, batch = ps.prepare_extend(state, {3: ids_of(6), 1: ids_of(5)})
    assert batch.out_cache_loc.tolist() == [36, 37, 38, 39, 40, 41, 44, 45, 46, 47, 48]
    assert free_pages(after) == []


def eviction_trace(state: ps.DecodeState, steps: int) -> list[tuple[int, int, int]]:
    """Decode without a forward; list (length before the step, first and last position given back)."""
    trace = []
    for _ in range(steps):
        old = state.requests[0]
        state, _ = bookkeep_decode(state)
        new = state.requests[0]
        if new.evicted_len != old.evicted_len:
            trace.append((old.kv_len, old.evicted_len, new.evicted_len))
        assert inv.check(state, ("W01", "W05", "W08")) == ()
    return trace


def test_eviction_of_prompt_300() -> None:
    """Sheet 1.7, no prefix sharing: nothing in the first decode, then [0,128) at 301, [128,256) at 384, ..."""
    state = opened(ps.init_state(WIDE, ps.Capacity(1, 700, 700), page_size=128), 1)
    state, _ = bookkeep_extend(state, {0: ids_of(300)})
    assert eviction_trace(state, 230) == [(301, 0, 128), (384, 128, 256), (512, 256, 384)]


@examples(40)
@given(
    prompt=st.integers(1, 90),
    steps=st.integers(1, 60),
    window=st.sampled_from((1, 5, 8, 16)),
    page_size=st.sampled_from((4, 8, 12, 32)),
)
def test_eviction_follows_rule(prompt: int, steps: int, window: int, page_size: int) -> None:
    """Sheet 1.7 for any prompt, window and page size; what the window or a closing C4 group may need stays."""
    model = tiny_model((4,), window=window)
    state = opened(ps.init_state(model, ps.Capacity(1, 192, 192), page_size=page_size), 1)
    state, _ = bookkeep_extend(state, {0: ids_of(prompt)})
    reach, evicted, expected = max(window, 8), 0, []
    for step in range(steps):
        pre = prompt + step
        if step >= 1 and pre - reach >= evicted + window:
            new = max(evicted, (pre - reach) // page_size * page_size)
            if new > evicted:
                expected.append((pre, evicted, new))
            evicted = new
    assert eviction_trace(state, steps) == expected


@given(
    pre=st.integers(0, 500), evicted=st.integers(0, 40), window=st.integers(1, 130), size=st.sampled_from((4, 12, 128))
)
def test_eviction_end_is_safe(pre: int, evicted: int, window: int, size: int) -> None:
    """The cursor never goes back, stands on pages, and stays behind every position that is still read."""
    old = evicted * size
    new = eviction_end(pre, old, window, size)
    assert new >= old
    assert new % size == 0
    assert new == old or new <= pre - max(window, 8)


def test_c128_table() -> None:
    """Sheet 4.4: which steps close a group of 128 and open a page; page 1 first and page 7 at position 2176."""
    state = opened(ps.init_state(WIDE, ps.Capacity(6, 3200, 2304, c128_pages=8), page_size=128), 6)
    found = {}
    for seq in (127, 128, 256, 2048, 2176):
        n = seq - 1 - state.requests[0].kv_len
        state = fill(state, 0, n)[0] if n else state
        if seq == 2176:
            for other in range(1, 6):
                state, _ = fill(state, other, 128)
        before = set(np.flatnonzero(inv.read_ledger(state).c128_refs).tolist())
        after, batch = ps.prepare_extend(state, {0: [3]})
        assert inv.check_prepared(state, batch, after) == ()
        opened_pages = set(np.flatnonzero(inv.read_ledger(after).c128_refs).tolist()) - before
        found[seq] = (batch.out_cache_loc_dsv4.out_c128_loc.tolist(), opened_pages)
        state = ps.commit(after, None)[0]
    assert found == {127: ([], set()), 128: ([16], {1}), 256: ([17], set()), 2048: ([31], set()), 2176: ([112], {7})}
    assert inv.read_ledger(state).by_id[0].sidecar.tolist() == [1, 7]


def fill(state: ps.DecodeState, request_id: int, n: int) -> tuple[ps.DecodeState, ps.ScheduleBatch]:
    """Give a request ``n`` more positions, without a forward and without sampling."""
    state, batch = ps.prepare_extend(state, {request_id: [3] * n})
    return ps.commit(state, None)[0], batch


def test_c128_counts_of_extends() -> None:
    """Sheet 4.4: 0 to 5000 closes 39 groups in 3 pages; 4096 to 5000 closes 7 in 1."""
    empty = opened(ps.init_state(WIDE, ps.Capacity(1, 5120, 5120), page_size=128), 1)
    whole, batch = fill(empty, 0, 5000)
    assert len(batch.out_cache_loc_dsv4.out_c128_loc) == 39
    assert inv.read_ledger(whole).by_id[0].n_c128 == 3
    part, _ = fill(empty, 0, 4096)
    rest, batch = fill(part, 0, 904)
    assert len(batch.out_cache_loc_dsv4.out_c128_loc) == 7
    assert len(part.table.free_c128_pages) - len(rest.table.free_c128_pages) == 1


def test_state_buffer_rows() -> None:
    """Sheet 4.5: 5 window pages make 56 rows of C4 state, 5 pool rows 896 of C128 state; the last is the dummy."""
    state = ps.init_state(WIDE, ps.Capacity(5, 640, 128), page_size=128)
    layout = KVLayout.of(WIDE.config, state.table.sizes)
    assert state.table.sizes.swa_pages == 5
    assert (layout.n_slots("c4_state"), layout.dummy("c4_state")) == (56, 55)
    assert (layout.n_slots("c128_state"), layout.dummy("c128_state")) == (896, 895)


def sheet_47() -> ps.DecodeState:
    """Build the state of sheet 4.7: pages of 128, full pages 1, 2, 3, window pages 3, 1, 2, lengths 10, 7, 20.

    Full and window pages are taken in lock-step here, so a lone extend gives equal numbers; the map is written
    directly.
    """
    state = opened(ps.init_state(WIDE, ps.Capacity(3, 640, 128), page_size=128), 3)
    state, _ = bookkeep_extend(state, {0: ids_of(10), 1: ids_of(7), 2: ids_of(20)})
    edits = [
        ("full_to_swa", full * 128 + np.arange(n), swa * 128 + np.arange(n))
        for full, swa, n in ((1, 3, 10), (2, 1, 7), (3, 2, 20))
    ]
    return attrs.evolve(state, table=attrs.evolve(state.table, handle=write_table(state.table, edits)))


def test_dsv4_example() -> None:
    """Sheet 4.7: full, window, C4 and C128 locations, state rows and page tables of one decode."""
    state = sheet_47()
    assert inv.check(state) == ()
    after, batch = ps.prepare_decode(state)
    view = ps.forward_batch(after, batch)
    locs, meta = batch.out_cache_loc_dsv4, view.metadata
    assert view.positions.tolist() == [10, 7, 20]
    assert locs.out_full_loc.tolist() == [138, 263, 404]
    assert locs.out_swa_loc.tolist() == meta.swa_loc.tolist() == [394, 135, 276]
    # B alone closes a group; its entry is at index 0 of the dense list, not at its row.
    assert locs.out_c4_loc.tolist() == meta.compressors[4].out_loc.tolist() == [65]
    assert locs.out_c128_loc.tolist() == []
    assert meta.compressors[4].first_pos.tolist() == [4]
    assert meta.compressors[4].history.tolist() == [8, 9, 10, 11, 12, 13, 14]
    assert meta.compressors[4].state_loc.tolist() == [26, 15, 20]
    assert meta.compressors[128].state_loc.tolist() == [138, 263, 404]
    windows = inv.read_ledger(after).by_id
    state_rows = [c4_state_loc(windows[i].windows, 128).tolist() for i in range(3)]
    assert state_rows[0][2:] == [26, 27, 28, 29, 30, 31, 24, 25, 26]
    assert state_rows[1] == [8, 9, 10, 11, 12, 13, 14, 15]
    assert state_rows[2][12:] == [20, 21, 22, 23, 16, 17, 18, 19, 20]
    assert meta.singles.c4_pages.tolist() == [[1], [2], [3]]
    assert meta.singles.c4_visible.tolist() == [2, 2, 5]
    assert meta.singles.c128_pages.shape == (3, 0)  # no row has an entry, so no column is read
    assert meta.singles.window_mask.sum(1).tolist() == [11, 8, 21]
    assert inv.check_view(after, batch, view) == ()


def test_first_c4_group_reads_dummy() -> None:
    """Sheet 4.5: the first group of 4 has no group before it; the dummy row stands for it."""
    state = opened(fresh(MODEL), 1)
    state, _ = bookkeep_extend(state, {0: ids_of(3)})
    after, batch = ps.prepare_decode(state)
    plan = ps.forward_batch(after, batch).metadata.compressors[4]
    dummy = state.kv.layout.dummy("c4_state")
    assert plan.history.tolist() == [dummy] * 4 + [8, 9, 10]


# Decode and extend are one thing; rows are independent of their order.


@examples(12)
@given(state=ps.strategies.states(MODEL, longest=20), data=st.data())
def test_decode_prepares_like_extend(state: ps.DecodeState, data: st.DataObject) -> None:
    """A17: preparing a decode is preparing an extend by the pending token: same slots, table and bundle."""
    # The first decode after a prefill gives no window back while an extend may; from the second on they agree.
    rows = [r for r in state.requests if r.has_pending and not r.finished and r.decode_count > 0]
    ids = data.draw(st.permutations([r.request_id for r in rows]))
    if not ids:
        return
    one, decode = ps.prepare_decode(state, only=ids)
    other, extend = ps.prepare_extend(state, dict.fromkeys(ids, ()))
    for name in ("req_pool_indices", "prefix_lens", "seq_lens", "out_cache_loc"):
        assert getattr(decode, name).tolist() == getattr(extend, name).tolist()
    for name in ("out_full_loc", "out_swa_loc", "out_c4_loc", "out_c128_loc"):
        assert getattr(decode.out_cache_loc_dsv4, name).tolist() == getattr(extend.out_cache_loc_dsv4, name).tolist()
    mine, theirs = inv.read_ledger(one), inv.read_ledger(other)
    for name in ("req_to_token", "full_to_swa", "sidecar", "page_refs", "free_pages", "free_swa_pages"):
        assert getattr(mine, name).tolist() == getattr(theirs, name).tolist()
    assert ps.forward_batch(one, decode).input_ids.tolist() == extend.input_ids.tolist()


@examples(8)
@given(data=st.data())
def test_step_commutes_with_row_order(data: st.DataObject) -> None:
    """B04: decoding in another row order gives every request the same token and logits, up to names of new pages."""
    state = opened(fresh(MODEL), 4, ps.SamplingParams(seed=3, ignore_eos=True))
    prompts = {i: data.draw(ps.strategies.prompts(VOCAB, 30)) for i in range(4)}
    state, _ = ps.extend_step(MODEL, state, prompts)
    order = data.draw(st.permutations(range(4)))
    one, straight = ps.decode_step(MODEL, state)
    other, turned = ps.decode_step(MODEL, state, only=order)
    assert turned.request_ids == tuple(order)
    torch.testing.assert_close(turned.logits, straight.logits[list(order)], atol=1e-5, rtol=0)
    assert [turned.next_token_ids[order.index(i)] for i in range(4)] == list(straight.next_token_ids)
    for request in one.requests:
        assert request.tokens == next(r.tokens for r in other.requests if r.request_id == request.request_id)


def test_step_is_its_pieces() -> None:
    """A decode step is prepare, forward_batch, forward, sample, relay, commit, and a forward its layers, to the bit."""
    state = opened(fresh(MODEL), 2, ps.SamplingParams(seed=1, ignore_eos=True))
    state, _ = ps.extend_step(MODEL, state, {0: ids_of(30), 1: ids_of(7)})
    whole, out = ps.decode_step(MODEL, state)
    now, batch = ps.prepare_decode(state)
    view = ps.forward_batch(now, batch)
    kv, logits = ps.forward(MODEL, now.kv, view)
    sampling, ids = ps.sample(logits, now.sampling, batch.request_ids, view.positions, stop_token_ids=(1,))
    now = ps.relay(attrs.evolve(now, kv=kv, sampling=sampling), batch, ids)
    now, finished = ps.commit(now, ids)
    mhc, layered = embed_tokens(MODEL, view), ps.prepare_decode(state)[0].kv
    for layer in range(MODEL.config.num_hidden_layers):
        mhc, layered = ps.layer_step(MODEL, layer, mhc, layered, view)
    assert torch.equal(head_logits(MODEL, mhc.streams), logits)
    assert inv.digest(attrs.evolve(now, kv=layered)) == inv.digest(whole)
    assert torch.equal(logits, out.logits)
    assert (tuple(ids.tolist()), finished) == (out.next_token_ids, dict(out.finished))
    assert inv.digest(now) == inv.digest(whole)


# Purity.


def results(state: ps.DecodeState) -> list[object]:
    """Call every public function on a state; return everything that came out, as comparable values."""
    found: list[object] = []
    ids = [r.request_id for r in state.requests]
    running = [r.request_id for r in state.requests if r.finished is None]
    other, new_id = ps.open_request(state, ps.SamplingParams(frequency_penalty=0.5)) if len(ids) < 4 else (state, -1)
    found += [inv.digest(other), new_id]
    for request_id in ids[:1]:
        found.append(inv.digest(ps.close_request(state, request_id)))
        if len(ids) < 4:
            found.append(inv.digest(ps.fork_request(state, request_id, sampling=ps.SamplingParams(seed=5))[0]))
    if running:
        tokens = {request_id: [3, 4, 5] for request_id in running}
        after, out = ps.extend_step(MODEL, state, tokens, logits="all")
        found += [inv.digest(after), out.logits, out.next_token_ids, dict(out.finished)]
        prepared, batch = ps.prepare_extend(state, tokens)
        view = ps.forward_batch(prepared, batch)
        kv, logits = ps.forward(MODEL, prepared.kv, view)
        sampling, sampled = ps.sample(
            logits, prepared.sampling, batch.request_ids, view.seq_lens - 1, stop_token_ids=(1,)
        )
        relayed = ps.relay(attrs.evolve(prepared, kv=kv, sampling=sampling), batch, sampled)
        committed, finished = ps.commit(relayed, sampled)
        mhc = ps.MHCState(streams=torch.ones(len(view.input_ids), 2, 16))
        streams, layer_kv = ps.layer_step(MODEL, 1, mhc, prepared.kv, view)
        found += [logits, sampled, streams.streams, inv.digest(attrs.evolve(prepared, kv=layer_kv))]
        found += [inv.digest(prepared), inv.digest(relayed), inv.digest(committed), dict(finished)]
        found += [batch.out_cache_loc.tolist(), view.positions]
        forced, out = ps.decode_step(MODEL, state, only=running, force=dict.fromkeys(running, 4))
        found += [inv.digest(forced), out.logits, out.next_token_ids]
    found.append(ps.forward_sequence(MODEL, torch.tensor(ids_of(9))).detach())
    return found


@examples(6)
@given(state=ps.strategies.states(MODEL, longest=20, max_operations=5))
def test_public_functions_are_pure(state: ps.DecodeState) -> None:
    """Every public function leaves its input as it was, repeats to the bit, and uses no global generator."""
    mark, generator = inv.digest(state), torch.random.get_rng_state()
    once = results(state)
    assert inv.digest(state) == mark
    again = results(state)
    assert inv.digest(state) == mark
    assert torch.equal(torch.random.get_rng_state(), generator)
    for one, other in zip(once, again, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@examples(10)
@given(
    operator=st.sampled_from(
        ("linear", "rms_norm", "attend", "pool_group", "enter_streams", "experts", "head_weights")
    ),
    call=st.integers(0, 8),
    error=st.sampled_from((RuntimeError, KeyboardInterrupt, SystemExit)),
    is_decode=st.booleans(),
)
def test_broken_step_changes_nothing(operator: str, call: int, error: type[BaseException], is_decode: bool) -> None:
    """A step that raises in any operator of any layer leaves its input and every held state as they were."""
    held = opened(fresh(MODEL), 2)
    held, _ = ps.extend_step(MODEL, held, {0: ids_of(125), 1: ids_of(9)})
    state, _ = ps.decode_step(MODEL, held)
    expected, out = ps.decode_step(MODEL, state)
    marks = [inv.digest(s) for s in (held, state, expected)]
    broken = ps.strategies.interrupted(MODEL, operator, call, error("broken off"))
    step: Callable[[], object] = (
        (lambda: ps.decode_step(broken, state))
        if is_decode
        else (lambda: ps.extend_step(broken, state, {0: ids_of(20)}))
    )
    with suppress(error):
        step()
    assert [inv.digest(s) for s in (held, state, expected)] == marks
    again, repeated = ps.decode_step(MODEL, state)
    assert torch.equal(repeated.logits, out.logits)
    assert inv.digest(again) == marks[2]


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_interrupt_in_each_layer(layer: int) -> None:
    """An interrupt in the attention of layer k comes through as it is, and the state can be stepped as before."""
    state = opened(fresh(MODEL), 1)
    state, _ = ps.extend_step(MODEL, state, {0: ids_of(20)})
    mark = inv.digest(state)
    broken = ps.strategies.interrupted(MODEL, "attend", layer, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        ps.decode_step(broken, state)
    assert inv.digest(state) == mark
    ps.decode_step(MODEL, state)


def calling_back(callback: Callable[[], object]) -> ps.Model:
    """Make a model whose attention calls back into the package."""
    attend = MODEL.ops.attend

    def attending(*args: Any, **kwargs: Any) -> torch.Tensor:
        callback()
        return attend(*args, **kwargs)

    return attrs.evolve(MODEL, ops=attrs.evolve(MODEL.ops, attend=attending))


def test_reentry_is_refused() -> None:
    """A callback from inside a step that steps or reads a state of the same buffers gets a StateBusyError."""
    held = opened(fresh(MODEL), 1)
    state, _ = ps.extend_step(MODEL, held, {0: ids_of(9)})
    marks = inv.digest(held), inv.digest(state)
    for callback in (
        lambda: ps.decode_step(MODEL, state),
        lambda: ps.extend_step(MODEL, held, {0: [1]}),
        lambda: state.kv.handle.rows("swa", torch.tensor([0])),
        lambda: ps.close_request(state, 0),
    ):
        with pytest.raises(ps.StateBusyError):
            ps.decode_step(calling_back(callback), state)
        assert (inv.digest(held), inv.digest(state)) == marks


def test_launched_step_must_end_first() -> None:
    """Nothing starts on a state whose prepared step has not been committed."""
    state = opened(fresh(MODEL), 1)
    state, _ = ps.extend_step(MODEL, state, {0: ids_of(9)})
    prepared, _ = ps.prepare_decode(state)
    mark = inv.digest(prepared)
    for call in (
        lambda: ps.decode_step(MODEL, prepared),
        lambda: ps.extend_step(MODEL, prepared, {0: [1]}),
        lambda: ps.prepare_decode(prepared),
        lambda: ps.close_request(prepared, 0),
        lambda: ps.fork_request(prepared, 0),
    ):
        with pytest.raises(ps.StateBusyError, match="prepared and not committed"):
            call()
    assert inv.digest(prepared) == mark
    with pytest.raises(ps.RequestError, match="expected a launched step"):
        ps.commit(state, None)


# Closing and forking.


def test_close_twice_is_refused() -> None:
    """A closed request is unknown, and so is one that never was."""
    state = opened(fresh(MODEL), 1)
    closed = ps.close_request(state, 0)
    for request_id in (0, 7, -1):
        with pytest.raises(ps.RequestError, match=f"request {request_id}: not open"):
            ps.close_request(closed, request_id)
        with pytest.raises(ps.RequestError, match=f"request {request_id}: not open"):
            ps.fork_request(closed, request_id)
    assert inv.check(ps.close_request(state, 0)) == ()


def test_fork_needs_room() -> None:
    """Without a free row or a page for the copies a fork is a CapacityError and changes nothing."""
    full = opened(ps.init_state(MODEL, ps.Capacity(2, 64, 64), page_size=8), 2)
    mark = inv.digest(full)
    with pytest.raises(ps.CapacityError, match="requests"):
        ps.fork_request(full, 0)
    assert inv.digest(full) == mark
    tight = opened(ps.init_state(MODEL, ps.Capacity(3, 16, 64), page_size=8), 1)
    tight, _ = ps.extend_step(MODEL, tight, {0: ids_of(12)})
    mark = inv.digest(tight)
    with pytest.raises(ps.CapacityError, match="pages"):
        ps.fork_request(tight, 0)
    assert inv.digest(tight) == mark


def test_fork_of_whole_pages_needs_none() -> None:
    """A fork whose parent fills its pages takes no page at all, and no page is lost when both are closed."""
    state = opened(ps.init_state(MODEL, ps.Capacity(3, 16, 64), page_size=8), 1)
    state, _ = ps.extend_step(MODEL, state, {0: ids_of(16)}, sample=False)
    forked, fork = ps.fork_request(state, 0)
    assert free_pages(forked) == free_pages(state) == []
    one = ps.close_request(forked, 0)
    assert free_pages(one) == []
    assert sorted(free_pages(ps.close_request(one, fork))) == [1, 2]


def test_finished_request_stays_closed_to_steps() -> None:
    """A finished request is not run again, nor is its fork; asking for it is a RequestError; closing it works."""
    state = opened(fresh(MODEL), 1, ps.SamplingParams(max_new_tokens=1, ignore_eos=True, temperature=0))
    state, out = ps.extend_step(MODEL, state, {0: ids_of(9)})
    assert out.finished == {0: "length"}
    forked, fork = ps.fork_request(state, 0)
    for request_id in (0, fork):
        with pytest.raises(ps.RequestError, match="has finished"):
            ps.decode_step(MODEL, forked, only=[request_id])
        with pytest.raises(ps.RequestError, match="has finished"):
            ps.extend_step(MODEL, forked, {request_id: [1]})
    assert inv.check(ps.close_request(forked, 0)) == ()


def test_reused_row_starts_clean() -> None:
    """R04: a request on a recycled row has nothing pending, whatever the row's last owner left in the relay."""
    state = opened(fresh(MODEL, 1), 1)
    state, _ = ps.extend_step(MODEL, state, {0: ids_of(9)})
    state = opened(ps.close_request(state, 0), 1)
    with pytest.raises(ps.RequestError, match="expected a pending token"):
        ps.decode_step(MODEL, state, only=[1])
    with pytest.raises(ps.RequestError, match="nothing is pending"):
        ps.extend_step(MODEL, state, {1: ()})
