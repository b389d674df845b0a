"""Prefill, or one chunk of it, possibly beside decoding rows.

Source: SGLang 0.5.23 ``managers/schedule_batch.py`` (``prepare_for_extend``); decode-path sheet 5, 7.3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs
import torch
from torch import Tensor

from ..model.forward import forward
from ..model.model import Model
from ..state.batch import StepOutput
from ..state.decode import DecodeState
from ..state.errors import RequestError
from .border import owned_step
from .commit import commit
from .decode import empty_output, finish_step
from .forward_batch import forward_batch
from .prepare import TokenIds, prepare_extend

__all__ = ["extend_step"]


@torch.no_grad()
def extend_step(
    model: Model,
    state: DecodeState,
    tokens: Mapping[int, TokenIds],
    *,
    sample: bool = True,
    logits: Literal["last", "all"] = "last",
    mask: Mapping[int, Tensor] | None = None,
) -> tuple[DecodeState, StepOutput]:
    """Feed prompts, chunks of them, or single tokens; sample each row's next token.

    A request with a pending token is fed that token first, then the given ids, so an empty chunk decodes it.

    Args:
        model: the model.
        state: before the step; it keeps its content and may be stepped again.
        tokens: request -> token ids, in row order.
        sample: False for an intermediate chunk: nothing is sampled and nothing is pending afterwards.
        logits: "last" for f32[B,V]; "all" for f32[T,V], every fed position of every row.
        mask: request -> i32[V/32] packed vocabulary bits (1 = allowed) for the token that is sampled.
    Returns:
        (state, out): the next state; sampled tokens, logits, logprobs, who has finished.
    Raises:
        RequestError: unknown or finished request, nothing to feed, ids outside the vocabulary.
        CapacityError: longer than the context, or a pool is short; nothing was changed.
    """
    if logits not in ("last", "all"):
        raise RequestError(
            f'logits: expected "last" or "all", got {logits!r}', field="logits", expected=("last", "all"), got=logits
        )
    with owned_step(model, state):
        before = state
        state, batch = prepare_extend(state, tokens)
        if not batch.request_ids:  # nothing runs: nothing changes
            return before, empty_output(model)
        view = forward_batch(state, batch, rowwise=model.numerics.invariant)
        kept: Literal["last", "all", "none"] = logits if sample or logits == "all" else "none"
        kv, out_logits = forward(model, state.kv, view, logits=kept)
        state = attrs.evolve(state, kv=kv)
        if sample:
            last = out_logits if logits == "last" else out_logits.index_select(0, view.last_rows)
            state, out = finish_step(state, batch, view, last, mask)
            return state, attrs.evolve(out, logits=out_logits)
        state, finished = commit(state, None)
        out = StepOutput(
            request_ids=batch.request_ids, next_token_ids=(), logits=out_logits, logprobs=None, finished=finished
        )
        return state, out
