"""Record the calls to simulated operators, and forbid reads on the host between them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Call", "HostReadError", "Recorder"]

# What has to wait for the device: numbers on the host, and shapes that depend on values.
_READS = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "masked_select", "_unique2"),
        *("unique_dim", "unique_consecutive", "bincount", "argwhere", "repeat_interleave.Tensor"),
    )
)
_METHODS = frozenset({"tolist", "numpy", "item", "cpu", "__bool__", "__int__", "__float__", "__index__"})


class HostReadError(AssertionError):
    """Python looked at a tensor's values where a device would have to be waited for."""


@attrs.frozen(eq=False, kw_only=True)
class Call:
    """One call of a simulated operator: its name, and shape and dtype of every tensor among its arguments."""

    name: str
    tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]
    options: Mapping[str, Any]


class _NoReads(TorchFunctionMode):
    """Refuse the methods that read a CPU tensor without going through the dispatcher."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _METHODS:
            raise HostReadError(f"{func.__name__} reads a tensor on the host")
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    """Lists every call of an operator in some namespaces, in order.

    Everything outside the kernels is watched, the kernels themselves are not: what they do inside is theirs.

    Args:
        namespaces: whose operators to list.
        allow_reads: do not refuse reads on the host.
    """

    def __init__(self, namespaces: Collection[str], *, allow_reads: bool = False) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._namespaces = frozenset(namespaces)
        self._allow_reads = allow_reads
        self._methods = _NoReads()

    def names(self) -> list[str]:
        """Qualified names of the calls, in order."""
        return [call.name for call in self.calls]

    def reading(self) -> Recorder:
        """Make the same recorder without the ban on host reads."""
        return Recorder(self._namespaces, allow_reads=True)

    def __enter__(self) -> Recorder:
        if not self._allow_reads:
            self._methods.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if not self._allow_reads:
            self._methods.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        overload = func._schema.overload_name
        if name.split("::")[0] in self._namespaces:
            values = [*args, *kwargs.values()]
            flat = [x for value in values for x in (value if isinstance(value, (list, tuple)) else [value])]
            tensors = tuple((tuple(x.shape), x.dtype) for x in flat if isinstance(x, Tensor))
            options = {k: v for k, v in kwargs.items() if not isinstance(v, Tensor)}
            self.calls.append(Call(name=name, tensors=tensors, options=options))
        elif not self._allow_reads and (name in _READS or f"{name}.{overload}" in _READS or _is_mask(name, args)):
            raise HostReadError(f"{name} needs a tensor's values on the host")
        return func(*args, **kwargs)


def _is_mask(name: str, args: Sequence[Any]) -> bool:
    """Tell whether an index holds a truth mask, whose result has a shape that depends on values."""
    if name not in ("aten::index", "aten::index_put_", "aten::index_put"):
        return False
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
