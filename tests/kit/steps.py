"""Short ways through the public functions that many tests need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import purestep as ps
import torch
from hypothesis import settings
from purestep.state.sampling import observe_outputs
from torch import Tensor

__all__ = ["ENDLESS", "bookkeep_decode", "bookkeep_extend", "examples", "fresh", "ids_of", "recompute", "run_alone"]

ENDLESS = ps.SamplingParams(temperature=0, ignore_eos=True)


def examples(count: int) -> settings:
    """Ask for so many examples in the fast profile, and for ten times as many in the deep one."""
    return settings(max_examples=max(1, count * settings().max_examples // 100))


def ids_of(n: int, vocab: int = 32, seed: int = 0) -> list[int]:
    """Draw token ids from 2 up, without touching a global generator."""
    return torch.randint(2, vocab, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def fresh(
    model: ps.Model, requests: int = 4, *, page_size: int = 8, context: int = 320, **limits: int
) -> ps.DecodeState:
    """Build an empty state with room for all requests at full length."""
    capacity = ps.Capacity(requests=requests, tokens=requests * (context + page_size), context=context, **limits)
    return ps.init_state(model, capacity, page_size=page_size)


@torch.no_grad()
def recompute(model: ps.Model, ids: Sequence[int]) -> Tensor:
    """Compute the logits of every position without a cache: f32[T,V]."""
    return ps.forward_sequence(model, torch.tensor(list(ids)))


def _commit(state: ps.DecodeState, batch: ps.ScheduleBatch) -> ps.DecodeState:
    ids = torch.full((len(batch.request_ids),), 5)
    state = attrs.evolve(state, sampling=observe_outputs(state.sampling, batch.request_ids, ids))
    return ps.commit(ps.relay(state, batch, ids), ids)[0]


def bookkeep_extend(
    state: ps.DecodeState, tokens: Mapping[int, Sequence[int]]
) -> tuple[ps.DecodeState, ps.ScheduleBatch]:
    """Make an extend step without its forward: every row samples token 5."""
    state, batch = ps.prepare_extend(state, tokens)
    return _commit(state, batch), batch


def bookkeep_decode(
    state: ps.DecodeState, only: Sequence[int] | None = None
) -> tuple[ps.DecodeState, ps.ScheduleBatch]:
    """Make a decode step without its forward: every row samples token 5."""
    state, batch = ps.prepare_decode(state, only=only)
    return _commit(state, batch), batch


def run_alone(
    model: ps.Model, prompt: Sequence[int], steps: int, params: ps.SamplingParams = ENDLESS, **state: int
) -> tuple[list[int], Tensor]:
    """Run one request in a state of its own.

    Returns:
        (tokens, logits f32[1+steps,V]): what it sampled and from what.
    """
    now = fresh(model, 1, **state)
    now, request_id = ps.open_request(now, params)
    now, out = ps.extend_step(model, now, {request_id: prompt})
    tokens, rows = [*out.next_token_ids], [out.logits]
    for _ in range(steps):
        if out.finished:
            break
        now, out = ps.decode_step(model, now)
        tokens += out.next_token_ids
        rows.append(out.logits)
    return tokens, torch.cat(rows)
