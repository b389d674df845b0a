"""The lightning indexer over quantised keys, and its metadata.

Rules and formulas: kernel sheet 5. Results are a set per token: their order is not promised, so ours is one that nobody
would rely on.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from ascend_sim.metadata import SIZE, check_metadata, make_metadata
from ascend_sim.rules import Kernel, Site
from torch import Tensor

__all__ = ["KERNELS"]

_WIDTH = 128
_MAX_PICKS = 2048
_EVERYTHING = 2**63 - 1


def _types(site: Site) -> tuple[torch.dtype, torch.dtype]:
    """Name the dtypes of codes and of scales on this chip."""
    return (torch.float8_e4m3fn, torch.float32) if site.rules.chip == "a5" else (torch.int8, torch.float16)


def _options(site: Site, o: dict[str, Any]) -> None:
    site.fixed(
        query_quant_mode=(o["query_quant_mode"], 0),
        key_quant_mode=(o["key_quant_mode"], 0),
        sparse_mode=(o["sparse_mode"], 3),
        layout_query=(o["layout_query"], "TND"),
        layout_key=(o["layout_key"], "PA_BSND"),
        pre_tokens=(o["pre_tokens"], _EVERYTHING),
        next_tokens=(o["next_tokens"], _EVERYTHING),
        cmp_ratio=(o["cmp_ratio"], 4),
    )
    most = 512 if site.rules.chip == "a5" and site.operator.startswith("_C_ascend") else _MAX_PICKS
    site.require(1 <= o["sparse_count"] <= most, f"sparse_count in 1..{most}", o["sparse_count"])


def _lengths(site: Site, o: dict[str, Any], n_rows: int) -> tuple[list[int], list[int]]:
    starts = site.ends("actual_seq_lengths_query", o["actual_seq_lengths_query"], n_rows)
    keys = site.tensor("actual_seq_lengths_key", o["actual_seq_lengths_key"], torch.int32, (len(starts) - 1,)).tolist()
    site.require(min(keys) >= 0, "actual_seq_lengths_key of 0 or more", keys)
    return starts, keys


def _facts(o: dict[str, Any], heads: int, width: int) -> dict[str, object]:
    names = ("actual_seq_lengths_query", "actual_seq_lengths_key", "sparse_count", "sparse_mode", "cmp_ratio")
    return {"heads": heads, "width": width, **{name: o[name] for name in names}}


def _metadata(site: Site, **o: Any) -> Tensor:
    _options(site, o)
    site.query_heads(o["num_heads_q"])
    site.fixed(num_heads_k=(o["num_heads_k"], 1))
    site.size("head_dim", o["head_dim"], (_WIDTH,))
    ends = o["actual_seq_lengths_query"]
    site.require(ends is not None, "actual_seq_lengths_query to be given", None)
    _, keys = _lengths(site, o, int(ends[-1]))
    site.require(o["batch_size"] in (0, len(keys)), f"batch_size {len(keys)}", o["batch_size"])
    return make_metadata("indexer", _facts(o, o["num_heads_q"], o["head_dim"]))


def _fake_metadata(site: Site, **o: Any) -> Tensor:
    return o["actual_seq_lengths_query"].new_empty((SIZE,), dtype=torch.int32)


def _index(
    site: Site,
    *,
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    query_dequant_scale: Tensor,
    key_dequant_scale: Tensor,
    block_table: Tensor | None,
    metadata: Tensor | None,
    sparse_count: int,
    cmp_ratio: int,
    **o: Any,
) -> tuple[Tensor, Tensor]:
    o |= {"sparse_count": sparse_count, "cmp_ratio": cmp_ratio}
    _options(site, o)
    site.fixed(return_value=(o["return_value"], False))
    site.absent(query_dtype=o.get("query_dtype"), key_dtype=o.get("key_dtype"))
    code, scale = _types(site)
    site.dtype("query", query, code)
    site.require(query.dim() == 3, "query of shape [T,N,D]", tuple(query.shape))
    n_rows, heads, width = query.shape
    site.query_heads(heads)
    site.size("the index width", width, (_WIDTH,))
    site.tensor("weights", weights, scale, (n_rows, heads))
    site.tensor("query_dequant_scale", query_dequant_scale, scale, (n_rows, heads))
    site.dtype("key", key, code)
    site.require(
        key.dim() == 4 and key.shape[2:] == (1, width), f"key of shape [pages,block,1,{width}]", tuple(key.shape)
    )
    site.block("key", key.shape[1])
    site.tensor("key_dequant_scale", key_dequant_scale, scale, key.shape[:3])
    product = weights.float() * query_dequant_scale.float()
    largest = torch.finfo(scale).max
    site.require(bool((product.abs() <= largest).all()), f"weights * scale within {scale}", float(product.abs().max()))
    starts, keys = _lengths(site, o, n_rows)
    counts = [n // cmp_ratio for n in keys]
    table = site.pages("block_table", block_table, counts, key.shape[1], len(key))
    check_metadata(site, metadata, "indexer", _facts(o, heads, width))
    out = torch.full((n_rows, 1, sparse_count), -1, dtype=torch.int32)
    for request, n_keys in enumerate(keys):
        for row in range(starts[request], starts[request + 1]):
            position = n_keys - (starts[request + 1] - row)
            logical = torch.arange(max(0, (position + 1) // cmp_ratio))
            pages = site.page_ids("block_table", table[request, logical // key.shape[1]], len(key))
            k, sk = (
                key[pages, logical % key.shape[1], 0].float(),
                key_dequant_scale[pages, logical % key.shape[1], 0].float(),
            )
            dots = query[row].float() @ k.t() * query_dequant_scale[row].float().unsqueeze(-1) * sk
            scores = (weights[row].float().unsqueeze(-1) * dots.relu()).sum(0)
            site.require(
                bool(scores.isfinite().all()), f"finite scores in row {row}: NaN has no order", scores.tolist()
            )
            best = torch.sort(scores, descending=True, stable=True).indices[:sparse_count]
            out[row, 0, : len(best)] = best.sort(descending=True).values.int()
    return out, torch.full((n_rows, 1, sparse_count), math.nan)


def _fake_index(site: Site, *, query: Tensor, sparse_count: int, **_: object) -> tuple[Tensor, Tensor]:
    shape = (query.shape[0], 1, sparse_count)
    return query.new_empty(shape, dtype=torch.int32), query.new_empty(shape, dtype=torch.float32)


_INDEX = Kernel(run=_index, fake=_fake_index)
_SCHEDULE = Kernel(run=_metadata, fake=_fake_metadata)

KERNELS = {
    "custom::npu_quant_lightning_indexer": _INDEX,
    "_C_ascend::npu_vllm_quant_lightning_indexer": _INDEX,
    "custom::npu_quant_lightning_indexer_metadata": _SCHEDULE,
    "_C_ascend::npu_vllm_quant_lightning_indexer_metadata": _SCHEDULE,
}
