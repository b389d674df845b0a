"""Gumbel noise as a pure function of (seed, position, column).

The hash takes the four 32-bit words ``seed_lo, seed_hi, position, column`` in this order (murmur3, 32 bit, initial
state 0, length word 16). Nothing else enters: no generator, no other row, no order of calls.

Source: SGLang ``srt/layers/sampler.py`` (seeded sampling); Austin Appleby's public MurmurHash3_x86_32.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

__all__ = ["gumbel_noise", "hash_columns"]

_U32: Final = 0xFFFFFFFF
_N_BYTES: Final = 16  # four words
_LOG_U_MAX: Final = -(2.0**-32)  # u = 1 would give infinite noise
_LOG_U_MIN: Final = torch.finfo(torch.float64).min  # and u = 0 as well


def _signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


# Words are i32 tensors: their products wrap as the hash wants it, and they move half the memory of i64.
_KEY_FACTORS: Final = (_signed(0xCC9E2D51), _signed(0x1B873593))
_STATE_OFFSET: Final = _signed(0xE6546B64)
_FINAL_FACTORS: Final = (_signed(0x85EBCA6B), _signed(0xC2B2AE35))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # The shift of a signed word drags its sign bit along.
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def _rotate_left(x: Tensor, bits: int) -> Tensor:
    return (x << bits) | _shift_right(x, 32 - bits)


def _absorb(state: Tensor, word: Tensor) -> Tensor:
    key = _rotate_left(word * _KEY_FACTORS[0], 15) * _KEY_FACTORS[1]
    return _rotate_left(state ^ key, 13) * 5 + _STATE_OFFSET


def hash_columns(seed: Tensor, position: Tensor, columns: Tensor) -> Tensor:
    """Hash every column of every row.

    Args:
        seed: i64[B]. All 64 bits count; a seed of 2**63 or more is given as its two's complement.
        position: i64[B]. Its low 32 bits count.
        columns: i64[V] shared by all rows, or i64[B,V].
    Returns:
        i64[B,V]. Unsigned 32-bit numbers.
    Source: MurmurHash3_x86_32.
    """
    state = torch.zeros_like(seed, dtype=torch.int32)
    for word in (seed, seed >> 32, position):
        state = _absorb(state, word.int())
    state = _absorb(state.unsqueeze(1), columns.int()) ^ _N_BYTES
    state = (state ^ _shift_right(state, 16)) * _FINAL_FACTORS[0]
    state = (state ^ _shift_right(state, 13)) * _FINAL_FACTORS[1]
    return (state ^ _shift_right(state, 16)).long() & _U32


def gumbel_noise(seed: Tensor, position: Tensor, columns: Tensor) -> Tensor:
    """Draw the standard Gumbel noise of every column of every row.

    ``u = h / (2**32 - 1)``, ``l = min(log u, -2**-32)`` and not below the smallest finite number, ``g = -log(-l)``.

    Args:
        seed: i64[B].
        position: i64[B]. Position of the token that the row's logits follow.
        columns: i64[V] shared by all rows, or i64[B,V]. Token ids, never ranks.
    Returns:
        f64[B,V]. Finite; between -709.8 and 22.2.
    Source: SGLang ``srt/layers/sampler.py``, ``multinomial_with_seed``.
    """
    uniform = hash_columns(seed, position, columns).double() / _U32
    return -torch.log(-uniform.log().clamp(_LOG_U_MIN, _LOG_U_MAX))
