"""Prefill, or one chunk of it, possibly beside decoding rows.

Source: SGLang 0.5.23 ``managers/schedule_batch.py`` (``prepare_for_extend``); decode-path sheet 5, 7.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from ..model.forward import forward
from ..model.model import Model
from ..state.batch import StepOutput
from ..state.decode import DecodeState
from ..state.errors import RequestError
from .announce import announce_step, runs_elsewhere, told_to_ranks
from .border import owned_step
from .commit import commit
from .decode import empty_output, finish_step
from .edits import Edits
from .forward_batch import forward_batch
from .prepare import TokenIds, prepare_extend
from .refeed import refeed_last
from .replays import Replay
from .taps import step_taps

__all__ = ["extend_step"]


@torch.no_grad()
def extend_step(
    model: Model,
    state: DecodeState,
    tokens: Mapping[int, TokenIds],
    *,
    sample: bool = True,
    limit: int | Mapping[int, int] | None = None,
    logits: Literal["last", "all"] = "last",
    mask: Mapping[int, Tensor] | None = None,
    capture: Iterable[str] = (),
    replay: Replay | None = None,
    edit: Edits | None = None,
) -> tuple[DecodeState, StepOutput]:
    """Feed prompts, chunks of them, or single tokens; sample each row's next token.

    A request with a pending token is fed that token first, then the given ids, so an empty chunk decodes it. With a
    ``limit`` a long text is fed in chunks beside decoding rows: give all of its ids once and then empty chunks; what is
    left over stays with the request, and it samples in the step that feeds its last token. An empty chunk on a request
    with nothing left to feed feeds its last tokens again. Over several ranks all step together; see ``decode_step``.

    Args:
        model: the model.
        state: before the step; it keeps its content and may be stepped again.
        tokens: request -> token ids, in row order.
        sample: False for an intermediate chunk: nothing is sampled and nothing is pending afterwards.
        limit: tokens to feed at most, of every request or by request, at least 128. A request with more stops at the
            last multiple of 128 below its limit.
        logits: "last" for f32[B,V]; "all" for f32[T,V], every fed position of every row.
        mask: request -> i32[V/32] packed vocabulary bits (1 = allowed) for the token that is sampled.
        capture: stages to return in ``out.captured``, one row per fed token; see ``decode_step``.
        replay: records whose choices are forced on the tokens that they name; see ``decode_step``.
        edit: request -> stage -> function of (row, token), called once per fed token and layer; see ``decode_step``.
    Returns:
        (state, out): the next state; sampled tokens, logits, logprobs, who has finished, captures. Requests with tokens
            left over are not among ``out.request_ids``.
    Raises:
        RankError: another rank is lost or late, could not begin its step or has decided otherwise; nothing was changed.
        RequestError: unknown or finished request, one without tokens, ids outside the vocabulary; an unknown stage; a
            forced choice that the token cannot make.
        ShapeError: an edited row or a record of the wrong shape or dtype.
        CapacityError: longer than the context, or a pool is short; nothing was changed.
    """
    if logits not in ("last", "all"):
        raise RequestError(
            f'logits: expected "last" or "all", got {logits!r}', field="logits", expected=("last", "all"), got=logits
        )
    with owned_step(model, state):
        before = state
        kept: Literal["last", "all", "none"] = logits if sample or logits == "all" else "none"
        with told_to_ranks(model):
            state = refeed_last(state, _empty_chunks(tokens))
            state, batch = prepare_extend(state, tokens, limit=limit)
            taps = step_taps(state, batch, capture=capture, replay=replay, edit=edit)
        shares = announce_step(model, state, batch, logits=kept, mask=mask if sample else None)
        if not batch.request_ids and not runs_elsewhere(shares):  # nothing runs: nothing changes
            return before, empty_output(model)
        view = forward_batch(state, batch, rowwise=model.numerics.invariant, shares=shares)
        kv, out_logits = forward(model, state.kv, view, logits=kept, tap=taps.tap)
        if not batch.request_ids:  # this replica was idle
            return before, empty_output(model)
        state, captured = attrs.evolve(state, kv=kv), taps.record(out_logits, kept)
        if sample:
            last = out_logits if logits == "last" else out_logits.index_select(0, view.last_rows)
            state, out = finish_step(model, state, batch, view, last, mask, captured=captured)
            return state, out if logits == "last" else attrs.evolve(out, logits=out_logits)
        state, finished = commit(state, None)
        out = StepOutput(
            request_ids=batch.request_ids,
            next_token_ids=(),
            logits=out_logits,
            logprobs=None,
            finished=finished,
            captured=captured,
        )
        return state, out


def _empty_chunks(tokens: Any) -> Iterator[int]:
    """Give the requests that are given nothing; whether ``tokens`` is right is for the preparation to say."""
    for i, chunk in tokens.items() if isinstance(tokens, Mapping) else ():
        if isinstance(i, int) and isinstance(chunk, Sized) and not len(chunk):
            yield i
