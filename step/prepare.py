"""The first half of a step on the host: which rows run, what they are fed, where they write.

A decode allocates for position ``L`` (the old length), maps it, and only then calls the length ``L + 1``; the layers
write the content later. Decode is the special case of extend with prefix ``L`` and length ``L + 1``.

Source: SGLang 0.5.23 ``managers/schedule_batch.py`` (``prepare_for_decode``, ``prepare_for_extend``); decode-path sheet
1.1, 1.7, 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import index
from typing import Any, Final

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from ..state.batch import ForwardMode, ScheduleBatch
from ..state.capacity import C128_RATIO
from ..state.decode import DecodeState, Request, find_request, replace_requests, requests_by_id
from ..state.errors import CapacityError, RequestError, StateBusyError
from ..state.sampling import observe_prompt, replace_output
from ..state.tokens import TokenLog
from .allocate import Growth, allocate, eviction_end
from .relay import put_token

__all__ = [
    "TokenIds",
    "distinct_ids",
    "prepare_decode",
    "prepare_extend",
    "require_committed",
    "running_requests",
]

Ints = NDArray[np.int64]
TokenIds = Sequence[int] | Ints | torch.Tensor

_NO_IDS: Final = np.empty(0, np.int64)


def running_requests(state: DecodeState) -> tuple[int, ...]:
    """Return the ids of the requests that ``decode_step`` would run, in order of opening; retracted ones wait."""
    return tuple(r.request_id for r in state.requests if r.finished is None and r.n_unfed and not r.is_parked)


def prepare_decode(
    state: DecodeState, *, only: Iterable[int] | None = None, force: Mapping[int, int] | None = None
) -> tuple[DecodeState, ScheduleBatch]:
    """Prepare one token for every running request.

    A request that has more than one unfed token (after a fork at an earlier token, a rewind or a retraction) is fed all
    of them; the batch is then one of extend rows, which compute the same.

    Args:
        state: before the step.
        only: requests to run, in this row order; default all running ones in order of opening.
        force: request -> token to feed instead of its pending one.
    Returns:
        (state, batch): slots are allocated and lengths advanced; contents are still to be written.
    Raises:
        RequestError: an unknown, finished or repeated request, or one that has no token to feed.
        CapacityError: a pool is short; nothing was changed.
    """
    require_committed(state)
    forced = {} if force is None else _mapping(force, "force")
    forced = dict(zip(distinct_ids(forced, "force"), forced.values(), strict=True))
    if only is None:
        running = {*running_requests(state), *forced}
        ids = tuple(r.request_id for r in state.requests if r.request_id in running)
    else:
        ids = distinct_ids(only, "only")
    strays = [i for i in forced if i not in ids]
    if strays:
        raise RequestError(
            f"force: expected requests of this step {ids}, got {strays}", field="force", expected=ids, got=strays
        )
    requests, opened = [], requests_by_id(state)
    for request_id in ids:
        request = _runnable(state, opened, request_id)
        if request_id in forced:
            state, request = _force(state, request, forced[request_id])
        elif not request.n_unfed:
            raise RequestError(
                f"request {request_id}: expected a pending token, got none; feed it with extend_step or force=",
                field="only",
                expected="a pending token",
                got=None,
            )
        requests.append(request)
    is_plain = all(request.n_unfed == 1 for request in requests)
    mode = ForwardMode.DECODE if is_plain else ForwardMode.EXTEND
    # The relay holds what was sampled last; any other token is known on the host.
    is_relayed = is_plain and not forced and all(request.has_pending for request in requests)
    return _prepare(state, mode, requests, {}, n_decodes=1, is_known=not is_relayed)


def prepare_extend(
    state: DecodeState, tokens: Mapping[int, TokenIds], *, limit: int | Mapping[int, int] | None = None
) -> tuple[DecodeState, ScheduleBatch]:
    """Prepare prompts or chunks of them; tokens that a request has not been fed yet come first.

    Args:
        state: before the step.
        tokens: request -> token ids, in row order; empty ids on a running request decode it.
        limit: tokens to feed at most, of every request or by request, at least 128; see ``extend_step``.
    Returns:
        (state, batch): slots are allocated and lengths advanced; contents are still to be written.
    Raises:
        RequestError: unknown or finished request, nothing to feed, ids outside the vocabulary.
        CapacityError: longer than the context, or a pool is short; nothing was changed.
    """
    require_committed(state)
    requests = []
    given = _mapping(tokens, "tokens")
    request_ids = distinct_ids(given, "tokens")
    opened = requests_by_id(state)
    for request_id, chunk in zip(request_ids, given.values(), strict=True):
        request = _runnable(state, opened, request_id)
        ids = _token_ids(chunk, state.config.vocab_size, request_id)
        if len(ids):
            state = attrs.evolve(state, sampling=observe_prompt(state.sampling, request_id, ids.tolist()))
            request = attrs.evolve(request, tokens=request.tokens.extend(ids))
        elif not request.n_unfed:
            raise RequestError(
                f"request {request_id}: expected at least one token to feed, got none and nothing is pending",
                field="tokens",
                expected=">= 1 token",
                got=0,
            )
        requests.append(request)
    return _prepare(state, ForwardMode.EXTEND, requests, _limits(limit, request_ids))


def _prepare(
    state: DecodeState,
    mode: ForwardMode,
    requests: Sequence[Request],
    limits: Mapping[int, int],
    *,
    n_decodes: int = 0,
    is_known: bool = True,
) -> tuple[DecodeState, ScheduleBatch]:
    state, requests = _placed(state, requests)
    ends = [_end(state, request, limits) for request in requests]
    evicted = _evicted(state, mode, requests, n_decodes)
    columns = [*zip(requests, ends, evicted, strict=True)]
    growth = Growth.of([(one.row, one.kv_len, end, one.evicted_len, evict_to) for one, end, evict_to in columns])
    table, locs = allocate(state.table, growth)
    grown = {one.request_id: one.grown(end, evict_to, one.decode_count + n_decodes) for one, end, evict_to in columns}
    batch = ScheduleBatch(
        forward_mode=mode,
        request_ids=tuple(grown),
        req_pool_indices=growth.rows,
        prefix_lens=growth.prefix_lens,
        seq_lens=growth.seq_lens,
        orig_seq_lens=growth.seq_lens.copy(),
        seq_lens_sum=sum(ends),
        input_ids=_joined_new(requests, ends) if is_known else None,
        sample_rows=np.array([i for i, (one, end, _) in enumerate(columns) if end == len(one.tokens)], np.int64),
        out_cache_loc=locs.out_full_loc,
        out_cache_loc_dsv4=locs,
    )
    return attrs.evolve(state, table=table, requests=replace_requests(state, grown), launched=batch), batch


def _placed(state: DecodeState, requests: Sequence[Request]) -> tuple[DecodeState, Sequence[Request]]:
    """Give those that were retracted a row."""
    n_parked = sum([request.is_parked for request in requests])
    if not n_parked:
        return state, requests
    free_rows, rows = state.table.free_rows.take(n_parked)
    new_rows, relay = iter(rows), state.relay
    placed = [attrs.evolve(r, row=next(new_rows)) if r.is_parked else r for r in requests]
    for request in (new for new, old in zip(placed, requests, strict=True) if new is not old):
        relay = put_token(relay, request)
    return attrs.evolve(state, table=attrs.evolve(state.table, free_rows=free_rows), relay=relay), placed


def _limits(limit: int | Mapping[int, int] | None, ids: Sequence[int]) -> Mapping[int, int]:
    """Return the limit of every request that has one."""
    if limit is None:
        return {}
    if isinstance(limit, Mapping):
        given = dict(zip(distinct_ids(limit, "limit"), limit.values(), strict=True))
    else:
        given = dict.fromkeys(ids, limit)
    limits = {
        i: -1 if isinstance(most, bool) or not hasattr(most, "__index__") else index(most) for i, most in given.items()
    }
    known = set(ids)
    wrong = {i: given[i] for i, most in limits.items() if i not in known or most < C128_RATIO}
    if wrong:
        raise RequestError(
            f"limit: expected at least {C128_RATIO} tokens for requests of this step {tuple(ids)}, got {wrong}",
            field="limit",
            expected=f">= {C128_RATIO}",
            got=wrong,
        )
    return limits


def _end(state: DecodeState, request: Request, limits: Mapping[int, int]) -> int:
    """Find where the tokens end that a request is fed in this step."""
    total = len(request.tokens)
    if total > state.capacity.context:
        raise CapacityError(
            f"request {request.request_id}: {total} tokens, but the state's context is {state.capacity.context}; "
            "shorten the prompt or give init_state a larger Capacity(context=...)",
            field="context",
            expected=f"<= {state.capacity.context}",
            got=total,
        )
    end = request.kv_len + limits.get(request.request_id, total)
    return total if total <= end else end // C128_RATIO * C128_RATIO


def _evicted(state: DecodeState, mode: ForwardMode, requests: Sequence[Request], n_decodes: int) -> list[int]:
    """Find up to where each request has given back its window pages once this step is prepared."""
    window, page_size = state.config.sliding_window, state.table.sizes.page_size
    # The first decode after a prefill evicts nothing.
    return [
        eviction_end(request.kv_len, request.evicted_len, window, page_size)
        if mode is ForwardMode.EXTEND or request.decode_count + n_decodes > 1
        else request.evicted_len
        for request in requests
    ]


def _force(state: DecodeState, request: Request, token_id: int) -> tuple[DecodeState, Request]:
    token = int(_token_ids([token_id], state.config.vocab_size, request.request_id)[0])
    if not request.has_pending:
        sampling = observe_prompt(state.sampling, request.request_id, [token])
        return attrs.evolve(state, sampling=sampling), attrs.evolve(request, tokens=request.tokens.append(token))
    sampling = replace_output(state.sampling, request.request_id, request.tokens[-1], token)
    return attrs.evolve(state, sampling=sampling), attrs.evolve(request, tokens=request.tokens.replace_last(token))


def _joined_new(requests: Sequence[Request], ends: Sequence[int]) -> Ints:
    parts = [request.tokens.span(request.kv_len, end) for request, end in zip(requests, ends, strict=True)]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _runnable(state: DecodeState, opened: Mapping[int, Request], request_id: int) -> Request:
    request = opened.get(request_id) or find_request(state, request_id)
    if request.finished is not None:
        raise RequestError(
            f"request {request_id}: expected a running request, but it has finished ({request.finished}); close it, or "
            "fork it before it ends",
            field="request_id",
            expected="running",
            got=request.finished,
        )
    return request


def _mapping(given: Any, field: str) -> dict[Any, Any]:
    if not isinstance(given, Mapping):
        raise RequestError(
            f"{field}: expected a mapping from request ids, got {type(given).__name__}", field=field, got=given
        )
    return dict(given)


def distinct_ids(ids: Iterable[Any], field: str) -> tuple[int, ...]:
    """Return request ids as plain integers (two tensors of one value are two keys of a dict), each once.

    Raises:
        RequestError: no integers, or one twice.
    """
    try:
        found = tuple(index(request_id) for request_id in ids)
    except TypeError as error:
        raise RequestError(f"{field}: expected request ids, got {ids!r}", field=field, got=ids) from error
    if len(set(found)) != len(found):
        raise RequestError(
            f"{field}: expected every request once, got {found}", field=field, expected="distinct ids", got=found
        )
    return found


def require_committed(state: DecodeState) -> None:
    """Refuse to go on while a prepared step has not been committed.

    Raises:
        StateBusyError: a step is launched.
    """
    if state.launched is not None:
        raise StateBusyError(
            f"state: a step of requests {state.launched.request_ids} is prepared and not committed; finish it "
            "(forward, sample, relay, commit) or go on from the state before it",
            field="launched",
            expected=None,
            got=state.launched.request_ids,
        )


def _token_ids(ids: Any, vocab_size: int, request_id: int) -> Ints:
    """Check token ids at the border and return them as i64[T]."""
    if isinstance(ids, tuple) and not ids:  # what decodes is given nothing, and is most of what a server's steps run
        return _NO_IDS
    found = TokenLog.of(_plain_ids(ids, request_id)).numpy()
    bad = found[(found < 0) | (found >= vocab_size)]
    if len(bad):
        raise RequestError(
            f"request {request_id}: expected token ids in [0, {vocab_size}), got {bad[:8].tolist()}",
            field="tokens",
            expected=f"[0, {vocab_size})",
            got=bad[:8].tolist(),
        )
    return found


def _plain_ids(ids: Any, request_id: int) -> Ints:
    try:
        if isinstance(ids, torch.Tensor):
            found = ids.detach().cpu().numpy()
        else:
            found = np.asarray(ids if isinstance(ids, np.ndarray) else [*ids])
            # Among integers numpy takes True for 1.
            has_flags = not isinstance(ids, np.ndarray) and any(isinstance(i, bool) for i in ids)
            found = found.astype(bool) if has_flags else found
    except (TypeError, ValueError, NotImplementedError) as error:
        raise RequestError(
            f"request {request_id}: expected a flat sequence of integer token ids, got {type(ids).__name__} ({error})",
            field="tokens",
            expected="i64[T]",
            got=type(ids).__name__,
        ) from error
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise RequestError(
            f"request {request_id}: expected a flat sequence of integer token ids, got {found.dtype} of shape "
            f"{found.shape}",
            field="tokens",
            expected="i64[T]",
            got=str(found.dtype),
        )
    return found.astype(np.int64)
