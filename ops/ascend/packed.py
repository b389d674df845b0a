"""What the A5 writes to its caches: packed entries, and index keys in FP8.

A packed row holds the channels without rotation as e4m3 numbers, one power of two for 64 of them, and the rotary ones
in bfloat16. Buffers keep bytes; the kernels get them as the e4m3 numbers that they are, for the most part.

Source: SGLang 0.5.23 ``hardware_backend/npu/attention/ascend_dsv4_backend.py``; cann-recipes-infer
``custom-npu_kv_compress_epilog.md``, ``custom-npu_indexer_compress_epilog.md``; kernel sheet 3.3, 4.5, 5.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from .providers import Providers

__all__ = ["KERNELS", "codes_of", "quantize_query", "slots_of", "write_entries", "write_keys"]

KERNELS: Final = ("write_window", "write_index", "quantize_rows")
"""Operators that the functions below call."""


def codes_of(cache: Tensor) -> Tensor:
    """See bytes as e4m3 numbers; anything else as it is."""
    return cache.view(torch.float8_e4m3fn) if cache.dtype is torch.uint8 else cache


def slots_of(loc: Tensor) -> Tensor:
    """Make the list of slots that the writing kernels take: i32[C]."""
    return loc.int()


def write_entries(providers: Providers, cache: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """Pack entries and write them; where there is nobody, to slot 0.

    Args:
        providers: of the machine.
        cache: u8[S,A]. Written.
        slots: i32[C].
        rows: bf16[C,D]. At least one.
    Returns:
        ``cache``.
    """
    operator, codes = providers["write_window"], codes_of(cache)
    # This package's operator wants an axis of heads.
    shaped = codes.unsqueeze(1) if operator.binding.provider == "vllm-ascend" else codes
    operator(cache=shaped, rows=rows, slots=slots)
    return cache


def write_keys(
    providers: Providers, keys: Tensor, scales: Tensor, slots: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Quantise index keys and write codes and scales.

    Args:
        providers: of the machine.
        keys: u8[S,J]. Written.
        scales: f32[S,1]. Written.
        slots: i32[C].
        rows: bf16[C,J]. At least one.
    Returns:
        (keys, scales).
    """
    providers["write_index"](cache=codes_of(keys), scales=scales, rows=rows, slots=slots)
    return keys, scales


def quantize_query(providers: Providers, x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise the heads of every index query to e4m3 with a scale each.

    Args:
        providers: of the machine.
        x: bf16[T,I,J].
    Returns:
        (codes float[T,I,J], scales f32[T,I]).
    """
    codes, scales = providers["quantize_rows"](x=x)
    return codes, scales.squeeze(-1)
