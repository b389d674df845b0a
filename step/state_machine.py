"""A machine that lives through random histories of our own states and checks every promise after every step.

Beside the state it keeps a naive model, which is nothing but lists of token ids, and states that it holds on to. After
every operation: no invariant is violated, the records say what the lists say, and every held state is what it was. At
the end, every logits row ever returned is compared with a recomputation of that request's tokens without any cache.

``decode_machine.py`` holds its sister for engines of other make, which looks at them from outside only.

Source: decode-path sheet, section 9; the machine has no counterpart upstream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import attrs
import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor

from ..model.model import Model
from ..state.batch import ScheduleBatch, StepOutput
from ..state.decode import DecodeState, find_request
from ..state.errors import CapacityError, PurestepError, RequestError
from ..state.invariants import (
    check,
    check_closed,
    check_committed,
    check_forked,
    check_prepared,
    check_retracted,
    check_rewound,
    check_sampled,
    check_view,
    digest,
)
from ..state.pages import c128_pages_needed, pages_needed
from ..state.sampling import SamplingParams
from .decode import decode_step
from .extend import extend_step
from .files import restore_state, save_state
from .forks import fork_request
from .forward_batch import forward_batch
from .histories import capacities, drops, interrupted, lengths, page_sizes, prompts, sampling_params
from .naive import Text, recompute
from .prepare import prepare_decode, prepare_extend
from .requests import close_request, init_state, open_request, retract_request, rewind_request
from .transfer import export_request, import_request

__all__ = ["StateMachine"]

Step = Callable[[Model, DecodeState], tuple[DecodeState, StepOutput]]
Prepare = Callable[[DecodeState], tuple[DecodeState, ScheduleBatch]]


_Texts = Mapping[int, Text]


@attrs.frozen(eq=False)
class _Held:
    """A state that the machine may come back to.

    Attributes:
        state: the state.
        texts: what its requests are.
        mark: its digest when it was taken.
    """

    state: DecodeState
    texts: _Texts
    mark: bytes


@attrs.frozen(eq=False)
class _Replay:
    """A step that was made and may be made again.

    Attributes:
        before: where it started.
        step: the call.
        mark: digest of the state it led to.
        logits: what it returned.
        ids: the tokens it sampled.
    """

    before: _Held
    step: Step
    mark: bytes
    logits: Tensor
    ids: tuple[int, ...]


class StateMachine(RuleBasedStateMachine):
    """Subclass it with ``models`` and run ``Subclass.TestCase``; every form of caches that a model has is drawn.

    Attributes:
        models: tiny float32 models to choose from; no choice in them (experts, index picks) may depend on rounding.
        tolerance: largest difference allowed between a step's logits and a recomputation.
        context: longest request.
        most_held: states held besides the current one.
    """

    models: ClassVar[Sequence[Model]] = ()
    tolerance: ClassVar[float] = 1e-4
    context: ClassVar[int] = 300
    most_held: ClassVar[int] = 3

    model: Model
    now: _Held

    def __init__(self) -> None:
        super().__init__()
        self.held: list[_Held] = []
        self.replays: list[_Replay] = []
        self.claims: dict[tuple[int, ...], list[Tensor]] = {}

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Build a state with a request or two."""
        self.model = self.models[data.draw(st.sampled_from(range(len(self.models))), label="model")]
        capacity = data.draw(capacities(self.context), label="capacity")
        page_size = data.draw(page_sizes(), label="page size")
        caches = data.draw(st.sampled_from(self.model.cache_forms), label="caches")
        state = init_state(self.model, capacity, page_size=page_size, seed=7, caches=caches)
        self._move(state, {})
        for _ in range(min(2, capacity.requests)):
            self._open(data.draw(sampling_params(self.model.config.vocab_size), label="params"))

    def teardown(self) -> None:
        """Recompute every logits row that was claimed."""
        if not self.claims:
            return
        for _, rows in self.claims.items():
            for row in rows[1:]:
                torch.testing.assert_close(row, rows[0], atol=self.tolerance, rtol=0)
        expected = self.recomputed(tuple(self.claims))
        for rows, logits in zip(self.claims.values(), expected, strict=True):
            torch.testing.assert_close(rows[0].cpu(), logits, atol=self.tolerance, rtol=0)

    def recomputed(self, texts: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
        """Compute the logits that follow each of several sequences anew; models that round need an exact way."""
        return recompute(self.model, texts)

    # What is true after every operation.

    def _move(self, state: DecodeState, texts: _Texts) -> None:
        """Accept a state as the current one."""
        _require_none(check(state))
        found = {r.request_id: r for r in state.requests}
        assert tuple(found) == tuple(texts), f"open requests {tuple(found)}, expected {tuple(texts)}"
        for request_id, text in texts.items():
            request = found[request_id]
            assert tuple(request.tokens.tolist()) == text.ids, f"tokens of request {request_id}"
            assert request.kv_len == text.n_fed, f"kv_len of request {request_id}"
            assert tuple(request.output_positions.tolist()) == text.said, f"outputs of request {request_id}"
            assert request.is_parked == text.is_parked, f"row of request {request_id}"
            assert (request.finished is not None) == text.is_over, f"end of request {request_id}"
        self.now = _Held(state, texts, digest(state))

    def _require_unchanged(self, *states: _Held) -> None:
        kept = (*states, *self.held, *(replay.before for replay in self.replays))
        for one in {id(one): one for one in kept}.values():
            assert digest(one.state) == one.mark, "a state changed after it was made"

    def _require_refused(self, kind: type[PurestepError], call: Callable[[], object]) -> PurestepError:
        try:
            call()
        except kind as error:
            self._require_unchanged(self.now)
            return error
        raise AssertionError(f"expected {kind.__name__}")

    def _running(self) -> list[int]:
        return [request_id for request_id, text in self.now.texts.items() if not text.is_over]

    # Operations.

    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        """Open a request."""
        self._open(data.draw(sampling_params(self.model.config.vocab_size), label="params"))

    def _open(self, params: SamplingParams) -> None:
        before = self.now
        if sum(not text.is_parked for text in before.texts.values()) == before.state.capacity.requests:
            self._require_refused(CapacityError, lambda: open_request(before.state, params))
            return
        state, request_id = open_request(before.state, params)
        self._move(state, {**before.texts, request_id: Text()})
        self._require_unchanged(before)

    @precondition(lambda self: self._running())
    @rule(data=st.data(), sample=st.sampled_from((True, True, False)), logits=st.sampled_from(("last", "all")))
    def extend(self, data: st.DataObject, sample: bool, logits: Any) -> None:
        """Feed prompts, chunks or nothing to several requests at once."""
        self._extend(data, data.draw(_subsets(self._running()), label="rows"), sample, logits)

    @precondition(lambda self: self._running())
    @rule(data=st.data(), sample=st.booleans())
    def feed(self, data: st.DataObject, sample: bool) -> None:
        """Feed one request."""
        self._extend(data, [data.draw(st.sampled_from(self._running()), label="row")], sample, "last")

    def _extend(self, data: st.DataObject, rows: Sequence[int], sample: bool, logits: Any) -> None:
        chunks: dict[int, tuple[int, ...]] = {}
        for request_id in rows:
            text = self.now.texts[request_id]
            shortest = 0 if text.has_unfed else 1
            room = max(shortest, self.context - len(text.ids))
            ids = prompts(self.model.config.vocab_size, min(room, 260), shortest)
            chunks[request_id] = data.draw(ids, label=f"chunk of {request_id}")
        self._step(
            lambda state: prepare_extend(state, chunks),
            lambda model, state: extend_step(model, state, chunks, sample=sample, logits=logits),
            {request_id: self.now.texts[request_id].ids + ids for request_id, ids in chunks.items()},
        )

    def _decodable(self) -> list[int]:
        return [i for i in self._running() if self.now.texts[i].has_unfed and not self.now.texts[i].is_parked]

    @precondition(lambda self: self._decodable())
    @rule(steps=st.integers(1, 4))
    def decode(self, steps: int) -> None:
        """Decode everything that runs, several times; retracted requests wait."""
        for _ in range(steps):
            rows = self._decodable()
            if rows:
                self._step(prepare_decode, decode_step, {i: self.now.texts[i].ids for i in rows})

    @precondition(lambda self: self._running())
    @rule(data=st.data())
    def decode_some(self, data: st.DataObject) -> None:
        """Decode some requests in any order, retracted ones too, some of them with a forced token."""
        rows = data.draw(_subsets(self._running()), label="rows")
        ids = st.integers(0, self.model.config.vocab_size - 1)
        force, fed = {}, {}
        for request_id in rows:
            text = self.now.texts[request_id]
            if not text.has_unfed or data.draw(st.booleans(), label=f"force {request_id}"):
                force[request_id] = data.draw(ids, label=f"token of {request_id}")
                fed[request_id] = text.forced(force[request_id])
            else:
                fed[request_id] = text.ids
        self._step(
            lambda state: prepare_decode(state, only=rows, force=force),
            lambda model, state: decode_step(model, state, only=rows, force=force),
            fed,
        )

    @precondition(lambda self: self._complete())
    @rule(data=st.data(), by_extend=st.booleans())
    def go_on(self, data: st.DataObject, by_extend: bool) -> None:
        """Ask a request that has nothing to feed for its next token: its last tokens are fed again."""
        before = self.now
        request_id = data.draw(st.sampled_from(self._complete()), label="request")
        try:
            if by_extend:
                state, out = extend_step(self.model, before.state, {request_id: ()})
            else:
                state, out = decode_step(self.model, before.state, only=[request_id])
        except CapacityError:
            self._require_unchanged(before)
            return
        text = before.texts[request_id]
        self._claim(before.texts, {request_id: text.ids}, out)
        texts = {**before.texts, request_id: text.fed(text.ids, out.next_token_ids, request_id in out.finished)}
        self._move(state, texts)
        self._require_unchanged(before)

    def _complete(self) -> list[int]:
        """List the running requests whose tokens are all fed."""
        return [i for i in self._running() if self.now.texts[i].ids and not self.now.texts[i].has_unfed]

    def _step(self, prepare: Prepare, step: Step, fed: Mapping[int, tuple[int, ...]]) -> None:
        """Make a step and check all of it.

        Args:
            prepare: the step's first half.
            step: the whole step.
            fed: request -> all its tokens once the step has fed them.
        """
        before, is_refused = self.now, False
        try:
            prepared, batch = prepare(before.state)
        except CapacityError:
            is_refused = True
        if is_refused:
            assert self._is_short(fed), "expected room for everything, but a step was refused"
            self._require_refused(CapacityError, lambda: step(self.model, before.state))
            return
        _require_none(check(prepared))
        _require_none(check_prepared(before.state, batch, prepared))
        _require_none(check_view(prepared, batch, forward_batch(prepared, batch)))
        state, out = step(self.model, before.state)
        _require_none(check_committed(prepared, out, state))
        # Logits of every position come for a whole step; each row's last one is what was sampled from.
        last = np.cumsum(batch.extend_lens) - 1 if len(out.logits) > len(fed) else np.arange(len(fed))
        if out.next_token_ids:
            _require_none(check_sampled(prepared, out.logits[torch.from_numpy(last)], None, out, state))
        assert batch.request_ids == tuple(fed), f"rows {batch.request_ids}, expected {tuple(fed)}"
        self._claim(before.texts, fed, out)
        texts = dict(before.texts)
        for i, (request_id, ids) in enumerate(fed.items()):
            sampled = out.next_token_ids[i : i + 1]
            texts[request_id] = texts[request_id].fed(ids, sampled, request_id in out.finished)
        self._move(state, texts)
        self._require_unchanged(before)
        self.replays = [*self.replays, _Replay(before, step, self.now.mark, out.logits, out.next_token_ids)][-2:]

    def _claim(self, texts: _Texts, fed: Mapping[int, tuple[int, ...]], out: StepOutput) -> None:
        """Remember which tokens each logits row follows."""
        n_rows = len(out.logits)
        if n_rows == len(fed):
            follows = list(fed.values())
        elif n_rows:
            follows = [ids[: n + 1] for i, ids in fed.items() for n in range(texts[i].n_fed, len(ids))]
        else:
            return
        assert len(follows) == n_rows, f"{n_rows} logits rows for {len(follows)} tokens"
        for ids, row in zip(follows, out.logits, strict=True):
            self.claims.setdefault(ids, []).append(row)

    def _is_short(self, fed: Mapping[int, tuple[int, ...]]) -> bool:
        """Tell whether some pool, the rows or the context cannot hold what a step wants to feed."""
        table, texts = self.now.state.table, self.now.texts
        if sum(texts[request_id].is_parked for request_id in fed) > len(table.free_rows):
            return True
        size = table.sizes.page_size
        spans = [(texts[request_id].n_fed, len(ids)) for request_id, ids in fed.items()]
        n_pages = sum(pages_needed(prefix, total, size) for prefix, total in spans)
        n_c128 = sum(c128_pages_needed(prefix, total) for prefix, total in spans)
        is_long = any(total > self.now.state.capacity.context for _, total in spans)
        # Window pages that the step gives back come on top; then there are fewer free ones than needed all the more.
        is_full = n_pages > min(len(table.free_pages), len(table.free_swa_pages))
        return is_long or is_full or n_c128 > len(table.free_c128_pages)

    def _one(self, data: st.DataObject) -> tuple[int, Text]:
        """Draw an open request."""
        request_id = data.draw(st.sampled_from(tuple(self.now.texts)), label="request")
        return request_id, self.now.texts[request_id]

    @precondition(lambda self: self.now.texts)
    @rule(data=st.data(), drop=st.none() | drops())
    def fork(self, data: st.DataObject, drop: int | None) -> None:
        """Fork a request, whole or some tokens before its end, or where the last one ends."""
        before = self.now
        parent, text = self._one(data)
        at = None if drop is None else max(0, len(text.ids) - drop)
        params = data.draw(st.none() | sampling_params(self.model.config.vocab_size), label="params")
        n = len(text.ids) if at is None else at
        n_said = len(text.cut(n, 0).said)
        if params is not None and params.max_new_tokens is not None and params.max_new_tokens <= n_said:
            self._require_refused(RequestError, lambda: fork_request(before.state, parent, at=at, sampling=params))
            return
        try:
            state, fork = fork_request(before.state, parent, at=at, sampling=params)
        except CapacityError:
            self._require_unchanged(before)
            return
        _require_none(check_forked(before.state, state, parent, fork, at))
        forked = attrs.evolve(text.cut(n, find_request(state, fork).kv_len), is_parked=False)
        self._move(state, {**before.texts, fork: forked})
        self._require_unchanged(before)

    @precondition(lambda self: self.now.texts)
    @rule(data=st.data(), drop=drops())
    def rewind(self, data: st.DataObject, drop: int) -> None:
        """Cut a request back; a finished one runs again."""
        before = self.now
        request_id, text = self._one(data)
        n = max(0, len(text.ids) - drop)
        try:
            state = rewind_request(before.state, request_id, n)
        except CapacityError:
            self._require_unchanged(before)
            return
        _require_none(check_rewound(before.state, state, request_id, n))
        self._move(state, {**before.texts, request_id: text.cut(n, find_request(state, request_id).kv_len)})
        self._require_unchanged(before)

    @precondition(lambda self: self.now.texts)
    @rule(data=st.data())
    def retract(self, data: st.DataObject) -> None:
        """Take a request's memory back; ``decode_some`` and ``extend`` resume it."""
        before = self.now
        request_id, text = self._one(data)
        state = retract_request(before.state, request_id)
        _require_none(check_retracted(before.state, state, request_id))
        self._move(state, {**before.texts, request_id: text.parked()})
        self._require_unchanged(before)

    @precondition(lambda self: self.now.texts)
    @rule(data=st.data())
    def export_and_import(self, data: st.DataObject) -> None:
        """Take a copy of a request in, as if it came from another state."""
        before = self.now
        request_id, text = self._one(data)
        try:
            state, copy = import_request(before.state, export_request(before.state, request_id))
        except CapacityError:
            self._require_unchanged(before)
            return
        # One that owns no slot needs no row before it is fed.
        self._move(state, {**before.texts, copy: attrs.evolve(text, is_parked=not text.n_fed)})
        self._require_unchanged(before)

    @rule()
    def save_and_restore(self) -> None:
        """Go on from a copy that went through files."""
        before = self.now
        with TemporaryDirectory() as folder:
            save_state(before.state, Path(folder))
            state = restore_state(self.model, Path(folder))
        self._move(state, before.texts)
        assert self.now.mark == before.mark, "a restored state is not the saved one"
        self._require_unchanged(before)

    @precondition(lambda self: self.now.texts)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """Close a request, finished or not."""
        before = self.now
        gone, _ = self._one(data)
        state = close_request(before.state, gone)
        _require_none(check_closed(before.state, state))
        self._move(state, {i: text for i, text in before.texts.items() if i != gone})
        self._require_unchanged(before)

    @rule()
    def hold(self) -> None:
        """Keep the current state."""
        self.held = [*self.held, self.now][-self.most_held :]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def go_back(self, data: st.DataObject) -> None:
        """Go on from a held state: a branch."""
        held = data.draw(st.sampled_from(range(len(self.held))), label="held state")
        left, self.now = self.now, self.held[held]
        self._require_unchanged(left, self.now)

    @precondition(lambda self: self.replays)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        """Make an earlier step again, from the state that it started from: same bits."""
        replay = self.replays[data.draw(st.sampled_from(range(len(self.replays))), label="step")]
        state, out = replay.step(self.model, replay.before.state)
        assert digest(state) == replay.mark, "the same step led to another state"
        assert torch.equal(out.logits, replay.logits), "the same step gave other logits"
        assert out.next_token_ids == replay.ids, "the same step sampled other tokens"
        self._require_unchanged(self.now)

    @rule(data=st.data(), fault=st.sampled_from(("vocabulary", "negative", "unknown", "nothing", "twice")))
    def refuse(self, data: st.DataObject, fault: str) -> None:
        """Ask for something impossible: an error, and nothing has changed."""
        state, vocab_size = self.now.state, self.model.config.vocab_size
        running = self._running()
        if fault == "unknown" or not running:
            self._require_refused(RequestError, lambda: extend_step(self.model, state, {state.next_id: [0]}))
            return
        request_id = data.draw(st.sampled_from(running), label="request")
        wrong = {"vocabulary": [0, vocab_size], "negative": [0, -1]}
        if fault in wrong:
            self._require_refused(RequestError, lambda: extend_step(self.model, state, {request_id: wrong[fault]}))
        elif fault == "twice":
            twice = [request_id, request_id]
            self._require_refused(RequestError, lambda: decode_step(self.model, state, only=twice))
        elif not self.now.texts[request_id].ids:
            self._require_refused(RequestError, lambda: extend_step(self.model, state, {request_id: ()}))

    @precondition(lambda self: self._running())
    @rule(
        data=st.data(),
        operator=st.sampled_from(("linear", "attend", "pool_group", "experts", "head_weights")),
        call=st.integers(0, 5),
        error=st.sampled_from((RuntimeError, KeyboardInterrupt)),
        length=lengths(40),
    )
    def interrupt(self, data: st.DataObject, operator: str, call: int, error: type[BaseException], length: int) -> None:
        """Break a step off in the middle: the state that it started from is whole."""
        request_id = data.draw(st.sampled_from(self._running()), label="request")
        model = interrupted(self.model, operator, call, error("broken off"))
        with suppress(error, CapacityError):
            extend_step(model, self.now.state, {request_id: [0] * length})
        self._require_unchanged(self.now)


def _subsets(ids: Sequence[int]) -> st.SearchStrategy[list[int]]:
    """Draw some of the ids, at least one, in any order."""
    return st.lists(st.sampled_from(ids), min_size=1, max_size=len(ids), unique=True)


def _require_none(violations: Sequence[object]) -> None:
    assert not violations, "\n".join(str(violation) for violation in violations)
