"""The weights of one DeepSeek-V4 model as a pytree of frozen values.

Field names follow the official checkpoint (``layers.3.attn.wq_a.weight`` is ``params.layers[3].attn.wq_a``); the routed
experts of a layer are stacked. Every matrix is stored ``[out, in]``. Over several ranks each holds a part of some axes
(``model/cuts.py``).

Source: DeepSeek-V4 release, ``inference/model.py`` (names and shapes).
"""

from __future__ import annotations

import attrs
from torch import Tensor

from ..ops.formats import StoredWeight
from ..ops.quantize import Int8Weight, MXWeight
from ..state.values import value

__all__ = [
    "AttentionParams",
    "CompressorParams",
    "DraftParams",
    "IndexerParams",
    "LayerParams",
    "MoEParams",
    "Params",
    "StreamParams",
    "Weight",
]

Weight = Tensor | Int8Weight | MXWeight | StoredWeight
"""A matrix that a model may hold as int8, in MX blocks, or as a release stores it; only the operators look into it."""


@value
@attrs.frozen(eq=False, kw_only=True)
class StreamParams:
    """Weights of one mHC mix (or, with ``M`` rows instead of ``(2+M)*M``, of the head's mix). All f32.

    Attributes:
        fn: f32[(2+M)*M,M*H]. Rows: M pre, M post, M*M comb (row-major [from, to]).
        base: f32[(2+M)*M].
        scale: f32[3] (pre, post, comb); f32[1] for the head.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor


@value
@attrs.frozen(eq=False, kw_only=True)
class CompressorParams:
    """Weights of one compressor; ``k`` is 2 for ratio 4 (overlapping halves a, b) and 1 for ratio 128.

    Attributes:
        wkv: float[k*D,H].
        wgate: float[k*D,H].
        ape: f32[4,k*D] or f32[128,k*D]. Position bias of the pooling logits.
        norm: float[D].
    """

    wkv: Tensor
    wgate: Tensor
    ape: Tensor
    norm: Tensor


@value
@attrs.frozen(eq=False, kw_only=True)
class IndexerParams:
    """Weights of the lightning indexer of a ratio-4 layer.

    Attributes:
        wq_b: float[I*J,Q].
        weights_proj: float[I,H].
        compressor: its own compressor, of width J.
    """

    wq_b: Weight
    weights_proj: Tensor
    compressor: CompressorParams


@value
@attrs.frozen(eq=False, kw_only=True)
class AttentionParams:
    """Weights of one attention sublayer.

    Attributes:
        wq_a: float[Q,H].
        q_norm: float[Q].
        wq_b: float[N*D,Q].
        wkv: float[D,H]. One head; key and value are the same vector.
        kv_norm: float[D].
        attn_sink: f32[N].
        wo_a: float[G*U,N*D/G]; with Ascend kernels float[G,U,N*D/G], the last two axes in the other order in memory,
            perhaps in MX blocks.
        wo_b: float[H,G*U].
        compressor: None in ratio-0 layers.
        indexer: None outside ratio-4 layers.
    """

    wq_a: Weight
    q_norm: Tensor
    wq_b: Weight
    wkv: Weight
    kv_norm: Tensor
    attn_sink: Tensor
    wo_a: Tensor | MXWeight | StoredWeight
    wo_b: Weight
    compressor: CompressorParams | None
    indexer: IndexerParams | None


@value
@attrs.frozen(eq=False, kw_only=True)
class MoEParams:
    """Weights of one mixture-of-experts sublayer.

    Attributes:
        gate: float[E,H].
        bias: f32[E]. Selection bias; None in hash layers.
        tid2eid: i64[V,K]. Expert ids by token id; None outside hash layers.
        w13: float[E,2*F,H]. Gate projection rows, then up projection rows.
        w2: float[E,H,F].
        shared_w13: float[2*F,H].
        shared_w2: float[H,F].
        place: i64[E]. Place of every expert where whole experts are dealt to ranks in another order than by number.
    """

    gate: Tensor
    bias: Tensor | None
    tid2eid: Tensor | None
    w13: Weight
    w2: Weight
    shared_w13: Weight
    shared_w2: Weight
    place: Tensor | None = None


@value
@attrs.frozen(eq=False, kw_only=True)
class LayerParams:
    """Weights of one layer: attention and MoE, each inside its own mHC.

    Attributes:
        attn_norm: float[H].
        ffn_norm: float[H].
        hc_attn: mHC around the attention.
        hc_ffn: mHC around the MoE.
    """

    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: StreamParams
    hc_ffn: StreamParams
    attn: AttentionParams
    ffn: MoEParams


@value
@attrs.frozen(eq=False, kw_only=True)
class Params:
    """All weights of a model.

    Attributes:
        embed: float[V,H].
        layers: one entry a layer.
        hc_head: f32. ``fn`` is [M,M*H], ``base`` [M], ``scale`` [1].
        norm: float[H].
        head: float[V,H].
    """

    embed: Tensor
    layers: tuple[LayerParams, ...]
    hc_head: StreamParams
    norm: Tensor
    head: Tensor


@value
@attrs.frozen(eq=False, kw_only=True)
class DraftParams:
    """All weights of the draft block of a release.

    Attributes:
        e_proj: float[H,H]. Of the normed embedding of the next token.
        h_proj: float[H,H]. Of the model's normed final streams.
        enorm: float[H].
        hnorm: float[H].
        block: a layer that compresses nothing and picks experts by score.
        hc_head: f32. As in ``Params``.
        norm: float[H].
    """

    e_proj: Weight
    h_proj: Weight
    enorm: Tensor
    hnorm: Tensor
    block: LayerParams
    hc_head: StreamParams
    norm: Tensor
