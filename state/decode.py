"""The whole state of a decode: what a step takes and what it returns."""

from __future__ import annotations

import attrs

from .batch import ScheduleBatch
from .capacity import Capacity
from .config import Config
from .errors import RequestError
from .handles import Handle
from .kv import KVState
from .sampling import SamplingState
from .table import RequestTable
from .tokens import TokenLog
from .values import value

__all__ = ["DecodeState", "Request", "find_request", "replace_requests"]


@attrs.frozen(eq=False, kw_only=True)
class Request:
    """The host record of one request.

    Its identity is (``row``, ``request_id``): rows are recycled, ids never.

    Attributes:
        request_id: unique within a state and everything derived from it in one line.
        row: row of the request table.
        tokens: every token so far: ``kv_len`` fed ones, then the pending one if there is one.
        outputs: the sampled ones among them; a forced token takes the place of the sampled one.
        kv_len: positions that own a slot and whose content is written.
        evicted_len: window pages of positions before this one have been given back.
        decode_count: decode steps so far.
        finished: why the request ended, or None.
    """

    request_id: int
    row: int
    tokens: TokenLog
    outputs: TokenLog
    kv_len: int = 0
    evicted_len: int = 0
    decode_count: int = 0
    finished: str | None = None

    @property
    def has_pending(self) -> bool:
        """Tell whether a sampled token waits to be fed."""
        return len(self.tokens) > self.kv_len


@value
@attrs.frozen(eq=False, kw_only=True)
class DecodeState:
    """Everything that a step needs; the caller owns it, may keep it and step it again.

    Attributes:
        config: numbers of the model that the caches are shaped for.
        capacity: what the caller asked for.
        seed: base of the seeds of unseeded requests.
        next_id: id of the next request to open.
        requests: open requests in order of opening.
        table: request table and allocators.
        kv: cache contents.
        relay: handle of ``token_ids`` i64[B+1]: the token sampled last, by table row.
        sampling: parameters and counters of every open request.
        launched: the step that is prepared and not yet committed, or None.
    """

    config: Config
    capacity: Capacity
    seed: int
    next_id: int
    requests: tuple[Request, ...]
    table: RequestTable
    kv: KVState
    relay: Handle
    sampling: SamplingState
    launched: ScheduleBatch | None


def find_request(state: DecodeState, request_id: int) -> Request:
    """Return the record of an open request.

    Raises:
        RequestError: no such request is open.
    """
    for request in state.requests:
        if request.request_id == request_id:
            return request
    names = ", ".join(str(request.request_id) for request in state.requests) or "none"
    raise RequestError(
        f"request {request_id!r}: not open in this state (open: {names}); open_request returns the id to use",
        field="request_id",
        expected=f"one of {names}",
        got=request_id,
    )


def replace_requests(state: DecodeState, changed: dict[int, Request]) -> tuple[Request, ...]:
    """Return the request records with some replaced, in unchanged order."""
    return tuple(changed.get(request.request_id, request) for request in state.requests)
