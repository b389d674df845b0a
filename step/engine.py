"""What an engine must offer to be tested against our model, and our own engine in that form, which serves as template.

An adapter wraps an engine of any make, one that changes itself or a pure one, whose state the adapter keeps. It needs
``open``, ``extend`` and ``decode``. Everything else is a protocol of its own: an adapter that lacks its methods is not
asked for them (the machine's rule is skipped).

================ ==================== ================================================================================
protocol         methods              what the machine promises to ask
================ ==================== ================================================================================
``Engine``       open, extend, decode any number of open requests at once, in any order, each named once
``CanFork``      fork                 ``0 <= at <=`` tokens fed so far; both sides go on, in any order
``CanRewind``    rewind               ``0 <= n <=`` tokens fed so far; after ``rewind(handle, 0)`` the request is empty
``CanRetract``   retract              the memory is taken back; the next ``extend`` or ``decode`` feeds it all anew
``CanClose``     close                the handle is not used again
``CanPersist``   save, load           ``load`` is called on a fresh engine and brings back the handles of ``save``
================ ==================== ================================================================================

A handle is anything hashable that the engine chooses. Logits may lie on any device and in any floating dtype.

Source: none; the operations are those of this package's public functions.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..model.model import Model
from ..state.batch import StepOutput
from ..state.capacity import Capacity
from ..state.decode import DecodeState, find_request
from ..state.sampling import SamplingParams
from .decode import decode_step
from .extend import extend_step
from .files import restore_state, save_state
from .forks import fork_request
from .requests import close_request, init_state, open_request, retract_request, rewind_request

__all__ = ["CanClose", "CanFork", "CanPersist", "CanRetract", "CanRewind", "Engine", "PurestepEngine"]


class Engine(Protocol):
    """What every adapter can do."""

    def open(self) -> Hashable:
        """Open a request without tokens.

        Returns:
            Its handle.
        """

    def extend(self, chunks: Mapping[Any, Sequence[int]]) -> Mapping[Any, Tensor]:
        """Feed one or more tokens to each of several requests, in one batch where the engine can.

        Args:
            chunks: handle -> token ids, at least one.
        Returns:
            handle -> logits float[V] that follow its last token.
        """

    def decode(self, tokens: Mapping[Any, int]) -> Mapping[Any, Tensor]:
        """Feed one token to each of several requests, by the engine's decode path.

        Args:
            tokens: handle -> token id; each of these requests has been fed before.
        Returns:
            handle -> logits float[V] that follow it.
        """


@runtime_checkable
class CanFork(Protocol):
    """An adapter that can share histories."""

    def fork(self, handle: Any, at: int) -> Hashable:
        """Open a request that begins with the first ``at`` tokens of another one.

        Returns:
            The new handle.
        """


@runtime_checkable
class CanRewind(Protocol):
    """An adapter that can cut histories."""

    def rewind(self, handle: Any, n: int) -> None:
        """Cut a request back to its first ``n`` tokens."""


@runtime_checkable
class CanRetract(Protocol):
    """An adapter that can take a request's memory away and go on with it later."""

    def retract(self, handle: Any) -> None:
        """Free everything that a request holds but its tokens."""


@runtime_checkable
class CanClose(Protocol):
    """An adapter that can end requests, so that others get their memory."""

    def close(self, handle: Any) -> None:
        """Close a request."""


@runtime_checkable
class CanPersist(Protocol):
    """An adapter that can save everything to a folder, and go on from there."""

    def save(self, path: Path) -> None:
        """Write all requests to a folder that exists and is empty."""

    def load(self, path: Path) -> None:
        """Replace all requests by those that were saved, under their handles."""


_FED = SamplingParams(temperature=0.0, ignore_eos=True)
"""Nothing that is sampled is used and nothing ends; greedy costs least."""


class PurestepEngine:
    """Our own steps as an engine; the adapter keeps the newest state."""

    def __init__(self, model: Model, *, requests: int = 4, context: int = 320, page_size: int = 8) -> None:
        """Build an empty state.

        Args:
            model: steps it.
            requests: most open requests.
            context: longest request.
            page_size: tokens per page.
        """
        capacity = Capacity(requests=requests, tokens=requests * (context + page_size), context=context)
        self.model = model
        self.state: DecodeState = init_state(model, capacity, page_size=page_size)

    def open(self) -> int:
        """Open a request without tokens."""
        self.state, request_id = open_request(self.state, _FED)
        return request_id

    def extend(self, chunks: Mapping[int, Sequence[int]]) -> Mapping[int, Tensor]:
        """Feed chunks in one batch."""
        self.state, out = extend_step(self.model, self.state, chunks)
        return self._rows(out)

    def decode(self, tokens: Mapping[int, int]) -> Mapping[int, Tensor]:
        """Feed one token each by a decode step."""
        self.state, out = decode_step(self.model, self.state, only=tokens, force=tokens)
        return self._rows(out)

    def _rows(self, out: StepOutput) -> Mapping[int, Tensor]:
        # The machine says what is fed next, so the sampled tokens are dropped again.
        for request_id in out.request_ids:
            self.state = rewind_request(self.state, request_id, find_request(self.state, request_id).kv_len)
        return dict(zip(out.request_ids, out.logits, strict=True))

    def fork(self, handle: int, at: int) -> int:
        """Open a request with the first ``at`` tokens of another one."""
        self.state, request_id = fork_request(self.state, handle, at=at)
        return request_id

    def rewind(self, handle: int, n: int) -> None:
        """Cut a request back."""
        self.state = rewind_request(self.state, handle, n)

    def retract(self, handle: int) -> None:
        """Take a request's row and pages back."""
        self.state = retract_request(self.state, handle)

    def close(self, handle: int) -> None:
        """Close a request."""
        self.state = close_request(self.state, handle)

    def save(self, path: Path) -> None:
        """Write the state to a folder."""
        save_state(self.state, path)

    def load(self, path: Path) -> None:
        """Read the state back."""
        self.state = restore_state(self.model, path)
