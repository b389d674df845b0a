"""Decode steps replayed from captured graphs: one graph per number of rows, over fixed inputs and the state's buffers.

A graph is captured over the raw cache buffers, whose addresses never change, and over one set of input tensors. Before
every replay the inputs are refreshed in place: token ids, positions, tables, and the operands that follow from the
lengths of the step, the split of the kernels' work among them. Rows beyond the step's own are idle: they write to the
sinks and their logits are dropped. Handles stay outside: re-rooting and saving happen before the replay, and a replay
that raises is rolled back like any step.

The graph facility is an argument with the interface of ``torch.npu``: ``NPUGraph()`` makes a graph with ``replay()``,
and ``graph(g)`` is the block that captures it.

Source: SGLang 0.5.23 ``hardware_backend/npu/graph_runner``; kernel sheet 9.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import attrs
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..model.forward import Operands, forward, layer_operands, run_model
from ..model.model import Model
from ..model.paged import write_rows
from ..state.batch import ForwardBatch, ScheduleBatch, StepOutput
from ..state.decode import DecodeState
from ..state.errors import ConfigError
from ..state.kv import KVState
from .border import owned_step
from .decode import begin_decode, empty_output, finish_step
from .forward_batch import forward_batch
from .prepare import prepare_decode

__all__ = ["DecodeGraph", "DecodeGraphs", "Graph", "GraphTool", "capture_decode", "graph_decode_step", "graph_forward"]

WARM_UPS: Final = 2
"""Eager runs before a capture: kernels keep plans by shape, and must not make one while they are captured."""


class Graph(Protocol):
    """A captured graph, such as ``torch.npu.NPUGraph``."""

    def replay(self) -> None:
        """Run what was captured, on the same tensors."""


class GraphTool(Protocol):
    """What captures graphs, such as ``torch.npu``."""

    def NPUGraph(self) -> Graph:
        """Make an empty graph."""

    def graph(self, graph: Any) -> AbstractContextManager[Any]:
        """Capture into ``graph`` what the block runs."""


@attrs.frozen(eq=False, kw_only=True)
class DecodeGraph:
    """One captured decode.

    Attributes:
        bucket: rows.
        model: that was captured.
        graph: what replays it.
        view: the step as the graph sees it; its tensors are refreshed before a replay.
        operands: what the layers share; likewise.
        logits: f32[B,V]. What a replay computes, until the next one.
        places: addresses of the cache buffers.
    """

    bucket: int
    model: Model
    graph: Graph
    view: ForwardBatch
    operands: Operands
    logits: Tensor
    places: Mapping[str, int]


@attrs.frozen(eq=False, kw_only=True)
class DecodeGraphs:
    """The graphs of one state's buffers, by rising number of rows."""

    graphs: tuple[DecodeGraph, ...]

    def fitting(self, batch: ScheduleBatch) -> DecodeGraph | None:
        """Return the smallest graph that a step fits, or None: more rows than any has, or rows of several tokens."""
        if (batch.extend_lens != 1).any():
            return None
        return next((graph for graph in self.graphs if graph.bucket >= len(batch.request_ids)), None)


@torch.no_grad()
def capture_decode(model: Model, state: DecodeState, buckets: Iterable[int], tool: GraphTool) -> DecodeGraphs:
    """Capture decodes of several numbers of rows over the buffers of a state.

    Args:
        model: the model, on Ascend kernels.
        state: any version of the state that will be stepped; it keeps its content.
        buckets: numbers of rows.
        tool: captures graphs.
    Returns:
        The graphs, for every state that shares these buffers.
    Raises:
        ConfigError: no state, no number of rows, or kernels whose steps have no fixed shapes.
    """
    if not isinstance(state, DecodeState):
        raise ConfigError(
            f"capture_decode: expected the state whose caches the graphs run over, got {type(state).__name__}; build "
            "it with init_state(model, capacity) first",
            field="state",
            expected="DecodeState",
            got=type(state).__name__,
        )
    sizes = sorted(set(buckets))
    if model.ops.paged is None:
        raise ConfigError(
            f"capture_decode: expected a model on Ascend kernels, got {model.ops.name!r} ones, whose steps have shapes "
            "that follow from the lengths",
            field="kernels",
            expected="ascend",
            got=model.ops.name,
        )
    if not sizes or sizes[0] < 1:
        raise ConfigError(
            f"buckets: expected numbers of rows, got {sizes}", field="buckets", expected=">= 1", got=sizes
        )
    with owned_step(model, state):
        return DecodeGraphs(graphs=tuple(_capture(model, state, size, tool) for size in sizes))


def _capture(model: Model, state: DecodeState, bucket: int, tool: GraphTool) -> DecodeGraph:
    prepared, batch = prepare_decode(state, only=())
    view = _own(_captured_part(forward_batch(prepared, batch, bucket=bucket)))
    operands = _own(layer_operands(model, state.kv.layout, view))
    graph = tool.NPUGraph()
    # Idle rows write to the sinks alone, and those are saved like any row.
    with state.kv.handle.write(write_rows(state.kv.layout, view.metadata, _layers(model))) as write:
        for _ in range(WARM_UPS):
            run_model(model, write.tensors, state.kv.layout, view, operands)
        with tool.graph(graph):
            logits = run_model(model, write.tensors, state.kv.layout, view, operands)
        places = _places(write.tensors)
    return DecodeGraph(
        bucket=bucket, model=model, graph=graph, view=view, operands=operands, logits=logits, places=places
    )


def _layers(model: Model) -> range:
    return range(model.config.num_hidden_layers)


def _captured_part(view: ForwardBatch) -> ForwardBatch:
    """Leave out what the model does not compute with, and what has no fixed shape."""
    return attrs.evolve(view, metadata=attrs.evolve(view.metadata, compressors={}))


def _own(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, torch.clone, tree)


def _places(buffers: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: buffer.data_ptr() for name, buffer in buffers.items()}


def _inputs(view: ForwardBatch, operands: Operands) -> list[Tensor]:
    """List every tensor that differs between two steps of one size."""
    parts = (view.input_ids, view.positions, view.metadata.swa_loc, view.metadata.tables, operands)
    return [leaf for leaf in pytree.tree_leaves(parts) if isinstance(leaf, Tensor)]


@torch.no_grad()
def graph_forward(graph: DecodeGraph, kv: KVState, view: ForwardBatch) -> tuple[KVState, Tensor]:
    """Run all layers of a decode and the head by a replay; the counterpart of ``forward``.

    Args:
        graph: that the step fits.
        kv: caches before the step.
        view: the step, padded to the graph's rows (``forward_batch(..., bucket=graph.bucket)``).
    Returns:
        (kv, logits f32[B,V]): as ``forward``, for the rows of the step.
    Raises:
        ConfigError: another size, or caches that the graph was not captured over.
    """
    if len(view.input_ids) != graph.bucket:
        got = len(view.input_ids)
        raise ConfigError(
            f"graph: expected a step padded to {graph.bucket} rows, got {got}; build it with "
            "forward_batch(..., bucket=graph.bucket)",
            field="bucket",
            expected=graph.bucket,
            got=got,
        )
    operands = layer_operands(graph.model, kv.layout, view)
    with kv.handle.write(write_rows(kv.layout, view.metadata, _layers(graph.model))) as write:
        if _places(write.tensors) != graph.places:
            raise ConfigError(
                "graph: expected the caches that it was captured over, got others; capture it over this state",
                field="kv",
                expected="the captured buffers",
                got="others",
            )
        for own, fresh in zip(_inputs(graph.view, graph.operands), _inputs(view, operands), strict=True):
            own.copy_(fresh)
        graph.graph.replay()
        logits = graph.logits[: view.batch_size].clone()
    return attrs.evolve(kv, handle=write.handle), logits


@torch.no_grad()
def graph_decode_step(
    graphs: DecodeGraphs,
    model: Model,
    state: DecodeState,
    *,
    only: Sequence[int] | None = None,
    force: Mapping[int, int] | None = None,
    mask: Mapping[int, Tensor] | None = None,
) -> tuple[DecodeState, StepOutput]:
    """Decode one token for every running request by a replay; a step that fits no graph runs eagerly.

    Args:
        graphs: of ``capture_decode``.
        model: the model.
        state: before the step; it keeps its content.
        only: as in ``decode_step``.
        force: as in ``decode_step``.
        mask: as in ``decode_step``.
    Returns:
        (state, out): as ``decode_step``.
    """
    with owned_step(model, state):
        before = state
        state, batch = begin_decode(state, only, force)
        if not batch.request_ids:  # nothing runs: nothing changes
            return before, empty_output(model)
        graph = graphs.fitting(batch)
        if graph is None:
            view = forward_batch(state, batch)
            kv, logits = forward(model, state.kv, view)
        else:
            view = forward_batch(state, batch, bucket=graph.bucket)
            kv, logits = graph_forward(graph, state.kv, view)
        return finish_step(model, attrs.evolve(state, kv=kv), batch, view, logits, mask)
