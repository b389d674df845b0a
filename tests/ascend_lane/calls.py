"""Calls whose shapes the genuine torch-npu and the simulator must agree on; every tensor is on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["CALLS", "described"]

BF16, I8, I32, I64, F32 = torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.float32
FP8 = torch.float8_e4m3fn


def meta(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """A tensor without content."""
    return torch.empty(shape, dtype=dtype, device="meta")


def described(result: Any) -> list[list[Any]]:
    """Shapes and dtypes of a result, as plain values."""
    tensors = result if isinstance(result, (list, tuple)) else [result]
    return [[list(x.shape), str(x.dtype).removeprefix("torch.")] for x in tensors]


def _routing(**options: Any) -> Any:
    fixed = {"expert_num": 256, "expert_tokens_num_type": 1, "expert_tokens_num_flag": True}
    return torch.ops.npu.npu_moe_init_routing_v2(
        meta(32, 4096), meta(32, 6, dtype=I32), **fixed, **{"active_expert_range": [0, 256], **options}
    )


def _grouped(x: Tensor, w: Tensor, **options: Any) -> Any:
    groups = {"split_item": 2, "group_type": 0, "group_list_type": 1, "group_list": meta(16, dtype=I64)}
    return torch.ops.npu.npu_grouped_matmul([x], [w], **groups, **options)


def _dispatch(**options: Any) -> Any:
    fixed = {"group_ep": "ep", "ep_world_size": 16, "ep_rank_id": 3, "moe_expert_num": 256}
    return torch.ops.npu.npu_moe_distribute_dispatch_v2(meta(32, 4096), meta(32, 6, dtype=I32), **fixed, **options)


def _combine() -> Any:
    fixed = {"group_ep": "ep", "ep_world_size": 16, "ep_rank_id": 3, "moe_expert_num": 256}
    operands = (meta(3072, 4096), meta(32, 6, dtype=I32), meta(393216, dtype=I32), meta(256, dtype=I32))
    return torch.ops.npu.npu_moe_distribute_combine_v2(*operands, meta(32, 6, dtype=F32), **fixed)


def _group_product() -> Any:
    turned = {"perm_x1": [1, 0, 2], "perm_x2": [0, 1, 2], "perm_y": [1, 0, 2]}
    return torch.ops.npu.npu_transpose_batchmatmul(meta(9, 8, 512), meta(8, 512, 128), **turned)


CALLS: dict[str, tuple[str, Callable[[], Any]]] = {
    "routing": ("a3", _routing),
    "routing of some experts": ("a3", lambda: _routing(active_expert_range=[16, 32])),
    "int8 routing": ("a3", lambda: _routing(quant_mode=1)),
    "grouped product": ("a3", lambda: _grouped(meta(192, 4096), meta(16, 4096, 4096))),
    "int8 grouped product": (
        "a3",
        lambda: _grouped(
            meta(192, 4096, dtype=I8),
            meta(16, 4096, 4096, dtype=I8),
            scale=[meta(16, 4096, dtype=F32)],
            per_token_scale=[meta(192, dtype=F32)],
            output_dtype=BF16,
        ),
    ),
    "dispatch": ("a3", _dispatch),
    "int8 dispatch": ("a3", lambda: _dispatch(quant_mode=2)),
    "combine": ("a3", _combine),
    "clipped activation": ("a3", lambda: torch.ops.npu.npu_clipped_swiglu(meta(192, 4096), interleaved=False)),
    "quantised activation": (
        "a3",
        lambda: torch.ops.npu.npu_dequant_swiglu_quant(meta(192, 4096, dtype=I32), quant_mode=1),
    ),
    "sum of experts": (
        "a3",
        lambda: torch.ops.npu.npu_moe_token_unpermute(meta(192, 4096), meta(192, dtype=I32), meta(32, 6)),
    ),
    "norm": ("a3", lambda: torch.ops.npu.npu_rms_norm(meta(32, 4096), meta(4096))),
    "int8 rows": ("a3", lambda: torch.ops.npu.npu_dynamic_quant(meta(32, 64, 128))),
    "int8 product": (
        "a3",
        lambda: torch.ops.npu.npu_quant_matmul(
            meta(32, 4096, dtype=I8), meta(4096, 512, dtype=I8), meta(512, dtype=F32), output_dtype=BF16
        ),
    ),
    "group product": ("a3", _group_product),
    "filter": (
        "a3",
        lambda: torch.ops.npu.npu_top_k_top_p(meta(4, 129280), meta(4), meta(4, dtype=I32)),
    ),
    "blocks": ("a5", lambda: torch.ops.npu.npu_dynamic_block_quant(meta(32, 64, 128), dst_type=292)),
    "mx blocks": ("a5", lambda: torch.ops.npu.npu_dynamic_mx_quant(meta(32, 8, 96), dst_type=292)),
    "group product of mx blocks": (
        "a5",
        lambda: torch.ops.npu.npu_transpose_quant_batchmatmul(
            meta(9, 8, 512, dtype=FP8),
            meta(8, 512, 128, dtype=FP8),
            BF16,
            group_sizes=[0, 0, 32],
            perm_x1=[1, 0, 2],
            perm_x2=[0, 1, 2],
            perm_y=[1, 0, 2],
        ),
    ),
}
"""Name -> chip whose simulator has the operator, and the call."""


def gate() -> Any:
    """The gate of torch-npu, which purestep does not call; its shapes are those of the one it does."""
    return torch.ops.npu.npu_moe_gating_top_k(meta(32, 256, dtype=F32), 6, norm_type=1)
