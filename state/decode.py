"""The whole state of a decode: what a step takes and what it returns."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .batch import ScheduleBatch
from .capacity import Capacity
from .config import Config
from .errors import RequestError
from .kv import KVState
from .numerics import Numerics
from .sampling import SamplingState
from .table import RequestTable
from .tokens import TokenLog
from .values import value

__all__ = ["DecodeState", "Request", "find_request", "replace_requests", "requests_by_id"]


@attrs.frozen(eq=False, kw_only=True)
class Request:
    """The host record of one request.

    Its identity is (``row``, ``request_id``): rows are recycled, ids never.

    Attributes:
        request_id: unique within a state and everything derived from it in one line.
        row: row of the request table; 0 while the request owns nothing (``retract_request``).
        tokens: every token so far: ``kv_len`` fed ones, then those that the next step feeds first.
        output_positions: positions of the sampled ones; a forced token takes the place of the sampled one.
        kv_len: positions that own a slot and whose content is written.
        evicted_len: window entries of positions before this one are gone.
        kept_len: tokens that the last cut kept; no forced token takes the place of one of them.
        decode_count: decode steps so far.
        finished: why the request ended, or None.
    """

    request_id: int
    row: int
    tokens: TokenLog
    output_positions: TokenLog
    kv_len: int = 0
    evicted_len: int = 0
    kept_len: int = 0
    decode_count: int = 0
    finished: str | None = None

    @property
    def outputs(self) -> NDArray[np.int64]:
        """The sampled tokens: i64[T]."""
        return self.tokens.numpy()[self.output_positions.numpy()]

    @property
    def n_outputs(self) -> int:
        """Number of sampled tokens."""
        return len(self.output_positions)

    @property
    def n_unfed(self) -> int:
        """Number of tokens that the next step feeds before anything else.

        One after a step that sampled; several where a fork, a rewind or a retraction left tokens to recompute.
        """
        return len(self.tokens) - self.kv_len

    @property
    def has_pending(self) -> bool:
        """Tell whether the last token was sampled and waits to be fed; a token that a cut kept is no such token."""
        last = len(self.tokens) - 1
        is_sampled = self.n_outputs > 0 and self.output_positions[-1] == last
        return self.n_unfed > 0 and is_sampled and last >= self.kept_len

    @property
    def is_parked(self) -> bool:
        """Tell whether the request owns nothing but its tokens."""
        return self.row == 0

    def grown(self, kv_len: int, evicted_len: int, decode_count: int) -> Request:
        """Return it with that many positions that own a slot, or have given their window entries back, and decodes."""
        # Every request changes so in every step; naming the fields takes half the time of attrs.evolve.
        return Request(
            request_id=self.request_id,
            row=self.row,
            tokens=self.tokens,
            output_positions=self.output_positions,
            kv_len=kv_len,
            evicted_len=evicted_len,
            kept_len=self.kept_len,
            decode_count=decode_count,
            finished=self.finished,
        )

    def sampled(self, token_id: int, finished: str | None) -> Request:
        """Return it with one more sampled token, and why it has ended, if it has."""
        return Request(
            request_id=self.request_id,
            row=self.row,
            tokens=self.tokens.append(token_id),
            output_positions=self.output_positions.append(len(self.tokens)),
            kv_len=self.kv_len,
            evicted_len=self.evicted_len,
            kept_len=self.kept_len,
            decode_count=self.decode_count,
            finished=finished,
        )


@value
@attrs.frozen(eq=False, kw_only=True)
class DecodeState:
    """Everything that a step needs; the caller owns it, may keep it and step it again.

    Attributes:
        config: numbers of the model that the caches are shaped for.
        numerics: rounding choices that the caches were computed with.
        fingerprint: of the model that the state was made for; saved files carry it.
        capacity: what the caller asked for.
        seed: base of the seeds of unseeded requests.
        next_id: id of the next request to open.
        requests: open requests in order of opening.
        table: request table and allocators.
        kv: cache contents.
        relay: i64[B+1]. The token sampled last, by table row.
        sampling: parameters and counters of every open request.
        launched: the step that is prepared and not yet committed, or None.
    """

    config: Config
    numerics: Numerics
    fingerprint: str
    capacity: Capacity
    seed: int
    next_id: int
    requests: tuple[Request, ...]
    table: RequestTable
    kv: KVState
    relay: Tensor
    sampling: SamplingState
    launched: ScheduleBatch | None


def requests_by_id(state: DecodeState) -> dict[int, Request]:
    """Return the records of the open requests, for who looks at several."""
    return {request.request_id: request for request in state.requests}


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
    return tuple([changed.get(request.request_id, request) for request in state.requests])
