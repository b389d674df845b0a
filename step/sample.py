"""Choose the next token of every row of a step.

``sample`` reads parameters, seeds and counts from the ``SamplingState`` and writes the new counts; the arithmetic is in
``ops/sampling.py``. Nothing here reads a tensor's content on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from ..ops.sampling import (
    apply_bias,
    apply_mask,
    apply_penalties,
    ban_tokens,
    map_rows,
    pick_greedy,
    sample_tokens,
    token_logprobs,
)
from ..state.batch import Logprobs
from ..state.errors import DtypeError, RequestError, ShapeError
from ..state.sampling import SamplingRow, SamplingState, observe_outputs, row_of

__all__ = ["NO_TOKEN", "logprobs_of", "sample"]

NO_TOKEN: Final = -1
"""What a row whose logits hold NaN is given in place of a token."""


def sample(
    logits: Tensor,
    sampling: SamplingState,
    request_ids: tuple[int, ...],
    positions: Tensor,
    *,
    stop_token_ids: tuple[int, ...],
    mask: Mapping[int, Tensor] | None = None,
    agree: Callable[[Tensor], Tensor] | None = None,
) -> tuple[SamplingState, Tensor]:
    """Sample one token for each row and count it.

    Order: additive penalties and held-back stop tokens, repetition penalty, mask, bias, choice. A row's token depends
    on its own logits, parameters, history, seed and position only. Where held-back stop tokens and the mask leave
    nothing, the mask wins (``apply_mask``). A row of nothing but minus infinity gets id 0. A row with NaN gets -1, at
    which ``commit`` refuses the step.

    Args:
        logits: f32[B,V]. Row ``i`` belongs to ``request_ids[i]``.
        sampling: the open requests; those not named are left alone.
        request_ids: B different open requests, in any order.
        positions: i64[B]. Position of the token that each row's logits follow.
        stop_token_ids: the model's own stop tokens, held back like the request's own until ``min_new_tokens``, whether
            or not the request ignores them afterwards.
        mask: by request id, i32[K] or i32[1,K] with K = ceil(V / 32): packed tokens, lowest bit first, 1 = allowed.
        agree: makes one choice of those of several ranks, i64[B] -> i64[B]; called on every rank, before anything is
            counted.
    Returns:
        (sampling, ids i64[B]): each row's ``n_outputs`` is one more and its token counted; -1 for a row with NaN.
    Raises:
        RequestError: a request is unknown, named twice, or masked without a row.
        ShapeError: logits, positions, counts or a mask do not fit together.
        DtypeError: logits are not f32, positions not i64, or a mask not i32.
    Aliasing: none with the logits; rows that count nothing share what they had.
    Source: SGLang ``srt/layers/sampler.py`` and ``srt/sampling/sampling_batch_info.py``.
    """
    rows = _rows_of(sampling, request_ids)
    _check_inputs(logits, positions, rows)
    if not mask and all(map(_takes_argmax, rows)):
        ids = pick_greedy(logits)
        largest = logits.gather(1, ids.unsqueeze(-1)).squeeze(-1)  # torch takes NaN for the largest
    else:
        ids, largest = _choose(_adjust(logits, rows, stop_token_ids, mask or {}), rows, positions), logits.amax(-1)
    chosen = ids.masked_fill(largest.isnan(), NO_TOKEN)
    if agree is not None:
        chosen = agree(chosen)
        ids = chosen.clamp(min=0)
    return observe_outputs(sampling, request_ids, ids), chosen


def logprobs_of(logits: Tensor, ids: Tensor, sampling: SamplingState, request_ids: tuple[int, ...]) -> Logprobs | None:
    """Compute the log-probabilities of a step, if any of its requests asked for them.

    Args:
        logits: f32[B,V]. As given to ``sample``.
        ids: i64[B]. As it returned them.
        sampling: the state before or after that step.
        request_ids: the rows' requests.
    Returns:
        None if no request asked. Else numbers for every row, also for those that asked for fewer alternatives or for
        none: P is the largest number asked for (at most V), and ``counts`` tells each row's share of it.
    Raises:
        RequestError: a request is unknown or named twice.
    Source: SGLang ``srt/layers/sampler.py``.
    """
    vocab_size = logits.shape[1]
    wanted = [row.params.logprobs for row in _rows_of(sampling, request_ids)]
    counts = tuple(None if count is None else min(count, vocab_size) for count in wanted)
    asked = [count for count in counts if count is not None]
    if not asked:
        return None
    chosen, top_ids, top_logprobs = token_logprobs(logits, ids, max(asked))
    return Logprobs(token_logprobs=chosen, top_ids=top_ids, top_logprobs=top_logprobs, counts=counts)


def _rows_of(sampling: SamplingState, request_ids: tuple[int, ...]) -> list[SamplingRow]:
    by_id = {row.request_id: row for row in sampling.rows}
    if len(set(request_ids)) != len(request_ids):
        message = f"sample: expected every request once, got {request_ids}; give each request one row"
        raise RequestError(message, field="request_ids", expected="different request ids", got=request_ids)
    return [by_id[request_id] if request_id in by_id else row_of(sampling, request_id) for request_id in request_ids]


def _takes_argmax(row: SamplingRow) -> bool:
    params = row.params
    return (
        params.is_greedy
        and not params.has_penalties
        and not params.logit_bias
        and row.n_outputs >= params.min_new_tokens
    )


def _check_inputs(logits: Tensor, positions: Tensor, rows: Sequence[SamplingRow]) -> None:
    if logits.dtype != torch.float32:
        raise _wrong(DtypeError, "logits", "f32[B,V]", logits.dtype, "convert them with .float()")
    if logits.ndim != 2 or logits.shape[0] != len(rows):
        expected = f"f32[B,V] with B = {len(rows)}, one row for each request"
        raise _wrong(ShapeError, "logits", expected, tuple(logits.shape), "cut padding rows off first")
    if positions.dtype != torch.int64:
        raise _wrong(DtypeError, "positions", "i64[B]", positions.dtype, "convert them with .long()")
    if positions.shape != logits.shape[:1]:
        expected = f"i64[B] with B = {len(rows)}"
        raise _wrong(ShapeError, "positions", expected, tuple(positions.shape), "give one position for each request")
    for row in rows:
        if row.output_counts is not None and row.output_counts.shape != logits.shape[1:]:
            expected = f"f32[B,V] with V = {row.output_counts.shape[0]}, as request {row.request_id} was opened with"
            raise _wrong(ShapeError, "logits", expected, tuple(logits.shape), "cut padding columns off first")


def _wrong(
    kind: type[DtypeError] | type[ShapeError], field: str, expected: str, got: object, remedy: str
) -> DtypeError | ShapeError:
    return kind(f"sample({field}): expected {expected}, got {got}; {remedy}", field=field, expected=expected, got=got)


def _adjust(
    logits: Tensor, rows: Sequence[SamplingRow], stop_token_ids: tuple[int, ...], mask: Mapping[int, Tensor]
) -> Tensor:
    # Stop tokens are held back after the repetition penalty instead of before it: minus infinity either way.
    adjusted = _penalise(logits, rows)
    adjusted = _hold_back_stops(adjusted, rows, stop_token_ids)
    adjusted = _mask(adjusted, rows, mask)
    return _bias(adjusted, rows)


def _penalise(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    picked = [at for at, row in enumerate(rows) if row.params.has_penalties]
    if not picked:
        return logits
    params = [rows[at].params for at in picked]
    counts = torch.stack([row.output_counts for row in rows if row.output_counts is not None])
    seen = torch.stack([row.prompt_seen for row in rows if row.prompt_seen is not None])
    frequency = logits.new_tensor([p.frequency_penalty for p in params])
    presence = logits.new_tensor([p.presence_penalty for p in params])
    repetition = logits.new_tensor([p.repetition_penalty for p in params])
    return map_rows(logits, picked, lambda some: apply_penalties(some, counts, seen, frequency, presence, repetition))


def _hold_back_stops(logits: Tensor, rows: Sequence[SamplingRow], stop_token_ids: tuple[int, ...]) -> Tensor:
    vocab_size = logits.shape[1]
    pairs = [
        (at, token_id)
        for at, row in enumerate(rows)
        if row.n_outputs < row.params.min_new_tokens
        for token_id in {*row.params.stop_token_ids, *stop_token_ids}
        if token_id < vocab_size
    ]
    if not pairs:
        return logits
    places = torch.tensor(pairs, device=logits.device)
    return ban_tokens(logits, places[:, 0], places[:, 1])


def _mask(logits: Tensor, rows: Sequence[SamplingRow], mask: Mapping[int, Tensor]) -> Tensor:
    place = {row.request_id: at for at, row in enumerate(rows)}
    n_words = (logits.shape[1] + 31) // 32
    for request_id, packed in mask.items():
        if request_id not in place:
            message = (
                f"sample(mask): expected request ids among {tuple(place)}, got {request_id}; mask rows of this step"
            )
            raise RequestError(message, field="mask", expected=tuple(place), got=request_id)
        if packed.dtype != torch.int32:
            raise _wrong(DtypeError, f"mask[{request_id}]", "i32", packed.dtype, "pack 32 tokens into one int32")
        if packed.shape not in ((n_words,), (1, n_words)):
            expected = f"({n_words},) or (1, {n_words})"
            raise _wrong(ShapeError, f"mask[{request_id}]", expected, tuple(packed.shape), "give ceil(V / 32) words")
    if not mask:
        return logits
    words = torch.stack([packed.reshape(n_words).to(logits.device) for packed in mask.values()])
    return map_rows(logits, [place[request_id] for request_id in mask], lambda some: apply_mask(some, words))


def _bias(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    triples = [(at, token_id, bias) for at, row in enumerate(rows) for token_id, bias in row.params.logit_bias]
    if not triples:
        return logits
    places = torch.tensor([(at, token_id) for at, token_id, _bias in triples], device=logits.device)
    return apply_bias(logits, places[:, 0], places[:, 1], logits.new_tensor([bias for _at, _id, bias in triples]))


def _choose(logits: Tensor, rows: Sequence[SamplingRow], positions: Tensor) -> Tensor:
    params = [row.params for row in rows]
    return sample_tokens(
        logits,
        positions,
        seeds=[row.seed for row in rows],
        temperature=[0.0 if p.is_greedy else p.temperature for p in params],
        top_k=[p.top_k for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
    )
