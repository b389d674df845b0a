"""A stand-in for ``torch.npu``'s graphs on a CPU: records the operators of a block, replays them on the same tensors.

A capture may not look at a tensor's values on the host. A replay runs the recorded calls again and writes their results
into the tensors that the capture returned, so that whoever holds those sees the new values, and nothing that the
capture computed in Python happens again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
from ascend_sim.recorder import Recorder
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["RecordedGraph", "RecordingTool"]


@attrs.define(eq=False)
class RecordedGraph:
    """Calls in order: (operator, args, kwargs, result)."""

    calls: list[tuple[Any, Any, Any, Any]] = attrs.field(factory=list)
    n_replays: int = 0

    def replay(self) -> None:
        """Run the calls again, into the tensors of the first time."""
        self.n_replays += 1
        for operator, args, kwargs, result in self.calls:
            again = operator(*args, **kwargs)
            for own, fresh in zip(_tensors(result), _tensors(again), strict=True):
                if own.numel() and own.untyped_storage().data_ptr() != fresh.untyped_storage().data_ptr():
                    own.copy_(fresh)


class _Recording(TorchDispatchMode):
    def __init__(self, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


@attrs.frozen
class RecordingTool:
    """What ``torch.npu`` is to a capture."""

    def NPUGraph(self) -> RecordedGraph:
        """Make an empty graph."""
        return RecordedGraph()

    @contextlib.contextmanager
    def graph(self, graph: RecordedGraph, **_: Any) -> Iterator[None]:
        """Record the block."""
        with Recorder({"npu", "custom"}), _Recording(graph.calls):
            yield


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
