"""From a function on tensors to the list of operators that it calls.

A function is traced once with tensors that hold no data, so nothing in it can depend on numbers: what a graph cannot
express raises here, and a graph is whole or not at all. A trace is a value: it can be sent to another process.

Source: none; ``make_fx``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from . import kept as _kept_operator  # noqa: F401  registers it
from . import packed as _packed_operator  # noqa: F401

__all__ = ["Call", "Like", "Trace", "fakes_of", "first_places", "trace"]

Call = Callable[..., Sequence[Tensor]]


@attrs.frozen(kw_only=True)
class Like:
    """What a graph knows of a tensor: all but its numbers.

    Attributes:
        shape: of one that fits.
        strides: of that.
        dtype: of its numbers.
        device: where it is.
        free: its axis that may have any other length above 1, if any.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: str
    free: int | None = None

    @classmethod
    def of(cls, x: Tensor, free: int | None = None) -> Like:
        """Describe a tensor, in a library's layout or not."""
        shape, strides = (tuple(map(_number, sizes)) for sizes in (x.shape, x.stride()))
        return cls(shape=shape, strides=strides, dtype=x.dtype, device=str(x.device), free=free)

    def empty(self) -> Tensor:
        """Make one."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)


def _number(size: Any) -> int:
    """Read a length; of one that may change, the one that it was traced with."""
    found: int = size if isinstance(size, int) else size.node.hint
    return found


@attrs.frozen(eq=False, kw_only=True)
class Trace:
    """What a function does, as a flat list of operators.

    Attributes:
        module: runs them.
        inputs: what it takes.
        results: what it gives.
        places: which arguments of the function it takes.
        n_operators: how many there are.
    """

    module: GraphModule
    inputs: tuple[Like, ...]
    results: tuple[Like, ...]
    places: tuple[int, ...]
    n_operators: int


def fakes_of(likes: Sequence[Like]) -> list[Tensor]:
    """Make tensors without numbers, for one trace or one compilation."""
    # Without a shape shared by chance: two caches of one length here may have different ones in a later call.
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))

    def fake(at: int, like: Like) -> Tensor:
        if like.free is None:
            with mode:
                return like.empty()
        sizes = [DimDynamic.DYNAMIC if axis == like.free else DimDynamic.STATIC for axis in range(len(like.shape))]
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
            dynamic_sizes=sizes, constraint_sizes=[None] * len(sizes)
        )
        return mode.from_tensor(like.empty(), symbolic_context=context, source=ConstantSource(f"argument_{at}"))

    return [fake(at, like) for at, like in enumerate(likes)]


def first_places(given: Sequence[Any]) -> list[int]:
    """Say of everything given where it stands first: what is one thing may share a product, what is equal may not."""
    seen: dict[int, int] = {}
    return [seen.setdefault(id(one), at) for at, one in enumerate(given)]


def trace(function: Call, args: Sequence[Tensor], free: Mapping[int, int]) -> Trace:
    """Trace a function.

    Args:
        function: of tensors to a list of tensors; it may write into its arguments.
        args: arguments of the right shapes; they are neither read nor written.
        free: argument -> its axis that may have any other length above 1 in a later call.
    Returns:
        The trace.
    """
    inputs = [Like.of(arg, free.get(at)) for at, arg in enumerate(args)]
    different: list[Any] = fakes_of(inputs)
    # A tensor that is given twice is one tensor: weights that are packed as one meet their rows once.
    fakes = [different[first] for first in first_places(args)]
    with torch.no_grad(), fakes[0].fake_mode:
        module = make_fx(function)(*fakes)
    _share_products(module.graph)
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    places = tuple(at for at, node in enumerate(nodes) if node.users)
    for node in nodes:
        if not node.users:
            module.graph.erase_node(node)
    (out,) = next(iter(reversed(module.graph.nodes))).args
    results = tuple(Like.of(node.meta["val"]) for node in out)
    for node in module.graph.nodes:
        node.meta = {}  # where it came from, which no other process has
    module.recompile()
    n_operators = sum(node.op == "call_function" for node in module.graph.nodes)
    return Trace(
        module=module,
        inputs=tuple(inputs[at] for at in places),
        results=results,
        places=places,
        n_operators=n_operators,
    )


def _share_products(graph: Graph) -> None:
    """Compute a product with the same rows and the same packed weight once, and what widens those rows."""
    ops = torch.ops
    shared = (ops.purestep.packed_linear.default, ops.purestep.kept.default, ops.aten._to_copy.default)
    seen: dict[Any, torch.fx.Node] = {}
    for node in list(graph.nodes):
        if node.target in shared:
            first = seen.setdefault((node.target, node.args, tuple(node.kwargs.items())), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
