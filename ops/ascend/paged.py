"""Kernels over whole caches: compressor, indexer, attention, and the writes and quantisation between them.

Functions of plain tensors. What a kernel writes is an argument that is named so, and is returned. Cumulative lengths
come in two forms, and the kernels disagree on them: ``query_starts`` has the leading zero, ``query_ends`` has not.
Caches are in the form of the A2 and A3 here: entries in the model's dtype, index keys int8 with f16 scales. The A5's
writes are in ``packed.py``.

Source: kernel sheet 3 to 6; cann-recipes-infer @fbc225d ``ops/ascendc/docs``, sgl-kernel-npu @f425bdf
``csrc/compressor``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ..dispatch import PagedOps
from . import packed
from .providers import Providers

__all__ = [
    "attend",
    "attention_metadata",
    "compress",
    "entry_slots",
    "index_metadata",
    "needed_kernels",
    "paged_ops",
    "pick_entries",
    "quantize_query",
    "rotate",
    "window_slots",
    "write_entries",
    "write_keys",
    "write_window",
]

_SHARED: Final = ("rotate", "compress", "index_metadata", "pick_entries", "attention_metadata", "attend")


def needed_kernels(chip: str) -> tuple[str, ...]:
    """List the operators that must all be there: they share the form of the caches."""
    return (*_SHARED, *(packed.KERNELS if chip == "a5" else ("write_rows", "quantize_rows")))


def paged_ops(providers: Providers) -> PagedOps | None:
    """Bind the functions below to a machine.

    Args:
        providers: of the machine.
    Returns:
        The table, or None where an operator is missing.
    """
    if not all(providers.has(name) for name in needed_kernels(providers.chip)):
        return None

    def bound(run: Callable[..., Any]) -> Callable[..., Any]:
        return partial(run, providers)

    is_packed = providers.chip == "a5"
    return PagedOps(
        form="packed" if is_packed else "ascend",
        scale_dtype=torch.float32 if is_packed else torch.float16,
        rotate=bound(rotate),
        compress=bound(compress),
        window_slots=packed.slots_of if is_packed else window_slots,
        entry_slots=packed.slots_of if is_packed else entry_slots,
        write_window=bound(packed.write_entries) if is_packed else write_window,
        write_entries=bound(packed.write_entries if is_packed else write_entries),
        write_keys=bound(packed.write_keys if is_packed else write_keys),
        quantize_query=bound(packed.quantize_query if is_packed else quantize_query),
        index_metadata=bound(index_metadata),
        pick_entries=bound(pick_entries),
        attention_metadata=bound(attention_metadata),
        attend=bound(attend),
    )


def rotate(providers: Providers, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs of the last R channels in place; with ``-sin``, rotate back.

    Args:
        providers: of the machine.
        x: float[T,D] or float[T,N,D], contiguous. Written.
        cos: f32[T,R]. Every value twice.
        sin: f32[T,R].
    Returns:
        ``x``.
    """
    n_rows, width = x.shape[0], x.shape[-1]
    turning = cos.shape[-1]
    providers["rotate"](
        x=x.view(n_rows, 1, -1, width),
        cos=cos.view(n_rows, 1, 1, turning),
        sin=sin.view(n_rows, 1, 1, turning),
        partial_slice=(width - turning, width),
    )
    return x


def compress(
    providers: Providers,
    x: Tensor,
    wkv: Tensor,
    wgate: Tensor,
    state: Tensor,
    ape: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    table: Tensor,
    query_starts: Tensor,
    used: Tensor,
    start_pos: Tensor,
    ring: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Pool the groups that close and keep the state of those that do not.

    Args:
        providers: of the machine.
        x: float[T,H]. Tokens of all rows, one row after the other.
        wkv: float[k*D,H]; k is 2 where groups of 4 overlap, 1 for groups of 128.
        wgate: float[k*D,H].
        state: f32[S,2*k*D]. Rings of the layer; written.
        ape: f32[4,k*D] or f32[128,k*D].
        norm: f32[D].
        cos: f32[C,R]. At the first positions of the closing groups, dense.
        sin: f32[C,R].
        table: i32[B,A]. State rows by position; where there is no token, the dummy. On the A5 i32[B], banks.
        query_starts: i32[B+1].
        used: i32[B]. New tokens of every row; 0 for an idle one.
        start_pos: i32[B]. Position of the first.
        ring: rows of a bank; 0 for 8 or 128, as the caches have.
        eps: of the norm.
    Returns:
        (entries float[C,D], state): entries dense; rows after the last closing group are undefined.
    """
    width = norm.shape[0]
    entries = providers["compress"](
        x=x,
        wkv=wkv,
        wgate=wgate,
        state=state.view(-1, ring or ape.shape[0] * wkv.shape[0] // width, state.shape[-1]),
        ape=ape,
        norm=norm,
        cos=cos,
        sin=sin,
        table=table,
        cu_seqlens=query_starts,
        seqused=used,
        start_pos=start_pos,
        rope_width=cos.shape[-1],
        ratio=ape.shape[0],
        coff=wkv.shape[0] // width,
        eps=eps,
    )
    return entries, state


def window_slots(loc: Tensor) -> Tensor:
    """Make the list of window slots that ``write_window`` takes: i64[T]."""
    return loc


def entry_slots(loc: Tensor) -> Tensor:
    """Make the list of entry slots that the writing kernels take: i32[C] -> i64[C,1]."""
    return loc.long().unsqueeze(-1)


def write_window(cache: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """Write rows of the window by index, as production does.

    Args:
        cache: float[S,D]. Written.
        slots: i64[T].
        rows: float[T,D].
    Returns:
        ``cache``.
    """
    return cache.index_copy_(0, slots, rows)


def write_entries(providers: Providers, cache: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """Write rows of a cache; none of the slots may be negative.

    Args:
        providers: of the machine.
        cache: float[S,D] or i8[S,D]. Written.
        slots: i64[C,1].
        rows: float[C,D] or i8[C,D].
    Returns:
        ``cache``.
    """
    providers["write_rows"](cache=cache, slots=slots, rows=rows)
    return cache


def write_keys(
    providers: Providers, keys: Tensor, scales: Tensor, slots: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Quantise index keys and write codes and scales.

    Args:
        providers: of the machine.
        keys: i8[S,J]. Written.
        scales: f16[S,1]. Written.
        slots: i64[C,1].
        rows: float[C,J].
    Returns:
        (keys, scales).
    """
    codes, factors = quantize_query(providers, rows)
    return (
        write_entries(providers, keys, slots, codes),
        write_entries(providers, scales, slots, factors.unsqueeze(-1)),
    )


def quantize_query(providers: Providers, x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise every row to int8 with a scale of its own.

    Args:
        providers: of the machine.
        x: float[...,J].
    Returns:
        (codes i8[...,J], scales f16[...]).
    """
    codes, scales = providers["quantize_rows"](x=x)
    return codes, scales.half()


def index_metadata(
    providers: Providers,
    query_ends: Tensor,
    key_lens: Tensor,
    *,
    n_heads: int,
    width: int,
    count: int,
    max_query: int,
    max_keys: int,
) -> Tensor:
    """Split the indexer's work over cores; good for these lengths only.

    Args:
        providers: of the machine.
        query_ends: i32[B].
        key_lens: i32[B]. In tokens.
        n_heads: I.
        width: J.
        count: P.
        max_query: most tokens of a row.
        max_keys: longest row.
    Returns:
        i32[1024].
    """
    metadata: Tensor = providers["index_metadata"](
        n_heads=n_heads,
        width=width,
        query_ends=query_ends,
        key_lens=key_lens,
        batch_size=key_lens.shape[0],
        max_seqlen_q=max_query,
        max_seqlen_k=max_keys,
        count=count,
        device=str(key_lens.device),
    )
    return metadata


def pick_entries(
    providers: Providers,
    query: Tensor,
    query_scale: Tensor,
    keys: Tensor,
    key_scale: Tensor,
    weights: Tensor,
    *,
    query_ends: Tensor,
    key_lens: Tensor,
    table: Tensor,
    metadata: Tensor,
    count: int,
) -> Tensor:
    """Choose the best visible entries of every token; entry j is visible from position 4*j + 3 on.

    Args:
        providers: of the machine.
        query: i8[T,I,J]; on the A5 e4m3.
        query_scale: f16[T,I]; on the A5 f32, like the other scales and the weights.
        keys: i8[C,32,1,J]. Pages; on the A5 the bytes of e4m3 numbers.
        key_scale: f16[C,32,1].
        weights: f16[T,I]. With both scale factors.
        query_ends: i32[B].
        key_lens: i32[B]. In tokens.
        table: i32[B,C].
        metadata: of ``index_metadata``.
        count: P.
    Returns:
        i32[T,1,P]: in no particular order, -1 where there are fewer.
    """
    picks: Tensor = providers["pick_entries"](
        query=query,
        key=packed.codes_of(keys),
        weights=weights,
        query_scale=query_scale,
        key_scale=key_scale,
        query_ends=query_ends,
        key_lens=key_lens,
        table=table,
        metadata=metadata,
        count=count,
    )[0]
    return picks


def attention_metadata(
    providers: Providers,
    query_starts: Tensor,
    key_lens: Tensor,
    *,
    n_heads: int,
    width: int,
    ratio: int,
    n_picks: int,
    window: int,
    rope_width: int,
    max_query: int,
    max_keys: int,
) -> Tensor:
    """Split the work of one kind of attention layer over cores; good for these lengths only.

    Args:
        providers: of the machine.
        query_starts: i32[B+1].
        key_lens: i32[B]. In tokens.
        n_heads: N.
        width: D.
        ratio: tokens per entry; 0 for the window alone.
        n_picks: entries that the indexer picks; 0 where all are read.
        window: W.
        rope_width: R; what packed rows have beside their codes.
        max_query: most tokens of a row.
        max_keys: longest row.
    Returns:
        i32[1024].
    """
    metadata: Tensor = providers["attention_metadata"](
        n_heads=n_heads,
        width=width,
        query_starts=query_starts,
        key_lens=key_lens,
        batch_size=key_lens.shape[0],
        max_seqlen_q=max_query,
        max_seqlen_kv=max_keys,
        n_picks=n_picks,
        ratio=ratio or 1,
        window_left=window - 1,
        has_entries=ratio > 0,
        device=str(key_lens.device),
        **_packing(providers, rope_width),
    )
    return metadata


def attend(
    providers: Providers,
    q: Tensor,
    window: Tensor,
    entries: Tensor | None,
    picks: Tensor | None,
    sink: Tensor,
    *,
    window_table: Tensor,
    entry_table: Tensor | None,
    query_starts: Tensor,
    key_lens: Tensor,
    metadata: Tensor,
    ratio: int,
    window_size: int,
    rope_width: int,
    scale: float,
) -> Tensor:
    """Attend to window, entries and sink.

    Args:
        providers: of the machine.
        q: float[T,N,D].
        window: float[C,128,1,D]. Pages; on the A5 packed rows, and so are the entries.
        entries: float[C,32,1,D] or float[C,16,1,D]; None for the window alone.
        picks: i32[T,1,P]; None where all visible entries are read.
        sink: f32[N].
        window_table: i32[B,C].
        entry_table: i32[B,C].
        query_starts: i32[B+1].
        key_lens: i32[B]. In tokens.
        metadata: of ``attention_metadata``.
        ratio: tokens per entry; 0 for the window alone.
        window_size: W; a token sees itself and W - 1 before it.
        rope_width: R; what packed rows have beside their codes.
        scale: of the dot products.
    Returns:
        float[T,N,D].
    """
    compressed = {"entries": entries, "entry_table": entry_table, "picks": picks}
    out: Tensor = providers["attend"](
        q=q,
        window=packed.codes_of(window),
        window_table=window_table,
        query_starts=query_starts,
        key_lens=key_lens,
        sinks=sink,
        metadata=metadata,
        scale=scale,
        ratio=ratio or 1,
        window_left=window_size - 1,
        **{name: packed.codes_of(x) for name, x in compressed.items() if x is not None},
        **_packing(providers, rope_width),
    )[0]
    return out


def _packing(providers: Providers, rope_width: int) -> dict[str, int]:
    """Say how rows are packed, to the kernels that take packed ones."""
    return {"rope_width": rope_width} if providers.chip == "a5" else {}
