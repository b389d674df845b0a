"""What the ranks of a test of whole steps run, and the same in one process to compare with.

A history is a list of steps; a step is one entry for every replica: ``Feed`` for an extend, None for a decode of
everything that runs, () for nothing at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import attrs
import purestep as ps
import torch
from kit.models import tiny_model
from kit.rank_collectives import joined
from kit.steps import ENDLESS, fresh
from purestep.model.cuts import cut_params
from purestep.model.loading import build_model
from torch import Tensor

__all__ = [
    "CHOOSING",
    "Feed",
    "Played",
    "Step",
    "choosing_model",
    "part_of",
    "play",
    "play_alone",
    "play_on_ranks",
    "worst_difference",
]


@attrs.frozen
class Feed:
    """One extend of one replica: tokens by request number."""

    tokens: Mapping[int, Sequence[int]]
    sample: bool = True
    logits: Literal["last", "all"] = "last"


Step = Sequence[Feed | tuple[()] | None]

CHOOSING: dict[str, Any] = {
    "heads": 4,
    "o_groups": 2,
    "index_heads": 16,
    "index_topk": 3,
    "experts": 8,
    "topk": 3,
    "inter": 16,
    "vocab": 33,
}
"""Sizes that 4 ranks can share, with real choices of experts and entries, and a vocabulary that nothing divides."""


def choosing_model(ratios: tuple[int, ...] = (0, 4, 128), seed: int = 0, **changes: Any) -> ps.Model:
    """Make the whole model."""
    return tiny_model(ratios, seed=seed, **(CHOOSING | changes))


@cache
def part_of(parallel: ps.Parallel, ratios: tuple[int, ...], seed: int, **changes: Any) -> ps.Model:
    """Make this rank's part of the model."""
    whole, ranks = choosing_model(ratios, seed, **changes), joined(parallel)
    return build_model(whole.config, cut_params(whole.config, whole.params, ranks), ranks=ranks)


@attrs.frozen
class Played:
    """What one replica returned, step by step."""

    request_ids: tuple[tuple[int, ...], ...]
    tokens: tuple[tuple[int, ...], ...]
    logits: tuple[Tensor, ...]
    captured: tuple[Mapping[str, Tensor], ...]


def play(
    model: ps.Model,
    history: Sequence[Step],
    replica: int,
    params: ps.SamplingParams = ENDLESS,
    *,
    capture: Sequence[str] = (),
    requests: int = 3,
    page_size: int = 8,
) -> tuple[ps.DecodeState, Played]:
    """Step one replica through a history."""
    state = fresh(model, requests, page_size=page_size)
    for _ in range(requests):
        state, _ = ps.open_request(state, params)
    outs = []
    for step in history:
        given = step[replica]
        if given is None:
            state, out = ps.decode_step(model, state, capture=capture)
        else:
            feed = given if isinstance(given, Feed) else Feed({})
            state, out = ps.extend_step(
                model, state, dict(feed.tokens), sample=feed.sample, logits=feed.logits, capture=capture
            )
        outs.append(out)
    return state, Played(
        request_ids=tuple(out.request_ids for out in outs),
        tokens=tuple(out.next_token_ids for out in outs),
        logits=tuple(out.logits for out in outs),
        captured=tuple({} if out.captured is None else out.captured.stages for out in outs),
    )


def play_on_ranks(
    parallel: ps.Parallel,
    history: Sequence[Step],
    params: ps.SamplingParams = ENDLESS,
    ratios: tuple[int, ...] = (0, 4, 128),
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Played:
    """Step this rank's replica through a history."""
    model = part_of(parallel, ratios, seed, **(changes or {}))
    return play(model, history, model.ranks.replica, params, **(options or {}))[1]


def play_alone(
    history: Sequence[Step],
    replica: int,
    params: ps.SamplingParams = ENDLESS,
    ratios: tuple[int, ...] = (0, 4, 128),
    seed: int = 0,
    changes: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Played:
    """Step one replica through a history in this process, with the whole model."""
    own = [step for step in history if step[replica] != ()]
    model = choosing_model(ratios, seed, **(changes or {}))
    return play(model, own, replica, params, **(options or {}))[1]


def worst_difference(found: Played, alone: Played) -> float:
    """Compare what a replica returned with what it returns alone, steps without rows left out.

    Returns:
        The largest difference of a logit; infinite where requests, tokens or numbers of rows differ.
    """
    found_steps, alone_steps = _steps_of(found), _steps_of(alone)
    if [step[:2] for step in found_steps] != [step[:2] for step in alone_steps]:
        return torch.inf
    pairs = [(a[2], b[2]) for a, b in zip(found_steps, alone_steps, strict=True)]
    if any(a.shape != b.shape for a, b in pairs):
        return torch.inf
    return max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)


def _steps_of(played: Played) -> list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]:
    steps = zip(played.request_ids, played.tokens, played.logits, strict=True)
    return [step for step in steps if step[0]]
