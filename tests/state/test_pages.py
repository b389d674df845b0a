"""Free lists and slot rules against plain Python lists and the worked numbers of the paged allocator."""

from __future__ import annotations

import copy
import gc
import pickle
import tracemalloc

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from purestep.state.errors import CapacityError, ConfigError, ShapeError
from purestep.state.pages import (
    FreeList,
    c128_pages,
    c128_pages_needed,
    c128_slot,
    c128_slots,
    decode_slots,
    extend_slots,
    groups,
    pages_needed,
)
from torch.utils import _pytree as pytree

PAGE_SIZES = st.sampled_from([1, 2, 4, 8])


class FreeListMachine(RuleBasedStateMachine):
    """Takes and gives pages beside a plain list, and goes back to older versions."""

    def __init__(self):
        super().__init__()
        self.free, self.model, self.out = FreeList.full(12), list(range(1, 13)), []
        self.versions = []

    @rule(n=st.integers(0, 5))
    def take(self, n):
        if n > len(self.model):
            with pytest.raises(CapacityError):
                self.free.take(n)
            return
        self.free, pages = self.free.take(n)
        assert list(pages) == self.model[:n]
        self.model, self.out = self.model[n:], self.out + list(pages)

    @precondition(lambda self: self.out)
    @rule(data=st.data())
    def give(self, data):
        pages = data.draw(st.lists(st.sampled_from(self.out), unique=True))
        self.free = self.free.give(pages)
        self.model = pages[::-1] + self.model
        self.out = [page for page in self.out if page not in pages]

    @rule()
    def hold(self):
        self.versions.append((self.free, list(self.model), list(self.out)))

    @precondition(lambda self: self.versions)
    @rule(data=st.data())
    def go_back(self, data):
        self.free, model, out = data.draw(st.sampled_from(self.versions))
        self.model, self.out = list(model), list(out)

    @invariant()
    def lists_agree(self):
        for free, model, out in [*self.versions, (self.free, self.model, self.out)]:
            pages = list(free)
            assert pages == model
            assert len(free) == len(model)
            assert 0 not in free
            assert sorted(pages + out) == list(range(1, 13))


TestFreeList = FreeListMachine.TestCase
TestFreeList.settings = settings(max_examples=60, stateful_step_count=25)


@given(n_pages=st.integers(0, 20), data=st.data())
def test_free_list_gives_back_as_many_as_were_freed(n_pages, data):
    """A19, A12: freed pages can be taken again at once, newest first, and no page appears twice."""
    free, taken = FreeList.full(n_pages).take(data.draw(st.integers(0, n_pages)))
    back = data.draw(st.permutations(taken)) if taken else ()
    again, pages = free.give(back).take(len(back))
    assert pages == tuple(reversed(back))
    assert tuple(again) == tuple(free)
    assert len(set(free.give(back))) == n_pages


@given(first=st.sets(st.integers(1, 9)), second=st.sets(st.integers(10, 20)))
def test_free_list_giving_together_is_giving_one_after_the_other(first, second):
    """One call with several pages leaves the same order as one call for each."""
    free, _ = FreeList.full(20).take(20)
    first, second = tuple(first), tuple(second)
    assert tuple(free.give(first + second)) == tuple(free.give(first).give(second)) == (first + second)[::-1]


def test_free_list_shortage_names_pool_needed_and_free():
    """A shortage changes nothing and says which pool, how many were needed and how many are free."""
    free, _ = FreeList.full(5, pool="C128").take(2)
    with pytest.raises(CapacityError, match=r"pool 'C128': needed 4, free 3; ") as caught:
        free.take(4)
    assert (caught.value.field, caught.value.expected, caught.value.got) == ("C128", 4, 3)
    assert tuple(free) == (3, 4, 5)


@pytest.mark.parametrize("pages", [(4,), (0,), (1, 1), (1, 2, 3)], ids=["fresh", "sink", "twice", "too many"])
def test_free_list_refuses_pages_that_are_not_out(pages):
    """A page that was never handed out, the sink, or a page that is back already cannot be given."""
    free, _ = FreeList.full(9).take(3)
    with pytest.raises(AssertionError, match="pool 'pages'"):
        free.give((3,)).give(pages)


def test_free_list_of_negative_size_is_refused():
    """A pool cannot have fewer than no pages."""
    with pytest.raises(ConfigError, match="expected n_pages >= 0, got -1"):
        FreeList.full(-1, pool="rows")


def test_free_list_costs_nothing_for_pages_it_does_not_move():
    """Making, taking from and giving to a list of a million pages allocates a few hundred bytes, not a copy."""
    free = FreeList.full(1_000_000)
    free, taken = free.take(500_000)
    free = free.give(taken)
    gc.collect()
    tracemalloc.start()
    for _ in range(100):
        free, pages = free.take(3)
        free = free.give(pages)
    FreeList.full(10**9)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000


def test_free_list_with_many_freed_pages_never_recurses():
    """200,000 freed pages are pickled, copied, walked, shown, treated as one leaf and destroyed without recursion."""
    n = 200_000
    free, pages = FreeList.full(n + 5).take(n)
    free = free.give(pages)
    loaded = pickle.loads(pickle.dumps(free))
    assert len(loaded) == n + 5
    assert tuple(loaded) == tuple(free)
    assert loaded.take(n + 5)[1] == free.take(n + 5)[1]
    assert copy.deepcopy(free) is free
    assert copy.copy(free) is free
    assert repr(free) == f"FreeList(pool='pages', n_pages={n + 5}, free={n + 5})"
    assert pytree.tree_leaves({"free": free}) == [free]
    del free, loaded
    gc.collect()


@given(free_pages=st.integers(0, 6))
def test_free_list_survives_pickling_at_every_split(free_pages):
    """A list that is part returned, part never handed out comes back from a pickle with the same order and name."""
    free, pages = FreeList.full(6, pool="swa").take(free_pages)
    free = free.give(pages[::2])
    loaded = pickle.loads(pickle.dumps(free))
    assert (tuple(loaded), loaded.pool) == (tuple(free), "swa")


def _with_pages(n_pages, pages):
    """Build a list whose first pages are ``pages``, by taking all and giving back."""
    free, taken = FreeList.full(n_pages).take(n_pages)
    rest = [page for page in taken if page not in pages]
    return free.give(reversed([*pages, *rest]))


@st.composite
def _batches(draw, page_size):
    """Rows as (prefix, total, pages held) and a free list that does not hold these pages."""
    rows = draw(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=5))
    rows = [(prefix, prefix + extra) for prefix, extra in rows]
    n_pages = sum(-(-total // page_size) for _, total in rows) + draw(st.integers(0, 3))
    order = draw(st.permutations(range(1, n_pages + 1)))
    free, _ = FreeList.full(n_pages).take(n_pages)
    tables, start = [], 0
    for prefix, _ in rows:
        held = -(-prefix // page_size)
        tables.append(order[start : start + held])
        start += held
    return free.give(order[start:]), rows, tables


def _last_loc(table, prefix, page_size):
    return table[(prefix - 1) // page_size] * page_size + (prefix - 1) % page_size if prefix else -1


def _naive(free, rows, tables, page_size):
    """Allocate token by token on plain lists."""
    free, tables, slots = list(free), [list(table) for table in tables], []
    for (prefix, total), table in zip(rows, tables, strict=True):
        own = []
        for position in range(prefix, total):
            if position % page_size == 0:
                table.append(free.pop(0))
            own.append(table[-1] * page_size + position % page_size)
        slots.append(own)
    return free, slots, tables


@given(data=st.data(), page_size=PAGE_SIZES)
def test_extend_is_the_token_by_token_rule(data, page_size):
    """A08, A09, A12, E05: slots, opened pages and the rest of the list equal a loop over tokens on plain lists."""
    free, rows, tables = data.draw(_batches(page_size))
    before = list(free)
    last = [_last_loc(table, prefix, page_size) for table, (prefix, _) in zip(tables, rows, strict=True)]
    after, slots, opened = extend_slots(free, [p for p, _ in rows], [s for _, s in rows], last, page_size)
    naive_free, naive_slots, naive_tables = _naive(free, rows, tables, page_size)
    assert slots.tolist() == [slot for row in naive_slots for slot in row]
    assert slots.dtype == np.int64
    assert [list(held) + list(new) for held, new in zip(tables, opened, strict=True)] == naive_tables
    assert list(after) == naive_free == before[sum(map(len, opened)) :]
    assert list(free) == before
    assert [len(new) for new in opened] == [pages_needed(prefix, total, page_size) for prefix, total in rows]
    assert len(set(slots.tolist())) == len(slots)
    assert all(slot >= page_size for slot in slots.tolist())


@given(data=st.data(), page_size=PAGE_SIZES)
def test_decode_is_extend_by_one(data, page_size):
    """A17, A08, A09: decode gives what extend gives with prefix L and total L + 1, list included."""
    free, rows, tables = data.draw(_batches(page_size))
    lens = [prefix for prefix, _ in rows]
    last = [_last_loc(table, length, page_size) for table, length in zip(tables, lens, strict=True)]
    needed = sum(length % page_size == 0 for length in lens)
    if needed > len(free):
        for attempt in (
            lambda: decode_slots(free, lens, last, page_size),
            lambda: extend_slots(free, lens, [n + 1 for n in lens], last, page_size),
        ):
            with pytest.raises(CapacityError, match=f"needed {needed}, free {len(free)}"):
                attempt()
        return
    before = list(free)
    after, slots = decode_slots(free, lens, last, page_size)
    extended, extended_slots, opened = extend_slots(free, lens, [n + 1 for n in lens], last, page_size)
    assert slots.tolist() == extended_slots.tolist()
    assert slots.dtype == np.int64
    assert list(after) == list(extended) == before[needed:]
    heads = [slot // page_size for slot, length in zip(slots.tolist(), lens, strict=True) if length % page_size == 0]
    assert heads == before[:needed] == [page for row in opened for page in row]
    assert all(slot % page_size == length % page_size for slot, length in zip(slots.tolist(), lens, strict=True))


@given(data=st.data(), page_size=PAGE_SIZES)
def test_extend_in_chunks_is_extend_at_once(data, page_size):
    """A single row gets the same slots whether it grows at once or in two chunks."""
    prefix, middle, total = sorted(data.draw(st.tuples(*[st.integers(0, 40)] * 3)))
    table = tuple(range(1, 1 + -(-prefix // page_size)))
    free, _ = FreeList.full(60).take(len(table))
    last = _last_loc(table, prefix, page_size)
    once_free, once, (new,) = extend_slots(free, [prefix], [total], [last], page_size)
    free, one, (a,) = extend_slots(free, [prefix], [middle], [last], page_size)
    last = _last_loc(table + a, middle, page_size)
    free, two, (b,) = extend_slots(free, [middle], [total], [last], page_size)
    assert np.concatenate((one, two)).tolist() == once.tolist()
    assert a + b == new
    assert list(free) == list(once_free)


def test_decode_worked_example():
    """Rows of length 10, 7, 20 with pages of 4 write slots 14, 23, 44, and only the third opens a page."""
    free, _ = FreeList.full(13).take(10)
    after, slots = decode_slots(free, [10, 7, 20], [13, 22, 43], 4)
    assert slots.tolist() == [14, 23, 44]
    assert list(free) == [11, 12, 13]
    assert list(after) == [12, 13]


def test_extend_worked_examples():
    """The worked extends: a tail, a whole page and a head; and two rows that share a list."""
    free, slots, opened = extend_slots(_with_pages(12, [9, 10, 11]), [6], [13], [21], 4)
    assert slots.tolist() == [22, 23, 36, 37, 38, 39, 40]
    assert opened == ((9, 10),)
    assert next(iter(free)) == 11
    free, slots, opened = extend_slots(_with_pages(12, [9, 10, 11, 12]), [0, 8], [6, 13], [-1, 27], 4)
    assert slots.tolist() == [36, 37, 38, 39, 40, 41, 44, 45, 46, 47, 48]
    assert opened == ((9, 10), (11, 12))


def test_long_extend_is_exact_beyond_int32():
    """A million positions on pages whose slots exceed int32 come out in order, in int64."""
    first = 2**31 // 128
    free = attrs.evolve(FreeList.full(first + 10_000), fresh=first + 1)
    _, slots, (opened,) = extend_slots(free, [0], [1_000_000], [-1], 128)
    assert opened[0] == first + 1
    assert int(slots[0]) == (first + 1) * 128 > 2**31
    assert np.array_equal(slots, slots[0] + np.arange(1_000_000))


def test_empty_batch_allocates_nothing():
    """No rows: no slots, and the list as it was."""
    free = FreeList.full(3)
    after, slots = decode_slots(free, [], [], 4)
    assert (list(after), slots.tolist(), slots.dtype) == ([1, 2, 3], [], np.dtype(np.int64))
    after, slots, opened = extend_slots(free, [], [], [], 4)
    assert (list(after), slots.tolist(), opened) == ([1, 2, 3], [], ())


def test_slot_rules_refuse_broken_input():
    """Rows that disagree in number, a page size of 0, and a last slot at another offset than its position."""
    free = FreeList.full(3)
    with pytest.raises(ShapeError, match=r"each of lens, last_locs"):
        decode_slots(free, [1, 2], [4], 4)
    with pytest.raises(ShapeError, match=r"each of prefix_lens, seq_lens, pages"):
        c128_slots(free, [0], [1], [])
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        decode_slots(free, [1], [4], 0)
    with pytest.raises(AssertionError, match="not the slots before"):
        decode_slots(free, [2], [4], 4)
    with pytest.raises(AssertionError, match="below prefix_lens"):
        extend_slots(free, [2], [1], [5], 4)


@pytest.mark.parametrize(
    ("length", "closes", "opens", "slot"),
    [
        (126, False, False, None),
        (127, True, True, 16),
        (255, True, False, 17),
        (2047, True, False, 31),
        (2175, True, True, 112),
    ],
)
def test_c128_worked_table(length, closes, opens, slot):
    """One decode step closes and opens exactly as tabled, when the row's pages are 1 and then 7."""
    held = [1, 7][: c128_pages(length)]
    free = _with_pages(8, [7] if held else [1])
    after, slots, (opened,) = c128_slots(free, [length], [length + 1], [held])
    assert slots.tolist() == ([slot] if closes else [])
    assert opened == ((7 if held else 1,) if opens else ())
    assert len(free) - len(after) == opens == c128_pages_needed(length, length + 1)


def test_c128_worked_extends():
    """0 to 5000 closes 39 entries on 3 pages; 4096 to 5000 closes 7 on one more."""
    _, slots, (opened,) = c128_slots(FreeList.full(9), [0], [5000], [()])
    assert (len(slots), opened, groups(5000), c128_pages(5000)) == (39, (1, 2, 3), 39, 3)
    assert slots.tolist() == list(range(16, 55))
    _, slots, (opened,) = c128_slots(_with_pages(9, [5]), [4096], [5000], [(1, 2, 0)])
    assert (len(slots), opened) == (7, (5,))


def test_c128_page_opens_at_128_of_every_2048():
    """A decode step opens a C128 page exactly when the new length is 128 modulo 2048."""
    for length in range(1, 6000):
        assert (c128_pages_needed(length - 1, length) == 1) == (length % 2048 == 128)


@given(prefix=st.integers(0, 6000), extra=st.integers(0, 6000), order=st.permutations(range(1, 9)))
def test_c128_slots_are_the_sidecar_formula(prefix, extra, order):
    """E05: every new entry lies at the slot that the row's pages name, and no shared page is written behind them."""
    held, total = order[: c128_pages(prefix)], prefix + extra
    free, _ = FreeList.full(8).take(8)
    free = free.give(reversed(order[len(held) :]))
    after, slots, (opened,) = c128_slots(free, [prefix], [total], [held])
    pages = [*held, *opened]
    assert slots.tolist() == [c128_slot(pages, group) for group in range(groups(prefix), groups(total))]
    assert len(pages) == c128_pages(total)
    assert list(after) == order[len(pages) :]


def test_c128_slot_of_a_page_not_held_is_refused():
    """A zero column of the sidecar is no page: its entries have no slot."""
    with pytest.raises(AssertionError, match="does not hold"):
        c128_slot((3, 0), 16)
