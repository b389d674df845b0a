"""Tracing a function with tensors that hold no data, and handing what it does to the compiler.

In a module of its own because importing the compiler takes seconds: ``ops/graph.py`` does so when it is first needed.

Source: none; ``make_fx`` and ``torch._inductor.standalone_compile``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._inductor import standalone_compile
from torch._inductor.exc import InductorError, InvalidCxxCompiler
from torch._inductor.lowering import fallback_handler, register_lowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ..state.errors import ConfigError
from . import kept as _kept_operator  # noqa: F401  registers it
from . import packed as _packed_operator  # noqa: F401

__all__ = ["traced_call"]

Call = Callable[..., Sequence[Tensor]]

_OPTIONS: Final = {
    # Packed weights are opaque, and have no strides to compare.
    "size_asserts": False,
    # Every rounding that the functions ask for happens, also where a wider number is at hand.
    "emulate_precision_casts": True,
    # Slots come from the request table, which the invariants check.
    "assert_indirect_indexing": False,
}

_LIBRARY_PRODUCT: Final = fallback_handler(torch.ops.mkldnn._linear_pointwise.default, add_to_fallback_set=False)


def traced_call(
    function: Call, args: Sequence[Tensor], free: Mapping[int, int], *, is_fused: bool
) -> tuple[Call, tuple[int, ...], int]:
    """Trace a function and compile the trace.

    Args:
        function: of tensors to a list of tensors; it may write into its arguments.
        args: arguments of the right shapes; they are neither read nor written.
        free: argument -> its axis that may have any other length above 1 in a later call.
        is_fused: whether operators may be computed together, in another order; if not, they are called one by one.
    Returns:
        (call, used, n): what takes the used arguments; which those are; how many operators it is made of.
    Raises:
        ConfigError: this machine has no C++ compiler.
    """
    # Without a shape shared by chance: two caches of one length here may have different ones in a later call.
    mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False))

    def fake(at: int) -> Tensor:
        sizes = [DimDynamic.DYNAMIC if axis == free.get(at) else DimDynamic.STATIC for axis in range(args[at].dim())]
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(
            dynamic_sizes=sizes, constraint_sizes=[None] * len(sizes)
        )
        return mode.from_tensor(args[at], symbolic_context=context, source=ConstantSource(f"argument_{at}"))

    with torch.no_grad(), mode:
        fakes = [fake(at) for at in range(len(args))]
        traced = make_fx(function)(*fakes)
    _share_products(traced.graph)
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    used = tuple(at for at, node in enumerate(inputs) if node.users)
    for node in inputs:
        if not node.users:
            traced.graph.erase_node(node)
    traced.recompile()
    n_operators = sum(node.op == "call_function" for node in traced.graph.nodes)
    if not is_fused:
        return traced.forward, used, n_operators
    given: list[Any] = [fakes[at] for at in used]
    try:
        call = standalone_compile(
            traced, given, dynamic_shapes="from_graph", options={"config_patches": dict(_OPTIONS)}
        )
    except InductorError as error:
        if not isinstance(error.inner_exception, InvalidCxxCompiler):
            raise
        raise ConfigError(
            "compiling: expected a C++ compiler, found none that works; install g++, or name one in the environment "
            "variable CXX",
            field="compiler",
            expected="g++",
        ) from error
    return call, used, n_operators


def _share_products(graph: torch.fx.Graph) -> None:
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


# What follows is not part of the key under which the compiler keeps graphs on disk: an operator whose lowering changes
# needs another name, or old graphs are found for it.


@register_lowering(torch.ops.purestep.kept.default, type_promotion_kind=None)
def _kept(x: Any) -> Any:
    """Store a tensor here, and read it wherever it is used."""
    x.realize()
    return x


@register_lowering(torch.ops.purestep.packed_linear.default, type_promotion_kind=None)
def _packed_linear(x: Any, w: Any) -> Any:
    """Call the library's product from the graph, without a way through Python's dispatcher."""
    return _LIBRARY_PRODUCT(x, w, None, "none", [], "")
