"""Letting a request go on whose tokens are all cached: its last token is fed again.

After an intermediate chunk, and after a cut at a reuse point, nothing waits to be fed, and the logits that would say
what follows are gone. A step that is asked for such a request by name feeds its last tokens again, from the nearest
reuse point before the end on.

Source: none; upstream keeps the last token of a matched prefix out of the match for the same reason (SGLang 0.5.23,
decode-path sheet E04).
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from ..state.decode import DecodeState, replace_requests
from .cuts import reuse_point
from .release import drop_behind

__all__ = ["refeed_last"]


def refeed_last(state: DecodeState, request_ids: Iterable[int]) -> DecodeState:
    """Drop the end of the caches of requests that have no unfed token, so that the next step feeds it again.

    Args:
        state: before.
        request_ids: requests that shall sample; others, unknown and finished ones are left for the step to judge.
    Returns:
        The state in which each of them has an unfed token, if it has any token at all.
    """
    idle = [r for r in state.requests if len(r.tokens) == r.kv_len and r.kv_len and not r.finished]
    wanted = set(request_ids) if idle else set()  # in most steps every request has something to feed
    for request in (request for request in idle if request.request_id in wanted):
        point = reuse_point(state, request, len(request.tokens) - 1)
        cut = attrs.evolve(request, kv_len=point, evicted_len=request.evicted_len if point else 0, decode_count=0)
        state = drop_behind(state, request, point)
        state = attrs.evolve(state, requests=replace_requests(state, {request.request_id: cut}))
    return state
