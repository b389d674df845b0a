"""The traced step: the bits of ``decode_step``, and statements about reads and writes that the caches confirm."""

from __future__ import annotations

import json
from collections.abc import Iterable

import attrs
import numpy as np
import purestep as ps
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kit.models import VOCAB, tiny_model
from kit.steps import ENDLESS, examples, fresh, ids_of
from purestep.model.loading import build_model
from purestep.state.ledger import digest, read_ledger
from purestep.step.prepare import running_requests
from purestep.step.trace import trace_step
from purestep.step.trace_values import Access, Trace, TraceStage
from torch import Tensor

MODEL = tiny_model()
CHOOSY = tiny_model((4, 0, 4), index_topk=2, window=12)
WIDE = tiny_model((0, 4, 128), window=128)
TABLES = ("req_to_token", "full_to_swa", "sidecar", "page_refs", "swa_refs", "c128_refs")
FREE = {"full": "free_pages", "window": "free_swa_pages", "c128": "free_c128_pages"}


def three_requests(model: ps.Model, page_size: int, swa_order: tuple[int, ...] = ()) -> ps.DecodeState:
    """Prefill the histories of 10, 7 and 20 tokens; ``swa_order`` names the window pages taken first."""
    state = fresh(model, 3, page_size=page_size, context=256)
    if swa_order:
        free = state.table.free_swa_pages.take(len(swa_order))[0].give(reversed(swa_order))
        state = attrs.evolve(state, table=attrs.evolve(state.table, free_swa_pages=free))
    prompts = {}
    for n in (10, 7, 20):
        state, request_id = ps.open_request(state, ENDLESS)
        prompts[request_id] = ids_of(n, seed=n)
    return ps.extend_step(model, state, prompts)[0]


def stage_of(trace: Trace, name: str) -> TraceStage:
    return next(stage for stage in trace.stages if stage.name == name)


def slots_of(accesses: Iterable[Access], store: str) -> dict[int, tuple[int, ...]]:
    return {one.request_id: one.slots for one in accesses if one.store == store}


def cache_rows(state: ps.DecodeState, accesses: Iterable[Access]) -> dict[str, set[int]]:
    """Turn what a trace says about caches into rows of the buffers."""
    layout = state.kv.layout
    rows: dict[str, set[int]] = {name: set() for name in buffers(state)}
    for one in accesses:
        if one.layer is not None:
            first = layout.place(one.store, one.layer) * layout.n_slots(one.store)
            rows[one.store] |= {first + slot for slot in one.slots}
    return rows


def buffers(state: ps.DecodeState) -> dict[str, Tensor]:
    with state.kv.handle.read() as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def with_rows(state: ps.DecodeState, content: dict[str, tuple[Iterable[int], Tensor | float]]) -> ps.DecodeState:
    """Change cache rows of a state."""
    rows = {name: torch.tensor(sorted(where), dtype=torch.int64) for name, (where, _) in content.items()}
    with state.kv.handle.write(rows) as write:
        for name, (_, values) in content.items():
            write.tensors[name][rows[name]] = values
    return attrs.evolve(state, kv=attrs.evolve(state.kv, handle=write.handle))


def told(trace: Trace, what: str) -> list[Access]:
    return [one for stage in trace.stages for one in getattr(stage, what)]


@examples(10)
@given(state=ps.strategies.states(MODEL))
def test_trace_step_is_decode_step(state: ps.DecodeState) -> None:
    """A traced step gives the logits, tokens and state of ``decode_step`` bit for bit, and leaves its input alone."""
    before = digest(state)
    after, out, trace = trace_step(MODEL, state)
    expected, plain = ps.decode_step(MODEL, state)
    assert torch.equal(out.logits, plain.logits)
    assert (out.request_ids, out.next_token_ids) == (plain.request_ids, plain.next_token_ids)
    assert (out.finished, out.captured) == (plain.finished, None)
    assert (digest(after), digest(state)) == (digest(expected), before)
    assert tuple(r.request_id for r in trace.running) == plain.request_ids
    assert bool(trace.stages) == bool(plain.request_ids)


def test_worked_numbers_of_small_pages() -> None:
    """Decode-path 1.2: slots 14, 23 and 44 at positions 10, 7 and 20, one page taken, the free list one shorter."""
    _, _, trace = trace_step(MODEL, three_requests(MODEL, page_size=4))
    rows = trace.running
    assert [r.row for r in rows] == [1, 2, 3]
    assert [(r.len_before, r.positions, r.len_after) for r in rows] == [(10, (10,), 11), (7, (7,), 8), (20, (20,), 21)]
    assert [r.out_full_loc for r in rows] == [(14,), (23,), (44,)]
    assert [r.slot_rules for r in rows] == [("slot 13 + 1",), ("slot 22 + 1",), ("new page 11",)]
    assert slots_of(stage_of(trace, "prepare").writes, "req_to_token") == {0: (10,), 1: (7,), 2: (20,)}
    full = trace.pools[0]
    assert (full.name, full.taken, full.next_before[:3], full.next_after[:2]) == ("full", (11,), (11, 12, 13), (12, 13))
    assert rows[0].slots_before == (4, 5, 6, 7, 8, 9, 10, 11, 12, 13)
    assert rows[0].slots_after == (*rows[0].slots_before, 14)


def test_worked_numbers_of_large_pages() -> None:
    """Decode-path 4.7 and 10: window slots 394, 135 and 276, one C4 entry at 65 for B, its state rows 8 to 15."""
    _, _, trace = trace_step(WIDE, three_requests(WIDE, page_size=128, swa_order=(3, 1, 2)))
    rows = trace.running
    assert [r.out_full_loc for r in rows] == [(138,), (263,), (404,)]
    assert [r.out_swa_loc for r in rows] == [(394,), (135,), (276,)]
    assert [r.out_c4_loc for r in rows] == [(), (65,), ()]
    assert [r.out_c128_loc for r in rows] == [(), (), ()]
    c4, c128 = stage_of(trace, "1.attn.compress"), stage_of(trace, "2.attn.compress")
    assert slots_of(c4.reads, "c4_state") == {1: (8, 9, 10, 11, 12, 13, 14)}
    assert slots_of(c4.writes, "c4_state") == {0: (26,), 1: (15,), 2: (20,)}
    assert slots_of(c4.writes, "c4") == slots_of(c4.writes, "index") == {1: (65,)}
    assert slots_of(c128.writes, "c128_state") == {0: (138,), 1: (263,), 2: (404,)}
    read = stage_of(trace, "1.attn.read").reads
    assert {i: len(slots) for i, slots in slots_of(read, "swa").items()} == {0: 11, 1: 8, 2: 21}
    assert {i: len(slots) for i, slots in slots_of(read, "c4").items()} == {0: 2, 1: 2, 2: 5}
    assert not slots_of(stage_of(trace, "2.attn.read").reads, "c128")


def test_shapes_follow_the_article() -> None:
    """Three tokens become rows, streams, scores of the whole vocabulary and three ids; the vocabulary is whole once."""
    _, _, trace = trace_step(MODEL, three_requests(MODEL, page_size=4))
    chains = {stage.name: [shape.sizes for shape in stage.shapes] for stage in trace.stages}
    assert chains["embed"] == [(3,), (3, 16), (3, 2, 16)]
    assert chains["1.attn.compress"] == [(3, 16), (1, 8)]
    assert chains["0.ffn.dispatch"] == [(3, 16), (6, 16)]
    assert chains["head"] == [(3, 2, 16), (3, 16), (3, VOCAB)]
    assert chains["sample"] == [(3, VOCAB), (3,)]
    assert [stage.name for stage in trace.stages if stage.vocabulary.startswith("whole")] == ["head", "sample"]
    moved = [stage.name for stage in trace.stages if "->" in stage.ownership]
    assert moved == [f"{i}.ffn.{what}" for i in range(3) for what in ("dispatch", "combine")]
    for stage in trace.stages:
        assert (stage.n_tokens, stage.request_ids, stage.positions) == (3, (0, 1, 2), (10, 7, 20))


def test_samples_become_inputs() -> None:
    """What one step writes into the relay is what the next one reads there and feeds."""
    state, _, first = trace_step(MODEL, three_requests(MODEL, page_size=4))
    _, _, second = trace_step(MODEL, state)
    written = {one.request_id: (one.slots, one.values) for one in stage_of(first, "relay").writes}
    reads = stage_of(second, "forward_batch").reads
    assert written == {one.request_id: (one.slots, one.values) for one in reads if one.store == "relay"}
    assert [(r.sampled,) for r in first.running] == [r.input_ids for r in second.running]


def test_forced_tokens_pass_the_relay_by() -> None:
    """A forced token is what the step feeds; the relay is not read."""
    state = three_requests(MODEL, page_size=4)
    _, _, trace = trace_step(MODEL, state, only=iter([1]), force={1: 9})
    assert [r.input_ids for r in trace.running] == [(9,)]
    assert [r.batch_row for r in trace.requests] == [None, 0, None]
    assert not slots_of(stage_of(trace, "forward_batch").reads, "relay")


def test_nothing_runs() -> None:
    """A step without rows has no stages."""
    state, out, trace = trace_step(MODEL, fresh(MODEL))
    assert (state.requests, out.request_ids, trace.stages, trace.requests) == ((), (), (), ())


@examples(10)
@given(state=ps.strategies.states(MODEL, longest=260), data=st.data())
def test_table_writes_are_what_changes(state: ps.DecodeState, data: st.DataObject) -> None:
    """Every table entry that changes is listed with its new value, whether pages are taken, given back or both."""
    state = ps.decode_step(MODEL, state)[0] if data.draw(st.booleans()) else state
    assume(running_requests(state))
    old = read_ledger(state)
    new = read_ledger(ps.decode_step(MODEL, state)[0])
    trace = trace_step(MODEL, state)[2]
    row_of = {request.request_id: request.row for request in trace.requests}
    for name in TABLES:
        was, now = getattr(old, name), getattr(new, name)
        told_at = {}
        for one in told(trace, "writes"):
            if one.store == name:
                row = [row_of[one.request_id]] if was.ndim == 2 else []
                told_at |= {(*row, slot): value for slot, value in zip(one.slots, one.values, strict=True)}
        changed = {tuple(at) for at in np.argwhere(was != now).tolist()}
        assert changed <= set(told_at), name
        assert all(int(now[at]) == value for at, value in told_at.items()), name
    for pool in trace.pools:
        assert pool.n_free_after == pool.n_free_before - len(pool.taken) + len(pool.given)
        assert pool.next_after == tuple(getattr(new, FREE[pool.name]).tolist())[:8]


@examples(10)
@given(state=ps.strategies.states(MODEL, longest=260))
def test_cache_writes_are_what_changes(state: ps.DecodeState) -> None:
    """The listed cache rows are written, whatever they held, and every other row keeps its bits."""
    assume(running_requests(state))
    _, out, trace = trace_step(MODEL, state)
    rows = cache_rows(state, told(trace, "writes"))
    poisoned = with_rows(state, {name: (where, torch.nan) for name, where in rows.items() if where})
    before = buffers(poisoned)
    after, again = ps.decode_step(MODEL, poisoned)
    assert torch.equal(again.logits, out.logits)
    for name, tensor in buffers(after).items():
        changed = (tensor.view(torch.int32) != before[name].view(torch.int32)).any(-1).nonzero().flatten()
        assert set(changed.tolist()) == rows[name], name


def result(model: ps.Model, state: ps.DecodeState, rows: dict[str, set[int]]) -> list[Tensor]:
    """Return everything that a step's forward makes: its logits and the rows that it writes, as bits."""
    prepared, batch = ps.prepare_decode(state)
    kv, logits = ps.forward(model, prepared.kv, ps.forward_batch(prepared, batch))
    kept = buffers(attrs.evolve(prepared, kv=kv))
    made = [logits, *(kept[name][sorted(where)] for name, where in rows.items())]
    return [tensor.contiguous().view(torch.int32) for tensor in made]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("model", [MODEL, CHOOSY], ids=["reads all", "picks"])
@examples(8)
@given(data=st.data())
def test_reads_are_what_matters(model: ps.Model, data: st.DataObject) -> None:
    """Noise in all rows that are not listed as read changes no bit of a step; a NaN in a listed one changes it.

    A row that the step itself writes first is read as written. An index key only takes part in a choice, which may come
    out the same.
    """
    state = data.draw(ps.strategies.states(model, longest=260))
    assume(running_requests(state))
    trace = trace_step(model, state)[2]
    writes, reads = (cache_rows(state, told(trace, what)) for what in ("writes", "reads"))
    expected = result(model, state, writes)
    noise = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    others = {}
    for name, tensor in buffers(state).items():
        unread = sorted(set(range(len(tensor))) - reads[name] | writes[name])
        others[name] = (unread, 100 * torch.randn((len(unread), tensor.shape[1]), generator=noise))
    assert same(result(model, with_rows(state, others), writes), expected)
    for name in reads.keys() - {"index"}:
        if listed := sorted(reads[name] - writes[name]):
            spoilt = {name: ([data.draw(st.sampled_from(listed))], torch.nan)}
            assert not same(result(model, with_rows(state, spoilt), writes), expected), name


@examples(10)
@given(n=st.integers(7, 15) | st.integers(1, 40), page_size=ps.strategies.page_sizes())
def test_picks_are_what_is_read(n: int, page_size: int) -> None:
    """A C4 layer reads the entries that the indexer picked: as many as there are, at most ``index_topk``."""
    state, request_id = ps.open_request(fresh(CHOOSY, 1, page_size=page_size), ENDLESS)
    state = ps.extend_step(CHOOSY, state, {request_id: ids_of(n, seed=n)})[0]
    _, _, trace = trace_step(CHOOSY, state)
    visible = (n + 1) // 4
    for layer in (0, 2):
        (choice,) = stage_of(trace, f"{layer}.attn.pick").choices
        assert (choice.n_candidates, len(choice.ids)) == (visible, min(visible, 2))
        slots = trace.running[0].slots_after
        read = slots_of(stage_of(trace, f"{layer}.attn.read").reads, "c4").get(request_id, ())
        assert read == tuple(slots[4 * entry + 3] // 4 for entry in choice.ids)
        keys = slots_of(stage_of(trace, f"{layer}.attn.pick").reads, "index")
        assert len(keys.get(request_id, ())) == (visible if visible > 2 else 0)


def test_experts_get_every_row_k_times() -> None:
    """Dispatch sends each token row to the experts that its route names, and no other."""
    model = tiny_model((0, 4), experts=6, topk=3)
    _, _, trace = trace_step(model, three_requests(model, page_size=4))
    for layer in range(2):
        routes = stage_of(trace, f"{layer}.ffn.route").choices
        sent = {(row, one.expert_id) for one in stage_of(trace, f"{layer}.ffn.dispatch").experts for row in one.rows}
        assert sent == {(row, expert) for row, choice in enumerate(routes) for expert in choice.ids}
        assert len(sent) == 9
        assert all(len(choice.weights) == 3 and choice.n_candidates == 6 for choice in routes)


def test_several_waiting_tokens() -> None:
    """A rewound request is traced token by token: all of them are fed, each at its own position."""
    state = three_requests(MODEL, page_size=4)
    for _ in range(3):
        state, _ = ps.decode_step(MODEL, state)
    state = ps.rewind_request(state, 2, 21)
    n_waiting = ps.find_request(state, 2).n_unfed
    _, out, trace = trace_step(MODEL, state)
    assert torch.equal(out.logits, ps.decode_step(MODEL, state)[1].logits)
    request = trace.requests[2]
    assert n_waiting > 1
    assert trace.forward_mode == "extend"
    assert request.positions == tuple(range(21 - n_waiting, 21))
    assert stage_of(trace, "embed").n_tokens == 2 + n_waiting


def test_window_pages_come_back() -> None:
    """Once a window has passed a page, the step that notices gives it back and says so."""
    state, request_id = ps.open_request(fresh(MODEL, 1, page_size=4), ENDLESS)
    state = ps.extend_step(MODEL, state, {request_id: ids_of(6)})[0]
    given_pages, held = [], {slot // 4 for slot in read_ledger(state).holdings[0].windows.tolist()}
    for _ in range(40):
        state, _, trace = trace_step(MODEL, state)
        given_pages += trace.pools[1].given
        assert set(trace.pools[1].given) <= held
        assert all({len(one.positions), len(one.values)} <= {0, len(one.slots)} for one in told(trace, "writes"))
        held = held - set(trace.pools[1].given) | set(trace.pools[1].taken)
    assert len(given_pages) >= 5
    assert {slot // 4 for slot in trace.requests[0].windows_after if slot} == held


def test_invariant_numerics() -> None:
    """Row-independent arithmetic, where every row reads by a table of its own, is told in the same words."""
    model = build_model(MODEL.config, MODEL.params, numerics=ps.Numerics(invariant=True))
    plain, rowwise = (trace_step(one, three_requests(one, page_size=4))[2] for one in (MODEL, model))
    assert [attrs.evolve(stage, choices=(), experts=()) for stage in plain.stages] == [
        attrs.evolve(stage, choices=(), experts=()) for stage in rowwise.stages
    ]


@examples(5)
@given(state=ps.strategies.states(MODEL, longest=260))
def test_trace_is_plain_data(state: ps.DecodeState) -> None:
    """``attrs.asdict`` makes JSON of a trace, and what an access lists side by side is equally long."""
    trace = trace_step(MODEL, state)[2]
    for one in told(trace, "reads") + told(trace, "writes"):
        assert {len(one.positions), len(one.values)} <= {0, len(one.slots)}
    assert json.loads(json.dumps(attrs.asdict(trace)))["page_size"] == state.table.sizes.page_size
