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
from ..state.kv import KVState
from .layer import head_logits, layer
from .model import Model
from .paged import Rotations, paged_attention, rotations, write_rows
from .stages import Tap, layer_tap, untapped

__all__ = ["embed_tokens", "forward", "layer_step"]


def embed_tokens(model: Model, batch: ForwardBatch) -> MHCState:
    """Start the residual streams of a step.

    Args:
        model: the model.
        batch: the step.
    Returns:
        All streams equal to the token embeddings.
    """
    rows = model.ops.embed_rows(batch.input_ids, model.params.embed, 0)
    return MHCState(streams=split_streams(rows, model.config.hc_mult))


def _run_layer(
    model: Model,
    i: int,
    streams: Tensor,
    kv: KVState,
    buffers: Mapping[str, Tensor],
    batch: ForwardBatch,
    factors: Rotations,
    tap: Tap,
) -> Tensor:
    p, tap = model.params.layers[i], layer_tap(tap, i)

    def attention(x: Tensor) -> Tensor:
        return paged_attention(model, i, p.attn, x, buffers, kv.layout, batch, factors, tap)

    return layer(model, p, streams, batch.input_ids, attention, tap)


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
    with kv.handle.write(rows) as write:
        streams = _run_layer(model, i, mhc.streams, kv, write.tensors, batch, rotations(model, batch), tap)
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
    layers = range(model.config.num_hidden_layers)
    with kv.handle.write(write_rows(kv.layout, batch.metadata, layers)) as write:
        factors = rotations(model, batch)
        streams = embed_tokens(model, batch).streams
        for i in layers:
            streams = _run_layer(model, i, streams, kv, write.tensors, batch, factors, tap)
        streams = tap("final.streams", streams)
        if logits != "all":
            kept = batch.last_rows if logits == "last" else batch.last_rows[:0]
            streams = streams.index_select(0, kept)
        out = head_logits(model, streams)
    return attrs.evolve(kv, handle=write.handle), out
