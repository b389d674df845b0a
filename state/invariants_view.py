"""What the model's view of a step must be, given the prepared state and the batch; decode-path sheet 9.1, 9.4, 9.5.

Every predicate takes (prepared, batch, view). All addresses are worked out anew from the tables, position by position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np
from torch import Tensor

from .batch import ChunkMetadata, CompressorMetadata, ForwardBatch, ScheduleBatch
from .capacity import C4_RATIO, C128_PAGE, C128_RATIO
from .ledger import Holding, Ints, Ledger, c4_state_rows
from .violations import Found, listed

__all__ = ["VIEW"]


def _host(tensor: Tensor) -> Ints:
    found: Ints = tensor.cpu().numpy()
    return found


def _rows(prepared: Ledger, batch: ScheduleBatch) -> Iterator[tuple[Holding, int, int, int]]:
    """Yield (request, first token, prefix, seq) of every row."""
    starts = np.cumsum(batch.extend_lens) - batch.extend_lens
    for i, request_id in enumerate(batch.request_ids):
        yield prepared.by_id[request_id], int(starts[i]), int(batch.prefix_lens[i]), int(batch.seq_lens[i])


def _tokens(prepared: Ledger, batch: ScheduleBatch) -> Iterator[tuple[Holding, int]]:
    """Yield (request, position) of every token."""
    for holding, _, prefix, seq in _rows(prepared, batch):
        for position in range(prefix, seq):
            yield holding, position


def mirrors_agree(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """L02: lengths on the device, on the host and in the batch are the same."""
    for name, found in (
        ("seq_lens", _host(view.seq_lens)),
        ("seq_lens_cpu", view.seq_lens_cpu),
        ("orig_seq_lens", _host(view.orig_seq_lens)),
    ):
        if not np.array_equal(found, batch.seq_lens):
            yield name, f"expected {listed(batch.seq_lens)}, got {listed(found)}"


def positions_follow_lengths(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """L03: a row's last token stands at position ``seq_lens - 1``; in a decode that is every token."""
    last = _host(view.positions)[_host(view.last_rows)]
    if not np.array_equal(last, np.maximum(batch.seq_lens - 1, 0)):
        yield "positions", f"expected seq_lens - 1 in last rows, got {listed(last)} for {listed(batch.seq_lens)}"


def lengths_summed(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """L04: ``seq_lens_sum`` is the sum of the host mirror."""
    if view.seq_lens_sum != int(view.seq_lens_cpu.sum()):
        yield "seq_lens_sum", f"expected {int(view.seq_lens_cpu.sum())}, got {view.seq_lens_sum}"


def inputs_are_tokens(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """L10: the ids fed are the requests' tokens at those positions, wherever they came from."""
    expected = [int(holding.tokens[position]) for holding, position in _tokens(prepared, batch)]
    if _host(view.input_ids).tolist() != expected:
        yield "input_ids", f"expected {listed(expected)}, got {listed(_host(view.input_ids))}"


def fields_shaped(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """L12: per-token fields have one entry a token, per-row fields one a row."""
    n_rows, n_tokens = len(batch.request_ids), int(batch.extend_lens.sum())
    if view.batch_size != n_rows:
        yield "batch_size", f"expected {n_rows}, got {view.batch_size}"
    for name in ("input_ids", "positions", "out_cache_loc"):
        if getattr(view, name).shape != (n_tokens,):
            yield name, f"expected {n_tokens} tokens, got shape {tuple(getattr(view, name).shape)}"
    for name in ("req_pool_indices", "seq_lens", "last_rows"):
        if getattr(view, name).shape != (n_rows,):
            yield name, f"expected {n_rows} rows, got shape {tuple(getattr(view, name).shape)}"
    singles, chunks = int((batch.extend_lens == 1).sum()), int((batch.extend_lens > 1).sum())
    meta = view.metadata
    if meta.tables is not None:
        return
    found = 0 if meta.singles is None else len(meta.singles.window_loc)
    if (found, len(meta.chunks)) != (singles, chunks):
        yield "metadata", f"expected {singles} single rows and {chunks} chunks, got {found} and {len(meta.chunks)}"


def positions_in_segments(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """E02: positions run from prefix to seq in every row, rows one after the other."""
    expected = [position for _, position in _tokens(prepared, batch)]
    if _host(view.positions).tolist() != expected:
        yield "positions", f"expected {listed(expected)}, got {listed(_host(view.positions))}"


def plain_ids_untranslated(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """T01: without a translating layout, write locations are the allocator's and no original is kept."""
    if view.out_cache_loc_virtual is not None:
        return
    if not np.array_equal(_host(view.out_cache_loc), batch.out_cache_loc):
        yield "out_cache_loc", f"expected {listed(batch.out_cache_loc)}, got {listed(_host(view.out_cache_loc))}"


def batch_ids_kept(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """T05: making the view leaves the batch's slots what they are in the table: virtual ids are kept there."""
    for holding, start, prefix, seq in _rows(prepared, batch):
        got = batch.out_cache_loc[start : start + seq - prefix]
        if not np.array_equal(got, holding.slots[prefix:seq]):
            yield holding.name, f"expected slots {listed(holding.slots[prefix:seq])}, got {listed(got)}"


def rows_kept(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """H07: one row a request is kept for the head, its last token's, in order."""
    expected = np.cumsum(batch.extend_lens) - 1
    if not np.array_equal(_host(view.last_rows), expected):
        yield "last_rows", f"expected {listed(expected)}, got {listed(_host(view.last_rows))}"


def window_read(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """W10: the window read is the map of the request's slots, position by position, its own token included."""
    window, meta = prepared.state.config.sliding_window, view.metadata
    if not np.array_equal(_host(meta.swa_loc), batch.out_cache_loc_dsv4.out_swa_loc):
        yield "swa_loc", "expected out_swa_loc"
    singles, chunks = _split(prepared, batch, view)
    for i, (holding, _, seq) in enumerate(singles):
        assert meta.singles is not None, "_split gives single rows only where they have a table"
        seen = _host(meta.singles.window_loc[i][meta.singles.window_mask[i]])
        expected = holding.windows[max(0, seq - window) : seq]
        if not np.array_equal(seen, expected):
            yield holding.name, f"expected window slots {listed(expected)}, got {listed(seen)}"
    for holding, chunk in chunks:
        expected = holding.windows[max(0, chunk.prefix_len - window + 1) : chunk.seq_len]
        if not np.array_equal(_host(chunk.window_loc), expected):
            yield holding.name, f"expected window slots {listed(expected)}, got {listed(_host(chunk.window_loc))}"


def c4_entries_read(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """C03: C4 entry g of a row is read at the slot of position 4g + 3, div 4; only closed groups are visible."""
    singles, chunks = _split(prepared, batch, view)
    per_page = prepared.sizes.c4_page
    for i, (holding, _, seq) in enumerate(singles):
        meta = view.metadata.singles
        assert meta is not None, "_split gives single rows only where they have a table"
        group = np.arange(int(meta.c4_visible[i]))
        seen = _host(meta.c4_pages[i])[group // per_page] * per_page + group % per_page
        yield from _entries(holding, seq // C4_RATIO, seen, _c4_slots(holding, seq))
    for holding, chunk in chunks:
        yield from _entries(holding, chunk.seq_len // C4_RATIO, _host(chunk.c4_loc), _c4_slots(holding, chunk.seq_len))


def c128_entries_read(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """C06: C128 entry g of a row is read at the slot that its sidecar row says; only closed groups are visible."""
    singles, chunks = _split(prepared, batch, view)
    for i, (holding, _, seq) in enumerate(singles):
        meta = view.metadata.singles
        assert meta is not None, "_split gives single rows only where they have a table"
        group = np.arange(int(meta.c128_visible[i]))
        seen = _host(meta.c128_pages[i])[group // C128_PAGE] * C128_PAGE + group % C128_PAGE
        yield from _entries(holding, seq // C128_RATIO, seen, _c128_slots(holding, seq))
    for holding, chunk in chunks:
        n = chunk.seq_len // C128_RATIO
        yield from _entries(holding, n, _host(chunk.c128_loc), _c128_slots(holding, chunk.seq_len))


def _entries(holding: Holding, count: int, seen: Ints, expected: Ints) -> Found:
    if len(seen) != count or not np.array_equal(seen, expected):
        yield holding.name, f"expected {count} entries at {listed(expected)}, got {listed(seen)}"


def _c4_slots(holding: Holding, seq: int) -> Ints:
    return holding.slots[:seq][C4_RATIO - 1 :: C4_RATIO] // C4_RATIO


def _c128_slots(holding: Holding, seq: int) -> Ints:
    group = np.arange(seq // C128_RATIO)
    return holding.sidecar[group // C128_PAGE] * C128_PAGE + group % C128_PAGE


def _split(
    prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch
) -> tuple[list[tuple[Holding, int, int]], list[tuple[Holding, ChunkMetadata]]]:
    """Sort rows into those with one token, as (request, prefix, seq), and those with several, with their chunk."""
    rows = tuple(_rows(prepared, batch))
    singles = [(holding, prefix, seq) for holding, _, prefix, seq in rows if seq == prefix + 1]
    several = [holding for holding, _, prefix, seq in rows if seq > prefix + 1]
    chunks = list(zip(several, view.metadata.chunks, strict=False))
    return singles if view.metadata.singles is not None else [], chunks


def closing_lists_dense(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """C04: compressed entries are written at the batch's dense lists of closing tokens."""
    locs = batch.out_cache_loc_dsv4
    for ratio, expected in ((C4_RATIO, locs.out_c4_loc), (C128_RATIO, locs.out_c128_loc)):
        plan = view.metadata.compressors.get(ratio)
        if plan is not None and not np.array_equal(_host(plan.out_loc), expected):
            yield f"out_loc of ratio {ratio}", f"expected {listed(expected)}, got {listed(_host(plan.out_loc))}"


def rotary_positions_first(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """C05: the rotary position of a compressed entry is the first one of its group."""
    for ratio, plan in view.metadata.compressors.items():
        closing = [position for _, position in _tokens(prepared, batch) if position % ratio == ratio - 1]
        expected = [position - ratio + 1 for position in closing]
        if _host(plan.first_pos).tolist() != expected:
            yield f"first_pos of ratio {ratio}", f"expected {expected}, got {listed(_host(plan.first_pos))}"


def state_rows_kept(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """C14: distinct pooling-state rows are written, one for each position that a later group may still need."""
    for ratio, plan in _by_member(prepared, view):
        name = f"state of ratio {ratio}"
        written = dict(zip(_host(plan.keep).tolist(), _host(plan.state_loc).tolist(), strict=True))
        if len(set(written.values())) != len(plan.state_loc):
            yield name, f"expected distinct rows, got {listed(_host(plan.state_loc))}"
        tokens = tuple(_tokens(prepared, batch))
        for at, slot in written.items():
            holding, position = tokens[at]
            expected = _state_row(prepared, holding, position, ratio)
            if slot != expected:
                yield name, f"expected row {expected} for position {position} of {holding.name}, got {slot}"
        for at, (holding, position) in enumerate(tokens):
            if position >= _first_needed(holding.request.kv_len, ratio) and at not in written:
                yield name, f"expected position {position} of {holding.name} to be kept"


def _first_needed(length: int, ratio: int) -> int:
    """Return the first position whose pooling state a group that closes after ``length`` positions reads."""
    return length - length % ratio - (C4_RATIO if ratio == C4_RATIO else 0)


def _state_row(prepared: Ledger, holding: Holding, position: int, ratio: int) -> int:
    if ratio == C128_RATIO:
        bank = prepared.state.kv.layout.c128_bank(np.array([holding.request.row]))
        return int(bank[position % len(bank)])
    return int(c4_state_rows(holding.windows[position : position + 1], prepared.sizes.page_size)[0])


def group_members_found(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """C15: a group's members are its positions in order; the dummy row stands exactly for positions below 0."""
    for ratio, plan in _by_member(prepared, view):
        buffer = "c4_state" if ratio == C4_RATIO else "c128_state"
        dummy = prepared.state.kv.layout.dummy(buffer)
        expected = _members(prepared, batch, ratio, dummy)
        found = _sources(plan)
        if found != expected:
            wrong = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), 0)
            yield f"members of ratio {ratio}", f"expected group {wrong} from {expected[wrong : wrong + 1]}, got another"


def _by_member(prepared: Ledger, view: ForwardBatch) -> Iterator[tuple[int, CompressorMetadata]]:
    """Give the compressors that keep a state row for every member of an open group, by ratio."""
    is_online = prepared.state.kv.layout.is_online
    return ((r, plan) for r, plan in view.metadata.compressors.items() if r == C4_RATIO or not is_online)


def groups_folded(prepared: Ledger, batch: ScheduleBatch, view: ForwardBatch) -> Found:
    """N16: an online group takes its tokens of the step in order, goes on from its own state, and is kept if open."""
    plan = view.metadata.compressors.get(C128_RATIO)
    if plan is None or not prepared.state.kv.layout.is_online:
        return
    dummy = prepared.state.kv.layout.dummy("c128_state")
    closing: list[tuple[int, list[int], int]] = []
    still_open: list[tuple[int, list[int], int]] = []
    for holding, start, prefix, seq in _rows(prepared, batch):
        for group in range(prefix // C128_RATIO, -(-seq // C128_RATIO)):
            first, end = max(prefix, group * C128_RATIO), min(seq, (group + 1) * C128_RATIO)
            source = holding.request.row if first % C128_RATIO else dummy
            tokens = list(range(start + first - prefix, start + end - prefix))
            (closing if end % C128_RATIO == 0 else still_open).append((source, tokens, holding.request.row))
    expected = [*closing, *still_open]
    history, members = _host(plan.history).tolist(), _host(plan.members).tolist()
    n_tokens = len(_host(plan.phase))
    found = [(source, [at for at in row if at < n_tokens]) for source, row in zip(history, members, strict=True)]
    if found != [(source, tokens) for source, tokens, _ in expected]:
        yield "groups of ratio 128", "expected each group's tokens of the step in order, from its own state"
    kept = dict(zip(_host(plan.keep).tolist(), _host(plan.state_loc).tolist(), strict=True))
    if kept != {len(closing) + i: row for i, (_, _, row) in enumerate(still_open)}:
        yield "state of ratio 128", f"expected the open groups' states to be kept, got {kept}"


def _members(prepared: Ledger, batch: ScheduleBatch, ratio: int, dummy: int) -> list[list[tuple[str, int]]]:
    """List for every closing token where each of its group's members comes from: a state row or a token."""
    n_members = 2 * C4_RATIO if ratio == C4_RATIO else ratio
    groups = []
    for holding, start, prefix, seq in _rows(prepared, batch):
        for end in range(prefix, seq):
            if end % ratio != ratio - 1:
                continue
            members = []
            for position in range(end - n_members + 1, end + 1):
                if position >= prefix:
                    members.append(("token", start + position - prefix))
                elif position < 0:
                    members.append(("state", dummy))
                else:
                    members.append(("state", _state_row(prepared, holding, position, ratio)))
            groups.append(members)
    return groups


def _sources(plan: CompressorMetadata) -> list[list[tuple[str, int]]]:
    history = _host(plan.history).tolist()
    return [
        [("state", history[at]) if at < len(history) else ("token", at - len(history)) for at in group]
        for group in _host(plan.members).tolist()
    ]


VIEW: Final[Mapping[str, Callable[[Ledger, ScheduleBatch, ForwardBatch], Found]]] = {
    "L02": mirrors_agree,
    "L03": positions_follow_lengths,
    "L04": lengths_summed,
    "L10": inputs_are_tokens,
    "L12": fields_shaped,
    "E02": positions_in_segments,
    "T01": plain_ids_untranslated,
    "T05": batch_ids_kept,
    "H07": rows_kept,
    "W10": window_read,
    "C03": c4_entries_read,
    "C04": closing_lists_dense,
    "C05": rotary_positions_first,
    "C06": c128_entries_read,
    "C14": state_rows_kept,
    "C15": group_members_found,
    "N16": groups_folded,
}
"""Predicates over (prepared, batch, view), by id."""
