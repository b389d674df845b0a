"""Random histories: of our own states, with every promise checked, and of engines under test, by their logits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import purestep as ps
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from kit.models import VOCAB, form_numerics, rounded_model, tiny_model
from kit.steps import examples
from purestep.state.kv import C4_RING, CacheForm
from purestep.step.naive import maximal
from purestep.step.release import layer_rows
from torch import Tensor

MODEL = tiny_model((0, 4, 128), window=8)


class OurStates(ps.strategies.StateMachine):
    """Steps tiny models with every mix of layer kinds and four windows."""

    models = (
        MODEL,
        tiny_model((4, 128), window=16),
        tiny_model((4, 0), window=128),
        tiny_model((128,), window=5),
    )


TestOurStates = OurStates.TestCase
TestOurStates.settings = settings(examples(25), stateful_step_count=settings().stateful_step_count // 2)


def paged(model: ps.Model, ids: tuple[int, ...], caches: CacheForm) -> Tensor:
    """Feed a sequence to a request of its own: the logits after every token."""
    state = ps.init_state(model, ps.Capacity(1, len(ids), len(ids)), caches=caches)
    state, request = ps.open_request(state)
    return ps.extend_step(model, state, {request: ids}, sample=False, logits="all")[1].logits


class OverForms(ps.strategies.StateMachine):
    """Steps models with row-independent arithmetic over every form of their caches, down to the bit."""

    models = (
        rounded_model(numerics=form_numerics("fp4", torch.bfloat16, invariant=True)),
        rounded_model((4, 128), numerics=form_numerics("fp8", torch.float32, invariant=True), dtype=torch.float32),
    )

    tolerance = 0.0

    def recomputed(self, texts: Sequence[tuple[int, ...]]) -> Sequence[Tensor]:
        """Feed each sequence alone."""
        runs = {ids: paged(self.model, ids, self.now.state.kv.layout.form) for ids in maximal(texts)}
        return [next(rows[len(ids) - 1] for run, rows in runs.items() if run[: len(ids)] == ids) for ids in texts]


TestOverForms = OverForms.TestCase
TestOverForms.settings = settings(examples(8), stateful_step_count=settings().stateful_step_count // 2)


class OurEngine(ps.strategies.DecodeMachine):
    """Runs our own steps as an engine under test."""

    model = MODEL

    @staticmethod
    def engine() -> ps.strategies.PurestepEngine:
        return ps.strategies.PurestepEngine(MODEL, page_size=4)


TestOurEngine = OurEngine.TestCase
TestOurEngine.settings = settings(examples(12), stateful_step_count=settings().stateful_step_count // 2)


@cache
def logits_after(ids: tuple[int, ...]) -> Tensor:
    """Recompute one row."""
    with torch.no_grad():
        return ps.forward_sequence(MODEL, torch.tensor(ids))[-1]


class TokenList:
    """The least that an adapter may be: three methods, over lists of tokens."""

    def __init__(self) -> None:
        self.ids: dict[int, tuple[int, ...]] = {}

    def open(self) -> int:
        self.ids[len(self.ids)] = ()
        return len(self.ids) - 1

    def extend(self, chunks: Mapping[int, Sequence[int]]) -> Mapping[int, Tensor]:
        self.ids |= {handle: self.ids[handle] + tuple(ids) for handle, ids in chunks.items()}
        return {handle: self.logits(handle) for handle in chunks}

    def decode(self, tokens: Mapping[int, int]) -> Mapping[int, Tensor]:
        return self.extend({handle: [token] for handle, token in tokens.items()})

    def logits(self, handle: int) -> Any:
        return logits_after(self.ids[handle])


def run(make: Callable[[], Any], count: int, steps: int, *phases: Phase) -> None:
    """Run the machine on an engine, the same histories every time."""

    class Machine(ps.strategies.DecodeMachine):
        model = MODEL
        engine = make
        context = 150

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=count,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            report_multiple_bugs=False,
            phases=[Phase.generate, *phases],
            suppress_health_check=list(HealthCheck),
        ),
    )


# Engines with a planted fault each.


class ForgetsPooling(ps.strategies.PurestepEngine):
    """Our engine, but a fork does not take the pooling state of its open C4 group along."""

    def __init__(self) -> None:
        super().__init__(MODEL)

    def fork(self, handle: int, at: int) -> int:
        fork = super().fork(handle, at)
        windows = ps.invariants.read_ledger(self.state).by_id[fork].windows
        kv, size = self.state.kv, self.state.table.sizes.page_size
        rows = windows[-1:] // size * C4_RING + np.arange(C4_RING * bool(len(windows)))
        with kv.handle.write({"c4_state": layer_rows(kv, "c4_state", rows)}) as write:
            write.tensors["c4_state"][layer_rows(kv, "c4_state", rows)] = 0.0
        self.state = attrs.evolve(self.state, kv=attrs.evolve(kv, handle=write.handle))
        return fork


class ForksLater(TokenList):
    """A fork at an earlier token takes everything."""

    def fork(self, handle: int, at: int) -> int:
        fork = self.open()
        self.ids[fork] = self.ids[handle]
        return fork


class SharesMemory(TokenList):
    """What a fork is fed its parent reads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.forks: dict[int, int] = {}

    def fork(self, handle: int, at: int) -> int:
        fork = self.open()
        self.ids[fork] = self.ids[handle][:at]
        self.forks[handle] = fork
        return fork

    def logits(self, handle: int) -> Any:
        n = len(self.ids[handle])
        shared = self.ids.get(self.forks.get(handle, -1), ())[: n - 1]
        return logits_after(shared + self.ids[handle][len(shared) :])


class CutsTooMuch(TokenList):
    """A rewind cuts one token too many."""

    def rewind(self, handle: int, n: int) -> None:
        self.ids[handle] = self.ids[handle][: max(0, n - 1)]


class SwapsRows(TokenList):
    """A batch comes back in another order than was asked."""

    def extend(self, chunks: Mapping[int, Sequence[int]]) -> Mapping[int, Tensor]:
        rows = super().extend(chunks)
        return dict(zip(rows, reversed(rows.values()), strict=True))


class ReusesDirtySlot(TokenList):
    """A request begins with what the closed one before it has left."""

    def __init__(self) -> None:
        super().__init__()
        self.left: tuple[int, ...] = ()

    def open(self) -> int:
        handle = super().open()
        self.ids[handle], self.left = self.left, ()
        return handle

    def close(self, handle: int) -> None:
        self.left = self.ids[handle][:1]


class RestoresShort(TokenList):
    """What comes back from files lacks the last token of each request."""

    def save(self, path: Path) -> None:
        (path / "ids.json").write_text(json.dumps(list(self.ids.values())))

    def load(self, path: Path) -> None:
        self.ids = {i: tuple(ids[:-1]) for i, ids in enumerate(json.loads((path / "ids.json").read_text()))}


class ForgetsRetracted(TokenList):
    """A retracted request starts again from nothing."""

    def retract(self, handle: int) -> None:
        self.ids[handle] = ()


FAULTS = (
    ForgetsPooling,
    ForksLater,
    SharesMemory,
    CutsTooMuch,
    SwapsRows,
    ReusesDirtySlot,
    RestoresShort,
    ForgetsRetracted,
)


@pytest.mark.parametrize("faulty", FAULTS, ids=[faulty.__name__ for faulty in FAULTS])
def test_fault_is_found(faulty: Callable[[], Any]) -> None:
    """The machine finds the fault of an engine and names call, request and position."""
    with pytest.raises(AssertionError, match=r"(extend|decode), request \d+ \(.*\): at position \d+ the logits differ"):
        run(faulty, 500, 10)


def test_least_adapter_is_enough() -> None:
    """An adapter with three methods is tested by what it has; nothing else is asked of it."""
    run(TokenList, 5, 6)


def test_history_shrinks_to_the_fault() -> None:
    """What is printed of an engine that rewinds too far is a prompt and a rewind."""
    with pytest.raises(AssertionError) as caught:
        run(CutsTooMuch, 100, 6, Phase.shrink)
    lines = "\n".join(caught.value.__notes__).splitlines()
    calls = [line.split("(")[0] for line in lines if line.startswith("state.")]
    assert calls == ["state.start", "state.rewind", "state.teardown"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (torch.zeros(VOCAB - 1), "expected logits of shape"),
        (torch.zeros(VOCAB, dtype=torch.int64), "expected floating-point logits"),
        (torch.full((VOCAB,), torch.nan), "differ from a recomputation by inf"),
        (None, "expected a tensor"),
    ],
)
def test_wrong_kinds_of_rows_are_named(row: Any, said: str) -> None:
    """Whatever is not a row of finite logits of the vocabulary's size is refused by name."""

    class Wrong(TokenList):
        def logits(self, handle: int) -> Any:
            return row

    with pytest.raises(AssertionError, match=said):
        run(Wrong, 10, 4)


def test_missing_rows_are_named() -> None:
    """A call that answers for fewer requests than it was asked about is a failure."""

    class Silent(TokenList):
        def extend(self, chunks: Mapping[int, Sequence[int]]) -> Mapping[int, Tensor]:
            return {}

    with pytest.raises(AssertionError, match="expected logits of"):
        run(Silent, 10, 4)


def test_refusals_change_nothing() -> None:
    """An engine that refuses by a declared error is held to what it had before, and not blamed for refusing."""

    class Small(TokenList):
        def extend(self, chunks: Mapping[int, Sequence[int]]) -> Mapping[int, Tensor]:
            if any(len(self.ids[handle]) + len(ids) > 6 for handle, ids in chunks.items()):
                raise MemoryError
            return super().extend(chunks)

    class Machine(ps.strategies.DecodeMachine):
        model = MODEL
        engine = Small
        refusals = (MemoryError,)

    quiet = settings(max_examples=8, stateful_step_count=6, derandomize=True, database=None, deadline=None)
    run_state_machine_as_test(Machine, settings=quiet)


@examples(4)
@given(checkpoint=ps.strategies.checkpoints(ps.strategies.configs(2, choices=False)), data=st.data())
def test_drawn_checkpoints_run(checkpoint: ps.strategies.TinyCheckpoint, data: st.DataObject) -> None:
    """A drawn checkpoint loads and steps a drawn batch like the recomputation."""
    model = checkpoint.load()
    state = ps.init_state(model, ps.Capacity(requests=4, tokens=4 * 48, context=40), page_size=8)
    for _ in range(4):
        state, _ = ps.open_request(state)
    batch = data.draw(ps.strategies.batches(model.config.vocab_size, 4, 20))
    _, out = ps.extend_step(model, state, batch)
    for request_id, row in zip(out.request_ids, out.logits, strict=True):
        with torch.no_grad():
            expected = ps.forward_sequence(model, torch.tensor(batch[request_id]))[-1]
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)


def test_one_checkpoint_is_one_model(tmp_path: Path) -> None:
    """Writing in shards, writing whole and loading in memory give the same weights."""
    checkpoint = ps.strategies.TinyCheckpoint(config=ps.strategies.tiny_config((4,)), seed=3)
    ids = torch.arange(9)
    models = [
        checkpoint.load(),
        ps.load_model(checkpoint.write(tmp_path / "whole")),
        ps.load_model(checkpoint.write(tmp_path / "shards", shards=3)),
    ]
    with torch.no_grad():
        rows = [ps.forward_sequence(model, ids) for model in models]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
