"""The tables that kernels read by: the worked numbers of decode-path 4.7, and the same slots as the plain metadata."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.models import tiny_model
from kit.steps import ENDLESS, bookkeep_decode, bookkeep_extend, examples, fresh, ids_of
from purestep.state.batch import CacheLocs, ForwardMode, ScheduleBatch
from purestep.state.capacity import PoolSizes
from purestep.state.errors import ConfigError
from purestep.state.kv import CacheForm, KVLayout
from purestep.state.paged_tables import AscendTables
from purestep.state.table import read_table
from purestep.step.ascend import ascend_metadata, ascend_tables
from purestep.step.metadata import attention_metadata, token_positions

CPU = torch.device("cpu")
MODEL = tiny_model()


def listed(tables: Any, name: str) -> Any:
    """One table as lists."""
    return getattr(tables, name).tolist()


def worked(*, bucket: int | None = None, form: CacheForm = "plain") -> AscendTables:
    """Tables of the worked example: rows A, B, C of lengths 10, 7, 20 before the step."""
    sizes = PoolSizes(page_size=128, requests=4, context=256, pages=4, swa_pages=5, c128_pages=4)
    layout = KVLayout.of(MODEL.config, attrs.evolve(sizes, requests=5))
    layout = attrs.evolve(layout, sizes=sizes, form=form)
    pages, windows = {1: 1, 2: 2, 3: 3}, {1: 3, 2: 1, 3: 2}
    table = np.zeros((5, 256), np.int64)
    full_to_swa = np.zeros(5 * 128 + 1, np.int64)
    for row, page in pages.items():
        table[row, :128] = page * 128 + np.arange(128)
        full_to_swa[page * 128 : page * 128 + 128] = windows[row] * 128 + np.arange(128)
    tables = {"req_to_token": table.reshape(-1), "full_to_swa": full_to_swa, "sidecar": np.zeros(5, np.int64)}
    locs = CacheLocs(
        out_full_loc=np.array([138, 263, 404]),
        out_swa_loc=np.array([394, 135, 276]),
        out_c4_loc=np.array([65]),
        out_c128_loc=np.empty(0, np.int64),
    )
    batch = schedule(rows=[1, 2, 3], prefix=[10, 7, 20], seq=[11, 8, 21], locs=locs)
    return ascend_tables(batch, tables, layout, CPU, bucket=bucket)


def schedule(*, rows: list[int], prefix: list[int], seq: list[int], locs: CacheLocs) -> ScheduleBatch:
    """A prepared step by its numbers."""
    return ScheduleBatch(
        forward_mode=ForwardMode.DECODE,
        request_ids=tuple(range(len(rows))),
        req_pool_indices=np.array(rows),
        prefix_lens=np.array(prefix),
        seq_lens=np.array(seq),
        orig_seq_lens=np.array(seq),
        seq_lens_sum=sum(seq),
        input_ids=None,
        sample_rows=np.arange(len(rows)),
        out_cache_loc=locs.out_full_loc,
        out_cache_loc_dsv4=locs,
    )


def test_worked_example() -> None:
    """Every number of decode-path 4.7: pages, dense lists, rope positions, state rows with their dummy."""
    t = worked()
    assert listed(t, "window_table") == [[3], [1], [2]]
    assert listed(t, "c4_table") == [[1], [2], [3]]
    assert listed(t, "c128_table") == [[0], [0], [0]]
    assert listed(t, "query_starts") == [0, 1, 2, 3]
    assert listed(t, "query_ends") == [1, 2, 3]
    assert listed(t, "key_lens") == [11, 8, 21]
    assert listed(t, "start_pos") == [10, 7, 20]
    assert listed(t, "used") == [1, 1, 1]
    c4, c128 = t.compressors[4], t.compressors[128]
    assert listed(c4, "loc") == [65, 0, 0]
    assert listed(c4, "first_pos") == [4, 0, 0]
    assert listed(c128, "loc") == [0, 0, 0]
    dummy = 55  # 5 window pages of 8 rows: 49 rounded up to 56, the last one
    assert listed(c4, "state_table") == [
        [26, 27, 28, 29, 30, 31, 24, 25, 26],
        [dummy, 8, 9, 10, 11, 12, 13, 14, 15],
        [20, 21, 22, 23, 16, 17, 18, 19, 20],
    ]
    assert c128.state_table.shape == (3, 129)
    assert c128.state_table[:, -1].tolist() == [138, 263, 404]
    assert (c128.state_table[0, : 128 - 10] == c128.state_table.max()).all()
    assert c128.state_table[0, 128 - 10 :].tolist() == [*range(128, 139)]


def test_worked_example_padded_to_a_bucket() -> None:
    """B08: idle rows feed nothing, write to the sinks, and keep only dummies; tables are as wide as the context."""
    t, plain = worked(bucket=5), worked()
    assert listed(t, "query_starts") == [0, 1, 2, 3, 4, 5]
    assert listed(t, "query_ends") == [1, 2, 3, 4, 5]
    assert listed(t, "key_lens") == [11, 8, 21, 1, 1]
    assert listed(t, "start_pos") == [10, 7, 20, 0, 0]
    assert listed(t, "used") == [1, 1, 1, 0, 0]
    assert listed(t, "live") == [1, 1, 1, 0, 0]
    assert listed(t, "window_table") == [[3, 0], [1, 0], [2, 0], [0, 0], [0, 0]]
    assert listed(t.compressors[4], "loc") == [65, 0, 0, 0, 0]
    assert listed(t.compressors[4], "first_pos") == [4, 0, 0, 0, 0]
    assert torch.equal(t.compressors[4].state_table[:3], plain.compressors[4].state_table)
    assert set(t.compressors[4].state_table[3:].flatten().tolist()) == {55}


def test_worked_example_on_the_a5() -> None:
    """Banks instead of rows of state: the window pages for C4, the rows of the request table for C128; idle rows 0."""
    t = worked(form="packed")
    assert listed(t.compressors[4], "state_table") == [3, 1, 2]
    assert listed(t.compressors[128], "state_table") == [1, 2, 3]
    for own in t.compressors.values():
        assert own.ring == 0
        for name in ("carried", "carried_to", "saved", "saved_loc", "rest"):
            assert listed(own, name) == []
    padded = worked(bucket=5, form="packed")
    assert listed(padded.compressors[4], "state_table") == [3, 1, 2, 0, 0]
    assert listed(padded.compressors[128], "state_table") == [1, 2, 3, 0, 0]
    # A fixed number of places: from the dummy to itself, where nothing is carried.
    assert listed(padded.compressors[4], "carried") == listed(padded.compressors[4], "carried_to") == [55] * 20


def one_row(prefix: int, seq: int) -> AscendTables:
    """Tables of one request on row 1 whose pages 1, 2, 3 have the window pages 4, 2, 3, on the A5."""
    sizes = PoolSizes(page_size=128, requests=4, context=384, pages=4, swa_pages=5, c128_pages=4)
    layout = attrs.evolve(KVLayout.of(MODEL.config, sizes), form="packed")
    table, full_to_swa = np.zeros((5, 384), np.int64), np.zeros(5 * 128 + 1, np.int64)
    for place, window in enumerate((4, 2, 3)):
        table[1, place * 128 : place * 128 + 128] = (place + 1) * 128 + np.arange(128)
        full_to_swa[(place + 1) * 128 : (place + 2) * 128] = window * 128 + np.arange(128)
    tables = {"req_to_token": table.reshape(-1), "full_to_swa": full_to_swa, "sidecar": np.ones(5, np.int64)}
    slots = table[1, prefix:seq]
    locs = CacheLocs(
        out_full_loc=slots,
        out_swa_loc=full_to_swa[slots],
        out_c4_loc=slots[slots % 4 == 3] // 4,
        out_c128_loc=slots[slots % 128 == 127] // 128,
    )
    return ascend_tables(schedule(rows=[1], prefix=[prefix], seq=[seq], locs=locs), tables, layout, CPU)


@pytest.mark.parametrize("position", [127, 128, 130, 131, 132, 135])
def test_what_a_page_needs_of_the_one_before(position: int) -> None:
    """Only the token that closes a page's first group brings the group before it: rows 4 to 7 of the page before."""
    own = one_row(position, position + 1).compressors[4]
    assert listed(own, "state_table") == [4 if position < 128 else 2]
    carried = [[36, 37, 38, 39], [20, 21, 22, 23]] if position == 131 else [[], []]
    assert [listed(own, "carried"), listed(own, "carried_to")] == carried


def test_rings_of_a_step() -> None:
    """A chunk has a ring with a row for all its positions; what closes comes from the caches and goes back there."""
    t = one_row(126, 270)
    c4, c128 = t.compressors[4], t.compressors[128]
    assert (c4.ring, c128.ring) == (8 + 143, 128 + 143)
    assert listed(c4, "state_table") == listed(c128, "state_table") == [1]
    # Positions 120..125 in window page 4; the chunk ends at 270: groups from 264 on are kept, in window page 3.
    assert listed(c4, "carried") == [32 + p % 8 for p in range(120, 126)]
    assert listed(c4, "carried_to") == [c4.ring + p for p in range(120, 126)]
    assert listed(c4, "saved") == [c4.ring + p % c4.ring for p in range(264, 270)]
    assert listed(c4, "saved_loc") == [24 + p % 8 for p in range(264, 270)]
    # The last groups of the pages that the chunk leaves behind, as tokens of the chunk; 124 and 125 came before it.
    assert listed(c4, "rest") == [0, 1, 126, 127, 128, 129]
    assert listed(c4, "rest_loc") == [38, 39, 20, 21, 22, 23]
    assert listed(c128, "carried") == [128 + p for p in range(126)]
    assert listed(c128, "saved_loc") == [128 + p % 128 for p in range(256, 270)]


def test_types_of_the_tables() -> None:
    """Tables, lengths and lists are int32 and contiguous; what a gather or scatter takes is int64."""
    t = worked(bucket=5)
    wide = {"first_pos", "rest", "rest_loc", "carried", "carried_to", "saved", "saved_loc"}
    for part in (t, *t.compressors.values()):
        for field in attrs.fields(type(part)):
            x = getattr(part, field.name)
            if isinstance(x, torch.Tensor) and field.name != "live":
                assert x.dtype is (torch.int64 if field.name in wide else torch.int32), field.name
                assert x.is_contiguous(), field.name


@pytest.mark.parametrize("page", [29077, 1 << 20])
def test_large_pages_do_not_wrap(page: int) -> None:
    """ASC-01: pages far out in the pools give the numbers that unbounded integers give, whatever their stride."""
    sizes = PoolSizes(page_size=128, requests=1, context=128, pages=page, swa_pages=page, c128_pages=page)
    slots = page * 128 + np.arange(128)
    full_to_swa = _Sparse({int(s): int(s) for s in slots})
    tables: Mapping[str, Any] = {
        "req_to_token": np.concatenate((np.zeros(128, np.int32), slots.astype(np.int32))),
        "full_to_swa": full_to_swa,
        "sidecar": np.array([0, page], np.int32),
    }
    locs = CacheLocs(
        out_full_loc=slots[127:],
        out_swa_loc=slots[127:],
        out_c4_loc=slots[127:] // 4,
        out_c128_loc=np.array([page * 16]),
    )
    batch = schedule(rows=[1], prefix=[127], seq=[128], locs=locs)
    t = ascend_tables(batch, tables, KVLayout.of(MODEL.config, sizes), CPU)
    assert listed(t, "window_table") == listed(t, "c4_table") == listed(t, "c128_table") == [[page]]
    assert listed(t.compressors[4], "loc") == [page * 32 + 31]
    assert listed(t.compressors[128], "loc") == [page * 16]
    assert t.compressors[4].state_table[0].tolist() == [page * 8 + q % 8 for q in range(119, 128)]


class _Sparse:
    """An array that holds few of its numbers."""

    def __init__(self, numbers: dict[int, int]) -> None:
        self.numbers = numbers

    def __getitem__(self, at: Any) -> Any:
        return np.vectorize(lambda i: self.numbers.get(int(i), 0), otypes=[np.int64])(at)


@st.composite
def prepared(draw: st.DrawFn, *, decode: bool = False) -> tuple[ps.DecodeState, ScheduleBatch]:
    """A state with a history, and the step that comes next."""
    page_size = draw(st.sampled_from([8, 16, 64]))
    state = fresh(MODEL, 3, page_size=page_size)
    lengths = draw(st.lists(st.sampled_from([1, 3, 4, 9, 64, 127, 128, 130]), min_size=1, max_size=3))
    chunks = {}
    for n in lengths:
        state, i = ps.open_request(state, ENDLESS)
        chunks[i] = ids_of(n)
    state, _ = bookkeep_extend(state, chunks)
    for _ in range(draw(st.integers(0, 9))):
        state, _ = bookkeep_decode(state)
    order = draw(st.permutations(sorted(chunks)))
    if decode:
        return ps.prepare_decode(state, only=order)
    return ps.prepare_extend(state, {i: ids_of(draw(st.sampled_from([0, 1, 3, 130]))) for i in order})


@examples(25)
@given(step=prepared())
def test_tables_lead_to_the_same_slots(step: tuple[ps.DecodeState, ScheduleBatch]) -> None:
    """Through pages, every visible position has the window slot and the entries that the plain tables give it."""
    state, batch = step
    layout, size = state.kv.layout, state.kv.layout.sizes.page_size
    with read_table(state.table) as tables:
        meta = ascend_metadata(batch, tables, layout, CPU)
        tokens = token_positions(batch)
        plain = attention_metadata(batch, tokens, tables, layout, MODEL.config.sliding_window, CPU)
        t = meta.tables
        assert torch.equal(meta.swa_loc, plain.swa_loc)
        for line, (row, seq, prefix) in enumerate(
            zip(batch.req_pool_indices, batch.seq_lens, batch.prefix_lens, strict=True)
        ):
            q = np.arange(max(0, prefix - MODEL.config.sliding_window + 1), seq)
            full = tables["req_to_token"][row * layout.sizes.context + q]
            window = t.window_table[line].numpy()[q // size] * size + q % size
            assert (window == tables["full_to_swa"][full]).all()
            ends = np.arange(3, seq, 4)
            full = tables["req_to_token"][row * layout.sizes.context + ends]
            entry = np.arange(seq // 4)
            c4_page = layout.sizes.c4_page
            assert (t.c4_table[line].numpy()[entry // c4_page] * c4_page + entry % c4_page == full // 4).all()
            groups = np.arange(seq // 128)
            sidecar = tables["sidecar"][row * layout.sizes.sidecar_width + groups // 16]
            assert (t.c128_table[line].numpy()[groups // 16] == sidecar).all()


@examples(25)
@given(step=prepared())
def test_dense_lists_and_state_rows(step: tuple[ps.DecodeState, ScheduleBatch]) -> None:
    """Dense lists begin with the plain metadata's and end in zeros; state rows are the plain ones, or the dummy."""
    state, batch = step
    layout, n_tokens = state.kv.layout, int(batch.extend_lens.sum())
    with read_table(state.table) as tables:
        meta = ascend_metadata(batch, tables, layout, CPU)
        for ratio, plan in meta.compressors.items():
            t = meta.tables.compressors[ratio]
            size = min(n_tokens, n_tokens // ratio + len(batch.request_ids))
            n = len(plan.out_loc)
            assert t.loc.shape == t.first_pos.shape == (size,)
            assert torch.equal(t.loc[:n].long(), plan.out_loc)
            assert not t.loc[n:].any()
            assert torch.equal(t.first_pos[:n], plan.first_pos)
            reach = 8 if ratio == 4 else 128
            assert t.state_table.shape == (len(batch.request_ids), reach + int(batch.extend_lens.max()))
            dummy = layout.dummy("c4_state" if ratio == 4 else "c128_state")
            written = dict(zip(plan.keep.tolist(), plan.state_loc.tolist(), strict=True))
            token = 0
            for line, (prefix, seq) in enumerate(zip(batch.prefix_lens, batch.seq_lens, strict=True)):
                rows = t.state_table[line].tolist()
                for column, row in enumerate(rows):
                    assert (row == dummy) == (not 0 <= prefix - reach + column < seq)
                for position in range(prefix, seq):
                    if token in written:
                        assert rows[position - prefix + reach] == written[token]
                    token += 1
            # What the kernel leaves out is among what the plain step writes, and nothing of it is written twice.
            assert {int(i): int(at) for i, at in zip(t.rest, t.rest_loc, strict=True)}.items() <= written.items()


@examples(15)
@given(step=prepared(decode=True), extra=st.integers(0, 3))
def test_buckets_change_no_real_row(step: tuple[ps.DecodeState, ScheduleBatch], extra: int) -> None:
    """A padded decode has the same lines as an unpadded one, in tables that may be wider."""
    state, batch = step
    n = len(batch.request_ids)
    with read_table(state.table) as tables:
        padded = ascend_tables(batch, tables, state.kv.layout, CPU, bucket=n + extra)
        plain = ascend_tables(batch, tables, state.kv.layout, CPU)
    for name in ("window_table", "c4_table", "c128_table"):
        own, wide = getattr(plain, name), getattr(padded, name)
        assert torch.equal(wide[:n, : own.shape[1]], own)
        assert not wide[n:].any()
        assert not wide[:n, own.shape[1] :].any()
    for name in ("key_lens", "start_pos", "used", "query_ends"):
        assert torch.equal(getattr(padded, name)[:n], getattr(plain, name))


def test_buckets_that_do_not_fit() -> None:
    """A bucket with fewer rows than the step, or for an extend, is refused."""
    state = fresh(MODEL, 2)
    state, a = ps.open_request(state, ENDLESS)
    state, batch = ps.prepare_extend(state, {a: [3, 4]})
    with read_table(state.table) as tables, pytest.raises(ConfigError, match="bucket"):
        ascend_tables(batch, tables, state.kv.layout, CPU, bucket=4)
    with pytest.raises(ConfigError, match="bucket"):
        worked(bucket=2)
