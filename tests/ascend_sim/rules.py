"""What the simulated kernels refuse, and how they say so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

__all__ = ["Kernel", "Rules", "SimulatorError", "Site", "dtype_of"]


class SimulatorError(AssertionError):
    """A call that a real kernel would refuse, misread or answer with garbage.

    Attributes:
        operator: as in ``custom::npu_hc_pre``.
        rule: what does not hold.
        got: what was given.
    """

    def __init__(self, operator: str, rule: str, got: object) -> None:
        super().__init__(f"{operator}: expected {rule}; got {got}")
        self.operator = operator
        self.rule = rule
        self.got = got


@attrs.frozen(eq=False, kw_only=True)
class Rules:
    """What the simulated machine is like.

    Attributes:
        chip: "a2", "a3" or "a5".
        heads: 64: attention and indexer take exactly 64 query heads; another number: any multiple of it.
        strict_sizes: whether widths must be those that the kernels are documented for.
        poison_dummy: whether writes to slot 0 leave NaN there.
        rope_width: rotary channels of a packed row; no operator argument says it.
        ranks: set of simulated expert-parallel ranks by communicator name, or None for one rank.
    """

    chip: str
    heads: int
    strict_sizes: bool
    poison_dummy: bool
    rope_width: int
    ranks: Mapping[str, Any]


@attrs.frozen(eq=False, kw_only=True)
class Kernel:
    """One simulated operator.

    Attributes:
        run: called with a site and every argument of the schema by name, defaults filled in.
        fake: the same for shapes only; None where nothing fresh is returned.
        strided: arguments that need not be contiguous.
        empty: whether tensors without elements are accepted.
    """

    run: Callable[..., Any]
    fake: Callable[..., Any] | None = None
    strided: frozenset[str] = frozenset()
    empty: bool = False


@attrs.frozen(eq=False, kw_only=True)
class Site:
    """Where a rule is checked: the operator and the machine."""

    operator: str
    rules: Rules

    def require(self, ok: bool, rule: str, got: object) -> None:
        """Raise unless ``ok``.

        Raises:
            SimulatorError: it does not hold.
        """
        if not ok:
            raise SimulatorError(self.operator, rule, got)

    def dtype(self, name: str, x: Tensor, *allowed: torch.dtype) -> None:
        """Require one of some dtypes."""
        self.require(x.dtype in allowed, f"{name} of dtype {' or '.join(map(str, allowed))}", x.dtype)

    def shape(self, name: str, x: Tensor, expected: Sequence[int]) -> None:
        """Require an exact shape."""
        self.require(tuple(x.shape) == tuple(expected), f"{name} of shape {tuple(expected)}", tuple(x.shape))

    def tensor(self, name: str, x: Tensor | None, dtype: torch.dtype, expected: Sequence[int]) -> Tensor:
        """Require an argument to be there, with a dtype and a shape; hand it back."""
        if x is None:
            raise SimulatorError(self.operator, f"{name} to be given", None)
        self.dtype(name, x, dtype)
        self.shape(name, x, expected)
        return x

    def absent(self, **arguments: object) -> None:
        """Require arguments to be left out, because the kernel does not support them here."""
        for name, value in arguments.items():
            self.require(value is None, f"{name} left out: not supported", value)

    def fixed(self, **arguments: tuple[object, object]) -> None:
        """Require the one supported value of options, given as (got, expected)."""
        for name, (got, expected) in arguments.items():
            self.require(got == expected, f"{name}={expected!r}, the only supported value", got)

    def query_heads(self, n: int) -> None:
        """Require a number of query heads that the kernel takes."""
        if self.rules.heads == 64:
            self.require(n == 64, "64 query heads", n)
        self.require(n % self.rules.heads == 0, f"a multiple of {self.rules.heads} query heads", n)

    def size(self, name: str, got: int, documented: Sequence[int]) -> None:
        """Require a documented width, where sizes are strict."""
        self.require(not self.rules.strict_sizes or got in documented, f"{name} among {sorted(documented)[:4]}...", got)

    def starts(self, name: str, x: Tensor | None, n_rows: int) -> list[int]:
        """Require cumulative lengths with a leading zero: i32[B+1]; hand back the numbers."""
        if x is None:
            raise SimulatorError(self.operator, f"{name} to be given", None)
        self.dtype(name, x, torch.int32)
        self.require(x.dim() == 1 and len(x) > 1, f"{name} of shape [B+1]", tuple(x.shape))
        numbers = x.tolist()
        self.require(numbers[0] == 0, f"{name} with a leading zero", numbers)
        self.require(numbers == sorted(numbers), f"{name} not decreasing", numbers)
        self.require(numbers[-1] == n_rows, f"{name} to end at the {n_rows} rows", numbers)
        return numbers

    def ends(self, name: str, x: Tensor | None, n_rows: int) -> list[int]:
        """Require cumulative lengths without a leading zero: i32[B]; hand back the numbers with it."""
        if x is None:
            raise SimulatorError(self.operator, f"{name} to be given", None)
        self.dtype(name, x, torch.int32)
        self.require(x.dim() == 1 and len(x) > 0, f"{name} of shape [B]", tuple(x.shape))
        numbers = x.tolist()
        self.require(numbers[0] > 0, f"{name} without a leading zero", numbers)
        self.require(numbers == sorted(numbers), f"{name} not decreasing", numbers)
        self.require(numbers[-1] == n_rows, f"{name} to end at the {n_rows} rows", numbers)
        return [0, *numbers]

    def pages(self, name: str, table: Tensor | None, counts: Sequence[int], block: int, n_pages: int) -> Tensor:
        """Require a block table that covers ``counts`` rows per line; only those columns are looked at.

        Returns:
            i64[B,width].
        """
        if table is None:
            raise SimulatorError(self.operator, f"{name} to be given", None)
        self.dtype(name, table, torch.int32)
        self.require(
            table.dim() == 2 and table.shape[0] == len(counts),
            f"{name} of shape [B={len(counts)},pages]",
            tuple(table.shape),
        )
        for line, count in enumerate(counts):
            needed = -(-count // block)
            self.require(
                table.shape[1] >= needed, f"{name} at least {needed} pages wide in line {line}", table.shape[1]
            )
        return table.long()

    def page_ids(self, name: str, ids: Tensor, n_pages: int) -> Tensor:
        """Require pages that exist, among those that are read."""
        self.require(
            bool(((ids >= 0) & (ids < n_pages)).all()), f"{name} with pages 0..{n_pages - 1} where read", ids.tolist()
        )
        return ids

    def block(self, name: str, rows: int) -> None:
        """Require a cache block size that the kernels take."""
        self.require(
            rows % 16 == 0 and 0 < rows <= 1024, f"{name} in blocks of a multiple of 16 rows, at most 1024", rows
        )


# torch's own numbers of its dtypes, as an operator sees them; from 256 on those of ACL, as torch-npu spells them.
_DTYPES: Mapping[int, torch.dtype] = {
    1: torch.int8,
    3: torch.int32,
    5: torch.float16,
    6: torch.float32,
    15: torch.bfloat16,
    23: torch.float8_e5m2,
    24: torch.float8_e4m3fn,
    44: torch.float8_e8m0fnu,
    291: torch.float8_e5m2,
    292: torch.float8_e4m3fn,
    293: torch.float8_e8m0fnu,
}


def dtype_of(site: Site, name: str, code: int) -> torch.dtype:
    """Translate a dtype argument of kind int."""
    site.require(code in _DTYPES, f"{name} to be the number of a known dtype", code)
    return _DTYPES[code]
