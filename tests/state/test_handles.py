"""Promises of the persistent handles: any held version stays exact, whatever is done to any other."""

from __future__ import annotations

import copy
import dis
import gc
import pickle
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from purestep.state import handles
from purestep.state.errors import DtypeError, ShapeError, StateBusyError
from purestep.state.handles import Handle, create_handle
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

SIZES = {"ids": 6, "kv": 5, "fp8": 4}
ROW_NUMBER_BYTES = 8
Snapshot = dict[str, np.ndarray]
Rows = dict[str, list[int]]


def make_tensors() -> dict[str, Tensor]:
    """Three small buffers of different row shapes and dtypes."""
    return {
        "ids": torch.arange(6) * 10,
        "kv": torch.arange(10.0).reshape(5, 2),
        "fp8": torch.arange(12.0).reshape(4, 3).to(torch.float8_e4m3fn),
    }


def raw(tensor: Tensor) -> np.ndarray:
    """Show a buffer as u8[rows, bytes], sharing its memory."""
    return tensor.view(torch.uint8).numpy().reshape(len(tensor), -1)


def snapshot_of(tensors: Any) -> Snapshot:
    """Copy every byte of every buffer."""
    return {name: raw(tensor).copy() for name, tensor in tensors.items()}


def snapshot_at(handle: Handle) -> Snapshot:
    """Copy every byte that a handle's version holds."""
    with handle.read() as tensors:
        return snapshot_of(tensors)


def same(one: Snapshot, other: Snapshot) -> bool:
    """Tell whether two snapshots are equal byte for byte."""
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def pointers(handle: Handle) -> dict[str, int]:
    """Give the address of every buffer."""
    with handle.read() as tensors:
        return {name: tensor.data_ptr() for name, tensor in tensors.items()}


def indices(rows: Rows) -> dict[str, Tensor]:
    """Make the row tensors that ``write`` takes."""
    return {name: torch.tensor(listed, dtype=torch.int64) for name, listed in rows.items()}


def scribble(pages: Snapshot, rows: Rows, seed: int) -> None:
    """Write bytes made from ``seed`` to the rows, in place."""
    draw = np.random.default_rng(seed)
    for name, listed in rows.items():
        for row in listed:
            pages[name][row] = draw.integers(0, 256, pages[name].shape[1], dtype=np.uint8)


def fill(tensors: Any, rows: Rows, seed: int) -> None:
    """Scribble on live buffers."""
    scribble({name: raw(tensors[name]) for name in rows}, rows, seed)


def filled(before: Snapshot, rows: Rows, seed: int) -> Snapshot:
    """Scribble on a full copy: the model that copies everything."""
    after = {name: page.copy() for name, page in before.items()}
    scribble(after, rows, seed)
    return after


def step(handle: Handle, rows: Rows, seed: int) -> Handle:
    """Write content made from ``seed`` to the rows and return the new version."""
    with handle.write(indices(rows)) as write:
        fill(write.tensors, rows, seed)
    return write.handle


def counter(n_rows: int) -> Handle:
    """Make a one-buffer handle of 64-bit zeros."""
    return create_handle({"x": torch.zeros(n_rows, dtype=torch.int64)})


def put(handle: Handle, row: int, number: int) -> Handle:
    """Write one number to one row of ``counter``."""
    with handle.write({"x": torch.tensor([row])}) as write:
        write.tensors["x"][row] = number
    return write.handle


def chain(length: int) -> list[Handle]:
    """Hold every version of a chain that counts up round three rows."""
    buffer = torch.zeros(3, dtype=torch.int64)
    array, rows = buffer.numpy(), [{"x": torch.tensor([row])} for row in range(3)]
    versions = [create_handle({"x": buffer})]
    for number in range(length):
        with versions[-1].write(rows[number % 3]) as write:
            array[number % 3] = number
        versions.append(write.handle)
    return versions


def lock_is_free(handle: Handle) -> bool:
    """Tell whether another thread can read now."""
    reader = threading.Thread(target=snapshot_at, args=(handle,), daemon=True)
    reader.start()
    reader.join(5)
    return not reader.is_alive()


row_lists, distinct_row_lists = (
    st.fixed_dictionaries(
        {},
        optional={name: st.lists(st.integers(0, size - 1), max_size=4, unique=unique) for name, size in SIZES.items()},
    )
    for unique in (False, True)
)


@attrs.frozen
class World:
    """What the model knows of one set of buffers: addresses, and how often one write named each row."""

    addresses: dict[str, int]
    row_bytes: dict[str, int]
    written: Counter[tuple[str, int]] = attrs.field(factory=Counter)

    @classmethod
    def of(cls, handle: Handle) -> World:
        with handle.read() as tensors:
            row_bytes = {name: tensor[0].nbytes + ROW_NUMBER_BYTES for name, tensor in tensors.items()}
        return cls(pointers(handle), row_bytes)

    def note(self, rows: Rows) -> None:
        for name, listed in rows.items():
            for row, times in Counter(listed).items():
                self.written[name, row] = max(self.written[name, row], times)

    def distinct_bytes(self) -> int:
        return sum(times * self.row_bytes[name] for (name, _), times in self.written.items())


@attrs.frozen
class Held:
    """A version that the test holds, with the model's full copy of it."""

    handle: Handle
    expected: Snapshot
    world: World


class HandleMachine(RuleBasedStateMachine):
    """A random tree of versions against a model that copies everything."""

    @initialize()
    def begin(self) -> None:
        tensors = make_tensors()
        expected = snapshot_of(tensors)
        handle = create_handle(tensors)
        self.held = [Held(handle, expected, World.of(handle))]

    def pick(self, number: int) -> Held:
        return self.held[number % len(self.held)]

    def check_bound(self, world: World) -> None:
        versions = [held for held in self.held if held.world is world]
        assert versions[0].handle.saved_bytes() <= max(0, 2 * len(versions) - 3) * world.distinct_bytes()

    @rule(number=st.integers(0, 99), rows=row_lists, seed=st.integers(0, 99))
    def write(self, number: int, rows: Rows, seed: int) -> None:
        held = self.pick(number)
        held.world.note(rows)
        handle = step(held.handle, rows, seed)
        self.held.append(Held(handle, filled(held.expected, rows, seed), held.world))
        del handle
        self.check_bound(held.world)

    @rule(number=st.integers(0, 99), rows=row_lists, seeds=st.lists(st.integers(0, 99), min_size=1, max_size=4))
    def advance(self, number: int, rows: Rows, seeds: list[int]) -> None:
        """A linear run that drops every input, as a decode loop does."""
        held = self.pick(number)
        held.world.note(rows)
        handle, expected = held.handle, held.expected
        for seed in seeds:
            handle, expected = step(handle, rows, seed), filled(expected, rows, seed)
        self.held[number % len(self.held)] = Held(handle, expected, held.world)

    @rule(
        number=st.integers(0, 99),
        rows=row_lists,
        seed=st.integers(0, 99),
        error=st.sampled_from([RuntimeError, KeyboardInterrupt, GeneratorExit, StopIteration]),
        reached=st.integers(0, 3),
    )
    def failing_write(self, number: int, rows: Rows, seed: int, error: type[BaseException], reached: int) -> None:
        part = dict(list(rows.items())[:reached])
        writes = []

        def broken() -> None:
            with self.pick(number).handle.write(indices(rows)) as write:
                writes.append(write)
                fill(write.tensors, part, seed)
                raise error("planted")

        with pytest.raises(error, match="planted"):
            broken()
        with pytest.raises(StateBusyError):
            _ = writes[0].handle

    @rule(number=st.integers(0, 99), name=st.sampled_from(sorted(SIZES)), data=st.data())
    def read_rows(self, number: int, name: str, data: st.DataObject) -> None:
        held = self.pick(number)
        rows = data.draw(st.lists(st.integers(0, SIZES[name] - 1), max_size=4))
        got = held.handle.rows(name, torch.tensor(rows, dtype=torch.int64))
        assert got.shape[1:] == held.handle.spec(name)[0][1:]
        assert got.dtype == held.handle.spec(name)[1]
        assert len(got) == len(rows)
        assert not rows or np.array_equal(raw(got), held.expected[name][rows])

    @precondition(lambda self: len(self.held) > 1)
    @rule(number=st.integers(0, 99))
    def drop(self, number: int) -> None:
        self.held.pop(number % len(self.held))

    @precondition(lambda self: len(self.held) > 2)
    @rule(number=st.integers(0, 99), descending=st.booleans())
    def drop_many(self, number: int, descending: bool) -> None:
        kept = self.held.pop(number % len(self.held))
        while self.held:
            self.held.pop(-1 if descending else 0)
        self.held.append(kept)

    @precondition(lambda self: len(self.held) < 6)
    @rule(number=st.integers(0, 99), copied=st.sampled_from([copy.deepcopy, lambda h: pickle.loads(pickle.dumps(h))]))
    def copy_out(self, number: int, copied: Callable[[Handle], Handle]) -> None:
        held = self.pick(number)
        handle = copied(held.handle)
        world = World.of(handle)
        assert not set(world.addresses.values()) & set(held.world.addresses.values())
        assert handle.saved_bytes() == 0
        self.held.append(Held(handle, held.expected, world))

    @invariant()
    def every_held_version_is_exact(self) -> None:
        for held in getattr(self, "held", []):
            with held.handle.read() as tensors:
                assert same(snapshot_of(tensors), held.expected)
                assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == held.world.addresses


HandleMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


class TestHandles(HandleMachine.TestCase):
    """Any held version can be read and written again, to identical bytes; branches never disturb each other."""


# ---- what is kept -------------------------------------------------------------------------------------------------


@given(st.lists(row_lists, max_size=8))
@settings(max_examples=30, deadline=None)
def test_linear_chain_keeps_nothing(plan: list[Rows]) -> None:
    """A chain of writes holds no saved row once each input is dropped."""
    handle = create_handle(make_tensors())
    for seed, rows in enumerate(plan):
        handle = step(handle, rows, seed)
        assert handle.saved_bytes() == 0


def test_dropped_branch_is_freed_at_once() -> None:
    """A version that nobody holds and nothing hangs on takes its saved rows with it, without another write."""
    base = counter(4)
    left, right = put(base, 0, 1), put(base, 1, 2)
    one_row = 8 + ROW_NUMBER_BYTES
    assert base.saved_bytes() == 2 * one_row
    del left
    assert base.saved_bytes() == one_row
    del right
    base.rows("x", torch.tensor([0]))
    assert base.saved_bytes() == 0


@given(st.lists(distinct_row_lists, min_size=2, max_size=10))
@settings(max_examples=40, deadline=None)
def test_one_held_version_costs_its_distinct_rows(plan: list[Rows]) -> None:
    """One held version costs exactly the distinct rows written since, however often each was written."""
    base = handle = create_handle(make_tensors())
    world, expected = World.of(base), snapshot_at(base)
    for seed, rows in enumerate([*plan, {}]):
        handle = step(handle, rows, seed)
    handle = step(handle, {}, 0)
    distinct = {(name, row) for rows in plan for name, listed in rows.items() for row in listed}
    assert base.saved_bytes() == sum(world.row_bytes[name] for name, _ in distinct)
    assert same(snapshot_at(base), expected)


def test_held_versions_keep_only_the_rows_up_to_the_next_held_one() -> None:
    """Two held versions of one chain do not save the same write twice."""
    base = counter(8)
    middle = put(put(base, 0, 1), 1, 1)
    newest = put(put(put(middle, 2, 2), 3, 2), 4, 2)
    newest = put(put(newest, 5, 3), 6, 3)
    assert base.saved_bytes() == (2 + 5) * (8 + ROW_NUMBER_BYTES)
    assert base.rows("x", torch.arange(8)).tolist() == [0] * 8
    assert middle.rows("x", torch.arange(8)).tolist() == [1, 1, 0, 0, 0, 0, 0, 0]
    assert newest.rows("x", torch.arange(8)).tolist() == [1, 1, 2, 2, 2, 3, 3, 0]


def test_repeated_rows_are_kept_once_after_merging() -> None:
    """Rows that one write announces several times count once as soon as a later version is merged in."""
    base = handle = counter(4)
    for rows in ([1, 1, 2, 1], [2, 2, 3], []):
        with handle.write({"x": torch.tensor(rows, dtype=torch.int64)}) as write:
            write.tensors["x"][rows] = 7
        handle = write.handle
    handle = put(handle, 0, 1)
    assert base.saved_bytes() == (3 + 1) * (8 + ROW_NUMBER_BYTES)
    assert base.rows("x", torch.arange(4)).tolist() == [0, 0, 0, 0]


def test_held_version_over_thousands_of_steps_stays_flat() -> None:
    """Saved bytes do not grow any more once every row of the held version has been saved."""
    n_rows, n_steps = 50, 4000
    base = handle = counter(n_rows)
    sizes = []
    for number in range(n_steps):
        handle = put(handle, number * 7 % n_rows, number)
        if number % 100 == 99:
            sizes.append(base.saved_bytes())
    row = 8 + ROW_NUMBER_BYTES
    assert set(sizes) == {(n_rows + 1) * row}, "every row once, and the last write's row until the next write"
    assert base.rows("x", torch.arange(n_rows)).tolist() == [0] * n_rows
    assert handle.rows("x", torch.tensor([(n_steps - 1) * 7 % n_rows])).item() == n_steps - 1


def test_retries_from_one_held_version_keep_nothing() -> None:
    """Stepping the same held version again and again, and dropping each result, keeps one difference at most."""
    base = counter(8)
    for number in range(200):
        put(base, number % 8, number)
        assert base.saved_bytes() <= 8 + ROW_NUMBER_BYTES
        assert len(base._node.children) <= 2
    assert base.rows("x", torch.arange(8)).tolist() == [0] * 8


def test_shared_ancestor_is_kept_once_and_merged_when_one_branch_is_left() -> None:
    """A dropped version with two branches is shared by them; it goes when one branch goes."""
    trunk = counter(8)
    fork = put(trunk, 0, 1)
    left, right = put(fork, 1, 2), put(fork, 2, 3)
    newest = put(trunk, 3, 4)
    row = 8 + ROW_NUMBER_BYTES
    assert newest.saved_bytes() == 4 * row
    del fork
    trunk = put(newest, 4, 5)
    assert trunk.saved_bytes() == 5 * row, "rows 0 and 3 of the shared version, and one row of each other"
    del right, newest
    trunk = put(trunk, 5, 6)
    assert trunk.saved_bytes() == 5 * row, "rows 1, 0, 3 and 4 of the branch, and row 5 of the dropped input"
    trunk = put(trunk, 5, 6)
    assert trunk.saved_bytes() == 6 * row
    assert left.rows("x", torch.arange(8)).tolist() == [1, 2, 0, 0, 0, 0, 0, 0]
    trunk = put(trunk, 5, 7)
    del left
    assert trunk.rows("x", torch.arange(8)).tolist() == [0, 0, 0, 4, 5, 7, 0, 0]
    assert trunk.saved_bytes() == 0


def test_everything_is_freed_without_the_garbage_collector() -> None:
    """Dropping the last handle frees the buffers by reference counting alone: there are no cycles."""
    gc.disable()
    try:
        buffer = torch.zeros(4, dtype=torch.int64)
        handle = create_handle({"x": buffer})
        with handle.read() as tensors:
            alive = weakref.ref(tensors["x"])
        del tensors
        versions = [handle] + [put(handle, row, 1) for row in range(4)]
        versions.append(put(versions[2], 0, 5))
        with suppress(RuntimeError), versions[1].write({"x": torch.tensor([1])}):
            raise RuntimeError
        handle.rows("x", torch.tensor([1]))
        assert alive() is not None
        del handle, versions
        assert alive() is None
    finally:
        gc.enable()


# ---- long chains --------------------------------------------------------------------------------------------------

LONG = 20_000


def in_a_small_stack(work: Callable[[], None]) -> None:
    """Run ``work`` in a thread whose stack is far too small for one C frame per version."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    before = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert not errors


def test_long_held_chain_is_read_and_destroyed_without_recursion() -> None:
    """Twenty thousand held versions can be read at both ends and dropped in any order."""

    def work() -> None:
        versions = chain(LONG)
        first, last = versions[0], versions[-1]
        assert first.rows("x", torch.arange(3)).tolist() == [0, 0, 0]
        assert last.rows("x", torch.tensor([(LONG - 1) % 3])).item() == LONG - 1
        del last
        while len(versions) > 1:
            versions.pop()
        del versions, first

    in_a_small_stack(work)


@pytest.mark.parametrize(("length", "descending"), [(LONG, True), (LONG // 10, False)])
def test_long_dropped_chain_is_merged_without_recursion(length: int, descending: bool) -> None:
    """Thousands of dropped versions between two held ones become one difference in the next write."""

    def work() -> None:
        versions = chain(length)
        first, last = versions[0], versions[-1]
        while versions:
            versions.pop(-1 if descending else 0)
        last = put(last, 0, 7)
        assert first.saved_bytes() == (3 + 1) * (8 + ROW_NUMBER_BYTES)
        assert first.rows("x", torch.arange(3)).tolist() == [0, 0, 0]
        del first, last

    in_a_small_stack(work)


# ---- interrupts ---------------------------------------------------------------------------------------------------


class Story:
    """A short history that passes every code path; ``held`` is what the teller holds at any moment."""

    def __init__(self) -> None:
        tensors = {name: tensor for name, tensor in make_tensors().items() if name != "kv"}
        self.held = {"base": (create_handle(tensors), snapshot_of(tensors))}
        self.addresses = {name: tensor.data_ptr() for name, tensor in tensors.items()}

    def write(self, source: str, name: str, rows: Rows, seed: int) -> None:
        handle, before = self.held[source]
        expected = filled(before, rows, seed)
        self.held[name] = (step(handle, rows, seed), expected)

    def tell(self) -> None:
        self.write("base", "trunk", {"ids": [1, 1], "fp8": [0]}, 1)
        self.write("trunk", "trunk", {"ids": [1, 3]}, 2)
        self.write("trunk", "trunk", {"ids": [5], "fp8": [2]}, 3)
        self.write("trunk", "trunk", {"ids": [0]}, 4)
        self.write("base", "fork", {"ids": [2, 4]}, 5)
        self.write("fork", "leaf", {"ids": [2, 3]}, 6)
        self.held.pop("fork", None)
        with suppress(RuntimeError), self.held["leaf"][0].write(indices({"ids": [0], "fp8": [1]})) as write:
            fill(write.tensors, {"ids": [0], "fp8": [1]}, 7)
            raise RuntimeError

    def check(self) -> None:
        torch.set_grad_enabled(True)  # torch's own no_grad is not proof against interrupts
        self.write("trunk" if "trunk" in self.held else "base", "later", {"ids": [4]}, 8)
        self.check_held()
        self.write("base", "another", {"ids": [0, 1], "fp8": [2]}, 9)
        self.check_held()
        assert lock_is_free(self.held["base"][0])

    def check_held(self) -> None:
        for handle, expected in self.held.values():
            with handle.read() as tensors:
                assert same(snapshot_of(tensors), expected)
                assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == self.addresses


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, GeneratorExit, SystemExit])
def test_rows_are_back_before_an_exception_leaves_the_write(error: type[BaseException]) -> None:
    """The live buffers hold the old rows again when the exception arrives, and the caller's exception is unchanged."""
    buffer, planted = torch.arange(6), error("planted")
    base = create_handle({"x": buffer})

    def broken() -> None:
        with base.write({"x": torch.tensor([4, 1, 1])}) as write:
            write.tensors["x"][1] = 90
            write.tensors["x"][4] = 91
            raise planted

    with pytest.raises(error) as caught:
        broken()
    assert caught.value is planted
    assert buffer.tolist() == [0, 1, 2, 3, 4, 5]


class InterruptOps(TorchDispatchMode):
    """Raises KeyboardInterrupt before or after the operators with the given numbers."""

    def __init__(self, numbers: tuple[int, ...], after: bool) -> None:
        super().__init__()
        self.numbers, self.after, self.count = numbers, after, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        hit = self.count in self.numbers
        if hit and not self.after:
            raise KeyboardInterrupt
        out = func(*args, **(kwargs or {}))
        if hit:
            raise KeyboardInterrupt
        return out


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("gap", [None, 1, 3], ids=["once", "next", "third"])
def test_interrupt_at_every_operator_leaves_held_versions_exact(after: bool, gap: int | None) -> None:
    """An interrupt at any tensor operator, and another one inside the rollback, harms no held version."""
    number = 0
    while True:
        number += 1
        numbers = (number,) if gap is None else (number, number + gap)
        story, mode = Story(), InterruptOps(numbers, after)
        with suppress(KeyboardInterrupt), mode:
            story.tell()
        story.check()
        if mode.count < number:
            break
    assert number > 40


CODE_FILES = (handles.__file__, contextmanager.__code__.co_filename)
CHECKS = ("CALL", "RESUME", "JUMP_BACKWARD")


def interrupted_at(number: int, work: Callable[[], None]) -> int:
    """Run ``work``, raise KeyboardInterrupt at one of the points where CPython looks for signals, and count them.

    It looks after a call, on entering or resuming a function and on a backward jump. ``with`` on a lock is none.
    """
    count = 0
    before: dict[Any, str] = {}

    def trace(frame: Any, event: str, _arg: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in CODE_FILES:
            return None
        frame.f_trace_opcodes = True
        if event == "return":
            before.pop(frame, None)
        elif event == "opcode":
            last = before.get(frame, "")
            before[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
            if last.startswith(CHECKS):
                count += 1
                if count == number:
                    before.clear()
                    raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    try:
        sys.settrace(trace)
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(previous)
    return count


@pytest.mark.parametrize("offset", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_interrupt_at_every_signal_point_leaves_held_versions_exact(offset: int) -> None:
    """An interrupt wherever CPython can deliver one inside the module harms no held version and leaks no lock."""
    total = interrupted_at(0, Story().tell)
    assert total > 300
    for number in range(offset, total + 1, 3):
        story = Story()
        interrupted_at(number, story.tell)
        story.check()


def test_real_signals_leave_held_versions_exact() -> None:
    """Real interrupts at arbitrary moments harm no held version and leak no lock."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals arrive in the main thread only")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    draw = np.random.default_rng(0)
    before = signal.signal(signal.SIGALRM, interrupt)
    hits = 0
    try:
        for delay in draw.uniform(5e-5, 6e-3, 150):
            story = Story()
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                story.tell()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            story.check()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert hits > 0


# ---- threads and re-entry -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hold", ["write", "read", "exclusive"])
def test_other_thread_waits(hold: str) -> None:
    """While one thread is inside write, read or exclusive, another thread's read waits and then sees its version."""
    base = counter(4)
    newest = put(base, 0, 1)
    seen: list[int] = []
    reader = threading.Thread(target=lambda: seen.append(int(base.rows("x", torch.tensor([0])))), daemon=True)
    blocks = {"write": lambda: newest.write({}), "read": newest.read, "exclusive": newest.exclusive}
    with blocks[hold]():
        reader.start()
        reader.join(0.05)
        assert reader.is_alive()
        assert seen == []
    reader.join(5)
    assert seen == [0]


@pytest.mark.parametrize("outer", ["write", "read"])
@pytest.mark.parametrize("inner", ["write", "read", "rows", "deepcopy", "pickle"])
def test_reentry_raises_and_harms_nothing(outer: str, inner: str) -> None:
    """A body that asks for any version of its own buffers gets StateBusyError, and can go on."""
    base = counter(4)
    newest = put(base, 0, 1)

    def ask() -> None:
        match inner:
            case "write":
                put(base, 1, 5)
            case "read":
                snapshot_at(base)
            case "rows":
                base.rows("x", torch.tensor([0]))
            case "deepcopy":
                copy.deepcopy(base)
            case "pickle":
                pickle.dumps(base)

    with newest.read() if outer == "read" else newest.write({"x": torch.tensor([2])}) as entered:
        with pytest.raises(StateBusyError, match="inside"):
            ask()
        if outer == "write":
            entered.tensors["x"][2] = 9
    result = entered.handle if outer == "write" else newest
    assert result.rows("x", torch.arange(4)).tolist() == [1, 0, 9 if outer == "write" else 0, 0]
    assert base.rows("x", torch.arange(4)).tolist() == [0, 0, 0, 0]


def test_other_buffers_are_not_busy() -> None:
    """A body may read and write handles of other buffers."""
    one, other = counter(4), counter(4)
    with one.write({"x": torch.tensor([0])}) as write:
        write.tensors["x"][0] = put(other, 1, 3).rows("x", torch.tensor([1])).item()
    assert write.handle.rows("x", torch.tensor([0])).item() == 3


def test_exclusive_lets_its_own_thread_work() -> None:
    """Inside exclusive the same thread reads, writes and enters exclusive again."""
    handle = counter(4)
    with handle.exclusive(), handle.exclusive():
        handle = put(handle, 0, 1)
        handle = put(handle, 1, 2)
        assert handle.rows("x", torch.arange(4)).tolist() == [1, 2, 0, 0]
    assert lock_is_free(handle)


def test_threads_that_step_their_own_branches_do_not_disturb_each_other() -> None:
    """Several threads step branches of one version, and each ends with its own content."""
    base = counter(8)
    results: dict[int, list[int]] = {}

    def walk(number: int) -> None:
        handle = base
        for turn in range(40):
            handle = put(handle, (number + turn) % 8, number)
        results[number] = handle.rows("x", torch.arange(8)).tolist()

    threads = [threading.Thread(target=walk, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [number] * 8 for number in range(1, 5)}
    assert base.rows("x", torch.arange(8)).tolist() == [0] * 8


# ---- cost ---------------------------------------------------------------------------------------------------------


class RecordNewBytes(TorchDispatchMode):
    """Records every operator and how many bytes of new storage it made."""

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.known, self.made = known, []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.made.append((str(func), 0 if storage.data_ptr() in self.known else storage.nbytes()))
        return out


class CountOps(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_merged_differences_stay_few_pieces() -> None:
    """A held version is restored in a number of copies that grows with the logarithm of the steps merged into it."""
    base = handle = counter(300)
    for row in range(300):
        handle = put(handle, row, 1)
    handle = put(handle, 0, 2)
    with CountOps() as ops:
        base.rows("x", torch.tensor([0]))
    assert ops.counts["index_copy_.default"] <= 11


def test_merging_moves_each_row_a_few_times() -> None:
    """Merging many versions that are dropped at once, the newest first, costs the sum of their rows, not its square."""
    n_rows = 400
    versions = [counter(n_rows)]
    for row in range(n_rows):
        versions.append(put(versions[-1], row, 1))
    base, newest = versions[0], versions[-1]
    while versions:
        versions.pop()
    with RecordNewBytes(set(pointers(newest).values())) as record:
        put(newest, 0, 2)
    all_rows = n_rows * (8 + ROW_NUMBER_BYTES)
    assert base.saved_bytes() >= all_rows
    assert sum(made for _, made in record.made) < 20 * all_rows


def test_linear_chain_runs_one_save_per_buffer_and_nothing_else() -> None:
    """A step of a linear chain saves the announced rows, keeps their numbers, and runs no other operator."""
    handle = create_handle(make_tensors())
    rows = indices({"ids": [1], "kv": [2], "fp8": [3]})
    with CountOps() as ops:
        for _ in range(5):
            with handle.write(rows) as write:
                pass
            handle = write.handle
    assert ops.counts == {"index_select.default": 15, "clone.default": 15}


def recorded_history(n_rows: int) -> list[tuple[str, int]]:
    """Run writes, failures, branches, merges and reads on buffers of ``n_rows`` rows and record every operator."""
    base = create_handle({"a": torch.zeros(n_rows, 16), "b": torch.zeros(n_rows, 2, 3, dtype=torch.bfloat16)})
    rows = {"a": torch.tensor([1, 5]), "b": torch.tensor([7])}
    with RecordNewBytes(set(pointers(base).values())) as record:
        handle = base
        for _ in range(12):
            with handle.write(rows) as write:
                write.tensors["a"][1].fill_(1)
            handle = write.handle
        with base.write(rows) as write:
            pass
        with suppress(RuntimeError), handle.write(rows):
            raise RuntimeError
        with handle.read() as tensors:
            tensors["a"].select(0, 0)
        base.rows("b", rows["b"])
        write.handle.rows("a", rows["a"])
    return record.made


def test_cost_does_not_depend_on_the_size_of_a_buffer() -> None:
    """The same history runs the same operators with the same bytes on small and on large buffers: no full copy."""
    small, large = recorded_history(16), recorded_history(4096)
    assert small == large
    assert max(made for _, made in large) <= 2 * 64 + 1
    assert any("index_select" in name for name, _ in large)


@given(st.sampled_from([torch.bfloat16, torch.float16, torch.float8_e5m2, torch.bool, torch.uint16, torch.int64]))
@settings(max_examples=12, deadline=None)
def test_every_dtype_and_layout_works(dtype: torch.dtype) -> None:
    """Buffers may have any dtype and strides, also those for which torch has no indexed copy."""
    buffer = torch.zeros(3, 5, dtype=torch.float32).to(dtype).t()
    base = create_handle({"x": buffer})
    with base.write({"x": torch.tensor([4, 0])}) as write:
        write.tensors["x"][4].copy_(torch.ones(3).to(dtype))
    assert base.rows("x", torch.tensor([4])).float().tolist() == [[0, 0, 0]]
    assert write.handle.rows("x", torch.tensor([4])).float().tolist() == [[1, 1, 1]]
    assert pointers(base) == {"x": buffer.data_ptr()}


# ---- the value itself ---------------------------------------------------------------------------------------------


def test_handle_is_one_opaque_leaf() -> None:
    """A handle is one leaf of any pytree and passes through tree_map by identity."""
    handle = counter(2)
    tree = {"pool": handle, "length": 3}
    assert pytree.tree_leaves(tree) == [handle, 3]
    assert pytree.tree_map(lambda leaf: leaf, tree)["pool"] is handle


def test_handle_is_an_immutable_value_compared_by_identity() -> None:
    """A handle cannot be changed, a shallow copy is itself, and only itself is equal to it."""
    handle = counter(2)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        handle._node = None
    assert copy.copy(handle) is handle
    assert handle != copy.deepcopy(handle)
    assert len({handle, copy.copy(handle)}) == 1
    assert repr(handle) == "Handle(x)"


def test_write_from_the_same_version_twice_gives_the_same_bytes() -> None:
    """Stepping a held version again after other steps gives identical bytes and leaves both results intact."""
    base = create_handle(make_tensors())
    rows: Rows = {"ids": [1, 2], "kv": [3]}
    first = step(base, rows, 1)
    step(step(first, {"ids": [1, 5]}, 2), {"kv": [3]}, 3)
    second = step(base, rows, 1)
    assert first is not second
    assert same(snapshot_at(first), snapshot_at(second))


def test_rows_are_kept_as_they_were_announced() -> None:
    """Changing the row tensor after the write has begun does not change what is restored."""
    base, rows = counter(4), torch.tensor([1])
    with base.write({"x": rows}) as write:
        write.tensors["x"][1] = 5
        rows.fill_(2)
    assert base.rows("x", torch.arange(4)).tolist() == [0, 0, 0, 0]
    assert write.handle.rows("x", torch.arange(4)).tolist() == [0, 5, 0, 0]


def test_rows_returns_a_clone() -> None:
    """What ``rows`` returns belongs to the caller."""
    base = counter(4)
    base.rows("x", torch.arange(4)).fill_(9)
    assert base.rows("x", torch.arange(4)).tolist() == [0, 0, 0, 0]


def test_sizes_and_specs_need_no_lock() -> None:
    """Names, specs and byte counts are there while a write is running, also from another thread."""
    handle = create_handle(make_tensors())
    seen: list[Any] = []
    with handle.write({}):
        look = threading.Thread(target=lambda: seen.extend([handle.names, handle.nbytes, handle.spec("kv")]))
        look.start()
        look.join(5)
    assert seen == [("ids", "kv", "fp8"), 48 + 40 + 12, (torch.Size([5, 2]), torch.float32, torch.device("cpu"))]


def test_buffers_stay_plain_tensors() -> None:
    """Gradients never reach a buffer, and callers may run steps under inference_mode and leave it again."""
    weight = torch.ones(2, requires_grad=True)
    base = create_handle({"x": weight * 0})
    with base.write({"x": torch.tensor([0])}) as write:
        write.tensors["x"].index_copy_(0, torch.tensor([0]), weight[:1] * 2)
    with write.handle.read() as tensors:
        assert not tensors["x"].requires_grad
        assert tensors["x"].is_leaf
    normal = torch.zeros(2)
    with torch.inference_mode():
        made = create_handle({"x": normal})
        newest = put(write.handle, 1, 3)
        copied = copy.deepcopy(base)
        assert copied.rows("x", torch.arange(2)).tolist() == [0, 0]
    assert base.rows("x", torch.arange(2)).tolist() == [0, 0]
    assert put(newest, 0, 4).rows("x", torch.arange(2)).tolist() == [4, 3]
    assert put(copied, 0, 4).rows("x", torch.arange(2)).tolist() == [4, 0]
    assert put(put(made, 0, 4), 0, 5).rows("x", torch.arange(2)).tolist() == [5, 0]
    assert made.rows("x", torch.arange(2)).tolist() == [0, 0]
    assert torch.is_grad_enabled()


def test_written_handle_exists_only_after_a_clean_exit() -> None:
    """Asking for the new version before the body has ended says what is wrong."""
    with counter(2).write({}) as write, pytest.raises(StateBusyError, match=r"Write\.handle"):
        _ = write.handle
    assert isinstance(write.handle, Handle)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ({"y": torch.tensor([0])}, ShapeError, r"expected one of x, got 'y'"),
        ({"x": torch.tensor([[0]])}, ShapeError, r"expected i64\[n\]"),
        ({"x": torch.tensor([0], dtype=torch.int32)}, DtypeError, r"expected i64\[n\]"),
        ({"x": [0]}, DtypeError, r"expected i64\[n\]"),
        ({"x": torch.tensor([4])}, ShapeError, r"0 <= row < 4"),
        ({"x": torch.tensor([-1])}, ShapeError, r"0 <= row < 4"),
    ],
    ids=["name", "rank", "dtype", "list", "too large", "negative"],
)
def test_bad_rows_are_refused_before_anything_changes(rows: Any, error: type[Exception], message: str) -> None:
    """Wrong names, types and numbers of rows raise an error that says what was expected, for write and for rows."""
    base = counter(4)
    with pytest.raises(error, match=message), base.write(rows):
        pass
    ((name, numbers),) = rows.items()
    with pytest.raises(error, match=message):
        base.rows(name, numbers)
    assert put(base, 0, 1).rows("x", torch.arange(4)).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("tensor", "error"),
    [(torch.tensor(1.0), ShapeError), ([1.0], DtypeError)],
    ids=["no rows", "no tensor"],
)
def test_create_handle_refuses_what_cannot_be_a_buffer(tensor: Any, error: type[Exception]) -> None:
    """A buffer is a tensor with rows."""
    with pytest.raises(error, match="create_handle"):
        create_handle({"x": tensor})


def test_create_handle_refuses_inference_tensors() -> None:
    """A tensor that torch would later refuse to write in place is refused at once."""
    with torch.inference_mode():
        tensor = torch.zeros(2)
    with pytest.raises(DtypeError, match="inference"):
        create_handle({"x": tensor})
