"""From a function on trees of tensors to machine code for its shapes.

The function is traced once with tensors that hold no data, so nothing in it can depend on numbers: what a graph cannot
express raises here, and a graph is whole or not at all. Tracing is ours and not the compiler's front end, because the
caller knows when shapes fit: a call then checks nothing, and costs some 20 us. The compiler keeps what it generates on
disk, by the content of the graph.

Source: none; see ``ops/tracing.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

import attrs
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["Graph", "compile_graph"]


@attrs.frozen(eq=False)
class Graph:
    """A compiled function.

    Attributes:
        call: takes the tensors at ``places``, in order; returns the tensors of the result, in order.
        places: which leaves of the arguments it reads or writes.
        n_operators: how many the traced function calls.
    """

    call: Callable[..., Sequence[Tensor]]
    places: tuple[int, ...]
    n_operators: int

    def __call__(self, leaves: Sequence[Any]) -> Sequence[Tensor]:
        """Run on the leaves of arguments of the shapes that were compiled; returns the leaves of the result."""
        return self.call(*[leaves[at] for at in self.places])


def compile_graph(
    function: Callable[..., Any],
    args: Sequence[Any],
    free: Mapping[int, int] = MappingProxyType({}),
    *,
    is_fused: bool = True,
) -> Graph:
    """Compile a function for the shapes of its arguments.

    Args:
        function: of trees of tensors and constants to a tree of tensors; it may write into its arguments.
        args: arguments of the right shapes; they are neither read nor written.
        free: leaf of the arguments -> its axis that may have any other length above 1 in a later call.
        is_fused: whether operators may be computed together, in another order; if not, they are called one by one.
    Returns:
        The graph.
    Raises:
        ConfigError: this machine has no C++ compiler.
    """
    leaves, spec = pytree.tree_flatten(tuple(args))
    at = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def flat(*tensors: Tensor) -> list[Tensor]:
        changed = dict(zip(at, tensors, strict=True))
        given = [changed.get(place, leaf) for place, leaf in enumerate(leaves)]
        found: list[Tensor] = pytree.tree_leaves(function(*pytree.tree_unflatten(given, spec)))
        return found

    tracing: Any = import_module(".tracing", __package__)
    numbers = {at.index(place): axis for place, axis in free.items()}
    call, used, n_operators = tracing.traced_call(flat, [leaves[place] for place in at], numbers, is_fused=is_fused)
    return Graph(call, tuple(at[number] for number in used), n_operators)
