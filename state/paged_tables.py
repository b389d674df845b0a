"""The tables that Ascend kernels find everything by: pages, lengths, slots, state rows; int32 unless said otherwise.

Rows of the batch that pad a step to a fixed size are *idle*: they feed no token, write to the sinks and read one row of
a sink. Lists of entries are dense: the closing groups in batch order, then zeros, which name the sink.

Source: SGLang 0.5.23 ``hardware_backend/npu/attention/ascend_dsv4_backend.py``; kernel sheet 4.2, 4.3, 9.1, 9.2.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from torch import Tensor

from .values import value

__all__ = ["AscendTables", "CompressorTables"]


@value
@attrs.frozen(eq=False, kw_only=True)
class CompressorTables:
    """Where one compressor finds its state and where its entries go.

    Attributes:
        state_table: i32[B,A]. State row of positions ``start_pos - reach .. ``, reach 8 or 128; the dummy where there
            is no such token. On the A5 i32[B], the bank of every row, in which position p lies at p modulo the ring.
        loc: i32[C]. Slot of every entry that closes, dense.
        first_pos: i64[C]. First position of its group, dense.
        rest: i64[A]. Token rows whose state the kernel does not keep although a cut may need it: the last group of
            every page that a chunk leaves behind.
        rest_loc: i64[A]. Their state slots.
        ring: rows of a bank where banks are made for this step alone; 0 where the caches are the banks, or on chips
            without banks.
        carried: i64[A]. State slots that closing groups need and that are not in the row's bank.
        carried_to: i64[A]. Where the kernel looks for them, as rows of the banks.
        saved: i64[A]. What the kernel keeps, as rows of banks made for this step; empty otherwise.
        saved_loc: i64[A]. Where it belongs.
    """

    state_table: Tensor
    loc: Tensor
    first_pos: Tensor
    rest: Tensor
    rest_loc: Tensor
    ring: int
    carried: Tensor
    carried_to: Tensor
    saved: Tensor
    saved_loc: Tensor


@value
@attrs.frozen(eq=False, kw_only=True)
class AscendTables:
    """What the kernels of one step read by.

    Attributes:
        query_starts: i32[B+1]. Where each row's tokens begin, with the leading zero: attention and compressor.
        query_ends: i32[B]. Where they end, without it: the indexer.
        key_lens: i32[B]. Length of each row with its new tokens, at least 1.
        start_pos: i32[B]. Length without them.
        used: i32[B]. How many they are; 0 for an idle row.
        window_table: i32[B,C]. Window pages; the sink where the window has passed.
        c4_table: i32[B,C]. Pages of C4 entries and index keys.
        c128_table: i32[B,C]. Pages of C128 entries.
        compressors: ratio -> its tables.
        live: f32[T]. 1 for a token, 0 for the place of an idle row; None where there are no idle rows by design.
        max_query: most tokens of a row.
        max_keys: longest row.
    """

    query_starts: Tensor
    query_ends: Tensor
    key_lens: Tensor
    start_pos: Tensor
    used: Tensor
    window_table: Tensor
    c4_table: Tensor
    c128_table: Tensor
    compressors: Mapping[int, CompressorTables]
    live: Tensor | None
    max_query: int
    max_keys: int
