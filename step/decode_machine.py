"""A machine that runs random histories on any engine and compares every logits row with a recomputation.

```python
class MyMachine(ps.strategies.DecodeMachine):
    model = reference           # a purestep Model with the weights that the engine runs
    engine = MyAdapter          # called without arguments: the adapter of a fresh, empty engine

TestMyEngine = MyMachine.TestCase    # for pytest or unittest
```

Beside the engine the machine keeps a list of token ids for each request. Whatever the engine returns must be what
``forward_sequence`` says of that whole list. A failure names the call, the request, the position and the difference,
and Hypothesis prints the shortest history that leads there. ``engine.py`` says what an adapter may leave out.

Where experts or index entries are chosen, two sound computations may choose differently at a near tie and then differ
by any amount. Test with a model that has nothing to choose: ``num_experts_per_tok`` is the number of experts and
``index_topk`` at least context / 4, as in ``strategies.configs(choices=False)``.

Source: decode-path sheet, section 9 (what histories are checked against); the machine has no counterpart upstream.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final

import attrs
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

from ..model.model import Model
from ..state.errors import ConfigError
from .engine import CanClose, CanFork, CanPersist, CanRetract, CanRewind, Engine
from .histories import batches, drops, prompts
from .naive import recompute

__all__ = ["DecodeMachine"]

LAST_FED: Final = (1, 0, 0, 0, 1)
"""What every request is fed in the end: enough to close a group of 4 and to look at it."""

MOST_KEPT: Final = 1000
"""Recomputed rows that are remembered."""


@attrs.frozen
class _Known:
    """What the machine knows of one open request.

    Attributes:
        name: its number in order of opening.
        story: what happened to it, for messages.
        ids: every token fed so far.
    """

    name: int
    story: tuple[str, ...]
    ids: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"request {self.name} ({', '.join(self.story)})"

    def told(self, event: str, ids: tuple[int, ...]) -> _Known:
        return _Known(self.name, (*self.story, event), ids)


_Book = Mapping[Hashable, _Known]


class DecodeMachine(RuleBasedStateMachine):
    """Subclass it with ``model`` and ``engine`` and run ``Subclass.TestCase``.

    In a printed history, ``place`` and the keys of a batch count the open requests in order of opening, from the start
    again where there are fewer; ``drop`` is how many tokens before its end a request is cut.

    Attributes:
        model: the reference, in float32.
        engine: called without arguments at the start of every history; returns the adapter of a fresh engine.
        tolerance: largest difference allowed between a logit and the reference's.
        requests: most requests that are open at once; the engine has room for all of them at full length.
        context: longest request.
        refusals: exceptions by which the engine may refuse a call, as if it had never been made. By default there are
            none: whatever is raised is a failure.
    """

    model: ClassVar[Model]
    engine: ClassVar[Callable[[], Engine]]
    tolerance: ClassVar[float] = 1e-4
    requests: ClassVar[int] = 4
    context: ClassVar[int] = 300
    refusals: ClassVar[tuple[type[Exception], ...]] = ()

    _logits: ClassVar[dict[tuple[int, ...], Tensor]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        # Shrinking runs nearly the same history hundreds of times, and the reference answers the same each time.
        cls._logits = {}

    def __init__(self) -> None:
        super().__init__()
        if self.model.dtype is not torch.float32:
            raise ConfigError(
                f"DecodeMachine.model: expected a float32 reference, got {self.model.dtype}; load it with "
                'dtype="float32", or rounding will look like a fault',
                field="model",
                expected=torch.float32,
                got=self.model.dtype,
            )
        self.tested: Any = type(self).engine()
        self.book: dict[Hashable, _Known] = {}
        self.n_opened = 0
        self.saved: tuple[TemporaryDirectory[str], _Book] | None = None
        self.is_sound = True

    def teardown(self) -> None:
        """Feed a few more tokens to every request, so that nothing done to one stays unseen."""
        try:
            if self.is_sound:
                self._feed("extend", {handle: LAST_FED for handle in self.book})
        finally:
            self._forget_saved()

    # What is true of every call.

    def _call(self, name: str, *args: Any) -> tuple[bool, Any]:
        """Call the engine: (whether it took the call, what it returned)."""
        self.is_sound = False
        try:
            returned = getattr(self.tested, name)(*args)
        except self.refusals:
            self.is_sound = True
            return False, None
        self.is_sound = True
        return True, returned

    def _feed(self, name: str, chunks: Mapping[Hashable, tuple[int, ...]], *, one_by_one: bool = False) -> None:
        """Feed tokens and compare all logits that come back.

        Args:
            name: of the engine's method.
            chunks: handle -> token ids; requests that would become too long are left out.
            one_by_one: make a call for each token.
        """
        chunks = {h: ids for h, ids in chunks.items() if len(self.book[h].ids) + len(ids) <= self.context}
        if not chunks:
            return
        calls: list[Mapping[Hashable, tuple[int, ...]]] = [chunks]
        if one_by_one:
            calls = [{handle: (token,)} for handle, ids in chunks.items() for token in ids]
        claims: list[tuple[_Known, Any]] = []
        for call in calls:
            given = {handle: ids[0] if name == "decode" else ids for handle, ids in call.items()}
            is_taken, rows = self._call(name, given)
            if not is_taken:
                break
            self.is_sound = False
            assert set(rows) == set(call), f"{name}: expected logits of {list(call)}, got those of {list(rows)}"
            for handle, ids in call.items():
                known = self.book[handle]
                self.book[handle] = attrs.evolve(known, ids=known.ids + ids)
                claims.append((self.book[handle], rows[handle]))
        self.is_sound = False
        self._recompute([known.ids for known, _ in claims])
        for known, row in claims:
            _require_close(f"{name}, {known}", known.ids, row, self._logits[known.ids], self.tolerance)
        self.is_sound = True

    def _recompute(self, texts: list[tuple[int, ...]]) -> None:
        if len(self._logits) > MOST_KEPT:
            self._logits.clear()
        new = [ids for ids in texts if ids not in self._logits]
        self._logits.update(zip(new, recompute(self.model, new), strict=True))

    def _at(self, place: int) -> Hashable:
        return tuple(self.book)[place % len(self.book)]

    def _named(self, batch: Mapping[int, Any]) -> dict[Hashable, Any]:
        """Find the requests of places; of several places of one request the first counts."""
        return {self._at(place): batch[place] for place in sorted(batch, reverse=True)}

    def _register(self, handle: Hashable, story: str, ids: tuple[int, ...]) -> None:
        self.is_sound = False
        assert handle not in self.book, f"expected a new handle, got {handle!r}, which is open"
        self.book[handle] = _Known(self.n_opened, (story,), ids)
        self.n_opened += 1
        self.is_sound = True

    def _forget_saved(self) -> None:
        if self.saved is not None:
            self.saved[0].cleanup()
            self.saved = None

    # Operations.

    @initialize(ids=st.runner().flatmap(lambda self: prompts(self.model.config.vocab_size, self.context)))
    def start(self, ids: tuple[int, ...]) -> None:
        """Open a request and feed it."""
        self.open()
        self._feed("extend", dict.fromkeys(self.book, ids))

    @precondition(lambda self: len(self.book) < self.requests)
    @rule()
    def open(self) -> None:
        """Open a request."""
        is_taken, handle = self._call("open")
        if is_taken:
            self._register(handle, "opened", ())

    @precondition(lambda self: self.book)
    @rule(batch=st.runner().flatmap(lambda self: batches(self.model.config.vocab_size, self.requests, self.context)))
    def extend(self, batch: dict[int, tuple[int, ...]]) -> None:
        """Feed chunks to several requests at once."""
        self._feed("extend", self._named(batch))

    @precondition(lambda self: any(known.ids for known in self.book.values()))
    @rule(batch=st.runner().flatmap(lambda self: batches(self.model.config.vocab_size, self.requests, 1)))
    def decode(self, batch: dict[int, tuple[int, ...]]) -> None:
        """Feed one token to several requests at once."""
        self._feed("decode", {h: ids for h, ids in self._named(batch).items() if self.book[h].ids})

    @precondition(lambda self: any(known.ids for known in self.book.values()))
    @rule(
        place=st.integers(0, 3),
        ids=st.runner().flatmap(lambda self: prompts(self.model.config.vocab_size, min(self.context, 140))),
    )
    def decode_on(self, place: int, ids: tuple[int, ...]) -> None:
        """Feed one request token by token."""
        handle = self._at(place)
        if self.book[handle].ids:
            self._feed("decode", {handle: ids}, one_by_one=True)

    @precondition(lambda self: isinstance(self.tested, CanFork) and 0 < len(self.book) < self.requests)
    @rule(place=st.integers(0, 3), drop=st.just(0) | drops())
    def fork(self, place: int, drop: int) -> None:
        """Fork a request at its end, or at an earlier token."""
        parent = self.book[self._at(place)]
        at = max(0, len(parent.ids) - drop)
        is_taken, handle = self._call("fork", self._at(place), at)
        if is_taken:
            self._register(handle, f"forked off request {parent.name} at {at}", parent.ids[:at])

    @precondition(lambda self: isinstance(self.tested, CanRewind) and self.book)
    @rule(place=st.integers(0, 3), drop=drops())
    def rewind(self, place: int, drop: int) -> None:
        """Cut a request back."""
        handle = self._at(place)
        known = self.book[handle]
        n = max(0, len(known.ids) - drop)
        if self._call("rewind", handle, n)[0]:
            self.book[handle] = known.told(f"rewound to {n}", known.ids[:n])

    @precondition(lambda self: isinstance(self.tested, CanRetract) and self.book)
    @rule(place=st.integers(0, 3))
    def retract(self, place: int) -> None:
        """Take a request's memory back; it goes on when it is fed again."""
        handle = self._at(place)
        known = self.book[handle]
        if self._call("retract", handle)[0]:
            self.book[handle] = known.told(f"retracted at {len(known.ids)}", known.ids)

    @precondition(lambda self: isinstance(self.tested, CanClose) and self.book)
    @rule(place=st.integers(0, 3))
    def close(self, place: int) -> None:
        """Close a request."""
        handle = self._at(place)
        if self._call("close", handle)[0]:
            del self.book[handle]

    @precondition(lambda self: isinstance(self.tested, CanPersist))
    @rule()
    def save(self) -> None:
        """Save everything; an earlier copy is dropped."""
        self._forget_saved()
        folder = TemporaryDirectory()
        self.saved = (folder, dict(self.book))
        if not self._call("save", Path(folder.name))[0]:
            self._forget_saved()

    @precondition(lambda self: self.saved is not None)
    @rule()
    def load(self) -> None:
        """Go on from what was saved, on a fresh engine."""
        assert self.saved is not None, "the precondition"
        folder, book = self.saved
        self.tested = type(self).engine()
        if self._call("load", Path(folder.name))[0]:
            self.book = {handle: known.told("loaded", known.ids) for handle, known in book.items()}
        else:
            self.book = {}


def _require_close(where: str, ids: tuple[int, ...], row: Any, expected: Tensor, tolerance: float) -> None:
    """Compare one row of logits with what it must be."""
    assert isinstance(row, Tensor), f"{where}: expected a tensor of logits, got {type(row).__name__}"
    assert row.shape == expected.shape, (
        f"{where}: expected logits of shape {list(expected.shape)}, got {list(row.shape)}"
    )
    assert row.is_floating_point(), f"{where}: expected floating-point logits, got {row.dtype}"
    got = row.detach().cpu().float()
    gaps = torch.nan_to_num((got - expected).abs(), nan=torch.inf)
    worst = int(gaps.argmax())
    assert gaps[worst] <= tolerance, (
        f"{where}: at position {len(ids) - 1} the logits differ from a recomputation by {float(gaps[worst]):.3g}, most "
        f"for token id {worst} (expected {float(expected[worst]):.5g}, got {float(got[worst]):.5g}, tolerance "
        f"{tolerance:g}); its tokens: {_shown(ids)}"
    )


def _shown(ids: tuple[int, ...]) -> str:
    return str(ids) if len(ids) <= 40 else f"{ids[:12]} ... {ids[-12:]} ({len(ids)} in all)"
