"""The closed alphabet of axis names, used in every shape token of the package.

A shape token is ``dtype[axes]``: ``bf16[T,H]``, ``i32[B]``, ``f32[]``. Values in brackets are V4-Flash / V4-Pro.

====== ==========================================================================================
letter meaning
====== ==========================================================================================
``B``  requests of this call
``T``  token rows of this call (plain decode: ``T = B``)
``L``  layers (43 / 61)
``M``  residual streams of mHC (4)
``H``  hidden width (4096 / 7168)
``N``  query heads (64 / 128)
``D``  head width (512), of which the last ``R`` are rotary
``R``  rotary width (64)
``Q``  query low-rank width (1024 / 1536)
``G``  output groups (8 / 16)
``U``  output low-rank width per group (1024)
``W``  sliding window (128)
``C``  compressed entries
``A``  token rows that a compressor still holds back
``I``  indexer heads (64)
``J``  indexer head width (128)
``P``  entries that the indexer picks (512 / 1024)
``E``  routed experts (256 / 384)
``K``  experts chosen per token (6)
``F``  expert width (2048 / 3072)
``V``  vocabulary (129280)
``S``  rows (slots) of a pool
``X``  keys that one query sees, padded
====== ==========================================================================================

The fact sheets that the formulas come from use ``D`` for hidden and ``H`` for heads; code uses this table.
"""

from __future__ import annotations

from typing import Final

__all__ = ["AXES", "DTYPES"]

AXES: Final = frozenset("BTLMHNDRQGUWCAIJPEKFVSX")
"""Every letter that a shape token may use (plain integers and products of them are allowed too)."""

DTYPES: Final = frozenset({"f64", "f32", "bf16", "f16", "fp8", "fp4", "i64", "i32", "i16", "i8", "u8", "bool", "float"})
"""Every dtype word of a shape token; ``float`` means the model's own floating dtype."""
