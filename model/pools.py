"""The rows of one layer in a cache buffer, written from entries and read as entries, whatever they are stored as.

What an entry is rounded to, the numerics say; a form that stores it quantised stores exactly that.

Source: model sheet 6.4; the forms are those of ``state/kv.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs
from torch import Tensor

from ..ops import packing
from ..state.kv import FP4_GROUP, FP8_GROUP, KVLayout
from .attention import round_entries, round_index, spread_index
from .model import Model

__all__ = ["Pool", "entry_pool", "key_pool"]


@attrs.frozen(eq=False)
class Pool:
    """One layer's rows of a buffer.

    Attributes:
        rows: float[S,D] or u8[S,B]. The buffer's part.
        encode: float[C,D] -> rows as they are stored.
        decode: rows as they are stored -> float[C,D].
    """

    rows: Tensor
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]

    def write(self, loc: Tensor, entries: Tensor) -> None:
        """Store entries float[C,D], as they were before rounding, in rows i64[C]."""
        self.rows.index_copy_(0, loc, self.encode(entries))

    def read(self, loc: Tensor) -> Tensor:
        """Read rows i64[C], in memory of their own: float[C,D]."""
        return self.decode(self.rows.index_select(0, loc))


def _as_it_is(rows: Tensor) -> Tensor:
    return rows


def entry_pool(model: Model, layout: KVLayout, rows: Tensor) -> Pool:
    """See rows as window or compressed entries."""
    if not layout.has_fp8_rows:
        return Pool(rows, partial(round_entries, model), _as_it_is)
    width, tail, dtype = model.config.head_dim, model.config.qk_rope_head_dim, model.dtype
    return Pool(
        rows,
        partial(packing.pack_entries, tail=tail, group=FP8_GROUP, n_bytes=rows.shape[-1], dtype=dtype),
        partial(packing.unpack_entries, width=width, tail=tail, group=FP8_GROUP, dtype=dtype),
    )


def key_pool(model: Model, layout: KVLayout, rows: Tensor) -> Pool:
    """See rows as index keys."""
    if not layout.has_fp8_rows:
        return Pool(rows, partial(round_index, model), _as_it_is)
    if layout.form.startswith("fp8"):
        return Pool(rows, lambda x: packing.pack_fp8_keys(spread_index(model, x)), packing.unpack_fp8_keys)
    unpack = partial(packing.unpack_fp4_keys, width=model.config.index_head_dim, group=FP4_GROUP, dtype=model.key_dtype)
    return Pool(rows, lambda x: packing.pack_fp4_keys(spread_index(model, x), FP4_GROUP), unpack)
