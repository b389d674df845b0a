"""The model on one step: all layers, or one at a time, as pure functions of (cache, batch).

Source: DeepSeek-V4 ``inference/model.py``, ``Transformer.forward``; decode-path sheet 1.1, event 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs
import torch
from torch import Tensor

from ..ops.streams import split_streams
from ..state.batch import ForwardBatch, MHCState
from ..state.errors import RequestError
from ..state.kv import KVLayout, KVState
from . import ascend
from .ascend import AscendOperands
from .context import context_attention
from .head import embed_ids
from .layer import head_logits, layer
from .model import Model
from .paged import Rotations, layer_rows, paged_attention, rotations, write_rows
from .params import LayerParams
from .stages import Tap, layer_tap, untapped

__all__ = ["Operands", "embed_tokens", "forward", "layer_operands", "layer_step", "run_layer", "run_model"]


def embed_tokens(model: Model, batch: ForwardBatch) -> MHCState:
    """Start the residual streams of a step.

    Args:
        model: the model.
        batch: the step.
    Returns:
        All streams equal to the token embeddings.
    """
    return MHCState(streams=split_streams(embed_ids(model, batch.input_ids), model.config.hc_mult))


Operands = Rotations | AscendOperands
"""What the layers of one step share; which of them, the kernel table decides."""


def layer_operands(model: Model, layout: KVLayout, batch: ForwardBatch) -> Operands:
    """Compute what the layers of one step share.

    Args:
        model: the model.
        layout: of the caches.
        batch: the step.
    Returns:
        Rotations, and with Ascend kernels the split of their work.
    Raises:
        ConfigError: caches of a form that the model's kernels do not read.
    """
    model.require_form(layout.form)
    return rotations(model, model.frequencies, batch) if model.ops.paged is None else ascend.operands(model, batch)


def run_layer(
    model: Model,
    p: LayerParams,
    ratio: int,
    streams: Tensor,
    rows: Mapping[str, Tensor],
    layout: KVLayout,
    batch: ForwardBatch,
    operands: Operands,
    tap: Tap = untapped,
) -> Tensor:
    """Run one layer on raw cache rows: what ``layer_step`` does inside its write.

    Args:
        model: the model.
        p: weights of the layer.
        ratio: of the layer.
        streams: float[T,M,H].
        rows: the layer's cache rows by buffer (``layer_rows``); the step's rows are written.
        layout: of the caches.
        batch: the step.
        operands: of ``layer_operands``.
        tap: of the layer.
    Returns:
        float[T,M,H].
    """
    tables = batch.metadata.tables

    def attention(x: Tensor) -> Tensor:
        if not x.shape[0]:  # an idle replica only takes part in what all replicas do
            return x
        if model.ranks.parallel.dcp > 1:
            return context_attention(model, ratio, p.attn, x, rows, layout, batch, operands, tap)
        if isinstance(operands, AscendOperands):
            return ascend.paged_attention(model, ratio, p.attn, x, rows, layout, batch, operands, tap)
        return paged_attention(model, ratio, p.attn, x, rows, layout, batch, operands, tap)

    if tables is not None and tables.live is not None:
        tap = _weightless(tap, tables.live)
    return layer(model, p, streams, batch.input_ids, attention, tap, batch.shares)


def _weightless(tap: Tap, live: Tensor) -> Tap:
    """Give the experts of idle rows no weight; their ids stay valid, as dispatch wants them."""

    def weigh(stage: str, x: Tensor) -> Tensor:
        x = tap(stage, x)
        # Not a product: what an idle row read from a sink may be no number.
        return torch.where(live.unsqueeze(-1) > 0, x, 0.0) if stage == "ffn.expert_weights" else x

    return weigh


@torch.no_grad()
def layer_step(
    model: Model, i: int, mhc: MHCState, kv: KVState, batch: ForwardBatch, *, tap: Tap = untapped
) -> tuple[MHCState, KVState]:
    """Run layer ``i`` of a step: write its new state, read its history, update the streams.

    Args:
        model: the model.
        i: layer, 0 to L-1.
        mhc: streams before the layer.
        kv: caches before the layer.
        batch: the step.
        tap: sees the layer's stages, and may replace them.
    Returns:
        (mhc, kv): streams after the layer; caches with this layer's rows written. The inputs keep their content.
    """
    if not 0 <= i < model.config.num_hidden_layers:
        last = model.config.num_hidden_layers - 1
        raise RequestError(f"layer: expected 0..{last}, got {i}", field="layer", expected=f"0..{last}", got=i)
    rows = write_rows(kv.layout, batch.metadata, range(i, i + 1))
    operands = layer_operands(model, kv.layout, batch)
    with kv.handle.write(rows) as write:
        view = layer_rows(write.tensors, kv.layout)[i]
        p, ratio = model.params.layers[i], kv.layout.kinds[i]
        streams = run_layer(model, p, ratio, mhc.streams, view, kv.layout, batch, operands, layer_tap(tap, i))
    return MHCState(streams=streams), attrs.evolve(kv, handle=write.handle)


@torch.no_grad()
def forward(
    model: Model,
    kv: KVState,
    batch: ForwardBatch,
    *,
    logits: Literal["last", "all", "none"] = "last",
    tap: Tap = untapped,
) -> tuple[KVState, Tensor]:
    """Run all layers of a step and the head.

    The rows that the step writes follow from the batch and are saved before the first of them changes; a step that
    raises leaves the caches as they were.

    Args:
        model: the model.
        kv: caches before the step.
        batch: the step.
        logits: of each request's last token, of every token, or none (an intermediate chunk).
        tap: sees every stage of every layer, and may replace it.
    Returns:
        (kv, logits): caches with the step's rows written; f32[B,V], f32[T,V] or f32[0,V]. ``kv`` given keeps its
        content.
    """
    if logits not in ("last", "all", "none"):
        raise RequestError(f'logits: expected "last", "all" or "none", got {logits!r}', field="logits", got=logits)
    operands = layer_operands(model, kv.layout, batch)
    layers = range(model.config.num_hidden_layers)
    with kv.handle.write(write_rows(kv.layout, batch.metadata, layers)) as write:
        out = run_model(model, write.tensors, kv.layout, batch, operands, logits=logits, tap=tap)
    return attrs.evolve(kv, handle=write.handle), out


def run_model(
    model: Model,
    buffers: Mapping[str, Tensor],
    layout: KVLayout,
    batch: ForwardBatch,
    operands: Operands,
    *,
    logits: Literal["last", "all", "none"] = "last",
    tap: Tap = untapped,
) -> Tensor:
    """Run all layers of a step and the head on raw buffers: what ``forward`` does inside its write.

    Args:
        model: the model.
        buffers: of the caches; the step's rows are written.
        layout: of the caches.
        batch: the step.
        operands: of ``layer_operands``.
        logits: as in ``forward``.
        tap: as in ``forward``.
    Returns:
        f32[B,V], f32[T,V] or f32[0,V].
    """
    streams = embed_tokens(model, batch).streams
    for i, (p, rows) in enumerate(zip(model.params.layers, layer_rows(buffers, layout), strict=True)):
        streams = run_layer(model, p, layout.kinds[i], streams, rows, layout, batch, operands, layer_tap(tap, i))
    streams = tap("final.streams", streams)
    if logits != "all":
        kept = batch.last_rows if logits == "last" else batch.last_rows[:0]
        streams = streams.index_select(0, kept)
    return head_logits(model, streams, batch.shares)
