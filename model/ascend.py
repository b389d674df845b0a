"""Attention of one layer over the paged caches through kernels that read them by tables of pages.

The counterpart of ``model/paged.py`` where the kernel table has ``paged`` kernels, with the same signature and the same
caches but for what their form says: on the A2 and A3 index keys are int8 with a scale each, on the A5 everything that
attention reads is FP8. Every row of a batch is one row of the tables, however
many tokens it feeds. What all layers of a kind share is computed once per step: rotations, and the split of the work
over cores, which is an operand of the kernels and good for the lengths of this step only.

Source: SGLang 0.5.23 ``hardware_backend/npu/attention/ascend_dsv4_backend.py``; kernel sheet 3 to 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
import torch
from torch import Tensor

from ..ops.dispatch import PagedOps
from ..ops.quantize import MXWeight, int8_weight, mx_weight
from ..state.batch import ForwardBatch
from ..state.capacity import C4_RATIO, C128_PAGE, C128_RATIO
from ..state.config import Config
from ..state.errors import ConfigError
from ..state.kv import KVLayout
from ..state.numerics import Numerics
from ..state.paged_tables import AscendTables, CompressorTables
from ..state.values import value
from .attention import group_rows, index_weights, query_heads
from .model import Model
from .params import AttentionParams, CompressorParams, IndexerParams, LayerParams, Params, Weight
from .reading import ordered_picks
from .stages import Tap, untapped

__all__ = ["AscendOperands", "Turn", "kernel_params", "operands", "paged_attention"]

MX_WIDTH: Final = 64
"""Channels that two MX blocks have, whose exponents come in pairs."""

Turn = tuple[Tensor, Tensor]
"""(cos, sin): f32[T,R] each, every value twice."""


@value
@attrs.frozen(eq=False, kw_only=True)
class AscendOperands:
    """What the layers of one step share.

    Attributes:
        turns: ratio -> cosines and sines at the token positions.
        entry_turns: ratio -> cosines and sines at the first positions of the closing groups, dense.
        window_slots: i64[T], or i32[T] on the A5. Window slot of every token.
        slots: ratio -> i64[C,1], or i32[C] on the A5. Slots of their entries, dense.
        attention: ratio -> i32[1024]. Split of the attention's work.
        index: i32[1024]. Split of the indexer's work; None in a model without indexers.
        rotation: float[J,J]. The Walsh-Hadamard matrix; None likewise.
    """

    turns: Mapping[int, Turn]
    entry_turns: Mapping[int, Turn]
    window_slots: Tensor
    slots: Mapping[int, Tensor]
    attention: Mapping[int, Tensor]
    index: Tensor | None
    rotation: Tensor | None


def operands(model: Model, batch: ForwardBatch) -> AscendOperands:
    """Compute what the layers of one step share.

    Args:
        model: the model.
        batch: the step, with tables.
    Returns:
        The operands; computed anew for every step, since they follow from its lengths.
    """
    paged, tables, config = _paged(model), _tables(batch), model.config
    turns: dict[int, Turn] = {}
    entry_turns: dict[int, Turn] = {}
    for ratio, frequencies in model.frequencies.items():
        # Layers of both ratios turn alike.
        is_known = ratio == C128_RATIO and C4_RATIO in turns
        turns[ratio] = turns[C4_RATIO] if is_known else _turn(batch.positions, frequencies)
        if ratio:
            entry_turns[ratio] = _turn(tables.compressors[ratio].first_pos, frequencies)
    lengths = {"max_query": tables.max_query, "max_keys": tables.max_keys}
    has_index = C4_RATIO in tables.compressors
    return AscendOperands(
        turns=turns,
        entry_turns=entry_turns,
        window_slots=paged.window_slots(batch.metadata.swa_loc),
        slots={ratio: paged.entry_slots(plan.loc) for ratio, plan in tables.compressors.items()},
        attention={
            ratio: paged.attention_metadata(
                tables.query_starts,
                tables.key_lens,
                n_heads=config.num_attention_heads,
                width=config.head_dim,
                ratio=ratio,
                n_picks=config.index_topk if ratio == C4_RATIO else 0,
                window=config.sliding_window,
                rope_width=config.qk_rope_head_dim,
                **lengths,
            )
            for ratio in model.frequencies
        },
        index=_index_metadata(paged, tables, config) if has_index else None,
        rotation=_hadamard(model) if has_index else None,
    )


def _paged(model: Model) -> PagedOps:
    assert model.ops.paged is not None, "the caller chose this sublayer for a table with paged kernels"
    return model.ops.paged


def _tables(batch: ForwardBatch) -> AscendTables:
    assert batch.metadata.tables is not None, "caches of the Ascend form come with tables"
    return batch.metadata.tables


def _turn(positions: Tensor, frequencies: Tensor) -> Turn:
    angles = (positions.float().unsqueeze(-1) * frequencies).repeat_interleave(2, -1)
    return angles.cos(), angles.sin()


def _index_metadata(paged: PagedOps, tables: AscendTables, config: Config) -> Tensor:
    return paged.index_metadata(
        tables.query_ends,
        tables.key_lens,
        n_heads=config.index_n_heads,
        width=config.index_head_dim,
        count=config.index_topk,
        max_query=tables.max_query,
        max_keys=tables.max_keys,
    )


def _hadamard(model: Model) -> Tensor:
    return model.ops.hadamard(torch.eye(model.config.index_head_dim, dtype=model.dtype, device=model.device))


def paged_attention(
    model: Model,
    ratio: int,
    p: AttentionParams,
    x: Tensor,
    rows: Mapping[str, Tensor],
    layout: KVLayout,
    batch: ForwardBatch,
    factors: AscendOperands,
    tap: Tap = untapped,
) -> Tensor:
    """Run the attention sublayer of one layer on the tokens of a step.

    Args:
        model: the model.
        ratio: of the layer.
        p: its attention weights.
        x: bf16[T,H]. Normed sublayer input.
        rows: the layer's cache rows by buffer; those of ``write_rows`` are written.
        layout: of the caches.
        batch: the step.
        factors: of ``operands``.
        tap: of the layer.
    Returns:
        bf16[T,H].
    """
    paged, tables = _paged(model), _tables(batch)
    cos, sin = factors.turns[ratio]
    q, low = query_heads(model, p, x)
    q = paged.rotate(q, cos, sin)
    kv = model.ops.rms_norm(model.ops.linear(x, p.wkv), p.kv_norm, model.config.rms_norm_eps)
    paged.write_window(rows["swa"], factors.window_slots, paged.rotate(kv, cos, sin))
    entries: Tensor | None = None
    entry_table: Tensor | None = None
    picks: Tensor | None = None
    if ratio:
        name = "c4" if ratio == C4_RATIO else "c128"
        closed = _compress(model, p.compressor, x, rows[f"{name}_state"], batch, factors, ratio)
        paged.write_entries(rows[name], factors.slots[ratio], closed)
        entries = _blocks(rows[name], layout.sizes.c4_page if ratio == C4_RATIO else C128_PAGE)
        entry_table = tables.c4_table if ratio == C4_RATIO else tables.c128_table
    if ratio == C4_RATIO:
        assert p.indexer is not None, "a ratio-4 layer has an indexer: the loader checks it"
        picks = _pick(model, p.indexer, x, low, rows, layout.sizes.c4_page, batch, factors)
        picks = _tapped(picks, tap)
    o = paged.attend(
        q,
        _blocks(rows["swa"], layout.sizes.page_size),
        entries,
        picks,
        p.attn_sink,
        window_table=tables.window_table,
        entry_table=entry_table,
        query_starts=tables.query_starts,
        key_lens=tables.key_lens,
        metadata=factors.attention[ratio],
        ratio=ratio,
        window_size=model.config.sliding_window,
        rope_width=model.config.qk_rope_head_dim,
        scale=model.config.head_dim**-0.5,
    )
    return group_rows(model, p, paged.rotate(tap("attn.heads", o), cos, -sin))


def _blocks(rows: Tensor, block: int) -> Tensor:
    """See the rows of a cache as pages: [S,D] -> [C,block,1,D]."""
    return rows.view(-1, block, 1, rows.shape[-1])


def _compress(
    model: Model,
    p: CompressorParams | None,
    x: Tensor,
    state: Tensor,
    batch: ForwardBatch,
    factors: AscendOperands,
    ratio: int,
) -> Tensor:
    """Pool what closes and keep the state that outlives the step: bf16[C,D], dense; the tail is undefined."""
    assert p is not None, "a layer with a ratio has a compressor: the loader checks it"
    tables = _tables(batch)
    plan, (cos, sin) = tables.compressors[ratio], factors.entry_turns[ratio]
    banks = state
    if plan.ring:
        banks = state.new_zeros(((plan.state_table.shape[0] + 1) * plan.ring, state.shape[1]))
    if plan.carried.shape[0]:
        banks.index_copy_(0, plan.carried_to, state.index_select(0, plan.carried))
    entries, banks = _paged(model).compress(
        x,
        p.wkv,
        p.wgate,
        banks,
        p.ape,
        p.norm,
        cos,
        sin,
        table=plan.state_table,
        query_starts=tables.query_starts,
        used=tables.used,
        start_pos=tables.start_pos,
        ring=plan.ring,
        eps=model.config.rms_norm_eps,
    )
    if plan.saved.shape[0]:
        state.index_copy_(0, plan.saved_loc, banks.index_select(0, plan.saved))
    if plan.rest.shape[0]:
        _keep_rest(model, p, x, state, plan, batch.positions)
    return entries


def _keep_rest(
    model: Model, p: CompressorParams, x: Tensor, state: Tensor, plan: CompressorTables, positions: Tensor
) -> None:
    """Write the state that the kernel leaves out and a cut at a page boundary may need."""
    wide = x.index_select(0, plan.rest).float()
    bias = p.ape.index_select(0, positions.index_select(0, plan.rest) % C4_RATIO)
    scores = model.ops.linear(wide, p.wgate.float()) + bias
    state.index_copy_(0, plan.rest_loc, torch.cat((model.ops.linear(wide, p.wkv.float()), scores), dim=-1))


def _pick(
    model: Model,
    p: IndexerParams,
    x: Tensor,
    low: Tensor,
    view: Mapping[str, Tensor],
    c4_page: int,
    batch: ForwardBatch,
    factors: AscendOperands,
) -> Tensor:
    """Write the index keys that close in this step and let the indexer choose: i32[T,1,P]."""
    paged, tables = _paged(model), _tables(batch)
    assert factors.rotation is not None, "a model with an indexer has one"
    assert factors.index is not None, "a model with an indexer has one"
    closed = _compress(model, p.compressor, x, view["index_state"], batch, factors, C4_RATIO)
    paged.write_keys(view["index"], view["index_scale"], factors.slots[C4_RATIO], closed @ factors.rotation)
    query = model.ops.linear(low, p.wq_b).unflatten(-1, (model.config.index_n_heads, -1))
    query, query_scale = paged.quantize_query(paged.rotate(query, *factors.turns[C4_RATIO]) @ factors.rotation)
    return paged.pick_entries(
        query,
        query_scale,
        _blocks(view["index"], c4_page),
        _blocks(view["index_scale"], c4_page).squeeze(-1),
        index_weights(model, p, x).to(paged.scale_dtype),
        query_ends=tables.query_ends,
        key_lens=tables.key_lens,
        table=tables.c4_table,
        metadata=factors.index,
        count=model.config.index_topk,
    )


def _tapped(picks: Tensor, tap: Tap) -> Tensor:
    """Show the picks to a tap in the order that it expects; where nobody looks their order does not matter."""
    if tap is untapped:
        return picks
    return tap("attn.picks", ordered_picks(picks.squeeze(1).long())).int().unsqueeze(1)


def kernel_params(config: Config, params: Params, dtype: torch.dtype, numerics: Numerics) -> Params:
    """Store weights as the kernels want them: compressor projections in the model's dtype, ``wo_a`` as [G,D,U].

    Args:
        config: the model's numbers.
        params: weights of ``build_model``.
        dtype: of the model.
        numerics: which weights to quantise. Int8 is for what releases quantise, but ``wo_a``, whose product has no int8
            form here.
    Returns:
        The same weights; ``wo_a`` is float[G,U,N*D/G] with its last two axes exchanged in memory.
    Raises:
        ConfigError: groups whose width the kernel of MX blocks does not take.
    """
    width = config.num_attention_heads * config.head_dim // config.o_groups
    if numerics.mx_output and width % MX_WIDTH:
        raise ConfigError(
            f"mx_output: expected groups of a multiple of {MX_WIDTH} channels, got {width}; load with "
            "Numerics.ascend_a5(mx_output=False)",
            field="numerics",
            expected=f"a multiple of {MX_WIDTH}",
            got=width,
        )

    def stored(w: Weight) -> Weight:
        return int8_weight(w) if numerics.int8_weights and isinstance(w, Tensor) else w

    def of_experts(w: Weight) -> Weight:
        return mx_weight(w) if numerics.mx_experts and isinstance(w, Tensor) else stored(w)

    def of_groups(w: Weight) -> Tensor | MXWeight:
        assert isinstance(w, Tensor), "weights for these kernels are expanded before"
        groups = w.unflatten(0, (config.o_groups, -1))
        if not numerics.mx_output:
            return _exchanged(groups)
        blocks = mx_weight(groups)
        return MXWeight(codes=_exchanged(blocks.codes), exponents=_exchanged(blocks.exponents))

    def compressor(p: CompressorParams) -> CompressorParams:
        return attrs.evolve(p, wkv=p.wkv.to(dtype), wgate=p.wgate.to(dtype))

    def indexer(p: IndexerParams) -> IndexerParams:
        return attrs.evolve(p, wq_b=stored(p.wq_b), compressor=compressor(p.compressor))

    def layer(p: LayerParams) -> LayerParams:
        attn, ffn = p.attn, p.ffn
        attn = attrs.evolve(
            attn,
            wq_a=stored(attn.wq_a),
            wq_b=stored(attn.wq_b),
            wkv=stored(attn.wkv),
            wo_a=of_groups(attn.wo_a),
            wo_b=stored(attn.wo_b),
            compressor=attn.compressor and compressor(attn.compressor),
            indexer=attn.indexer and indexer(attn.indexer),
        )
        ffn = attrs.evolve(
            ffn,
            w13=of_experts(ffn.w13),
            w2=of_experts(ffn.w2),
            shared_w13=stored(ffn.shared_w13),
            shared_w2=stored(ffn.shared_w2),
        )
        return attrs.evolve(p, attn=attn, ffn=ffn)

    return attrs.evolve(params, layers=tuple(layer(p) for p in params.layers))


def _exchanged(w: Tensor) -> Tensor:
    """Store a weight with its axes 1 and 2 exchanged in memory; its shape stays."""
    return w.transpose(1, 2).contiguous().transpose(1, 2)
