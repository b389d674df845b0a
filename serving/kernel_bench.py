"""Where a kernel is checked: its inputs go to the device, its results come back.

Numbers are drawn from a generator that depends on nothing but a seed, so that two machines check the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from ..ops.ascend.providers import Providers

__all__ = ["Bench", "Check", "Pair", "draw", "draw_int"]

Pair = tuple[Tensor, Tensor]
"""What the kernel gave, and what the reference gives."""


@attrs.frozen(eq=False, kw_only=True)
class Bench:
    """A machine's operators and its device."""

    providers: Providers
    device: torch.device

    def put(self, x: Tensor) -> Tensor:
        """Copy a tensor to the device."""
        return x.to(self.device, copy=True)

    def call(self, operator: str, **given: Any) -> Any:
        """Call an operator with arguments by our names; tensors on the host are copied to the device first."""
        return self.providers[operator](**{name: self._there(value) for name, value in given.items()})

    def provider(self, operator: str) -> str:
        """Name the package whose kernel runs an operator."""
        return self.providers[operator].binding.provider

    def _there(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.device == self.device else self.put(value)
        if isinstance(value, Sequence) and value and all(isinstance(one, Tensor) for one in value):
            return [self._there(one) for one in value]
        return value


@attrs.frozen(eq=False, kw_only=True)
class Check:
    """One comparison of an operator with its reference.

    Attributes:
        operator: logical name.
        case: what is tried, in words.
        tolerance: the largest difference allowed, as a share of the reference's largest number; 0 where nothing but
            data moves.
        run: makes both results.
        chips: where it applies.
        needs: further operators that it calls.
    """

    operator: str
    case: str
    tolerance: float
    run: Callable[[Bench], Pair]
    chips: tuple[str, ...] = ("a2", "a3", "a5")
    needs: tuple[str, ...] = ()


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def draw_int(seed: int, low: int, high: int, *shape: int) -> Tensor:
    """Draw whole numbers below ``high``: i64."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))
