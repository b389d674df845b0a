"""What the preparation of a step does to lengths and inputs; decode-path sheet 9.1 (phase P) and 9.7.

Every predicate takes (before, batch, after): the state given to ``prepare_decode`` or ``prepare_extend``, and what came
back. Decode is the case of one new token per row, so one text serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import attrs
import numpy as np

from .batch import ForwardMode, ScheduleBatch
from .ledger import Holding, Ledger, same_record
from .violations import Found, listed

__all__ = ["LENGTHS", "Row", "rows_of"]


@attrs.frozen(eq=False)
class Row:
    """One row of a batch, before and after.

    Attributes:
        before: the request.
        after: the same one, prepared.
        start: its first token among the step's tokens.
        prefix: positions before the step.
        seq: positions after it.
    """

    before: Holding
    after: Holding
    start: int
    prefix: int
    seq: int

    @property
    def tokens(self) -> slice:
        """Its tokens among the step's tokens."""
        return slice(self.start, self.start + self.seq - self.prefix)

    @property
    def name(self) -> str:
        """How messages call it."""
        return self.after.name


def rows_of(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Iterator[Row]:
    """Pair the rows of a batch with their requests; rows that L12 complains about are left out."""
    start = 0
    lens = zip(batch.request_ids, batch.prefix_lens.tolist(), batch.seq_lens.tolist(), strict=False)
    for request_id, prefix, seq in lens:
        one, other = before.by_id.get(request_id), after.by_id.get(request_id)
        if one is not None and other is not None:
            yield Row(one, other, start, prefix, seq)
        start += seq - prefix


def lengths_grow(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """L01: a decode makes every length one longer; ``orig_seq_lens`` go along."""
    if batch.forward_mode is ForwardMode.DECODE and (batch.extend_lens != 1).any():
        yield "seq_lens", f"expected prefix_lens + 1, got {listed(batch.seq_lens)} for {listed(batch.prefix_lens)}"
    if not np.array_equal(batch.orig_seq_lens, batch.seq_lens):
        yield "orig_seq_lens", f"expected seq_lens, got {listed(batch.orig_seq_lens)}"


def lengths_summed(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """L04: ``seq_lens_sum`` is the sum of ``seq_lens``."""
    if batch.seq_lens_sum != int(batch.seq_lens.sum()):
        yield "seq_lens_sum", f"expected {int(batch.seq_lens.sum())}, got {batch.seq_lens_sum}"


def lengths_recorded(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """L05, L07: records of the batch's requests move from ``prefix_lens`` to ``seq_lens``, all others stay."""
    for row in rows_of(before, batch, after):
        if row.after.request.kv_len != row.seq:
            yield row.name, f"expected kv_len = seq_len = {row.seq}, got {row.after.request.kv_len}"
    for request_id, holding in before.by_id.items():
        other = after.by_id.get(request_id)
        if request_id not in batch.request_ids and (other is None or not same_record(holding, other)):
            yield holding.name, "expected the record of a request outside the batch to stay"


def inputs_follow_relay(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """L10: what is fed is each request's next tokens; without host ids, what the relay holds for its row.

    It is also R03 and R04: a row that somebody else had before shows that one's token until it is written anew.
    """
    for row in rows_of(before, batch, after):
        expected = row.after.tokens[row.prefix : row.seq]
        relayed = before.relay[[row.after.request.row]]
        got = relayed if batch.input_ids is None else batch.input_ids[row.tokens]
        if not np.array_equal(got, expected):
            yield row.name, f"expected inputs {listed(expected)}, got {listed(got)}"


def old_lengths_kept(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """L11: the state before still shows the old lengths, and they are the batch's ``prefix_lens``."""
    for row in rows_of(before, batch, after):
        if row.before.request.kv_len != row.prefix:
            yield row.name, f"expected prefix_len {row.before.request.kv_len}, got {row.prefix}"


def fields_shaped(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """L12: per-row fields have one entry a row, per-token fields one a token, and rows are those of their requests."""
    n_rows, n_tokens = len(batch.request_ids), int(batch.extend_lens.sum())
    for name in ("req_pool_indices", "prefix_lens", "seq_lens", "orig_seq_lens"):
        if getattr(batch, name).shape != (n_rows,):
            yield name, f"expected {n_rows} rows, got shape {getattr(batch, name).shape}"
    locs = batch.out_cache_loc_dsv4
    for name, found in (("out_cache_loc", batch.out_cache_loc), ("out_swa_loc", locs.out_swa_loc)):
        if found.shape != (n_tokens,):
            yield name, f"expected {n_tokens} tokens, got shape {found.shape}"
    if batch.input_ids is not None and batch.input_ids.shape != (n_tokens,):
        yield "input_ids", f"expected {n_tokens} tokens, got shape {batch.input_ids.shape}"
    for request_id, pool_row in zip(batch.request_ids, batch.req_pool_indices.tolist(), strict=False):
        if request_id not in after.by_id:
            yield "request_ids", f"expected open requests, got {request_id}"
        elif after.by_id[request_id].request.row != pool_row:
            yield f"request {request_id}", f"expected row {after.by_id[request_id].request.row}, got {pool_row}"


def new_lengths_add_up(before: Ledger, batch: ScheduleBatch, after: Ledger) -> Found:
    """E01: prefix + new = seq, at least one new token a row, and all of them together are the step's tokens."""
    if (batch.extend_lens < 1).any():
        yield "seq_lens", f"expected at least one new token a row, got {listed(batch.extend_lens)}"
    if int(batch.extend_lens.sum()) != len(batch.out_cache_loc):
        yield "out_cache_loc", f"expected {int(batch.extend_lens.sum())} slots, got {len(batch.out_cache_loc)}"


LENGTHS: Final[Mapping[str, Callable[[Ledger, ScheduleBatch, Ledger], Found]]] = {
    "L01": lengths_grow,
    "L04": lengths_summed,
    "L05": lengths_recorded,
    "L10": inputs_follow_relay,
    "L11": old_lengths_kept,
    "L12": fields_shaped,
    "E01": new_lengths_add_up,
}
"""Predicates over (before, batch, after), by id."""
