"""What holds for the request records, their rows and their counters; decode-path sheet 9.1, 9.2 (rows), 9.9 (relay).

Ids as there; those that begin with N are this package's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from .capacity import C128_RATIO
from .ledger import Ledger
from .partition import partition
from .violations import Found, listed

__all__ = ["REQUESTS"]


def lengths_in_order(ledger: Ledger) -> Found:
    """L06: ``0 <= evicted_len <= kv_len <= context``, no slot without a token, none at all without a row."""
    context = ledger.sizes.context
    for holding in ledger.holdings:
        request = holding.request
        if not 0 <= request.evicted_len <= request.kv_len <= context:
            lens = f"evicted_len {request.evicted_len}, kv_len {request.kv_len}, context {context}"
            yield holding.name, f"expected 0 <= evicted_len <= kv_len <= context, got {lens}"
        if request.is_parked and request.kv_len:
            yield holding.name, f"expected no slots without a row, got kv_len {request.kv_len}"
        if request.kv_len > len(holding.tokens):
            yield holding.name, f"expected a token for each of {request.kv_len} slots, got {len(holding.tokens)}"


def lengths_of_launched(ledger: Ledger) -> Found:
    """L07: while a step is launched, each of its rows has ``seq_lens`` slots: one per token if it may sample."""
    batch = ledger.state.launched
    if batch is None:
        return
    for row, (request_id, seq_len) in enumerate(zip(batch.request_ids, batch.seq_lens.tolist(), strict=False)):
        holding = ledger.by_id.get(request_id)
        if holding is None:
            yield f"request {request_id}", "expected a launched request to be open"
        elif row not in batch.sample_rows and holding.request.kv_len == seq_len < len(holding.tokens):
            continue  # a limit has left some unfed
        elif not holding.request.kv_len == seq_len == len(holding.tokens) or row not in batch.sample_rows:
            lens = f"kv_len {holding.request.kv_len}, seq_len {seq_len}, {len(holding.tokens)} tokens"
            yield holding.name, f"expected kv_len = seq_len = number of tokens, got {lens}"


def pending_is_last_output(ledger: Ledger) -> Found:
    """L08: at rest only the token sampled last has no slot (kv_len = P + o - 1), or a cut left more."""
    if ledger.state.launched is not None:
        return
    for holding in ledger.holdings:
        request = holding.request
        if request.kv_len % C128_RATIO == 0:  # where a cut may have left any number of tokens to recompute
            continue
        if request.n_unfed not in (0, 1):
            yield holding.name, f"expected at most one token without a slot, got {request.n_unfed}"
        elif request.n_unfed and request.n_outputs and not request.has_pending:
            yield holding.name, "expected the pending token to be the last sampled one"


def relay_holds_pending(ledger: Ledger) -> Found:
    """L10: at rest the relay holds every request's pending token, at its row."""
    if ledger.state.launched is not None:
        return
    for holding in ledger.holdings:
        request = holding.request
        if not request.has_pending or not 0 < request.row < len(ledger.relay):
            continue
        got = int(ledger.relay[request.row])
        if got != request.tokens[-1]:
            yield holding.name, f"expected relay[{request.row}] = {request.tokens[-1]}, got {got}"


def rows_partition(ledger: Ledger) -> Found:
    """A16: live requests have distinct rows in 1..R, and the others are free; a retracted one has none."""
    rows = np.array([h.request.row for h in ledger.holdings if not h.request.is_parked], np.int64)
    if len(set(rows.tolist())) != len(rows):
        yield "request table", f"expected distinct rows, got {listed(rows)}"
    yield from partition("row", ledger.free_rows, rows, ledger.sizes.requests)


def outputs_bounded(ledger: Ledger) -> Found:
    """B16: no request has more outputs than it asked for."""
    params = {row.request_id: row.params for row in ledger.state.sampling.rows}
    for holding in ledger.holdings:
        request = holding.request
        most = None if request.request_id not in params else params[request.request_id].max_new_tokens
        if most is not None and request.n_outputs > most:
            yield holding.name, f"expected at most {most} outputs, got {request.n_outputs}"


def sampling_rows_match(ledger: Ledger) -> Found:
    """N04: one sampling row per open request, in the same order; at rest it has counted every output."""
    requests = [holding.request for holding in ledger.holdings]
    ids = tuple(request.request_id for request in requests)
    found = tuple(row.request_id for row in ledger.state.sampling.rows)
    if found != ids:
        yield "sampling", f"expected rows of requests {ids}, got {found}"
        return
    if ledger.state.launched is not None:
        return
    for request, row in zip(requests, ledger.state.sampling.rows, strict=True):
        if row.n_outputs != request.n_outputs:
            name = f"request {request.request_id}"
            yield name, f"expected n_outputs = {request.n_outputs}, got {row.n_outputs}"


def counts_are_of_the_tokens(ledger: Ledger) -> Found:
    """N15: what penalties look at is what the request was given and what it said, no more."""
    rows = {row.request_id: row for row in ledger.state.sampling.rows}
    for holding in ledger.holdings:
        row = rows.get(holding.request.request_id)
        if row is None or row.output_counts is None or row.prompt_seen is None or ledger.state.launched is not None:
            continue
        is_output = np.zeros(len(holding.tokens), bool)
        is_output[holding.request.output_positions.numpy()] = True
        size = len(row.output_counts)
        if not np.array_equal(np.bincount(holding.tokens[is_output], minlength=size), row.output_counts.cpu().numpy()):
            yield holding.name, "expected output_counts to count its sampled tokens"
        if not np.array_equal(
            np.bincount(holding.tokens[~is_output], minlength=size) > 0, row.prompt_seen.cpu().numpy()
        ):
            yield holding.name, "expected prompt_seen to mark the tokens that it was given"


def ids_never_repeat(ledger: Ledger) -> Found:
    """N05: request ids are distinct and below the next one to be given."""
    ids = [holding.request.request_id for holding in ledger.holdings]
    if len(set(ids)) != len(ids):
        yield "requests", f"expected distinct ids, got {listed(ids)}"
    if any(request_id >= ledger.state.next_id for request_id in ids):
        yield "requests", f"expected ids below {ledger.state.next_id}, got {listed(ids)}"


REQUESTS: Final[Mapping[str, Callable[[Ledger], Found]]] = {
    "L06": lengths_in_order,
    "L07": lengths_of_launched,
    "L08": pending_is_last_output,
    "L10": relay_holds_pending,
    "A16": rows_partition,
    "B16": outputs_bounded,
    "N04": sampling_rows_match,
    "N05": ids_never_repeat,
    "N15": counts_are_of_the_tokens,
}
"""Predicates over one state, by id."""
