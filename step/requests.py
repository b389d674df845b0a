"""The empty state, and requests that come, go, wait and go back.

Source: SGLang 0.5.23 ``mem_cache/common.py``, ``hardware_backend/npu/dsv4/dsv4_req_to_token_pool.py``; decode-path
sheet 1.6, 1.10, 4.4. Rewinding has no counterpart upstream.
"""

from __future__ import annotations

import attrs
import torch

from ..model.fingerprint import fingerprint
from ..model.model import Model
from ..state.capacity import Capacity, PoolSizes
from ..state.decode import DecodeState, Request, find_request, replace_requests
from ..state.errors import ConfigError, RequestError
from ..state.kv import CacheForm, init_kv
from ..state.sampling import (
    SEED_LIMIT,
    SamplingParams,
    SamplingState,
    add_row,
    check_vocabulary,
    cut_row,
    drop_row,
)
from ..state.table import init_table
from ..state.tokens import TokenLog
from .cuts import checked_length, cut_history, cut_record, reuse_point
from .prepare import require_committed
from .relay import put_token
from .release import drop_behind, release_row

__all__ = [
    "check_params",
    "check_seed",
    "close_request",
    "init_state",
    "open_request",
    "retract_request",
    "rewind_request",
]


def init_state(
    model: Model, capacity: Capacity, *, page_size: int = 128, seed: int = 0, caches: CacheForm | None = None
) -> DecodeState:
    """Build an empty state for a model.

    Args:
        model: what will step it.
        capacity: requests, tokens and context to make room for.
        page_size: tokens per page, a multiple of 4.
        seed: base of the seeds of requests that bring none.
        caches: how they are stored, one of ``model.cache_forms``: "plain" in the model's dtype; "fp8" and "fp4" as
            rows of FP8 with index keys in FP8 or FP4; "online", "fp8-online" and "fp4-online" with a small pooling
            state for C128. Default plain; Ascend kernels have a form of their own.
    Returns:
        A state without requests; all pools allocated and free.
    Raises:
        ConfigError: a page size, seed or form that cannot be used, or a context beyond the model's positions.
    """
    if capacity.context > model.config.max_position_embeddings:
        raise ConfigError(
            f"Capacity.context: expected at most the model's {model.config.max_position_embeddings} positions, got "
            f"{capacity.context}",
            field="context",
            expected=f"<= {model.config.max_position_embeddings}",
            got=capacity.context,
        )
    check_seed(seed)
    form = model.cache_form if caches is None else caches
    model.require_form(form)
    sizes = PoolSizes.of(capacity, page_size)
    return DecodeState(
        config=model.config,
        numerics=model.numerics,
        fingerprint=fingerprint(model),
        capacity=capacity,
        seed=seed,
        next_id=0,
        requests=(),
        table=init_table(sizes),
        kv=init_kv(
            model.config,
            sizes,
            model.dtype,
            model.device,
            form,
            model.key_dtype,
            ways=model.ranks.parallel.dcp,
            share=model.ranks.context.rank,
        ),
        relay=torch.zeros(sizes.requests + 1, dtype=torch.int64, device=model.device),
        sampling=SamplingState(rows=()),
        launched=None,
    )


def check_seed(seed: int) -> None:
    """Refuse what cannot be the base of seeds.

    Raises:
        ConfigError: not an integer of 64 bits.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < SEED_LIMIT:
        raise ConfigError(
            f"seed: expected an integer, 0 <= seed < 2**64, got {seed!r}", field="seed", expected="u64", got=seed
        )


def open_request(state: DecodeState, params: SamplingParams | None = None) -> tuple[DecodeState, int]:
    """Open a request without tokens.

    Args:
        state: before.
        params: how to sample; default ``SamplingParams()``.
    Returns:
        (state, request_id).
    Raises:
        CapacityError: no table row is free.
        RequestError: ids in ``params`` outside the vocabulary.
    """
    request_id = state.next_id
    params = SamplingParams() if params is None else params
    check_params(state, params)
    sampling = add_row(
        state.sampling,
        request_id,
        params,
        base_seed=state.seed,
        vocab_size=state.config.vocab_size,
        device=state.kv.device,
    )
    free_rows, (row,) = state.table.free_rows.take(1)
    opened = Request(request_id=request_id, row=row, tokens=TokenLog(), output_positions=TokenLog())
    state = attrs.evolve(
        state,
        table=attrs.evolve(state.table, free_rows=free_rows),
        next_id=request_id + 1,
        requests=(*state.requests, opened),
        sampling=sampling,
    )
    return state, request_id


def check_params(state: DecodeState, params: SamplingParams) -> None:
    """Refuse what is no ``SamplingParams``, or one that holds back every token of this model."""
    if not isinstance(params, SamplingParams):
        raise RequestError(
            f"params: expected SamplingParams, got {type(params).__name__}", field="params", expected="SamplingParams"
        )
    check_vocabulary(params, state.config.vocab_size)
    held_back = {*params.stop_token_ids, *state.config.eos_token_id}
    if params.min_new_tokens and len(held_back) >= state.config.vocab_size:
        raise RequestError(
            "stop_token_ids: with the model's own they are every token, and min_new_tokens holds them all back",
            field="stop_token_ids",
        )


def close_request(state: DecodeState, request_id: int) -> DecodeState:
    """Close a request: its row and every page that nobody else names become free.

    Args:
        state: before; it keeps its content, the request included.
        request_id: an open request, finished or not.
    Returns:
        The state without the request.
    Raises:
        RequestError: no such request is open.
    """
    require_committed(state)
    request = find_request(state, request_id)
    state = release_row(state, request)
    return attrs.evolve(
        state,
        requests=tuple(other for other in state.requests if other is not request),
        sampling=drop_row(state.sampling, request_id),
    )


def retract_request(state: DecodeState, request_id: int) -> DecodeState:
    """Take a request's row and pages back; it keeps its tokens, its seed and its counts, and waits.

    ``decode_step`` leaves it out until it is named: ``decode_step(only=[request_id])`` or an ``extend_step`` takes a
    row again, feeds all its tokens, the pending one included, and goes on as if nothing had been.

    Args:
        state: before.
        request_id: an open request; one that waits already stays as it is.
    Returns:
        The state in which the request owns nothing but its tokens.
    Raises:
        RequestError: no such request is open.
    """
    require_committed(state)
    request = find_request(state, request_id)
    state = release_row(state, request)
    parked = attrs.evolve(request, row=0, kv_len=0, evicted_len=0, decode_count=0)
    return attrs.evolve(state, requests=replace_requests(state, {request_id: parked}))


def rewind_request(state: DecodeState, request_id: int, n: int) -> DecodeState:
    """Cut a request back to its first ``n`` tokens; a finished one that loses a token runs again.

    What lies behind the nearest reuse point (``fork_request`` says which those are) is given back, and the tokens
    between that point and ``n`` are fed first by the next step: ``find_request(state, request_id).n_unfed`` of them.
    Where that is none, a step that names the request feeds its last tokens again.

    Args:
        state: before; it keeps its content.
        request_id: an open request.
        n: tokens to keep.
    Returns:
        The state in which the request has ``n`` tokens.
    Raises:
        RequestError: no such request, or it does not have ``n`` tokens.
        CapacityError: no page for its own copy of a partly kept C128 page that a fork reads too; nothing was changed.
    """
    require_committed(state)
    request = find_request(state, request_id)
    n = checked_length(request, n, "n")
    if n == len(request.tokens):
        return state
    point = reuse_point(state, request, n)
    state = drop_behind(state, request, point)
    cut = cut_record(request, n, point)
    return attrs.evolve(
        state,
        requests=replace_requests(state, {request_id: cut}),
        relay=put_token(state.relay, cut),
        sampling=cut_row(state.sampling, request_id, cut_history(state, cut)),
    )
