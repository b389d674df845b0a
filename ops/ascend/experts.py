"""Routed experts on Ascend kernels: on one rank, and as the pieces of expert parallelism over several.

On one rank rows are expanded and sorted by expert, run group by group, put back and summed. Over ranks each rank sends
its rows to where their experts are (``dispatch_rows``), runs the experts that it holds on what arrived
(``run_experts``) and gets the weighted sums back (``combine_rows``); the first and the last are collective calls, which
an idle rank must enter too.

Weights in MX blocks (A5) meet rows quantised in blocks, and the activation quantises its own result. The A5 has no
clamped activation in floating point; there it is the plain one.

Source: SGLang 0.5.23 ``hardware_backend/npu/moe``, vllm-ascend @182b75e ``ops/fused_moe``; op-plugin
``torch_npu-npu_grouped_matmul.md``, cann-recipes-infer ``custom-npu_swiglu_group_quant.md``; kernel sheet 7.2 to 7.4.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..experts import gate_up
from ..quantize import Int8Weight, MXWeight
from .providers import Providers

__all__ = ["E4M3", "Ranks", "Received", "combine_rows", "dispatch_rows", "experts_here", "run_experts"]

Matrices = Tensor | Int8Weight | MXWeight
"""One matrix per expert, [E,out,in]."""

E4M3: Final = 292
E8M0: Final = 293
"""Dtypes as torch-npu's operators number those of ACL."""


class Ranks(NamedTuple):
    """Where a rank stands among those that share the experts.

    Attributes:
        group: name of the communicator.
        size: ranks in it.
        rank: this one.
        n_experts: experts of all ranks.
        most_rows: most token rows of any rank.
    """

    group: str
    size: int
    rank: int
    n_experts: int
    most_rows: int


class Received(NamedTuple):
    """What a rank was sent, sorted by its own experts; rows after the last are undefined.

    Attributes:
        rows: float[A,H] or i8[A,H].
        scales: f32[A]. Of int8 rows.
        counts: i64[E]. Rows of every expert of this rank.
        way: i32[A]. What the way back needs.
        arrived: i32[E]. Running sums by expert and rank; likewise.
    """

    rows: Tensor
    scales: Tensor
    counts: Tensor
    way: Tensor
    arrived: Tensor


def experts_here(
    providers: Providers, x: Tensor, ids: Tensor, weights: Tensor, w13: Matrices, w2: Matrices, limit: float
) -> Tensor:
    """Run the experts that were hit, all of them on this rank; see ``ops/experts.py``.

    Args:
        providers: of the machine.
        x: float[T,H].
        ids: i64[T,K].
        weights: f32[T,K].
        w13: float[E,2*F,H], or int8, or in MX blocks.
        w2: float[E,H,F], likewise.
        limit: clamp of the SwiGLU.
    Returns:
        f32[T,H].
    Rounding: outputs are weighted after the down projection and summed in f32, then rounded once.
    """
    n_experts = len(w13 if isinstance(w13, Tensor) else w13.codes)
    rows, row_idx, counts, scales = providers["init_routing"](
        x=x.contiguous(),
        ids=ids.int(),
        active_num=ids.numel(),
        expert_capacity=-1,
        n_experts=n_experts,
        expert_range=(0, n_experts),
        quant_mode=1 if isinstance(w13, Int8Weight) else -1,
    )
    out = run_experts(providers, rows, scales, counts, w13, w2, limit, x.dtype)
    # Signs mark rows that were dropped; none are here, and the kernel takes no negative index.
    joined = providers["combine_rows"](rows=out, row_idx=row_idx.abs(), weights=weights.to(out.dtype))
    return joined.float()


def run_experts(
    providers: Providers,
    rows: Tensor,
    scales: Tensor,
    counts: Tensor,
    w13: Matrices,
    w2: Matrices,
    limit: float,
    dtype: torch.dtype,
) -> Tensor:
    """Run experts on rows that are sorted by expert.

    Args:
        providers: of the machine.
        rows: float[A,H], or i8[A,H] for int8 weights.
        scales: f32[A]. Of int8 rows.
        counts: i64[E]. Rows of every expert.
        w13: float[E,2*F,H], or int8, or in MX blocks.
        w2: float[E,H,F], likewise.
        limit: clamp of the SwiGLU; it always applies.
        dtype: of the result.
    Returns:
        float[A,H].
    """
    if isinstance(w13, MXWeight):
        return _run_in_blocks(providers, rows, counts, w13, w2, limit, dtype)
    hidden = _by_expert(providers, rows, scales, w13, counts, dtype)
    if providers.has("activate"):
        hidden = providers["activate"](x=hidden, limit=limit)
    else:
        hidden = gate_up(hidden, limit).to(hidden.dtype)
    if isinstance(w2, Int8Weight):
        hidden, scales = providers["quantize_rows"](x=hidden)
    return _by_expert(providers, hidden, scales, w2, counts, dtype)


def _run_in_blocks(
    providers: Providers, rows: Tensor, counts: Tensor, w13: Matrices, w2: Matrices, limit: float, dtype: torch.dtype
) -> Tensor:
    """Run experts whose weights are in MX blocks on rows that are sorted by expert."""
    codes, exponents = providers["quantize_groups"](x=rows, dst_type=E4M3)
    hidden = _by_expert(providers, codes, exponents, w13, counts, dtype)
    codes, exponents, _ = providers["activate_blocks"](x=hidden, counts=counts, limit=limit)
    return _by_expert(providers, codes, exponents, w2, counts, dtype)


def _by_expert(
    providers: Providers, rows: Tensor, scales: Tensor, w: Matrices, counts: Tensor, dtype: torch.dtype
) -> Tensor:
    """Multiply every expert's rows by its matrix; ``scales`` are those of the rows, where they are quantised."""
    factors: dict[str, Any] = {"x": [rows], "counts": counts}
    if isinstance(w, Int8Weight):
        factors |= {"w": [w.codes.transpose(1, 2)], "scale": [w.scales], "x_scale": [scales], "output_dtype": dtype}
    elif isinstance(w, MXWeight):
        # The exponents keep the order of the codes, pairs of blocks together.
        factors |= {"w": [w.codes.transpose(1, 2)], "scale": [w.exponents.transpose(1, 2)], "x_scale": [scales]}
        factors |= {"scale_dtype": E8M0, "per_token_scale_dtype": E8M0, "output_dtype": dtype}
    else:
        factors["w"] = [w.transpose(1, 2)]
    y: Tensor = providers["grouped_matmul"](**factors)[0]
    return y


def dispatch_rows(
    providers: Providers, x: Tensor, ids: Tensor, ranks: Ranks, *, active: Tensor | None, is_int8: bool
) -> Received:
    """Send rows to the ranks of their experts.

    Args:
        providers: of the machine.
        x: float[T,H].
        ids: i64[T,K]. Experts of all ranks; none twice in a row.
        ranks: this rank's place.
        active: bool[T]. Rows that take part, all of them first; None for all.
        is_int8: quantise the rows on their way, for int8 weights.
    Returns:
        What this rank was sent.
    """
    rows, scales, way, counts, arrived, _, _ = providers["dispatch"](
        x=x.contiguous(),
        expert_ids=ids.int(),
        **_place(ranks),
        x_active_mask=active,
        quant_mode=2 if is_int8 else 0,
        expert_token_nums_type=1,
    )
    return Received(rows=rows, scales=scales, counts=counts, way=way, arrived=arrived)


def combine_rows(
    providers: Providers,
    outputs: Tensor,
    received: Received,
    ids: Tensor,
    weights: Tensor,
    ranks: Ranks,
    *,
    active: Tensor | None,
) -> Tensor:
    """Bring the experts' outputs back and sum them.

    Args:
        providers: of the machine.
        outputs: float[A,H]. Of ``run_experts`` on what was received.
        received: of ``dispatch_rows``.
        ids: i64[T,K]. As given there, and so is ``active``.
        weights: f32[T,K].
        ranks: this rank's place.
        active: bool[T].
    Returns:
        f32[T,H]; zero where a row took no part.
    """
    joined = providers["combine"](
        expand_x=outputs,
        expert_ids=ids.int(),
        assist_info_for_combine=received.way,
        ep_send_counts=received.arrived,
        expert_scales=weights,
        **_place(ranks),
        x_active_mask=active,
        comm_quant_mode=0,
    ).float()
    # What took no part is undefined there.
    return joined if active is None else joined.masked_fill(~active.unsqueeze(-1), 0.0)


def _place(ranks: Ranks) -> dict[str, str | int]:
    return {
        "group_ep": ranks.group,
        "ep_world_size": ranks.size,
        "ep_rank_id": ranks.rank,
        "moe_expert_num": ranks.n_experts,
        "global_bs": ranks.most_rows * ranks.size,
    }
