"""Noticing replies that end in the same words over and over, to be counted and never to be interfered with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["ends_in_repetition"]

LONGEST_BLOCK: Final = 64
"""Tokens of the longest block that is looked for."""

LEAST_TIMES: Final = 6
"""How often a block must be said in a row."""

LEAST_TOKENS: Final = 48
"""Tokens that all of it must have: a few short words said six times may be meant."""


def ends_in_repetition(ids: Sequence[int]) -> bool:
    """Tell whether the last tokens of a reply are one block, again and again.

    Args:
        ids: all tokens of the reply.
    """
    for length in range(1, LONGEST_BLOCK + 1):
        end = ids[len(ids) - max(LEAST_TOKENS, LEAST_TIMES * length) :]
        if len(ids) >= max(LEAST_TOKENS, LEAST_TIMES * length) and end[length:] == end[:-length]:
            return True
    return False
