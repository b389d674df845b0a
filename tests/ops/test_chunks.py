"""The kernels of long chunks against the plain ones, at every border of their tiles, and the memory that they take."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.steps import examples
from purestep.model.reading import ordered_picks
from purestep.ops import attention, chunks, experts, indexer, streams
from purestep.ops.dispatch import FUSED, INVARIANT, REFERENCE, Ops
from purestep.state.errors import ConfigError
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

CLOSE = {"atol": 2e-5, "rtol": 2e-5}
REACH = 16


def draw(seed: int, *shape: int) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def chunk_case(
    seed: int, first: int, n_rows: int, ratio: int, count: int | None, heads: int = 3, width: int = 8
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of ``attend_chunk``: a chunk after ``first`` cached tokens; ``count`` entries are picked a row."""
    last, n_entries = first + n_rows, (first + n_rows) // ratio if ratio else 0
    q, window = draw(seed, n_rows, heads, width), draw(seed + 1, last - max(0, first - REACH + 1), width)
    entries = draw(seed + 2, n_entries, width) if n_entries else None
    picks = None
    if entries is not None and count is not None:
        visible = torch.arange(first + 1, last + 1) // ratio
        picks = ordered_picks(indexer.pick_entries(draw(seed + 3, n_rows, n_entries), visible, count))
    options = {"first": first, "ratio": ratio, "reach": REACH, "scale": 0.4, "rounding": False, "budget": 1 << 24}
    return (q, window, entries, picks, draw(seed + 4, heads)), options


def by_the_formula(args: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Attend row by row over the keys that each one sees, in double precision."""
    q, window, entries, picks, sink = args
    first, ratio = options["first"], options["ratio"]
    start, rows = first + len(q) - len(window), []
    for i, query in enumerate(q.double()):
        position = first + i
        seen = [window[max(0, position - REACH + 1) - start : position + 1 - start]]
        if entries is not None:
            own = picks[i][picks[i] >= 0] if picks is not None else torch.arange((position + 1) // ratio)
            seen.append(entries[own])
        keys = torch.cat(seen).double()
        weights = (query @ keys.T * options["scale"]).exp()
        rows.append(weights @ keys / (weights.sum(-1) + sink.double().exp()).unsqueeze(-1))
    return torch.stack(rows).float()


@pytest.mark.parametrize("ops", [REFERENCE, FUSED], ids=lambda ops: ops.name)
@examples(40)
@given(
    seed=st.integers(0, 999),
    first=st.sampled_from((0, 1, REACH - 1, REACH, 63, 127, 200)) | st.integers(0, 300),
    n_rows=st.sampled_from((1, 2, REACH, 63, 64, 65, 130)) | st.integers(1, 140),
    ratio=st.sampled_from((0, 4, 128)),
    count=st.none() | st.sampled_from((1, 4, 16, 200)),
    budget=st.sampled_from((1, 3000, 1 << 24)),
)
def test_chunk_attention(
    ops: Ops, seed: int, first: int, n_rows: int, ratio: int, count: int | None, budget: int
) -> None:
    """A chunk's tokens read their window, their entries and the sink as the formula says, at every border of a tile."""
    args, options = chunk_case(seed, first, n_rows, ratio, count)
    options["budget"] = budget
    before = [x.clone() if isinstance(x, Tensor) else x for x in args]
    found = ops.attend_chunk(*args, **options)
    torch.testing.assert_close(found, by_the_formula(args, options), **CLOSE)
    assert torch.equal(found, ops.attend_chunk(*args, **options))
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True) if isinstance(a, Tensor))


@pytest.mark.parametrize("rounding", [True, False, "normalised"])
@examples(15)
@given(seed=st.integers(0, 999), first=st.integers(0, 200), n_rows=st.integers(1, 80), count=st.none() | st.just(4))
def test_chunk_attention_rounds_alike(
    rounding: bool | str, seed: int, first: int, n_rows: int, count: int | None
) -> None:
    """In bfloat16 both versions differ by the last place of the result, whatever the numerics round on the way."""
    args, options = chunk_case(seed, first, n_rows, 4, count)
    narrow = [x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args[:-1]]
    options["rounding"] = rounding
    both = [ops.attend_chunk(*narrow, args[-1], **options) for ops in (REFERENCE, FUSED)]
    assert both[0].dtype == both[1].dtype == torch.bfloat16
    torch.testing.assert_close(*both, atol=2e-2, rtol=2e-2)


def test_rows_without_a_key_read_nothing() -> None:
    """Where a row's picks are all missing and many, only window and sink are left."""
    args, options = chunk_case(0, 300, 40, 4, 2)
    args[3].fill_(-1)
    none = (args[0], args[1], None, None, args[4])
    torch.testing.assert_close(FUSED.attend_chunk(*args, **options), by_the_formula(none, options), **CLOSE)


def test_row_independent_kernels_take_no_chunk() -> None:
    """The row-independent table refuses keys that rows share, instead of summing them in an order of its own."""
    args, options = chunk_case(0, 0, 5, 4, None)
    with pytest.raises(ConfigError, match="attend_chunk"):
        INVARIANT.attend_chunk(*args, **options)


@examples(30)
@given(
    seed=st.integers(0, 999),
    n_rows=st.integers(0, 40),
    chosen=st.integers(1, 4),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    stored=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_experts_in_blocks(seed: int, n_rows: int, chosen: int, dtype: torch.dtype, stored: torch.dtype) -> None:
    """Experts one after the other give what they give stage by stage, also where some have no row."""
    x, w13, w2 = draw(seed, n_rows, 6).to(dtype), draw(seed + 1, 5, 8, 6).to(stored), draw(seed + 2, 5, 6, 4).to(stored)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(n_rows, 5, generator=generator).argsort(-1)[:, :chosen]
    args = (x, ids, torch.rand(n_rows, chosen, generator=generator), w13, w2, 0.6, REFERENCE.linear)
    before = x.clone()
    counts = torch.bincount(ids.flatten(), minlength=5).tolist()
    found, expected = chunks.run_blocks(*args, counts), experts.run_sorted(*args)
    assert found.dtype == expected.dtype
    assert torch.equal(x, before)
    torch.testing.assert_close(found, expected, **({"atol": 2e-2, "rtol": 2e-2} if dtype is torch.bfloat16 else CLOSE))


@examples(20)
@given(
    seed=st.integers(0, 999),
    n=st.integers(0, 40),
    block=st.sampled_from((1, 96, 97, 1 << 20)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    rounding=st.booleans(),
)
def test_streams_in_blocks(seed: int, n: int, block: int, dtype: torch.dtype, rounding: bool) -> None:
    """Streams updated block by block, from an expanded embedding too, are those updated at once."""
    rows, y = draw(seed, n, 4, 8).to(dtype), draw(seed + 1, n, 8).to(dtype)
    post, comb = draw(seed + 2, n, 4), draw(seed + 3, n, 4, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "BLOCK", block)
        for own in (rows, streams.split_streams(y, 4)):
            found = chunks.update_streams(own, y, post, comb, rounding=rounding)
            expected = streams.update_streams(own, y, post, comb, rounding=rounding)
            torch.testing.assert_close(found, expected, atol=4e-2 if dtype is torch.bfloat16 else 1e-5, rtol=1e-2)


@given(
    seed=st.integers(0, 999), n=st.integers(1, 9), spread=st.sampled_from([0.5, 2.0, 6.0]), rounds=st.integers(1, 20)
)
def test_sinkhorn_along_the_rows(seed: int, n: int, spread: float, rounds: int) -> None:
    """Scaling rows and columns of all tokens at once gives the matrices of the plain rounds, one after the other."""
    logits = draw(seed, n, 4, 4) * spread
    found = chunks.sinkhorn_columns(logits, rounds, 1e-6)
    assert found.is_contiguous()
    torch.testing.assert_close(found, streams.sinkhorn(logits, rounds, 1e-6), atol=1e-6, rtol=1e-5)


@examples(30)
@given(
    seed=st.integers(0, 999),
    n=st.integers(0, 40),
    entries=st.integers(1, 60),
    tile=st.sampled_from((1, 500, 1 << 18)),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    rounding=st.booleans(),
)
def test_index_scores_in_blocks(seed: int, n: int, entries: int, tile: int, dtype: torch.dtype, rounding: bool) -> None:
    """Scores in blocks of rows are the plain ones, in both dtypes."""
    q, keys, weights = (draw(seed + i, *shape).to(dtype) for i, shape in enumerate(((n, 3, 8), (entries, 8), (n, 3))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "TILE_SCORES", tile)
        found = chunks.index_scores(q, keys, weights, rounding=rounding)
    expected = indexer.index_scores(q, keys, weights, rounding=rounding)
    torch.testing.assert_close(found, expected, **({"atol": 0.1, "rtol": 2e-2} if dtype is torch.bfloat16 else CLOSE))


def peak_of(run: Callable[[], object], folder: Path) -> int:
    """Bytes that a call holds at once beyond what was there before, as the allocator records them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    seen.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    sizes = [event["args"] for event in events if event["name"] == "[memory]"]
    first = sizes[0]["Total Allocated"] - sizes[0]["Bytes"]
    return max(one["Total Allocated"] for one in sizes) - first


@pytest.mark.parametrize("count", [None, 16])
def test_memory_of_chunk_attention(count: int | None, tmp_path: Path) -> None:
    """Beyond its result a chunk's attention holds one tile: no more for twice the rows, nor a score for each key."""
    peaks = []
    for n_rows in (256, 512):
        args, options = chunk_case(0, 4000, n_rows, 4, count)
        peaks.append(peak_of(lambda a=args, o=options: FUSED.attend_chunk(*a, **o), tmp_path) - args[0].nbytes)
    assert peaks[1] < 1.2 * peaks[0]
    assert peaks[1] < 6 * 4 * max(chunks.TILE_SCORES, chunks.TILE_KEYS)


def test_memory_of_picked_entries(tmp_path: Path) -> None:
    """Where each row gathers what it picked, four times the history takes no more memory."""
    peaks = []
    for first in (2000, 8000):
        args, options = chunk_case(0, first, 256, 4, 16)
        peaks.append(peak_of(lambda a=args, o=options: FUSED.attend_chunk(*a, **o), tmp_path))
    assert peaks[1] <= 1.05 * peaks[0]


def test_plain_tiles_agree_with_one_tile() -> None:
    """The plain version in tiles of one row is the plain version in one tile."""
    args, options = chunk_case(3, 37, 20, 4, 3)
    whole = attention.attend_chunk(*args, **options)
    torch.testing.assert_close(attention.attend_chunk(*args, **(options | {"budget": 1})), whole, **CLOSE)
