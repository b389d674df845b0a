"""One decode step: the sampled token becomes the input, gets its slot, writes its state, reads its history, is sampled.

This is the whole path; each function of the table is pure and public, and takes the previous one's result. Between
``prepare_decode`` and ``commit`` the state remembers the step as ``launched``, which is how ``commit`` knows its rows.

====================== ============================================================ ==================================
function               reads                                                        returns
====================== ============================================================ ==================================
``prepare_decode``     host lengths ``L``, request table, free lists                slots of position ``L``; ``L + 1``
``forward_batch``      request table, relay (the token sampled last)                inputs, positions ``L``, page tables
``forward``            caches                                                       new rows in the caches, logits
``sample``             logits, sampling parameters and counters                     one token id per row
``relay``              token ids                                                    the next step's inputs, by table row
``commit``             token ids (read by the host, once)                           token logs, who has finished
====================== ============================================================ ==================================

Source: SGLang 0.5.23, the path from ``managers/scheduler.py`` to ``layers/sampler.py``; decode-path sheet, section 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import torch
from torch import Tensor

from ..model.forward import forward
from ..model.model import Model
from ..state.batch import ForwardBatch, ScheduleBatch, StepOutput
from ..state.captured import Captured
from ..state.decode import DecodeState
from .announce import agreement, announce_step, runs_elsewhere, told_to_ranks
from .border import owned_step
from .commit import commit_tokens
from .edits import Edits
from .forward_batch import forward_batch
from .prepare import distinct_ids, prepare_decode
from .refeed import refeed_last
from .relay import relay
from .replays import Replay
from .sample import logprobs_of, sample
from .taps import step_taps

__all__ = ["decode_step", "empty_output", "finish_step"]


@torch.no_grad()
def decode_step(
    model: Model,
    state: DecodeState,
    *,
    only: Iterable[int] | None = None,
    force: Mapping[int, int] | None = None,
    mask: Mapping[int, Tensor] | None = None,
    capture: Iterable[str] = (),
    replay: Replay | None = None,
    edit: Edits | None = None,
) -> tuple[DecodeState, StepOutput]:
    """Decode one token for every running request.

    A request that ``only`` names and that has nothing to feed (after an intermediate chunk, or a cut at a reuse point)
    is fed its last tokens again.

    Over several ranks all of them step together, each with the state of its replica. A replica with nothing to run
    takes part all the same, and its state stays what it was.

    Args:
        model: the model.
        state: before the step; it keeps its content and may be stepped again.
        only: requests to run, in this row order; default all running ones in order of opening.
        force: request -> token to feed instead of its pending one.
        mask: request -> i32[V/32] packed vocabulary bits (1 = allowed) for the token that is sampled.
        capture: stages of ``model/stages.py`` to return in ``out.captured``, one row per fed token: ``"attn.input"``
            for every layer that has it, ``"3.attn.input"`` for one.
        replay: what steps captured; its expert choices and index picks are forced on the tokens that it names by
            (request, position), the last record of a token counting. Other tokens choose for themselves; records that
            name no token of this step are refused.
        edit: request -> stage -> ``f(x, token)``, called once for every fed token of the request and layer with a copy
            of its row; what it returns is used instead. A request that does not run is left out.
    Returns:
        (state, out): the next state; the row's sampled token, logits f32[B,V], logprobs, who has finished, captures.
    Raises:
        RankError: another rank is lost or late, could not begin its step or has decided otherwise; nothing was changed.
        RequestError: an unknown, finished or repeated request, or one without tokens; an unknown stage; a forced choice
            that the token cannot make; records of other tokens alone.
        ShapeError: an edited row or a record of the wrong shape or dtype.
        CapacityError: a pool is short; nothing was changed.
    """
    with owned_step(model, state):
        before = state
        with told_to_ranks(model):
            state, batch = begin_decode(state, only, force)
            taps = step_taps(state, batch, capture=capture, replay=replay, edit=edit)
        shares = announce_step(model, state, batch, mask=mask)
        if not batch.request_ids and not runs_elsewhere(shares):  # nothing runs: nothing changes
            return before, empty_output(model)
        view = forward_batch(state, batch, rowwise=model.numerics.invariant, shares=shares)
        kv, logits = forward(model, state.kv, view, tap=taps.tap)
        if not batch.request_ids:  # this replica was idle
            return before, empty_output(model)
        captured = taps.record(logits, "last")
        return finish_step(model, attrs.evolve(state, kv=kv), batch, view, logits, mask, captured=captured)


def begin_decode(
    state: DecodeState, only: Iterable[int] | None, force: Mapping[int, int] | None
) -> tuple[DecodeState, ScheduleBatch]:
    """Prepare a decode as ``decode_step`` does: a named request with nothing to feed is fed its last tokens again.

    Args:
        state: before the step.
        only: requests to run; None for all running ones.
        force: request -> token to feed instead of its pending one.
    Returns:
        (state, batch): as ``prepare_decode``.
    """
    if only is not None:
        only = distinct_ids(only, "only")
        state = refeed_last(state, [i for i in only if force is None or i not in force])
    return prepare_decode(state, only=only, force=force)


def empty_output(model: Model) -> StepOutput:
    """Return the output of a step without rows."""
    logits = torch.empty((0, model.config.vocab_size), dtype=torch.float32, device=model.device)
    return StepOutput(request_ids=(), next_token_ids=(), logits=logits, logprobs=None, finished={})


def finish_step(
    model: Model,
    state: DecodeState,
    batch: ScheduleBatch,
    view: ForwardBatch,
    logits: Tensor,
    mask: Mapping[int, Tensor] | None,
    captured: Captured | None = None,
) -> tuple[DecodeState, StepOutput]:
    """Sample, relay and commit: what decode and extend end with.

    Args:
        model: the model.
        state: after the forward.
        batch: the step.
        view: its model view.
        logits: f32[B,V]. Of each request's last token.
        mask: request -> packed vocabulary bits.
        captured: what the step's taps recorded.
    Returns:
        (state, out): as ``decode_step``; ``out`` has the rows that sample.
    """
    ids, positions = batch.sample_ids, view.seq_lens - 1
    if len(ids) < len(batch.request_ids):  # a limit has left tokens of the others unfed
        rows = torch.from_numpy(batch.sample_rows).to(logits.device)
        logits, positions = logits.index_select(0, rows), positions.index_select(0, rows)
        mask = {i: bits for i, bits in (mask or {}).items() if i in ids or i not in batch.request_ids}
    stops = state.config.eos_token_id
    agree = agreement(model.ranks, is_constrained=bool(mask))
    sampling, next_ids = sample(logits, state.sampling, ids, positions, stop_token_ids=stops, mask=mask, agree=agree)
    state = relay(attrs.evolve(state, sampling=sampling), batch, next_ids)
    state, finished, sampled = commit_tokens(state, next_ids)
    out = StepOutput(
        request_ids=ids,
        next_token_ids=sampled,
        logits=logits,
        logprobs=logprobs_of(logits, next_ids, sampling, ids),
        finished=finished,
        captured=captured,
    )
    return state, out
