"""A model whose thin products read weights in the layout that they are fastest in, for compiled graphs.

Weights that meet the same rows are packed as one, so that one product serves them all. Expert stacks stay as they are,
their kernel gathers from them, unless their experts are large and meet enough rows each. A host without bfloat16
arithmetic packs float32 copies of bfloat16 weights, which are the same numbers.

Source: none; model sheet 2 says which weights meet which rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from ..ops.dispatch import INVARIANT, TRACED
from ..ops.fused import EMULATES_BF16, LARGE_WEIGHT
from ..ops.packed import pack, pack_stack
from ..ops.traced import THIN_ROWS
from .model import Model
from .params import AttentionParams, LayerParams, MoEParams, Params, StreamParams
from .variants import numeric_ops

__all__ = ["pack_experts", "packed_params", "packs_experts", "packs_weights", "traced_model"]

_MANY: Final = 4 if EMULATES_BF16 else 1
"""Rows an expert from which a product of its own is faster than blocks of rows, for large experts.

Processors without bfloat16 arithmetic are those without AVX-512, too, whose library multiplies few rows more slowly."""

_MANY_WIDENED: Final = 8
"""The same where packing widens bfloat16, and twice as many bytes are read."""


def traced_model(model: Model) -> Model:
    """Give a model the operators that compiled graphs are made of.

    Args:
        model: on one rank, its weights expanded, on kernels of this package.
    Returns:
        The same model for tracing; row-independent arithmetic keeps its operators.
    """
    ops = INVARIANT if model.numerics.invariant else TRACED
    return attrs.evolve(model, ops=numeric_ops(ops, model.numerics, model.dtype, is_stored=False))


def packed_params(model: Model) -> Params:
    """Pack the weights that thin products read.

    Args:
        model: of ``traced_model``, on a CPU.
    Returns:
        Its weights, the packed ones copies.
    """
    params = model.params
    return attrs.evolve(
        params,
        layers=tuple(_packed_layer(model, p) for p in params.layers),
        head=_packed(params.head),
    )


def packs_weights(model: Model, n_rows: int) -> bool:
    """Tell whether so many rows multiply weights faster in the library's layout than in a loop over them as they are.

    Args:
        model: of ``traced_model``, on a CPU.
        n_rows: of a step.
    """
    return n_rows > (1 if _is_large(model) and not EMULATES_BF16 else THIN_ROWS)


def packs_experts(model: Model, n_rows: int) -> bool:
    """Tell whether so many rows multiply large experts faster by one product each.

    Args:
        model: of ``traced_model``, on a CPU.
        n_rows: of a step.
    """
    config = model.config
    most = _MANY_WIDENED if EMULATES_BF16 and _first_stack(model).dtype is torch.bfloat16 else _MANY
    return _is_large(model) and n_rows * config.num_experts_per_tok >= most * config.n_routed_experts


def _is_large(model: Model) -> bool:
    return _first_stack(model)[0].numel() >= LARGE_WEIGHT


def _first_stack(model: Model) -> Tensor:
    w13 = model.params.layers[0].ffn.w13
    assert isinstance(w13, Tensor), "weights are expanded"
    return w13


def pack_experts(params: Params) -> Params:
    """Pack the experts of every layer, too: as much memory again, twice as much where that widens them."""

    def packed(p: LayerParams) -> LayerParams:
        return attrs.evolve(p, ffn=attrs.evolve(p.ffn, w13=_stack(p.ffn.w13), w2=_stack(p.ffn.w2)))

    return attrs.evolve(params, layers=tuple(packed(p) for p in params.layers))


def _wide(w: Any) -> Tensor:
    wide: Tensor = w.float() if EMULATES_BF16 else w
    return wide


def _stack(w: Any) -> Any:
    return pack_stack(map(_wide, w.unbind(0)))


def _packed(w: Any) -> Any:
    """Pack one weight; what only ``linear`` looks into may be anything that it takes."""
    return pack(_wide(w))[0]


def _together(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Pack weights that meet the same rows, those of one dtype as one."""
    wide = {name: _wide(w) for name, w in weights.items()}
    found: dict[str, Any] = {}
    for dtype in {w.dtype for w in wide.values()}:
        names = [name for name, w in wide.items() if w.dtype is dtype]
        found |= zip(names, pack(*(wide[name] for name in names)), strict=True)
    return found


def _packed_layer(model: Model, p: LayerParams) -> LayerParams:
    return attrs.evolve(
        p,
        hc_attn=_packed_streams(p.hc_attn),
        hc_ffn=_packed_streams(p.hc_ffn),
        attn=_packed_attention(model, p.attn),
        ffn=_packed_experts(model, p.ffn),
    )


def _packed_streams(p: StreamParams) -> StreamParams:
    return attrs.evolve(p, fn=_packed(p.fn))


def _packed_attention(model: Model, p: AttentionParams) -> AttentionParams:
    projections: dict[str, Any] = {"wq_a": p.wq_a, "wkv": p.wkv}
    inputs: dict[str, Any] = {}
    low: dict[str, Any] = {"wq_b": p.wq_b}
    if p.compressor is not None:
        inputs |= {"wkv": p.compressor.wkv, "wgate": p.compressor.wgate}
    if p.indexer is not None:
        own = p.indexer.compressor
        inputs |= {"index_wkv": own.wkv, "index_wgate": own.wgate, "weights_proj": p.indexer.weights_proj}
        low["index_wq_b"] = p.indexer.wq_b
    if model.rounds_activations:  # then the projections meet rounded rows, and the compressors do not
        x, own_inputs, q = _together(projections), _together(inputs) if inputs else {}, _together(low)
    else:
        both = _together(projections | {f"input_{name}": w for name, w in inputs.items()})
        x, own_inputs, q = both, {name: both[f"input_{name}"] for name in inputs}, _together(low)
    compressor, indexer = p.compressor, p.indexer
    if compressor is not None:
        compressor = attrs.evolve(compressor, wkv=own_inputs["wkv"], wgate=own_inputs["wgate"])
    if indexer is not None:
        indexer = attrs.evolve(
            indexer,
            wq_b=q["index_wq_b"],
            weights_proj=own_inputs["weights_proj"],
            compressor=attrs.evolve(indexer.compressor, wkv=own_inputs["index_wkv"], wgate=own_inputs["index_wgate"]),
        )
    return attrs.evolve(
        p,
        wq_a=x["wq_a"],
        wkv=x["wkv"],
        wq_b=q["wq_b"],
        wo_a=_packed_groups(p.wo_a, model.config.o_lora_rank),
        wo_b=_packed(p.wo_b),
        compressor=compressor,
        indexer=indexer,
    )


def _packed_groups(w: Any, n_rows: int) -> Any:
    """Pack the weight of every output group; small ones are faster in one product of all."""
    return _stack(w.unflatten(0, (-1, n_rows))) if n_rows * w.shape[1] >= LARGE_WEIGHT else _wide(w)


def _packed_experts(model: Model, p: MoEParams) -> MoEParams:
    if model.rounds_activations:
        gate, shared = _packed(p.gate.float()), _packed(p.shared_w13)
    else:
        both = _together({"gate": p.gate, "shared": p.shared_w13})
        gate, shared = both["gate"], both["shared"]
    return attrs.evolve(p, gate=gate, shared_w13=shared, shared_w2=_packed(p.shared_w2))
