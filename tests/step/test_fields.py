"""Faults that comparable engines had, as kinds: compressor borders, windows, company in a batch, allocation.

Ids in docstrings are rows of the field-case sheet. Everything is compared with the same request alone or with a
recompute of the whole sequence that keeps no state.
"""

from __future__ import annotations

from itertools import pairwise

import attrs
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.models import VOCAB, tiny_model
from kit.steps import ENDLESS, bookkeep_decode, bookkeep_extend, examples, fresh, ids_of, recompute, run_alone
from purestep.state.ledger import live_rows
from torch import Tensor

inv = ps.invariants
MODEL = tiny_model()
WINDOW = tiny_model((0,), window=8)
C4 = tiny_model((4,), window=8)
C128 = tiny_model((128,), window=8)
CLOSE = 1e-4
"""Float32 sums in another order, on logits of deviation 2."""


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, atol=CLOSE, rtol=0)


def opened(state: ps.DecodeState, count: int, params: ps.SamplingParams = ENDLESS) -> ps.DecodeState:
    for _ in range(count):
        state, _ = ps.open_request(state, params)
    return state


def prompts(longest: int = 40) -> st.SearchStrategy[tuple[int, ...]]:
    return ps.strategies.prompts(VOCAB, longest)


# Compressor state and group borders.


@examples(20)
@given(n=st.integers(1, 9) | st.integers(1, 40), page_size=ps.strategies.page_sizes(), seed=st.integers(0, 9))
def test_first_entries(n: int, page_size: int, seed: int) -> None:
    """CMP-01: prompts around the first group borders give the logits of a full recompute."""
    ids = ids_of(n, seed=seed)
    state = opened(fresh(C4, 1, page_size=page_size), 1)
    _, out = ps.extend_step(C4, state, {0: ids}, logits="all")
    close(out.logits, recompute(C4, ids))


@examples(5)
@given(first=prompts(300), short=st.sampled_from((1, 3, 100, 127)), seed=st.integers(0, 9))
def test_recycled_row_remembers_nothing(first: tuple[int, ...], short: int, seed: int) -> None:
    """CMP-03, BAT-03: a request on a used row and used pages equals one in a fresh state, bit for bit."""
    capacity = ps.Capacity(1, 320, 320)
    used = opened(ps.init_state(MODEL, capacity, page_size=8), 1)
    used, _ = ps.extend_step(MODEL, used, {0: first})
    used, _ = ps.decode_step(MODEL, used)
    used = opened(ps.close_request(used, 0), 1)
    unused = opened(ps.init_state(MODEL, capacity, page_size=8), 1)
    used, one = ps.extend_step(MODEL, used, {1: ids_of(short, seed=seed)})
    unused, other = ps.extend_step(MODEL, unused, {0: ids_of(short, seed=seed)})
    assert torch.equal(one.logits, other.logits)
    for _ in range(5):
        used, one = ps.decode_step(MODEL, used)
        unused, other = ps.decode_step(MODEL, unused)
        assert torch.equal(one.logits, other.logits)
        assert one.next_token_ids == other.next_token_ids


def test_decode_closes_groups() -> None:
    """CMP-05: one token, the rest forced in by decodes: every position equals a prefill, and entries are counted."""
    ids = ids_of(140)
    state = opened(fresh(MODEL, 1), 1)
    state, out = ps.extend_step(MODEL, state, {0: ids[:1]})
    rows = [out.logits]
    for n, token in enumerate(ids[1:], 2):
        prepared, batch = ps.prepare_decode(state, force={0: token})
        singles = ps.forward_batch(prepared, batch).metadata.singles
        assert (singles.c4_visible.tolist(), singles.c128_visible.tolist()) == ([n // 4], [n // 128])
        state, out = ps.decode_step(MODEL, state, force={0: token})
        rows.append(out.logits)
    close(torch.cat(rows), recompute(MODEL, ids))


@examples(4)
@given(data=st.data())
def test_rows_may_be_shuffled(data: st.DataObject) -> None:
    """CMP-07: rows in a new order every step, one request leaving and one joining: all equals the solo runs."""
    # Groups of 4 and of 128 close while the rows move.
    texts = [ids_of(data.draw(st.sampled_from((125, 126, 127, 3))), seed=i) for i in range(4)]
    params = [attrs.evolve(ENDLESS, temperature=1.0, seed=i) for i in range(4)]
    state = fresh(MODEL, 3)
    said: dict[int, list[int]] = {}
    rows: dict[int, list[Tensor]] = {}
    for i in range(3):
        state, _ = ps.open_request(state, params[i])
    state, out = ps.extend_step(MODEL, state, dict(enumerate(texts[:3])))
    for step in range(8):
        for i, request_id in enumerate(out.request_ids):
            said.setdefault(request_id, []).append(out.next_token_ids[i])
            rows.setdefault(request_id, []).append(out.logits[i])
        if step == 3:
            state, _ = ps.open_request(ps.close_request(state, 1), params[3])
            state, out = ps.extend_step(MODEL, state, {3: texts[3]})
        else:
            order = data.draw(st.permutations([r.request_id for r in state.requests]))
            state, out = ps.decode_step(MODEL, state, only=order)
    for request_id, tokens in said.items():
        alone, logits = run_alone(MODEL, texts[request_id], len(tokens) - 1, params[request_id])
        assert tokens == alone
        close(torch.stack(rows[request_id]), logits)


@examples(4)
@given(lengths=st.lists(st.sampled_from((1, 3, 5, 9, 14, 129, 130)), min_size=2, max_size=4), seed=st.integers(0, 9))
def test_ragged_batch(lengths: list[int], seed: int) -> None:
    """CMP-09, BAT-07: prompts of any lengths together equal each of them alone, through prefill and decode."""
    texts = [ids_of(n, seed=seed + i) for i, n in enumerate(lengths)]
    state = opened(fresh(MODEL, len(texts)), len(texts))
    state, out = ps.extend_step(MODEL, state, dict(enumerate(texts)))
    rows = [out.logits]
    for _ in range(3):
        state, out = ps.decode_step(MODEL, state)
        rows.append(out.logits)
    for i, text in enumerate(texts):
        close(torch.stack([row[i] for row in rows]), run_alone(MODEL, text, 3)[1])


def test_nothing_is_padded_with_a_token() -> None:
    """CMP-09: with NaN as the embedding of every id that no prompt uses, a ragged batch gives the same bits."""
    texts = {0: [5, 6, 7], 1: [5, 7, 6, 5, 6], 2: [6] * 9, 3: [7, 5] * 65}
    embed = MODEL.params.embed.clone()
    embed[[i for i in range(VOCAB) if i not in (5, 6, 7)]] = torch.nan
    poisoned = attrs.evolve(MODEL, params=attrs.evolve(MODEL.params, embed=embed))
    state = opened(fresh(MODEL), 4)
    _, clean = ps.extend_step(MODEL, state, texts)
    _, out = ps.extend_step(poisoned, state, texts)
    assert torch.equal(out.logits, clean.logits)


@examples(4)
@given(one=st.integers(127, 133), other=st.integers(127, 133), page_size=st.sampled_from((4, 32, 128)))
def test_requests_are_not_one_stream(one: int, other: int, page_size: int) -> None:
    """CMP-11: two prompts of about a group of 128 packed in one prefill equal separate prefills, entries included."""
    texts = {0: ids_of(one, seed=1), 1: ids_of(other, seed=2)}
    state = opened(fresh(MODEL, 2, page_size=page_size), 2)
    packed, out = ps.extend_step(MODEL, state, texts, logits="all")
    close(out.logits, torch.cat([recompute(MODEL, ids) for ids in texts.values()]))
    separate, _ = ps.extend_step(MODEL, state, {0: texts[0]})
    separate, _ = ps.extend_step(MODEL, separate, {1: texts[1]})
    packed, mine = ps.decode_step(MODEL, packed)
    separate, theirs = ps.decode_step(MODEL, separate)
    close(mine.logits, theirs.logits)


def stored(state: ps.DecodeState, request_id: int) -> dict[str, Tensor]:
    """Copy out every cache row that a request may still read, by buffer, in order of position."""
    ledger, layout = inv.read_ledger(state), state.kv.layout
    found = {}
    for name, slots in live_rows(ledger, ledger.by_id[request_id]).items():
        firsts = torch.arange(layout.n_layers(name)) * layout.n_slots(name)
        rows = (firsts.unsqueeze(-1) + torch.from_numpy(slots)).flatten()
        found[name] = state.kv.handle.rows(name, rows)
    return found


@examples(6)
@given(
    n=st.sampled_from((3, 4, 11, 127, 128, 131, 257)),
    data=st.data(),
    page_size=ps.strategies.page_sizes(),
)
def test_stores_do_not_show_chunks(n: int, data: st.DataObject, page_size: int) -> None:
    """C18, C19: n tokens in any chunks and one decode leave the window, entries and pooling state of one prefill."""
    ids = ids_of(n + 1)
    state = opened(fresh(MODEL, 2, page_size=page_size), 2)
    state, _ = ps.extend_step(MODEL, state, {0: ids}, sample=False)
    cuts = data.draw(st.sets(st.integers(1, n), max_size=3), label="cuts")
    for start, end in pairwise((0, *sorted(cuts | {n}))):
        state, _ = ps.extend_step(MODEL, state, {1: ids[start:end]}, sample=False)
    state, _ = ps.decode_step(MODEL, state, only=[1], force={1: ids[n]})
    whole, pieces = stored(state, 0), stored(state, 1)
    evicted = [request.evicted_len for request in state.requests]
    for name, rows in pieces.items():
        if name == "swa":
            layers = state.kv.layout.n_layers(name)
            kept = n + 1 - max(evicted)
            rows, whole[name] = (part.unflatten(0, (layers, -1))[:, -kept:] for part in (rows, whole[name]))
        close(rows, whole[name])


@pytest.mark.parametrize(("model", "sees"), [(WINDOW, False), (C4, True), (C128, True)], ids=["window", "c4", "c128"])
def test_distant_token_matters(model: ps.Model, sees: bool) -> None:
    """CMP-13: a change of token 10 reaches position 299 through compressed entries alone, in prefill and in decode."""
    ids = ids_of(300)
    changed = [*ids[:10], ids[10] % (VOCAB - 1) + 1, *ids[11:]]
    assert changed[10] != ids[10]
    state = opened(fresh(model, 2), 2)
    _, prefill = ps.extend_step(model, state, {0: ids, 1: changed})
    fed, _ = ps.extend_step(model, state, {0: ids[:-1], 1: changed[:-1]})
    _, decode = ps.decode_step(model, fed, force={0: ids[-1], 1: ids[-1]})
    for logits in (prefill.logits, decode.logits):
        difference = float((logits[0] - logits[1]).abs().max())
        assert (difference > 1e-3) == sees, difference
        assert sees or difference < 1e-5


@pytest.mark.parametrize("model", [C4, C128, MODEL], ids=["c4", "c128", "all"])
def test_no_entries_yet(model: ps.Model) -> None:
    """MTH-09: the first decodes, with no entry in C4 and C128 layers, equal a recompute."""
    ids = ids_of(6)
    state = opened(fresh(model, 1), 1)
    rows = []
    for token in ids:
        state, out = ps.decode_step(model, state, only=[0], force={0: token})
        rows.append(out.logits)
    close(torch.cat(rows), recompute(model, ids))


# Windows.


@pytest.mark.parametrize("n", [127, 128, 129, 255, 256, 257])
@pytest.mark.parametrize("page_size", [8, 128])
def test_window_seam(n: int, page_size: int) -> None:
    """SWA-01: the decode at length n reads the last 128 positions, each once, its own included, oldest first."""
    model = tiny_model((0, 4), window=128)
    state = opened(fresh(model, 1, page_size=page_size), 1)
    for part in pairwise((0, n // 2, n - 1)):
        state, _ = bookkeep_extend(state, {0: ids_of(part[1] - part[0] - (part[0] > 0))})
    prepared, batch = ps.prepare_decode(state)
    view = ps.forward_batch(prepared, batch)
    seen = view.metadata.singles.window_loc[0][view.metadata.singles.window_mask[0]].tolist()
    peers = inv.read_ledger(prepared).by_id[0].windows
    assert batch.seq_lens.tolist() == [n]
    assert seen == peers[max(0, n - 128) :].tolist()
    assert len(set(seen)) == min(n, 128)
    assert seen[-1] == batch.out_cache_loc_dsv4.out_swa_loc[0]


@examples(5)
@given(
    cuts=st.sets(st.sampled_from((126, 127, 128, 129, 254, 255, 256, 257)), max_size=4),
    window=st.sampled_from((5, 8, 128)),
)
def test_chunks_across_the_seam(cuts: set[int], window: int) -> None:
    """SWA-01: 300 tokens in any chunks around the borders give the logits of one recompute."""
    model, ids = tiny_model((0, 4, 128), window=window), ids_of(300)
    state = opened(fresh(model, 1), 1)
    rows = []
    for start, end in pairwise((0, *sorted(cuts), 300)):
        state, out = ps.extend_step(model, state, {0: ids[start:end]}, sample=False, logits="all")
        rows.append(out.logits)
    close(torch.cat(rows), recompute(model, ids))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_stacked_windows_see_further(depth: int) -> None:
    """SWA-03: a stack of windows sees ``depth * (W - 1) + 1`` positions: that many replayed tokens do, fewer do not."""
    window = 8
    model = tiny_model((0,) * depth, window=window)
    ids = ids_of(80)
    state = opened(fresh(model, 1), 1)
    state, _ = ps.extend_step(model, state, {0: ids[:-1]})
    state, cold = ps.decode_step(model, state, force={0: ids[-1]})
    reach = depth * (window - 1) + 1
    replayed = run_alone(model, ids[-reach:], 0)[1]
    close(replayed, cold.logits)
    shorter = run_alone(model, ids[-(reach - 1) :], 0)[1]
    assert float((shorter - cold.logits).abs().max()) > CLOSE


# Company.


def sink_rows(state: ps.DecodeState, name: str) -> Tensor:
    """List the rows of page 0 (of table row 0) of a buffer, in every layer."""
    sizes = state.table.sizes
    count = {"swa": sizes.page_size, "c4": sizes.c4_page, "index": sizes.c4_page, "c128": 16, "c128_state": 128}
    layout = state.kv.layout
    firsts = torch.arange(layout.n_layers(name)) * layout.n_slots(name)
    return (firsts.unsqueeze(-1) + torch.arange(count.get(name, 8))).flatten()


def poisoned(state: ps.DecodeState) -> ps.DecodeState:
    """Fill the sink of every pool with NaN."""
    rows = {name: sink_rows(state, name) for name in state.kv.handle.names}
    with state.kv.handle.write(rows) as write:
        for name, numbers in rows.items():
            write.tensors[name][numbers] = torch.nan
    return attrs.evolve(state, kv=attrs.evolve(state.kv, handle=write.handle))


@examples(4)
@given(texts=st.lists(prompts(140), min_size=2, max_size=4), page_size=st.sampled_from((8, 128)))
def test_sink_may_hold_poison(texts: list[tuple[int, ...]], page_size: int) -> None:
    """BAT-01: with NaN in every sink page, ragged prefills and decodes are finite and the same to the bit."""
    clean = opened(fresh(MODEL, page_size=page_size), len(texts))
    dirty = poisoned(clean)
    clean, one = ps.extend_step(MODEL, clean, dict(enumerate(texts)))
    dirty, other = ps.extend_step(MODEL, dirty, dict(enumerate(texts)))
    for _ in range(4):
        assert bool(other.logits.isfinite().all())
        assert torch.equal(one.logits, other.logits)
        clean, one = ps.decode_step(MODEL, clean)
        dirty, other = ps.decode_step(MODEL, dirty)


@examples(3)
@given(data=st.data(), mates=st.sampled_from((1, 3, 7)))
def test_company_does_not_matter(data: st.DataObject, mates: int) -> None:
    """BAT-05: a request in a batch of 2, 4 or 8, at any place, has the logits that it has alone, within rounding."""
    texts = [data.draw(prompts(40)) for _ in range(mates + 1)]
    place = data.draw(st.integers(0, mates))
    state = opened(fresh(MODEL, mates + 1), mates + 1)
    state, out = ps.extend_step(MODEL, state, dict(enumerate(texts)))
    rows = [out.logits[place]]
    for _ in range(3):
        state, out = ps.decode_step(MODEL, state)
        rows.append(out.logits[place])
    close(torch.stack(rows), run_alone(MODEL, texts[place], 3)[1])


@examples(3)
@given(text=prompts(20), seed=st.integers(0, 2**63))
def test_limits_cut_one_text(text: tuple[int, ...], seed: int) -> None:
    """BAT-12: with 1 to 5 new tokens allowed, a request says that many first words of the same text, and ends."""
    said = []
    for most in range(1, 6):
        params = ps.SamplingParams(seed=seed, max_new_tokens=most, ignore_eos=True)
        said.append(run_alone(MODEL, text, 10, params)[0])
    assert [len(tokens) for tokens in said] == [1, 2, 3, 4, 5]
    assert all(shorter == longer[:-1] for shorter, longer in pairwise(said))


# Allocation.


@examples(15)
@given(data=st.data(), page_size=st.sampled_from((4, 32, 128)))
def test_pages_are_conserved(data: st.DataObject, page_size: int) -> None:
    """KVA-01: free + used = total in every pool after every admission, append, eviction, fork and close."""
    state = ps.init_state(MODEL, ps.Capacity(4, 640, 400, swa_tokens=320, c128_pages=5), page_size=page_size)
    kinds = st.sampled_from(("append", "append", "decode", "decode", "fork", "close", "open"))
    for kind in ("open", *data.draw(st.lists(kinds, max_size=25))):
        ids = [r.request_id for r in state.requests]
        running = [r.request_id for r in state.requests if r.finished is None]
        try:
            if kind == "open":
                state, _ = ps.open_request(state, ENDLESS)
            elif kind == "append" and running:
                rows = data.draw(st.sets(st.sampled_from(running), min_size=1))
                state, _ = bookkeep_extend(state, {i: ids_of(data.draw(ps.strategies.lengths(140))) for i in rows})
            elif kind == "decode":
                state, _ = bookkeep_decode(state)
            elif kind in ("fork", "close") and ids:
                chosen = data.draw(st.sampled_from(ids))
                state = ps.fork_request(state, chosen)[0] if kind == "fork" else ps.close_request(state, chosen)
        except ps.CapacityError:
            continue
        assert inv.check(state, ("A11", "W08", "C10", "A16", "N01", "N02", "C09", "A12", "A19")) == ()
    for request in state.requests:
        state = ps.close_request(state, request.request_id)
    sizes, table = state.table.sizes, state.table
    totals = (sizes.pages, sizes.swa_pages, sizes.c128_pages, sizes.requests)
    lists = (table.free_pages, table.free_swa_pages, table.free_c128_pages, table.free_rows)
    assert tuple(len(free) for free in lists) == totals


@given(n=st.integers(65, 200))
@examples(5)
def test_impossible_prompt_is_refused(n: int) -> None:
    """KVA-03: a prompt larger than the whole pool is an immediate error that names the pool; the next one is served."""
    state = opened(ps.init_state(MODEL, ps.Capacity(2, 64, 256), page_size=8), 2)
    mark = inv.digest(state)
    with pytest.raises(ps.CapacityError, match="full pages") as caught:
        ps.extend_step(MODEL, state, {0: ids_of(n)})
    assert (caught.value.field, caught.value.got) == ("full pages", 8)
    assert inv.digest(state) == mark
    _, out = ps.extend_step(MODEL, state, {1: ids_of(5)})
    close(out.logits[0], recompute(MODEL, ids_of(5))[-1])


def test_all_reach_the_context_together() -> None:
    """KVA-13: eight requests run into the context limit at once: each ends with "length", and all slots come back."""
    state = opened(ps.init_state(MODEL, ps.Capacity(8, 8 * 24, 24), page_size=8), 8)
    state, out = ps.extend_step(MODEL, state, {i: ids_of(18, seed=i) for i in range(8)})
    steps = 0
    while not out.finished:
        state, out = ps.decode_step(MODEL, state)
        steps += 1
    assert dict(out.finished) == dict.fromkeys(range(8), "length")
    assert steps == 6
    assert all(r.kv_len == 24 for r in state.requests)
    for request_id in range(8):
        state = ps.close_request(state, request_id)
    assert sorted(state.table.free_pages) == list(range(1, 25))
    assert inv.check(state) == ()
