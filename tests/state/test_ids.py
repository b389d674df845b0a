"""Id spaces: the worked numbers of every layout, and the properties that make ids safe to index with."""

from __future__ import annotations

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from purestep.state.errors import ConfigError, DtypeError
from purestep.state.ids import (
    BlockInterleave,
    KernelLoc,
    MarkedLoc,
    PageInterleave,
    PhysicalLoc,
    PlainLayout,
    TokenInterleave,
    UnifiedLayout,
    VirtualLoc,
    invert_pages,
    window_from_kernel,
)
from torch.utils import _pytree as pytree

I64 = torch.int64


def _virtual(*ids):
    return VirtualLoc(ids=torch.tensor(ids, dtype=I64))


def _unified(*v2p, page_size=4, row_blocks=2):
    return UnifiedLayout(page_size=page_size, row_blocks=row_blocks, v2p=torch.tensor(v2p, dtype=I64))


@st.composite
def _tables(draw, n_virtual=8, n_physical=11):
    """A page table with unmapped pages; page 0 is page 0."""
    places = draw(st.permutations(range(1, n_physical)))
    mapped = draw(st.lists(st.booleans(), min_size=n_virtual - 1, max_size=n_virtual - 1))
    return [0, *(place if is_mapped else -1 for place, is_mapped in zip(places, mapped, strict=False))]


@st.composite
def _sharded(draw):
    """Every rank of one sharded layout, over 1 to 4 ways."""
    ways, size = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4, 8]))
    kind = draw(st.sampled_from(["token", "block", "page"]))
    build = {
        "token": lambda rank: TokenInterleave(ways=ways, rank=rank, inner=PlainLayout(page_size=size)),
        "block": lambda rank: BlockInterleave(ways=ways, rank=rank, block=size),
        "page": lambda rank: PageInterleave(ways=ways, rank=rank, page_size=size),
    }[kind]
    return [build(rank) for rank in range(ways)], 1 if kind == "token" else size, size


def test_unified_worked_example():
    """Pages 1 and 2 lie at 3 and 1, with two row blocks in a page."""
    layout, loc = _unified(0, 3, 1), _virtual(5, 6, 9, -1)
    assert layout.physical(loc).ids.tolist() == [13, 14, 5, 0]
    assert layout.kernel(loc).ids.tolist() == [25, 26, 9, 0]


def test_window_worked_example():
    """Virtual 6 has window row 22, directly and by going back from kernel row 26."""
    full, window = _unified(0, 3, 1), _unified(0, 5, -1, row_blocks=1)
    p2v = invert_pages(full.v2p, 4)
    assert p2v.tolist() == [0, 2, -1, 1]
    assert window_from_kernel(full, p2v, window, KernelLoc(ids=torch.tensor([26]))).ids.tolist() == [22]
    assert window.kernel(_virtual(6)).ids.tolist() == [22]


def test_token_interleave_worked_example():
    """Widened id 13 is row 6 of rank 1 of two; rank 0 writes the sink."""
    ranks = [TokenInterleave(ways=2, rank=rank, inner=_unified(0, 3, 1)) for rank in range(2)]
    assert ranks[0].owner(_virtual(13)).tolist() == [1]
    assert ranks[0].local_row(_virtual(13)).tolist() == [6]
    assert [layout.kernel(_virtual(13)).ids.tolist() for layout in ranks] == [[0], [26]]
    assert [layout.physical(_virtual(13)).ids.tolist() for layout in ranks] == [[0], [14]]
    assert [layout.local_len(11) for layout in ranks] == [6, 5]


def test_block_interleave_worked_example():
    """Blocks of 4 dealt to two ranks: the tabled rows, -1 only where marked, and the tabled lengths."""
    ranks, loc = [BlockInterleave(ways=2, rank=rank, block=4) for rank in range(2)], _virtual(8, 11, 12, 13, 16)
    assert ranks[0].owner(loc).tolist() == [0, 0, 1, 1, 0]
    assert ranks[0].marked(loc).marked.tolist() == [4, 7, -1, -1, 8]
    assert ranks[1].marked(loc).marked.tolist() == [-1, -1, 4, 5, -1]
    assert ranks[0].kernel(loc).ids.tolist() == [4, 7, 0, 0, 8]
    assert ranks[1].marked(loc).sink().ids.tolist() == [0, 0, 4, 5, 0]
    assert [layout.local_len(11) for layout in ranks] == [7, 4]
    assert [layout.local_len(13) for layout in ranks] == [8, 5]


def test_page_interleave_worked_example():
    """Slot 26 lies on logical page 6: rank 0, its page 3, its slot 14."""
    layout = PageInterleave(ways=2, rank=0, page_size=4)
    assert layout.owner(_virtual(26)).tolist() == [0]
    assert layout.local_row(_virtual(26)).tolist() == [14]
    assert layout.kernel(_virtual(26)).ids.tolist() == [14]
    assert attrs.evolve(layout, rank=1).kernel(_virtual(26)).ids.tolist() == [0]


def test_page_interleave_chains_start_where_most_pages_are_free():
    """A chain takes the class with most free pages, the lowest on ties, and goes round; capacity counts the least."""
    layout = PageInterleave(ways=3, rank=0, page_size=4)
    assert layout.chain_base([2, 5, 5]) == 1
    assert [layout.page_class(1, page) for page in range(4)] == [1, 2, 0, 1]
    assert layout.n_available([2, 5, 5]) == 3 * 4 * 2


@given(ids=st.lists(st.integers(0, 1000)))
def test_plain_layout_translates_nothing(ids):
    """T01: a plain pool's write ids equal the allocated ones, and it says that it does not translate."""
    layout, loc = PlainLayout(page_size=4), _virtual(*ids)
    assert not layout.is_translating
    assert layout.physical(loc).ids.tolist() == layout.kernel(loc).ids.tolist() == ids


def test_layouts_that_translate_say_so():
    """One rank of one translates nothing, unless its inner layout does."""
    plain, unified = PlainLayout(page_size=4), _unified(0, 1)
    assert unified.is_translating
    assert [BlockInterleave(ways=n, rank=0, block=4).is_translating for n in (1, 2)] == [False, True]
    assert [PageInterleave(ways=n, rank=0, page_size=4).is_translating for n in (1, 2)] == [False, True]
    assert [TokenInterleave(ways=n, rank=0, inner=plain).is_translating for n in (1, 2)] == [False, True]
    assert TokenInterleave(ways=1, rank=0, inner=unified).is_translating


@given(table=_tables(), row_blocks=st.integers(1, 3), page_size=st.sampled_from([1, 4, 8]))
def test_unified_addresses(table, row_blocks, page_size):
    """T02, T03: offsets stay, kernel rows follow from physical ones, mapped ids never meet, and tables invert."""
    layout = _unified(*table, page_size=page_size, row_blocks=row_blocks)
    mapped = [t for t in range(len(table) * page_size) if table[t // page_size] >= 0]
    loc = _virtual(*mapped)
    physical, kernel = layout.physical(loc).ids, layout.kernel(loc).ids
    assert torch.equal(physical % page_size, loc.ids % page_size)
    assert torch.equal(kernel, physical // page_size * page_size * row_blocks + loc.ids % page_size)
    assert len(set(physical.tolist())) == len(set(kernel.tolist())) == len(mapped)
    p2v = invert_pages(layout.v2p, 11)
    assert all(p2v[place] == page for page, place in enumerate(table) if place >= 0)
    assert int((p2v >= 0).sum()) == sum(place >= 0 for place in table)
    assert torch.equal(layout.virtual(layout.kernel(loc), p2v).ids, loc.ids)


@given(table=_tables(), sharded=_sharded(), negative=st.integers(-10, -1))
def test_ids_that_lead_nowhere_become_the_sink(table, sharded, negative):
    """T04: 0, negative ids and ids on unmapped pages are 0 in every layout, on every rank."""
    unified = _unified(*table)
    unmapped = [page * 4 + 1 for page, place in enumerate(table) if place < 0]
    nowhere = _virtual(0, -1, negative, *unmapped)
    inside = [TokenInterleave(ways=2, rank=rank, inner=unified) for rank in range(2)]
    assert set(unified.physical(nowhere).ids.tolist() + unified.kernel(nowhere).ids.tolist()) == {0}
    for layout in sharded[0]:
        assert layout.owner(_virtual(-1, negative)).tolist() == [-1, -1]
        assert layout.is_mine(_virtual(-1, negative)).tolist() == [False, False]
        assert layout.local_row(_virtual(-1, negative)).tolist() == [0, 0]
    for layout in [PlainLayout(page_size=4), *sharded[0], *inside]:
        assert layout.physical(_virtual(0, -1, negative)).ids.tolist() == [0, 0, 0]
        assert layout.kernel(_virtual(0, -1, negative)).ids.tolist() == [0, 0, 0]
    for layout in inside:
        assert set(layout.kernel(_virtual(*(t * 2 + rank for t in unmapped for rank in range(2)))).ids.tolist()) <= {0}


@given(sharded=_sharded(), data=st.data())
def test_translation_never_touches_the_allocated_ids(sharded, data):
    """T05: writing to a translated tensor leaves the allocated ids as they were."""
    layouts = [PlainLayout(page_size=4), _unified(0, 3, 1, 2, 5), *sharded[0]]
    layout = data.draw(st.sampled_from(layouts))
    loc = _virtual(0, 5, -1, 9)
    for out in (layout.physical(loc).ids, layout.kernel(loc).ids):
        out.fill_(77)
    assert loc.ids.tolist() == [0, 5, -1, 9]


@given(table=_tables(), data=st.data())
def test_moving_a_page_keeps_what_virtual_ids_name(table, data):
    """T06: after a compaction the new table finds the old content under the same virtual ids."""
    layout = _unified(*table)
    content = torch.arange(11 * 4 * 2)
    taken = [place for place in table if place >= 0]
    page = data.draw(st.sampled_from([i for i, place in enumerate(table) if place > 0] or [0]))
    target = data.draw(st.sampled_from([place for place in range(11) if place not in taken])) if page else 0
    moved = attrs.evolve(layout, v2p=layout.v2p.index_fill(0, torch.tensor([page]), target))
    stride = layout.page_size * layout.row_blocks
    after = content.clone()
    after.view(11, stride)[target] = content.view(11, stride)[table[page]]
    loc = _virtual(*(t for t in range(len(table) * 4) if table[t // 4] >= 0))
    assert torch.equal(after[moved.kernel(loc).ids], content[layout.kernel(loc).ids])
    assert layout.v2p.tolist() == table


@given(sharded=_sharded())
def test_every_id_has_one_owner(sharded):
    """T07: beyond the sink page exactly one rank writes a real row, and (owner, row) names the id."""
    layouts, _, size = sharded
    first = len(layouts) * size
    loc = _virtual(*range(first, first + 60))
    rows = torch.stack([layout.kernel(loc).ids for layout in layouts])
    mine = torch.stack([layout.is_mine(loc) for layout in layouts])
    assert torch.equal((rows != 0).sum(0), torch.ones(60, dtype=I64))
    assert torch.equal(rows != 0, mine)
    owners, local = layouts[0].owner(loc), layouts[0].local_row(loc)
    assert torch.equal(rows.gather(0, owners[None])[0], local)
    assert len(set(zip(owners.tolist(), local.tolist(), strict=True))) == 60


@given(sharded=_sharded(), length=st.integers(0, 80), start=st.integers(0, 80))
def test_local_lengths_count_owned_positions(sharded, length, start):
    """T08: lengths add up, equal the number of owned positions, also from a start, and differ by a block at most."""
    layouts, block, _ = sharded
    lengths = [layout.local_len(length) for layout in layouts]
    owned = [int(layout.is_mine(_virtual(*range(length))).sum()) for layout in layouts]
    assert sum(lengths) == length
    assert lengths == owned
    assert 0 <= max(lengths) - min(lengths) <= block
    start = min(start, length)
    between = [int(layout.is_mine(_virtual(*range(start, length))).sum()) for layout in layouts]
    assert [layout.local_len(length, start) for layout in layouts] == between


@given(sharded=_sharded(), length=st.integers(0, 80), pages=st.permutations(range(1, 81)))
def test_write_then_read_over_all_ranks_gives_every_position_once(sharded, length, pages):
    """T09: every rank writes all ids of a request and reads its own positions back; together they are all, once."""
    layouts, _, size = sharded
    wide = size * len(layouts)
    slots = torch.tensor([pages[q // wide] * wide + q % wide for q in range(length)], dtype=I64)
    seen = []
    for layout in layouts:
        pool = torch.full((82 * size,), -1)
        pool[layout.kernel(VirtualLoc(ids=slots)).ids] = torch.arange(length)
        positions = layout.local_positions(length)
        read = pool[layout.kernel(VirtualLoc(ids=slots[positions])).ids]
        assert torch.equal(read, positions)
        seen += read.tolist()
    assert sorted(seen) == list(range(length))


@given(full=_tables(), other=_tables(), blocks=st.tuples(st.integers(1, 3), st.integers(1, 3)))
def test_window_routes_agree(full, other, blocks):
    """T10: a window id by going back from the kernel's row equals the direct one, wherever the full side is mapped."""
    # A window page is freed before its full page, so it never outlives it.
    window = [place if kept >= 0 else -1 for place, kept in zip(other, full, strict=True)]
    layout, side = _unified(*full, row_blocks=blocks[0]), _unified(*window, row_blocks=blocks[1])
    loc = _virtual(-1, *range(len(full) * 4))
    loc = VirtualLoc(ids=loc.ids[(loc.ids < 4) | (layout.kernel(loc).ids > 0)])
    back = window_from_kernel(layout, invert_pages(layout.v2p, 11), side, layout.kernel(loc))
    direct = side.kernel(loc)
    assert torch.equal(back.ids, direct.ids)


@pytest.mark.parametrize("block", [29_077, 2**20])
def test_addresses_beyond_int32_are_exact(block):
    """Block 29,077 and block 2^20 at a stride of 73,856 rows come out exact, and int64 on every device."""
    page_size, row_blocks = 128, 577
    layout = _unified(0, block, page_size=page_size, row_blocks=row_blocks)
    assert page_size * row_blocks == 73_856
    assert layout.kernel(_virtual(128 + 127)).ids.tolist() == [block * 73_856 + 127]
    assert block * 73_856 > 2**31
    table = layout.v2p
    p2v = torch.full((block + 1,), -1).index_fill(0, torch.tensor([block]), 1)
    assert layout.virtual(layout.kernel(_virtual(255)), p2v).ids.tolist() == [255]
    dealt = TokenInterleave(ways=2, rank=1, inner=layout)
    assert dealt.kernel(_virtual(2 * 255 + 1)).ids.tolist() == [block * 73_856 + 127]
    far = block * 73_856
    for sharded in (BlockInterleave(ways=2, rank=0, block=128), PageInterleave(ways=2, rank=0, page_size=128)):
        assert sharded.local_row(_virtual(far)).tolist() == [far // 256 * 128]
    meta = attrs.evolve(layout, v2p=table.to("meta")).kernel(VirtualLoc(ids=torch.empty(3, dtype=I64, device="meta")))
    assert (meta.ids.dtype, meta.ids.device.type) == (I64, "meta")


@pytest.mark.parametrize("space", [PhysicalLoc, KernelLoc])
def test_a_negative_id_cannot_be_indexed_with(space):
    """Whoever builds an id that is indexed with gets 0 for -1, so no write wraps round to the last row."""
    ids = torch.tensor([-1, 3, -7])
    pool = torch.zeros(5)
    pool[space(ids=ids).ids] = 1.0
    assert pool.tolist() == [1, 0, 0, 1, 0]
    assert ids.tolist() == [-1, 3, -7]


def test_spaces_do_not_mix():
    """The types are distinct, marked rows have no ids to index with, and nothing is translated twice."""
    assert len({VirtualLoc, PhysicalLoc, KernelLoc, MarkedLoc}) == 4
    marked = BlockInterleave(ways=2, rank=0, block=4).marked(_virtual(4))
    assert not hasattr(marked, "ids")
    for layout in (PlainLayout(page_size=4), _unified(0, 1), BlockInterleave(ways=2, rank=0, block=4)):
        with pytest.raises(DtypeError, match="expected VirtualLoc, got KernelLoc"):
            layout.kernel(layout.kernel(_virtual(4)))


@pytest.mark.parametrize("space", [VirtualLoc, PhysicalLoc, KernelLoc])
@pytest.mark.parametrize("ids", [torch.tensor([1], dtype=torch.int32), [1]], ids=["int32", "list"])
def test_ids_are_int64_tensors(space, ids):
    """Ids of any other type are refused where they enter."""
    with pytest.raises(DtypeError, match="expected an int64 tensor"):
        space(ids=ids)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: PlainLayout(page_size=0), r"PlainLayout\.page_size: expected at least 1, got 0"),
        (lambda: _unified(0, row_blocks=0), r"UnifiedLayout\.row_blocks: expected at least 1, got 0"),
        (lambda: BlockInterleave(ways=2, rank=2, block=4), r"BlockInterleave\.rank: expected 0\.\.1, got 2"),
        (lambda: BlockInterleave(ways=0, rank=0, block=4), r"BlockInterleave\.ways: expected at least 1, got 0"),
    ],
)
def test_impossible_layouts_are_refused(build, message):
    """A layout without pages, blocks or ranks, or of a rank beyond its ways, is a configuration error."""
    with pytest.raises(ConfigError, match=message):
        build()


def test_layouts_and_ids_are_pytrees():
    """A tree map reaches the tensors of layouts and ids and rebuilds the same classes."""
    layout = TokenInterleave(ways=2, rank=1, inner=_unified(0, 3, 1))
    tree = pytree.tree_map(lambda leaf: leaf, (layout, layout.kernel(_virtual(13))))
    assert tree[0].kernel(_virtual(13)).ids.tolist() == tree[1].ids.tolist() == [26]
