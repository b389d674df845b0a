"""The scheduler's view of a decode state: requests by the server's numbers, and whether a step would fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from ..state.decode import DecodeState, find_request, requests_by_id
from ..state.errors import CapacityError
from ..state.pages import c128_pages_needed, pages_needed
from ..state.sampling import SamplingParams
from ..step.cuts import reuse_point
from ..step.forks import fork_request
from ..step.prepare import prepare_extend
from ..step.requests import close_request, open_request, retract_request
from .scheduler import Progress, Rows

__all__ = ["Pool"]


@attrs.frozen(eq=False, kw_only=True)
class Pool:
    """A state with names; every change is another pool.

    Attributes:
        state: the state.
        params: key -> how to sample, of every request that may be opened.
        ids: key -> request id, of what is open.
        given: key -> tokens of the prompt that no step has been given yet.
    """

    state: DecodeState
    params: Mapping[int, SamplingParams] = attrs.field(factory=dict)
    ids: Mapping[int, int] = attrs.field(factory=dict)
    given: Mapping[int, tuple[int, ...]] = attrs.field(factory=dict)

    def open(self, key: int, prompt: Sequence[int], point: int | None) -> Pool | None:
        """Open a request, on a point of reuse if one is named; None where no row or page is free."""
        try:
            if point is None:
                state, request_id = open_request(self.state, self.params[key])
            else:
                state, request_id = fork_request(self.state, self.ids[point], sampling=self.params[key], as_prompt=True)
        except CapacityError:
            return None
        rest = tuple(prompt[find_request(state, request_id).kv_len :])
        return attrs.evolve(self, state=state, ids={**self.ids, key: request_id}, given={**self.given, key: rest})

    def close(self, key: int) -> Pool:
        """Close a request or a point."""
        ids = {name: request for name, request in self.ids.items() if name != key}
        given = {name: rest for name, rest in self.given.items() if name != key}
        return attrs.evolve(self, state=close_request(self.state, self.ids[key]), ids=ids, given=given)

    def retract(self, key: int) -> Pool:
        """Give back what a request holds but its tokens."""
        return attrs.evolve(self, state=retract_request(self.state, self.ids[key]))

    def keep(self, point: int, key: int, n: int) -> Pool | None:
        """Hold a request's first ``n`` tokens as a point; None where that is no reuse point, or there is no room."""
        request = find_request(self.state, self.ids[key])
        if reuse_point(self.state, request, n) != n:
            return None
        try:
            state, request_id = fork_request(
                self.state, request.request_id, at=n, sampling=SamplingParams(seed=0), as_prompt=True
            )
        except CapacityError:
            return None
        return attrs.evolve(self, state=state, ids={**self.ids, point: request_id})

    def fits(self, rows: Rows) -> bool:
        """Tell whether every row and page that a step of these rows takes is free."""
        if self._fits_easily(rows):
            return True
        try:
            prepare_extend(self.state, self.chunks(rows), limit=self.limits(rows))
        except CapacityError:
            return False
        return True

    def _fits_easily(self, rows: Rows) -> bool:
        """Tell whether there is room even if the step gives no window page back, by counting alone."""
        table = self.state.table
        size, n_pages, n_c128, n_rows = table.sizes.page_size, 0, 0, 0
        opened = requests_by_id(self.state)
        for key, most in rows:
            request = opened[self.ids[key]]
            total = len(request.tokens) + len(self.given.get(key, ()))
            end = min(total, request.kv_len + most)
            n_pages += pages_needed(request.kv_len, end, size)
            n_c128 += c128_pages_needed(request.kv_len, end)
            n_rows += request.is_parked
        return (
            n_pages <= min(len(table.free_pages), len(table.free_swa_pages))
            and n_c128 <= len(table.free_c128_pages)
            and n_rows <= len(table.free_rows)
        )

    def progress(self, key: int) -> Progress:
        """Tell how far a request is."""
        request = find_request(self.state, self.ids[key])
        return Progress(
            n_tokens=len(request.tokens) + len(self.given.get(key, ())),
            n_cached=request.kv_len,
            n_outputs=request.n_outputs,
        )

    def tokens(self, key: int, n: int) -> tuple[int, ...]:
        """Return the first ``n`` tokens of a request."""
        return tuple(find_request(self.state, self.ids[key]).tokens[:n].tolist())

    def chunks(self, rows: Rows) -> dict[int, tuple[int, ...]]:
        """Return what ``extend_step`` is given for these rows."""
        return {self.ids[key]: self.given.get(key, ()) for key, _ in rows}

    def decoded_len(self, rows: Rows) -> int | None:
        """Return how long the longest row is after a step that feeds each one known token; None if it feeds more."""
        opened = requests_by_id(self.state)
        found = [opened[self.ids[key]] for key, _ in rows]
        if not found or any(self.given.get(key) for key, _ in rows) or any(one.n_unfed != 1 for one in found):
            return None
        return max(len(one.tokens) for one in found)

    def limits(self, rows: Rows) -> dict[int, int]:
        """Return the limits of these rows, by request."""
        return {self.ids[key]: most for key, most in rows}

    def stepped(self, state: DecodeState, rows: Rows) -> Pool:
        """Go on from the state after a step of these rows."""
        fed = {key for key, _ in rows}
        return attrs.evolve(self, state=state, given={key: rest for key, rest in self.given.items() if key not in fed})
