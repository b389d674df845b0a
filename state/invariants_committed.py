"""What sampling, relay and commit do, and closing and forking; decode-path sheet 9.4 (C12), 9.6, 9.7 (E07), 9.9.

Ids as there; those that begin with N are this package's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch

from .batch import ScheduleBatch, StepOutput
from .invariants_compressed import is_empty_state, layer_rows
from .kv import C128_RING
from .ledger import Holding, Ints, Ledger, digest_rows, same_record
from .violations import Found, listed

__all__ = ["CLOSED", "COMMITTED", "FORKED"]


def _pairs(batch: ScheduleBatch, out: StepOutput, after: Ledger) -> list[tuple[int, int | None]]:
    """Return (request id, sampled token or None) for every row of the step."""
    sampled: list[int | None] = [*out.next_token_ids] if out.next_token_ids else [None] * len(batch.request_ids)
    return list(zip(batch.request_ids, sampled, strict=False))


def tokens_appended(prepared: Ledger, out: StepOutput, after: Ledger) -> Found:
    """E07: a step that samples appends exactly its token to each of its requests, any other step none."""
    batch = _launched(prepared)
    sampled = dict(_pairs(batch, out, after))
    for request_id, holding in prepared.by_id.items():
        other = after.by_id.get(request_id)
        token = sampled.get(request_id)
        expected = holding.tokens if token is None else np.append(holding.tokens, token)
        outputs = holding.request.outputs if token is None else holding.request.outputs.append(token)
        if other is None or not np.array_equal(other.tokens, expected) or other.request.outputs != outputs:
            yield holding.name, f"expected its tokens and outputs followed by {'nothing' if token is None else token}"


def rows_reported(prepared: Ledger, out: StepOutput, after: Ledger) -> Found:
    """H04: the output has the batch's rows, in order, and nothing is launched any more."""
    batch = _launched(prepared)
    if out.request_ids != batch.request_ids:
        yield "request_ids", f"expected {batch.request_ids}, got {out.request_ids}"
    if len(out.next_token_ids) not in (0, len(batch.request_ids)):
        yield "next_token_ids", f"expected one a row or none, got {len(out.next_token_ids)}"
    if after.state.launched is not None:
        yield "launched", "expected the step to be over"


def logits_sound(prepared: Ledger, out: StepOutput, after: Ledger) -> Found:
    """H08: logits are f32, one column per token id, finite."""
    vocab_size = after.state.config.vocab_size
    if out.logits.dtype != torch.float32 or out.logits.ndim != 2 or out.logits.shape[1] != vocab_size:
        yield "logits", f"expected f32[...,{vocab_size}], got {out.logits.dtype} {tuple(out.logits.shape)}"
    elif not bool(out.logits.isfinite().all()):
        yield "logits", "expected finite numbers"


def ids_in_vocabulary(prepared: Ledger, out: StepOutput, after: Ledger) -> Found:
    """S01: sampled ids are ids of the vocabulary."""
    wrong = [token for token in out.next_token_ids if not 0 <= token < after.state.config.vocab_size]
    if wrong:
        yield "next_token_ids", f"expected ids below {after.state.config.vocab_size}, got {listed(wrong)}"


def stops_held_back(prepared: Ledger, out: StepOutput, after: Ledger) -> Found:
    """S06: no request stops before it has the outputs that it asked for at least."""
    params = {row.request_id: row.params for row in after.state.sampling.rows}
    for request_id, reason in out.finished.items():
        n_outputs = len(after.by_id[request_id].request.outputs) if request_id in after.by_id else 0
        if reason == "stop" and request_id in params and n_outputs <= params[request_id].min_new_tokens:
            yield (
                f"request {request_id}",
                f"expected more than {params[request_id].min_new_tokens} outputs before a stop",
            )


def relay_written(prepared: Ledger, out: StepOutput, after: Ledger) -> Found:
    """R01: the relay holds each row's sampled token, and is unchanged everywhere else."""
    batch = _launched(prepared)
    expected = prepared.relay.copy()
    for pool_row, (_, token) in zip(batch.req_pool_indices.tolist(), _pairs(batch, out, after), strict=False):
        expected[pool_row] = expected[pool_row] if token is None else token
    wrong = np.flatnonzero(expected != after.relay)
    if len(wrong):
        yield "relay", f"expected {listed(expected[wrong])} in rows {listed(wrong)}, got {listed(after.relay[wrong])}"


def finishes_recorded(prepared: Ledger, out: StepOutput, after: Ledger) -> Found:
    """G02: who has finished is reported once, recorded, and stays so."""
    for request_id, holding in prepared.by_id.items():
        other = after.by_id.get(request_id)
        was, now = holding.request.finished, None if other is None else other.request.finished
        reported = out.finished.get(request_id)
        if now != (was if reported is None else reported) or (was is not None and reported is not None):
            yield holding.name, f"expected finished {was or reported}, got {now}"


def commit_keeps_slots(prepared: Ledger, out: StepOutput, after: Ledger) -> Found:
    """N07: from the preparation on, tables, pools and lengths are as they were."""
    for name in ("req_to_token", "full_to_swa", "sidecar", "page_refs", "swa_refs", "c128_refs"):
        if not np.array_equal(getattr(prepared, name), getattr(after, name)):
            yield name, "expected no change after the preparation"
    for name in ("free_rows", "free_pages", "free_swa_pages", "free_c128_pages"):
        if not np.array_equal(getattr(prepared, name), getattr(after, name)):
            yield name, "expected no change after the preparation"
    for request_id, holding in prepared.by_id.items():
        other = after.by_id.get(request_id)
        if other is None or other.request.kv_len != holding.request.kv_len:
            yield holding.name, "expected its length to stay after the preparation"


def _launched(prepared: Ledger) -> ScheduleBatch:
    batch = prepared.state.launched
    assert batch is not None, "a prepared state has a launched batch"
    return batch


COMMITTED: Final[Mapping[str, Callable[[Ledger, StepOutput, Ledger], Found]]] = {
    "E07": tokens_appended,
    "H04": rows_reported,
    "H08": logits_sound,
    "S01": ids_in_vocabulary,
    "S06": stops_held_back,
    "R01": relay_written,
    "G02": finishes_recorded,
    "N07": commit_keeps_slots,
}
"""Predicates over (prepared, out, after), by id."""


def _closed(before: Ledger, after: Ledger) -> list[Holding]:
    return [holding for request_id, holding in before.by_id.items() if request_id not in after.by_id]


def references_dropped(before: Ledger, after: Ledger) -> Found:
    """A19: a closed request's pages lose exactly one reference each; those without any can be allocated again."""
    size = before.sizes.page_size
    for name, free, names in (
        ("page_refs", "free_pages", [holding.pages for holding in _closed(before, after)]),
        ("swa_refs", "free_swa_pages", [before.swa_pages(holding) for holding in _closed(before, after)]),
        ("c128_refs", "free_c128_pages", [h.sidecar[h.sidecar > 0] for h in _closed(before, after)]),
    ):
        expected: Ints = getattr(before, name).copy()
        for pages in names:
            expected[pages] -= 1
        if not np.array_equal(getattr(after, name), expected):
            yield name, "expected one reference less for each page of a closed request"
        n_freed = int(((expected == 0) & (getattr(before, name) > 0)).sum())
        got = len(getattr(after, free)) - len(getattr(before, free))
        if got != n_freed:
            yield free, f"expected {n_freed} pages more, got {got} (pages of {size})"


def bank_cleared(before: Ledger, after: Ledger) -> Found:
    """C12: a freed row has no C128 pages and an empty C128 state, whose bank is (0, -inf)."""
    kv = after.state.kv
    for holding in _closed(before, after):
        row = holding.request.row
        if after.sidecar[row].any():
            yield holding.name, f"expected sidecar row {row} to be zero, got {listed(after.sidecar[row])}"
        if kv.layout.n_layers("c128_state"):
            bank = layer_rows(kv, "c128_state", row * C128_RING + np.arange(C128_RING))
            if not is_empty_state(bank):
                yield holding.name, f"expected an empty C128 state in row {row}"


def others_unchanged(before: Ledger, after: Ledger) -> Found:
    """N08: closing leaves every other request's record, slots and cache rows as they were."""
    for request_id, holding in after.by_id.items():
        old = before.by_id.get(request_id)
        if old is not None and not _same(before, old, after, holding):
            yield holding.name, "expected no change"


def _same(before: Ledger, old: Holding, after: Ledger, new: Holding) -> bool:
    is_named = np.array_equal(old.slots, new.slots) and np.array_equal(old.sidecar, new.sidecar)
    return same_record(old, new) and is_named and digest_rows(before, old) == digest_rows(after, new)


CLOSED: Final[Mapping[str, Callable[[Ledger, Ledger], Found]]] = {
    "A19": references_dropped,
    "C12": bank_cleared,
    "N08": others_unchanged,
}
"""Predicates over (before, after) of closing requests, by id."""


def fork_continues(before: Ledger, after: Ledger, parent_id: int, fork_id: int) -> Found:
    """N06: a fork has its parent's tokens and lengths, names the parent's whole pages and no page that it may write."""
    parent, fork = after.by_id.get(parent_id), after.by_id.get(fork_id)
    if parent is None or fork is None or fork_id in before.by_id:
        yield f"request {fork_id}", f"expected a new request beside {parent_id}"
        return
    size, n = after.sizes.page_size, fork.request.kv_len
    if fork.tokens.tolist() != parent.tokens.tolist() or n != parent.request.kv_len:
        yield fork.name, f"expected the tokens and length of {parent.name}"
    whole = n // size
    if fork.pages[:whole].tolist() != parent.pages[:whole].tolist():
        yield fork.name, f"expected the whole pages of {parent.name}, got {listed(fork.pages)}"
    if np.intersect1d(fork.pages[whole:], parent.pages).size:
        yield fork.name, "expected its partly filled page to be its own"


def fork_reads_same(before: Ledger, after: Ledger, parent_id: int, fork_id: int) -> Found:
    """N09: what a fork may read has the content of what its parent may read."""
    parent, fork = after.by_id.get(parent_id), after.by_id.get(fork_id)
    if parent is not None and fork is not None and digest_rows(after, parent) != digest_rows(after, fork):
        yield fork.name, f"expected the cache content of {parent.name}"


def parent_unchanged(before: Ledger, after: Ledger, parent_id: int, fork_id: int) -> Found:
    """N10: forking leaves every request that was open as it was."""
    yield from others_unchanged(before, after)


FORKED: Final[Mapping[str, Callable[[Ledger, Ledger, int, int], Found]]] = {
    "N06": fork_continues,
    "N09": fork_reads_same,
    "N10": parent_unchanged,
}
"""Predicates over (before, after, parent id, fork id), by id."""
