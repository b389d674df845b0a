"""The compressor: pools token groups into entries and keeps the state of open groups.

Rules and formulas: kernel sheet 4.1 to 4.4; cann/ops-transformer ``experimental/attention/compressor`` (rings). Three
ways to address the state: blocks of a table (mode 1), a table of rows (mode 2 of sgl-kernel-npu), one bank, a ring, per
request (mode 2 of the recipes' package on the A5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import attrs
import torch
from ascend_sim.rows import check_pairs, turn_pairs
from ascend_sim.rules import Kernel, Site
from torch import Tensor

__all__ = ["KERNELS"]

_DOCUMENTED = {(512, 4, 2), (128, 4, 2), (512, 128, 1)}
_HIDDEN = range(1024, 10240 + 1, 512)
_INTERLEAVED = 2

Locate = Callable[[int, int], int | None]
"""(request, position) -> row of the flat state to read or write, or None where there is nothing before position 0."""


@attrs.frozen(eq=False, kw_only=True)
class _Call:
    """One call, checked.

    Attributes:
        ratio: tokens per group.
        coff: groups that an entry spans.
        width: D.
        rows: token rows of every request, as (first, count); unused tokens left out.
        start: position of the first of them.
        locate: where state lies.
        can_write: whether a row of the flat state may be written.
        saves_all: whether every position is kept, or only what a later group needs.
    """

    ratio: int
    coff: int
    width: int
    rows: Sequence[tuple[int, int]]
    start: Sequence[int]
    locate: Locate
    can_write: Callable[[int], bool]
    saves_all: bool


def _lengths(
    site: Site, x: Tensor, cu: Tensor | None, used: Tensor | None, start: Tensor | None
) -> tuple[Tensor, list[int]]:
    """Flatten the tokens and read where every request's begin: (x[T,H], starts with a leading zero)."""
    site.require(x.dim() in (2, 3), "x of rank 2 or 3", x.dim())
    if x.dim() == 3:
        site.absent(cu_seqlens=cu)
        begins = list(range(0, x.shape[0] * x.shape[1] + 1, x.shape[1]))
        x = x.flatten(0, 1)
    else:
        begins = site.starts("cu_seqlens", cu, len(x))
    n = len(begins) - 1
    used = site.tensor("seqused", used, torch.int32, (n,))
    start = site.tensor("start_pos", start, torch.int32, (n,))
    room = [b - a for a, b in pairwise(begins)]
    site.require(
        all(0 <= u <= r for u, r in zip(used.tolist(), room, strict=True)), f"seqused within {room}", used.tolist()
    )
    site.require(bool((start >= 0).all()), "start_pos of 0 or more", start.tolist())
    return x, begins


def _weights(site: Site, call: dict[str, Tensor], ratio: int, coff: int) -> int:
    """Check the weights and the state; hand back D."""
    x, norm = call["x"], call["norm_weight"]
    width, hidden = norm.shape[0], x.shape[-1]
    site.dtype("x", x, torch.bfloat16, torch.float16)
    site.require((ratio, coff) in {(4, 2), (128, 1)}, "ratio 4 with coff 2, or 128 with 1", (ratio, coff))
    site.size("(width, ratio, coff)", (width, ratio, coff), sorted(_DOCUMENTED))
    site.size("the hidden width", hidden, _HIDDEN)
    for name in ("wkv", "wgate"):
        site.tensor(name, call[name], x.dtype, (coff * width, hidden))
    site.tensor("ape", call["ape"], torch.float32, (ratio, coff * width))
    site.tensor("norm_weight", norm, torch.float32, (width,))
    state = call["state_cache"]
    site.dtype("state_cache", state, torch.float32)
    site.require(
        state.dim() == 3 and state.shape[-1] == 2 * coff * width,
        f"state_cache of shape [blocks,rows,{2 * coff * width}]",
        tuple(state.shape),
    )
    return width


def _paged(
    site: Site, table: Tensor, state: Tensor, call: Sequence[tuple[int, int]]
) -> tuple[Locate, Callable[[int], bool]]:
    """Mode 1: blocks of rows; block 0 is never written."""
    rows = state.shape[1]
    last = [position for _, position in call]
    ids = site.pages("state_block_table", table, last, rows, state.shape[0])

    def locate(request: int, position: int) -> int | None:
        if position < 0:
            return None
        page = int(ids[request, position // rows])
        site.require(0 <= page < state.shape[0], f"state blocks 0..{state.shape[0] - 1}", page)
        return page * rows + position % rows

    return locate, lambda row: row >= rows


def _explicit(
    site: Site, table: Tensor, state: Tensor, spans: Sequence[tuple[int, int]], reach: int, capacity: int
) -> tuple[Locate, Callable[[int], bool]]:
    """Mode 2 of sgl-kernel-npu: column c is position ``start - reach + c``; what does not exist is a cleared row."""
    n_rows = state.shape[0] * state.shape[1]
    flat = state.view(n_rows, 2, -1)
    site.dtype("state_block_table", table, torch.int32)
    site.require(
        table.dim() == 2 and table.shape[0] == len(spans) and table.shape[1] >= reach + capacity,
        f"state_block_table of shape [{len(spans)}, {reach + capacity} or more]: state rows, not banks or blocks",
        tuple(table.shape),
    )
    ids = table.tolist()
    for request, (start, end) in enumerate(spans):
        for column, row in enumerate(ids[request]):
            position = start - reach + column
            site.require(0 <= row < n_rows, f"state rows 0..{n_rows - 1}", row)
            if position < 0 or position >= end or start == end:
                is_clear = bool((flat[row, 0] == 0).all() and (flat[row, 1] == -math.inf).all())
                site.require(
                    row > 0 and is_clear,
                    f"a cleared row (0, -inf) other than 0 in line {request}, column {column}, which has no token",
                    row,
                )
    return lambda request, position: ids[request][position - spans[request][0] + reach], lambda row: True


def _banks(
    site: Site, table: Tensor, state: Tensor, n: int, reach: int, capacity: int
) -> tuple[Locate, Callable[[int], bool]]:
    """Mode 2 on the A5: one bank, a ring, per request; a call's positions, history included, have a row each."""
    n_banks, ring = state.shape[:2]
    table = site.tensor("state_block_table", table, torch.int32, (n,))
    least = reach + max(capacity, 1) - 1
    site.require(least <= ring <= 1024, f"rings of {least} to 1024 rows", ring)
    site.require(n_banks >= n, f"at least {n} banks", n_banks)
    site.page_ids("state_block_table", table, n_banks)
    banks = table.tolist()
    live = [bank for bank in banks if bank]
    site.require(len(live) == len(set(live)), "one request per bank, but bank 0", banks)
    return (
        lambda request, position: None if position < 0 else banks[request] * ring + position % ring,
        lambda row: True,
    )


def _addresses(
    site: Site, mode: int, table: Tensor | None, state: Tensor, spans: list[tuple[int, int]], reach: int
) -> tuple[Locate, Callable[[int], bool]]:
    modes = (1, 2)
    if site.operator.startswith("_C_ascend") or (site.operator.startswith("custom") and site.rules.chip != "a5"):
        modes = (1,)
    site.require(mode in modes, f"cache_mode among {modes} in this package on this chip", mode)
    site.require(table is not None, "state_block_table to be given", None)
    assert table is not None, "required above"
    if mode == 1:
        return _paged(site, table, state, spans)
    capacity = max(end - start for start, end in spans)
    if site.operator.startswith("custom"):
        return _banks(site, table, state, len(spans), reach, capacity)
    return _explicit(site, table, state, spans, reach, capacity)


def _compressor(
    site: Site,
    *,
    x: Tensor,
    wkv: Tensor,
    wgate: Tensor,
    state_cache: Tensor,
    ape: Tensor,
    norm_weight: Tensor,
    rope_sin: Tensor,
    rope_cos: Tensor,
    state_block_table: Tensor | None,
    cu_seqlens: Tensor | None,
    seqused: Tensor | None,
    start_pos: Tensor | None,
    rope_head_dim: int,
    cmp_ratio: int,
    coff: int,
    norm_eps: float,
    rotary_mode: int,
    cache_mode: int,
    state_cache_stride_dim0: int = 0,
) -> Tensor:
    tensors = {"x": x, "wkv": wkv, "wgate": wgate, "state_cache": state_cache, "ape": ape, "norm_weight": norm_weight}
    width = _weights(site, tensors, cmp_ratio, coff)
    site.fixed(rotary_mode=(rotary_mode, _INTERLEAVED), state_cache_stride_dim0=(state_cache_stride_dim0, 0))
    x, begins = _lengths(site, x, cu_seqlens, seqused, start_pos)
    assert seqused is not None, "required in _lengths"
    assert start_pos is not None, "required in _lengths"
    n_out = _entry_rows(len(x), len(begins) - 1, cmp_ratio)
    site.require(
        0 < rope_head_dim <= width and rope_head_dim % 2 == 0, "an even rope_head_dim within the width", rope_head_dim
    )
    for name, r in (("rope_sin", rope_sin), ("rope_cos", rope_cos)):
        site.tensor(name, r, torch.float32, (n_out, rope_head_dim))
        check_pairs(site, name, r)
    used, start = seqused.tolist(), start_pos.tolist()
    spans = [(s, s + u) for s, u in zip(start, used, strict=True)]
    locate, can_write = _addresses(site, cache_mode, state_block_table, state_cache, spans, coff * cmp_ratio)
    call = _Call(
        ratio=cmp_ratio,
        coff=coff,
        width=width,
        rows=list(zip(begins, used, strict=False)),
        start=start,
        locate=locate,
        can_write=can_write,
        saves_all=cache_mode == 1,
    )
    pooled = _run(site, call, x, wkv, wgate, ape, state_cache.view(-1, state_cache.shape[-1]))
    out = x.new_full((n_out, width), math.nan)
    if len(pooled):
        normed = pooled * (pooled.pow(2).mean(-1, keepdim=True) + norm_eps).rsqrt() * norm_weight
        head, tail = normed.split((width - rope_head_dim, rope_head_dim), -1)
        k = len(pooled)
        out[:k] = torch.cat((head, turn_pairs(tail, rope_cos[:k], rope_sin[:k])), -1).to(x.dtype)
    return out


def _run(site: Site, call: _Call, x: Tensor, wkv: Tensor, wgate: Tensor, ape: Tensor, flat: Tensor) -> Tensor:
    """Pool what closes, then save what stays: f32[C,D]."""
    k = x.float() @ wkv.float().t()
    s = x.float() @ wgate.float().t()
    pooled, saved = [], []
    for request, (first, count) in enumerate(call.rows):
        start, end = call.start[request], call.start[request] + count
        new = {}
        for row, p in enumerate(range(start, end), first):
            new[p] = torch.cat((k[row], s[row] + ape[p % call.ratio]))
        pooled += [_pool(call, flat, new, request, group) for group in range(start // call.ratio, end // call.ratio)]
        oldest_needed = end // call.ratio * call.ratio - (call.coff - 1) * call.ratio
        for p, row in new.items():
            if call.saves_all or p // call.ratio * call.ratio >= oldest_needed:
                saved.append((call.locate(request, p), row))
    places = [place for place, _ in saved]
    site.require(len(set(places)) == len(places), "one token per state row", places)
    # After every read: in a ring the oldest and the newest position may share a row.
    for place, row in saved:
        assert place is not None, "a new token has a position"
        if call.can_write(place):
            flat[place] = row
    return torch.stack(pooled) if pooled else flat.new_empty((0, call.width))


def _pool(call: _Call, flat: Tensor, new: dict[int, Tensor], request: int, group: int) -> Tensor:
    """Pool one closed group; with an overlap, from the a-halves of the one before and the b-halves of its own."""
    d, ratio = call.width, call.ratio
    absent = torch.cat((flat.new_zeros(call.coff * d), flat.new_full((call.coff * d,), -math.inf)))

    def row(position: int) -> Tensor:
        if position in new:
            return new[position]
        place = call.locate(request, position)
        return absent if place is None else flat[place]

    own = torch.stack([row(p) for p in range(group * ratio, (group + 1) * ratio)])
    kv, score = own.chunk(2, -1)
    if call.coff == 2:
        before = torch.stack([row(p) for p in range((group - 1) * ratio, group * ratio)])
        kv_before, score_before = before.chunk(2, -1)
        kv = torch.cat((kv_before[:, :d], kv[:, d:]))
        score = torch.cat((score_before[:, :d], score[:, d:]))
    return (torch.softmax(score, 0) * kv).sum(0)


def _entry_rows(n_tokens: int, n_requests: int, ratio: int) -> int:
    return min(n_tokens, n_tokens // ratio + n_requests)


def _fake(
    site: Site, *, x: Tensor, norm_weight: Tensor, cu_seqlens: Tensor | None, cmp_ratio: int, **_: object
) -> Tensor:
    n_tokens = x.shape[0] if x.dim() == 2 else x.shape[0] * x.shape[1]
    n_requests = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty((_entry_rows(n_tokens, n_requests, cmp_ratio), norm_weight.shape[0]))


_KERNEL = Kernel(run=_compressor, fake=_fake, strided=frozenset())

KERNELS = {"npu::compressor": _KERNEL, "custom::compressor": _KERNEL, "_C_ascend::compressor": _KERNEL}
