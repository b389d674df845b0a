"""The end of a step on the host: record the sampled tokens and see who has finished.

Here the host reads the sampled ids, once. Finish tests in the order of the decode-path sheet 8.4: stop and end ids,
then length.

Source: SGLang 0.5.23 ``managers/scheduler_components/batch_result_processor.py``; decode-path sheet 8.4.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import torch
from torch import Tensor

from ..state.decode import DecodeState, Request, find_request, replace_requests, requests_by_id
from ..state.errors import RequestError, ShapeError
from ..state.sampling import SamplingParams
from .sample import NO_TOKEN

__all__ = ["commit", "commit_tokens"]


def commit(state: DecodeState, ids: Tensor | None) -> tuple[DecodeState, Mapping[int, str]]:
    """Record the ids of the launched step.

    Args:
        state: after the relay.
        ids: i64[B]. Sampled tokens, one per row of the launched batch's ``sample_rows``; None after a step that did not
            sample.
    Returns:
        (state, finished): nothing is launched any more; request id -> "stop" or "length" for requests that ended.
    Raises:
        RequestError: no step is launched, or the logits of a request hold NaN; the error's ``got`` names the requests,
            and the state before the step can be stepped without them.
    """
    state, finished, _ = commit_tokens(state, ids)
    return state, finished


def commit_tokens(state: DecodeState, ids: Tensor | None) -> tuple[DecodeState, Mapping[int, str], tuple[int, ...]]:
    """Do what ``commit`` does and return the ids as well, which the host reads only once.

    Args:
        state: as for ``commit``.
        ids: as for ``commit``.
    Returns:
        (state, finished, sampled): one token id per row that sampled.
    Raises:
        RequestError: as ``commit``.
    """
    batch = state.launched
    if batch is None:
        raise RequestError("commit: expected a launched step, got none; prepare one first", field="launched")
    if ids is None:
        return attrs.evolve(state, launched=None), {}, ()
    request_ids = batch.sample_ids
    sampled = _read_ids(ids, request_ids, state.config.vocab_size)
    rows = {row.request_id: row for row in state.sampling.rows}
    opened = requests_by_id(state)
    changed: dict[int, Request] = {}
    finished: dict[int, str] = {}
    for request_id, token_id in zip(request_ids, sampled, strict=True):
        request = opened.get(request_id) or find_request(state, request_id)
        reason = _finish_reason(state, rows[request_id].params, request.kv_len, request.n_outputs + 1, token_id)
        if reason is not None:
            finished[request_id] = reason
        changed[request_id] = request.sampled(token_id, reason)
    return attrs.evolve(state, requests=replace_requests(state, changed), launched=None), finished, tuple(sampled)


def _read_ids(ids: Tensor, request_ids: tuple[int, ...], vocab_size: int) -> list[int]:
    """Read the sampled ids on the host, the only time in a step, and check them."""
    n_rows = len(request_ids)
    if ids.dtype is not torch.int64 or ids.shape != (n_rows,):
        raise ShapeError(
            f"commit: expected ids i64[{n_rows}], one per row that samples, got {ids.dtype} {tuple(ids.shape)}",
            field="ids",
            expected=(n_rows,),
            got=tuple(ids.shape),
        )
    sampled: list[int] = ids.tolist()
    broken = [request_id for request_id, token_id in zip(request_ids, sampled, strict=True) if token_id == NO_TOKEN]
    if broken:
        raise RequestError(
            f"commit: the logits of requests {broken} hold NaN, so no token can be sampled; look at the weights or at "
            "what was written into the state, or step the others with only=",
            field="logits",
            expected="numbers",
            got=broken,
        )
    bad = [token_id for token_id in sampled if not 0 <= token_id < vocab_size]
    if bad:
        raise RequestError(f"commit: expected ids in [0, {vocab_size}), got {bad[:8]}", field="ids", got=bad[:8])
    return sampled


def _finish_reason(
    state: DecodeState, params: SamplingParams, kv_len: int, n_outputs: int, token_id: int
) -> str | None:
    if token_id in params.stop_token_ids or (not params.ignore_eos and token_id in state.config.eos_token_id):
        return "stop"
    if params.max_new_tokens is not None and n_outputs >= params.max_new_tokens:
        return "length"
    # The sampled token would be fed at position kv_len; without room for it the request has reached its context.
    return "length" if kv_len >= state.capacity.context else None
