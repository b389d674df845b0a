"""What sampling, relay and commit do; decode-path sheet 9.7 (E07), 9.9.

Ids as there; those that begin with N are this package's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import torch

from .batch import ScheduleBatch, StepOutput
from .ledger import Holding, Ledger
from .violations import Found, listed

__all__ = ["COMMITTED"]


def _pairs(batch: ScheduleBatch, out: StepOutput, after: Ledger) -> list[tuple[int, int | None]]:
    """Return (request id, sampled token or None) for every row of the step."""
    sampled = dict(zip(out.request_ids, out.next_token_ids, strict=False))
    return [(request_id, sampled.get(request_id)) for request_id in batch.request_ids]


def tokens_appended(prepared: Ledger, out: StepOutput, after: Ledger) -> Found:
    """E07: a step that samples appends exactly its token to each of its requests, any other step none."""
    batch = _launched(prepared)
    sampled = dict(_pairs(batch, out, after))
    for request_id, holding in prepared.by_id.items():
        other = after.by_id.get(request_id)
        token = sampled.get(request_id)
        expected = holding.tokens if token is None else np.append(holding.tokens, token)
        outputs = holding.request.output_positions
        outputs = outputs if token is None else outputs.append(len(holding.tokens))
        if other is None or not np.array_equal(other.tokens, expected) or other.request.output_positions != outputs:
            yield holding.name, f"expected its tokens and outputs followed by {'nothing' if token is None else token}"


def rows_reported(prepared: Ledger, out: StepOutput, after: Ledger) -> Found:
    """H04: the output has the rows that sampled, or all rows of a step that does not sample, in order."""
    batch = _launched(prepared)
    allowed = [batch.sample_ids] if out.next_token_ids else [batch.request_ids, batch.sample_ids]
    if out.request_ids not in allowed:
        yield "request_ids", f"expected {allowed[0]}, got {out.request_ids}"
    if len(out.next_token_ids) not in (0, len(out.request_ids)):
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
        n_outputs = after.by_id[request_id].request.n_outputs if request_id in after.by_id else 0
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
    """G02: who has finished is reported once, recorded, and stays so; a stop token counts before any length."""
    for request_id, holding in prepared.by_id.items():
        other = after.by_id.get(request_id)
        was, now = holding.request.finished, None if other is None else other.request.finished
        reported = out.finished.get(request_id)
        if now != (was if reported is None else reported) or (was is not None and reported is not None):
            yield holding.name, f"expected finished {was or reported}, got {now}"
    for request_id, token in _pairs(_launched(prepared), out, after):
        ended = after.by_id.get(request_id)
        reason = None if ended is None or token is None else _reason(after, ended, token)
        if out.finished.get(request_id) != reason:
            yield f"request {request_id}", f"expected it to end by {reason}, got {out.finished.get(request_id)}"


def _reason(after: Ledger, holding: Holding, token: int) -> str | None:
    """Work out why a request ends with a token, if it does."""
    params = next((r.params for r in after.state.sampling.rows if r.request_id == holding.request.request_id), None)
    if params is None:
        return None
    if token in params.stop_token_ids or (not params.ignore_eos and token in after.state.config.eos_token_id):
        return "stop"
    is_long = params.max_new_tokens is not None and holding.request.n_outputs >= params.max_new_tokens
    return "length" if is_long or len(holding.tokens) > after.sizes.context else None


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
