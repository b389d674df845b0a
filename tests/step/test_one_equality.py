"""One equality: however a token's history came about, its logits have the same bits.

Every request follows a known text, so that the logits after its n-th token are known: those of that text fed in one
piece to a request of its own. They must come out again in batches, chunks and decode steps, after forks, rewinds,
retractions, exports and saves, on every page size, in any order.
"""

from __future__ import annotations

import random
import tempfile
from functools import cache
from typing import Any

import attrs
import purestep as ps
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from kit.models import VOCAB, form_numerics, rounded_model
from kit.steps import ENDLESS, examples, ids_of
from purestep.state.kv import CACHE_FORMS
from torch import Tensor

N = 400
PAGE_SIZES = (4, 8, 12, 32, 128)
TEXTS = tuple(tuple(ids_of(N, VOCAB, seed)) for seed in range(3))
N_CONFIGS = 40


def config_of(number: int) -> dict[str, Any]:
    """Make up one of the configurations: layer kinds, window, widths, heads, experts, how much the indexer picks."""
    draw = random.Random(number)
    heads = draw.choice((1, 2, 4))
    experts = draw.choice((2, 4, 6))
    return {
        "ratios": tuple(draw.choice((0, 4, 4, 128)) for _ in range(draw.randint(1, 4))),
        "window": draw.choice((5, 8, 16, 64, 128)),
        "hidden": draw.choice((8, 16, 24)),
        "heads": heads,
        "o_groups": draw.choice([g for g in (1, 2) if heads % g == 0]),
        "head_dim": draw.choice((8, 16)),
        "q_lora": draw.choice((8, 12)),
        "experts": experts,
        "topk": draw.randint(1, experts),
        "hash_layers": draw.randint(0, 1),
        "inter": draw.choice((8, 12, 16)),
        "streams": draw.choice((2, 4)),
        "index_topk": draw.choice((4, 20, 1024)),
        "seed": number,
    }


def model_of(number: int, dtype: torch.dtype, caches: str) -> ps.Model:
    """Make a model of a configuration, with row-independent arithmetic and numerics that its caches hold."""
    return rounded_model(numerics=form_numerics(caches, dtype, invariant=True), dtype=dtype, **config_of(number))


@cache
def expected(number: int, dtype: torch.dtype, caches: Any) -> tuple[Tensor, ...]:
    """The logits after every token of every text, each fed in one piece to a request of its own: f32[T,V]."""
    model, found = model_of(number, dtype, caches), []
    for text in TEXTS:
        state = ps.init_state(model, ps.Capacity(1, N, N), page_size=128, caches=caches)
        state, request = ps.open_request(state, ENDLESS)
        found.append(ps.extend_step(model, state, {request: text}, sample=False, logits="all")[1].logits)
    return tuple(found)


@attrs.define
class Run:
    """A state under test.

    Attributes:
        model: steps it.
        rows: the right logits of every text.
        state: the newest state.
        texts: which text each request follows.
        known: how many of the text's tokens each request has; behind them there may be a sampled one.
    """

    model: ps.Model
    rows: tuple[Tensor, ...]
    state: ps.DecodeState
    texts: dict[int, int]
    known: dict[int, int]

    def fed(self, request: int) -> int:
        return ps.find_request(self.state, request).kv_len

    def waits(self, request: int) -> bool:
        return ps.find_request(self.state, request).has_pending

    def accept(self, state: ps.DecodeState) -> None:
        assert ps.invariants.check(state) == ()
        self.state = state

    def extend(self, chunks: dict[int, int]) -> None:
        """Feed the next tokens of some requests; the sampled token that waits is replaced by the text's."""
        for request in chunks:
            if len(ps.find_request(self.state, request).tokens) > self.known[request]:
                self.accept(ps.rewind_request(self.state, request, self.known[request]))
        before = {request: self.fed(request) for request in chunks}
        ids = {r: TEXTS[self.texts[r]][self.known[r] : self.known[r] + n] for r, n in chunks.items()}
        state, out = ps.extend_step(self.model, self.state, ids, sample=False, logits="all")
        self.accept(state)
        found = out.logits.split([self.fed(request) - before[request] for request in chunks])
        for request, logits in zip(chunks, found, strict=True):
            self.known[request] += chunks[request]
            assert self.fed(request) == self.known[request]
            assert torch.equal(logits, self.rows[self.texts[request]][before[request] : self.fed(request)])

    def decode(self, requests: list[int]) -> None:
        """Decode the text's next token of some requests; it takes the place of a sampled token that waits.

        Where the text's own last token waits as a sampled one (after a cut), nothing is forced: it is what is fed.
        """
        force = {}
        for request in requests:
            if not (self.waits(request) and len(ps.find_request(self.state, request).tokens) == self.known[request]):
                force[request] = TEXTS[self.texts[request]][self.known[request]]
                self.known[request] += 1
        state, out = ps.decode_step(self.model, self.state, only=requests, force=force)
        self.accept(state)
        for request, logits in zip(requests, out.logits, strict=True):
            assert self.fed(request) == self.known[request]
            assert torch.equal(logits, self.rows[self.texts[request]][self.known[request] - 1])


def moved(run: Run, page_size: int, through_files: bool) -> ps.DecodeState:
    """Export every request and import all of them, in reverse order, into a new state with other pages."""
    caches = run.state.kv.layout.form
    state = ps.init_state(run.model, ps.Capacity(6, 6 * N + 64, N + 8), page_size=page_size, seed=3, caches=caches)
    texts, known = {}, {}
    for request in reversed(run.texts):
        exported = ps.export_request(run.state, request)
        if through_files:
            with tempfile.TemporaryDirectory() as folder:
                ps.save_request(exported, folder)
                exported = ps.load_request(folder)
        state, new = ps.import_request(state, exported)
        texts[new], known[new] = run.texts[request], run.known[request]
    run.texts, run.known = texts, known
    return state


def restored(run: Run) -> ps.DecodeState:
    """Save the whole state and read it again."""
    with tempfile.TemporaryDirectory() as folder:
        ps.save_state(run.state, folder)
        return ps.restore_state(run.model, folder)


LENGTHS = st.sampled_from((1, 1, 2, 3, 4, 5, 7, 8, 13, 31, 64, 124, 127, 128, 129))
OPERATIONS = ("extend", "extend", "decode", "decode", "fork", "fork", "rewind", "retract", "move", "restore", "close")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@examples(30)
@given(number=st.integers(0, N_CONFIGS - 1), data=st.data())
def test_every_way_to_a_token_gives_the_same_bits(dtype: torch.dtype, number: int, data: st.DataObject) -> None:
    """Solo = batched = chunked = decoded = forked = rewound = retracted and resumed = moved = saved and restored."""
    follow_texts(number, dtype, "plain", data)


@pytest.mark.parametrize("caches", CACHE_FORMS[1:-1])
@examples(6)
@given(dtype=st.sampled_from((torch.bfloat16, torch.float32)), number=st.integers(0, N_CONFIGS - 1), data=st.data())
def test_it_holds_in_every_form_of_caches(caches: str, dtype: torch.dtype, number: int, data: st.DataObject) -> None:
    """The same with FP8 rows, FP8 and FP4 index keys, and online pooling."""
    follow_texts(number, dtype, caches, data)


@examples(3)
@given(dtype=st.sampled_from((torch.bfloat16, torch.float32)), number=st.integers(0, N_CONFIGS - 1))
def test_quantised_rows_hold_the_same_numbers(dtype: torch.dtype, number: int) -> None:
    """A model's logits have the same bits whether its rounded rows are stored quantised or not."""
    for caches in ("fp8", "fp4"):
        model = model_of(number, dtype, caches)
        state = ps.init_state(model, ps.Capacity(1, N, N), caches="plain")
        state, request = ps.open_request(state, ENDLESS)
        logits = ps.extend_step(model, state, {request: TEXTS[0]}, sample=False, logits="all")[1].logits
        assert torch.equal(logits, expected(number, dtype, caches)[0])


def follow_texts(number: int, dtype: torch.dtype, caches: Any, data: st.DataObject) -> None:
    """Lead three requests through drawn operations and compare every row of logits."""
    model, rows = model_of(number, dtype, caches), expected(number, dtype, caches)
    page_size = data.draw(st.sampled_from(PAGE_SIZES))
    state = ps.init_state(model, ps.Capacity(6, 6 * N + 64, N + 8), page_size=page_size, caches=caches)
    texts = {}
    for text in range(3):
        state, request = ps.open_request(state, ENDLESS)
        texts[request] = text
    run = Run(model, rows, state, texts, dict.fromkeys(texts, 0))
    for _ in range(data.draw(st.integers(2, 9), label="operations")):
        step(run, data.draw(st.sampled_from(OPERATIONS), label="operation"), data)
    going = [request for request in run.texts if run.known[request] < N]
    if going:
        run.decode(going)


def step(run: Run, operation: str, data: st.DataObject) -> None:
    """Do one operation to one or several requests, where that is possible."""
    open_ids = list(run.texts)
    going = [request for request in open_ids if run.known[request] < N]
    rows = data.draw(st.lists(st.sampled_from(going), min_size=1, unique=True), label="rows") if going else []
    event(operation)
    if operation == "extend" and rows:
        run.extend({r: min(data.draw(LENGTHS, label=f"chunk of {r}"), N - run.known[r]) for r in rows})
    elif operation == "decode" and rows:
        run.decode(rows)
    elif operation == "move":
        run.accept(moved(run, data.draw(st.sampled_from(PAGE_SIZES)), data.draw(st.booleans(), label="files")))
    elif operation == "restore":
        run.accept(restored(run))
    if operation not in ("fork", "rewind", "retract", "close"):
        return
    request = data.draw(st.sampled_from(open_ids), label="request")
    n = data.draw(st.integers(0, run.known[request]) | st.just(run.known[request]), label="tokens kept")
    if operation == "fork" and len(open_ids) < 6:
        at = data.draw(st.sampled_from((n, None)), label="at")
        state, fork = ps.fork_request(run.state, request, at=at)
        run.texts |= {fork: run.texts[request]}
        run.known |= {fork: run.known[request] if at is None else at}
        run.accept(state)
    elif operation == "rewind":
        run.accept(ps.rewind_request(run.state, request, n))
        run.known |= {request: n}
    elif operation == "retract":
        run.accept(ps.retract_request(run.state, request))
    elif operation == "close" and len(open_ids) > 1:
        run.texts = {r: text for r, text in run.texts.items() if r != request}
        run.accept(ps.close_request(run.state, request))
