"""The functions over whole caches on the simulator: what they write, what they return, which entries they pick."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.ascend import SIZES, machine_for
from kit.steps import examples
from purestep.ops import attention, indexer, quantize, rotary
from purestep.ops.ascend.paged import paged_ops
from purestep.ops.ascend.providers import choose_providers, installed_schemas
from purestep.ops.dispatch import PagedOps
from torch import Tensor

BF16, I32, U8 = torch.bfloat16, torch.int32, torch.uint8
CHIPS = ("a3", "a5")
ROPE = SIZES["rope_dim"]


def draw(seed: int, *shape: int) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(chip: str = "a3") -> PagedOps:
    """The functions of the simulated machine."""
    found = paged_ops(choose_providers(chip, installed_schemas()))
    assert found is not None
    return found


@pytest.fixture(params=CHIPS)
def paged(request: pytest.FixtureRequest) -> Iterator[PagedOps]:
    """The functions on a simulated machine."""
    with machine_for(chip=request.param):
        yield made(request.param)


def entry_cache(paged: PagedOps, rows: Tensor) -> Tensor:
    """Write rows from slot 1 on into a cache of the machine's form; slot 0 is nobody's."""
    is_packed = paged.form == "packed"
    cache = torch.zeros(len(rows) + 1, 128, dtype=U8) if is_packed else rows.new_zeros(len(rows) + 1, rows.shape[1])
    slots = paged.entry_slots(torch.arange(1, len(rows) + 1, dtype=I32))
    assert paged.write_entries(cache, slots, rows) is cache
    return cache


def key_cache(paged: PagedOps, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Write index keys from slot 0 on, except that slot 0 stays zero."""
    kind = U8 if paged.form == "packed" else torch.int8
    keys, scales = torch.zeros(rows.shape, dtype=kind), torch.zeros(len(rows), 1, dtype=paged.scale_dtype)
    slots = paged.entry_slots(torch.arange(1, len(rows), dtype=I32))
    paged.write_keys(keys, scales, slots, rows[1:])
    return keys, scales


def rounded(paged: PagedOps, rows: Tensor) -> Tensor:
    """What a cache keeps of entries."""
    if paged.form == "ascend":
        return rows
    plain, tail = rows.split((rows.shape[-1] - ROPE, ROPE), -1)
    return torch.cat((quantize.round_fp8(plain, 64), tail), -1)


def test_rotation_is_in_place_and_turns_back(paged: PagedOps) -> None:
    """Rotating writes and returns its argument, equals the complex product exactly, and -sin undoes it."""
    angles = (torch.arange(5).unsqueeze(-1) * rotary.rotary_frequencies(8, 100.0)).repeat_interleave(2, -1)
    cos, sin = angles.cos(), angles.sin()
    factors = rotary.rotary_factors(torch.arange(5), rotary.rotary_frequencies(8, 100.0))
    for x, turns in ((draw(0, 5, 16), factors), (draw(1, 5, 4, 16), factors.unsqueeze(1))):
        given = x.to(BF16)
        expected = rotary.apply_rotary(given, turns)
        back = rotary.apply_rotary(expected, turns.conj())
        found = paged.rotate(given, cos, sin)
        assert found is given
        assert torch.equal(found, expected)
        assert torch.equal(paged.rotate(found, cos, -sin), back)


@pytest.mark.parametrize("chip", CHIPS)
@examples(10)
@given(seed=st.integers(0, 99), n=st.integers(1, 6))
def test_written_rows_and_only_those(chip: str, seed: int, n: int) -> None:
    """Entries and window rows go to their slots as the cache keeps them, and every other row but the sink stays."""
    with machine_for(chip=chip):
        paged = made(chip)
        width = 128 if chip == "a5" else 16
        before = draw(seed, 32, width).mul(30).to(U8 if chip == "a5" else BF16)
        slots = torch.randperm(31, generator=torch.Generator().manual_seed(seed))[:n] + 1
        rows = draw(seed + 1, n, 16).mul(20).to(BF16)
        padded = torch.cat((slots, torch.zeros(2, dtype=torch.int64)))
        given_rows = torch.cat((rows, rows[:1], rows[:1]))
        entries, window = before.clone(), before.clone()
        assert paged.write_entries(entries, paged.entry_slots(padded.int()), given_rows) is entries
        assert paged.write_window(window, paged.window_slots(padded), given_rows) is window
        others = [i for i in range(1, 32) if i not in slots.tolist()]
        for cache in (entries, window):
            assert torch.equal(cache[others], before[others])
            assert torch.equal(cache[slots], entry_cache(paged, rows)[1:])


def test_quantised_queries(paged: PagedOps) -> None:
    """Codes times scales are the rows within half a step, and the largest value of a row has the largest code."""
    x = draw(3, 7, 2, 16).to(BF16)
    codes, scales = paged.quantize_query(x)
    assert (scales.dtype, scales.shape) == (paged.scale_dtype, (7, 2))
    largest = 448 if paged.form == "packed" else 127
    assert (codes.float().abs().amax(-1) == largest).all()
    error = (codes.float() * scales.float().unsqueeze(-1) - x.float()).abs()
    step = x.float().abs() / 16 + 1e-3 if paged.form == "packed" else 0.51 * scales.float().unsqueeze(-1) + 1e-3
    assert (error <= step).all()


@pytest.mark.parametrize("chip", CHIPS)
@examples(10)
@given(seed=st.integers(0, 99), lengths=st.lists(st.integers(1, 130), min_size=1, max_size=3), count=st.integers(1, 9))
def test_picks_are_the_best_entries(chip: str, seed: int, lengths: list[int], count: int) -> None:
    """Every token picks as many visible entries as it may, and only such as codes may mistake for the best."""
    with machine_for(chip=chip):
        paged = made(chip)
        n_entries = 32
        pages = torch.randperm(len(lengths) * 2, generator=torch.Generator().manual_seed(seed)) + 1
        table = pages.view(len(lengths), 2).to(I32)
        keys = draw(seed, int(pages.max()) + 1, 16, 1, 16).to(BF16)
        codes, scales = key_cache(paged, keys.view(-1, 16))
        query, weights = draw(seed + 1, len(lengths), 4, 16).to(BF16), draw(seed + 2, len(lengths), 4)
        weights = weights.to(paged.scale_dtype)
        query_codes, query_scale = paged.quantize_query(query)
        key_lens = torch.tensor(lengths, dtype=I32)
        query_ends = torch.arange(1, len(lengths) + 1, dtype=I32)
        sizes = {"n_heads": 4, "width": 16, "count": count, "max_query": 1, "max_keys": max(lengths)}
        metadata = paged.index_metadata(query_ends, key_lens, **sizes)
        picks = paged.pick_entries(
            query_codes,
            query_scale,
            codes.view(keys.shape),
            scales.view(-1, 16, 1),
            weights,
            query_ends=query_ends,
            key_lens=key_lens,
            table=table,
            metadata=metadata,
            count=count,
        )
        assert (picks.shape, picks.dtype) == ((len(lengths), 1, count), I32)
        for line, n in enumerate(lengths):
            own = keys[table[line].long()].view(n_entries, 16)[: n // 4]
            scores = indexer.index_scores(query[line].unsqueeze(0), own, weights[line].unsqueeze(0), rounding=False)[0]
            chosen = [i for i in picks[line, 0].tolist() if i >= 0]
            assert len(set(chosen)) == len(chosen) == min(count, n // 4)
            others = [i for i in range(n // 4) if i not in chosen]
            if chosen and others:
                slack = (0.6 if chip == "a5" else 0.15) * float(weights[line].float().abs().sum())
                assert float(scores[chosen].min()) >= float(scores[others].max()) - slack


@pytest.mark.parametrize("chip", CHIPS)
@examples(10)
@given(seed=st.integers(0, 99), length=st.integers(1, 140), window=st.sampled_from([1, 5, 128]))
def test_attention_over_pages(chip: str, seed: int, length: int, window: int) -> None:
    """Attention over paged window and C128 entries equals the plain operator over the gathered keys."""
    with machine_for(chip=chip):
        paged = made(chip)
        n_pages = -(-length // 64)
        table = (torch.randperm(n_pages, generator=torch.Generator().manual_seed(seed)) + 1).unsqueeze(0).to(I32)
        cache, entries = draw(seed, n_pages + 1, 64, 1, 16).to(BF16), draw(seed + 1, 3, 16, 1, 16).to(BF16)
        entry_table = torch.tensor([[2]], dtype=I32)
        q, sink = draw(seed + 2, 1, 4, 16).to(BF16), draw(seed + 3, 4)
        starts, lens = torch.tensor([0, 1], dtype=I32), torch.tensor([length], dtype=I32)
        sizes = {"max_query": 1, "max_keys": length, "n_heads": 4, "width": 16, "n_picks": 0, "window": window}
        stored, stored_entries = (
            entry_cache(paged, x.view(-1, 16)[1:].contiguous()).view(*x.shape[:3], -1) for x in (cache, entries)
        )
        for ratio in (0, 128):
            metadata = paged.attention_metadata(starts, lens, ratio=ratio, rope_width=ROPE, **sizes)
            found = paged.attend(
                q,
                stored,
                stored_entries if ratio else None,
                None,
                sink,
                window_table=table,
                entry_table=entry_table if ratio else None,
                query_starts=starts,
                key_lens=lens,
                metadata=metadata,
                ratio=ratio,
                window_size=window,
                rope_width=ROPE,
                scale=0.25,
            )
            keys = cache[table[0].long()].view(-1, 16)[max(0, length - window) : length]
            if ratio:
                keys = torch.cat((keys, entries[2].view(-1, 16)[: length // 128]))
            mask = torch.ones(1, len(keys), dtype=torch.bool)
            expected = attention.attend(q, rounded(paged, keys), mask, sink, scale=0.25, rounding=False)
            torch.testing.assert_close(found.float(), expected.float(), atol=0.02, rtol=0.01)
