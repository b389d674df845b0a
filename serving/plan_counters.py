"""Counting what a step under FakeTensor would move, compute and hold.

Source: none; bytes moved per rank are those of ring algorithms, as in NCCL's and HCCL's documentation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["Collective", "StepCounter"]

_MOVED: Final[Mapping[str, tuple[str, Callable[[int, int], float]]]] = {
    "all_reduce": ("all-reduce", lambda n, size: 2 * (n - 1) / n * size),
    "all_gather_into_tensor": ("all-gather", lambda n, size: (n - 1) * size),
    "reduce_scatter_tensor": ("reduce-scatter", lambda n, size: (n - 1) / n * size),
    "all_to_all_single": ("all-to-all", lambda n, size: (n - 1) / n * size),
    "broadcast": ("broadcast", lambda n, size: size),
}
"""Operator -> (name, bytes that a rank sends for an operand of ``size`` bytes in a group of ``n``)."""


@attrs.frozen(kw_only=True)
class Collective:
    """One kind of collective in a step.

    Attributes:
        name: what it is.
        group: ranks that take part.
        count: how often.
        operand: bytes of the operands of one rank, together.
        moved: bytes that one rank sends, together.
    """

    name: str
    group: int
    count: int
    operand: int
    moved: int


class StepCounter(TorchDispatchMode):
    """Watches the operators of a step.

    Args:
        sizes: name of a process group -> its ranks.
        held: bytes that an opaque operator holds inside, by its name, from its arguments.
    """

    def __init__(self, sizes: Mapping[str, int], held: Mapping[str, Callable[..., int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes, self._inside = sizes, held
        self._found: dict[tuple[str, int], list[tuple[int, float]]] = {}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._bytes = 0
        self.peak = 0

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """What was exchanged, by kind and group."""
        return tuple(
            Collective(
                name=name,
                group=group,
                count=len(calls),
                operand=sum(size for size, _ in calls),
                moved=round(sum(moved for _, moved in calls)),
            )
            for (name, group), calls in sorted(self._found.items())
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note what it does."""
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and name in _MOVED:
            self._exchange(name, args)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._hold(tensor.untyped_storage())
        inside = self._inside[name](*args) if name in self._inside else 0
        if self._bytes + inside > self.peak:
            self._forget()
            self.peak = max(self.peak, self._bytes + inside)
        return out

    def _exchange(self, name: str, args: Any) -> None:
        n = self._sizes[next(arg for arg in reversed(args) if isinstance(arg, str) and arg in self._sizes)]
        label, moved = _MOVED[name]
        self._found.setdefault((label, n), []).append((args[0].nbytes, moved(n, args[0].nbytes)))

    def _hold(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._live:
            self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
            self._bytes += storage.nbytes()

    def _forget(self) -> None:
        for key in [key for key, (storage, _) in self._live.items() if storage.expired()]:
            self._bytes -= self._live.pop(key)[1]
