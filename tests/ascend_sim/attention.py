"""Attention over shared key/value rows with a sink, and its metadata.

Rules and formulas: kernel sheet 6.1 to 6.3. The A5 form reads packed rows (``packed.py``); what it takes beyond that,
after cann/ops-transformer's document of ``npu_kv_quant_sparse_attn_sharedkv``: picks with the empty ones last, and of
sizes 512 picks and a window of 127 to the left.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from ascend_sim.metadata import SIZE, check_metadata, make_metadata
from ascend_sim.packed import GROUP, packed_width, unpack_rows
from ascend_sim.rules import Kernel, Site
from torch import Tensor

__all__ = ["KERNELS"]

_RATIOS = (1, 4, 128)
_WIDTH = 512


def _options(site: Site, o: dict[str, Any]) -> None:
    """Check what both the operator and its metadata take."""
    site.require(o["cmp_ratio"] in _RATIOS, f"cmp_ratio among {_RATIOS}", o["cmp_ratio"])
    site.fixed(
        ori_mask_mode=(o["ori_mask_mode"], 4),
        cmp_mask_mode=(o["cmp_mask_mode"], 3),
        ori_win_right=(o["ori_win_right"], 0),
        layout_q=(o["layout_q"], "TND"),
        layout_kv=(o["layout_kv"], "PA_ND"),
    )
    site.require(o["ori_win_left"] >= 0, "ori_win_left of 0 or more", o["ori_win_left"])
    site.absent(cu_seqlens_ori_kv=o.get("cu_seqlens_ori_kv"), cu_seqlens_cmp_kv=o.get("cu_seqlens_cmp_kv"))
    site.absent(seqused_q=o.get("seqused_q"))


def _lengths(site: Site, cu: Tensor | None, used: Tensor | None, n_rows: int) -> tuple[list[int], list[int]]:
    """Check the lengths of queries and keys: (starts with a leading zero, keys per request)."""
    starts = site.starts("cu_seqlens_q", cu, n_rows)
    keys = site.tensor("seqused_kv", used, torch.int32, (len(starts) - 1,)).tolist()
    for request, n_keys in enumerate(keys):
        n = starts[request + 1] - starts[request]
        site.require(
            n_keys >= max(n, 1), f"seqused_kv of at least {max(n, 1)} in line {request}: its own tokens count", n_keys
        )
    return starts, keys


def _facts(
    o: dict[str, Any], heads: int, width: int, cu: object, used: object, topk: int, has_cmp: bool
) -> dict[str, object]:
    """List what the work split depends on."""
    return {
        "heads": heads,
        "width": width,
        "cu_seqlens_q": cu,
        "seqused_kv": used,
        "topk": topk,
        "has_cmp_kv": has_cmp,
        **{name: o[name] for name in ("cmp_ratio", "ori_mask_mode", "cmp_mask_mode", "ori_win_left", "ori_win_right")},
        **{name: o.get(name) for name in ("kv_quant_mode", "tile_size", "rope_head_dim")},
    }


def _metadata(site: Site, **o: Any) -> Tensor:
    _options(site, o)
    site.query_heads(o["num_heads_q"])
    site.fixed(num_heads_kv=(o["num_heads_kv"], 1), has_ori_kv=(o["has_ori_kv"], True), ori_topk=(o["ori_topk"], 0))
    site.size("head_dim", o["head_dim"], (_WIDTH,))
    cu = o["cu_seqlens_q"]
    site.require(cu is not None, "cu_seqlens_q to be given", None)
    starts, keys = _lengths(site, cu, o["seqused_kv"], int(cu[-1]))
    site.require(o["has_cmp_kv"] == (o["cmp_ratio"] != 1), "has_cmp_kv unless cmp_ratio is 1", o["has_cmp_kv"])
    site.require(o["batch_size"] in (0, len(keys)), f"batch_size {len(keys)}", o["batch_size"])
    longest_q = max(b - a for a, b in pairwise(starts))
    site.require(
        o["max_seqlen_q"] == 0 or o["max_seqlen_q"] >= longest_q, f"max_seqlen_q {longest_q}", o["max_seqlen_q"]
    )
    site.require(
        o["max_seqlen_kv"] == 0 or o["max_seqlen_kv"] >= max(keys), f"max_seqlen_kv {max(keys)}", o["max_seqlen_kv"]
    )
    _quantised_options(site, o)
    facts = _facts(o, o["num_heads_q"], o["head_dim"], cu, o["seqused_kv"], o["cmp_topk"], o["has_cmp_kv"])
    return make_metadata("attention", facts)


def _quantised_options(site: Site, o: dict[str, Any]) -> None:
    if "kv_quant_mode" in o:
        site.size("ori_win_left", o["ori_win_left"], (127,))
        site.fixed(kv_quant_mode=(o["kv_quant_mode"], 1), tile_size=(o["tile_size"], GROUP))
        site.fixed(rope_head_dim=(o["rope_head_dim"], site.rules.rope_width))


def _fake_metadata(site: Site, **o: Any) -> Tensor:
    given = next(x for x in (o["cu_seqlens_q"], o["seqused_kv"]) if x is not None)
    return given.new_empty((SIZE,), dtype=torch.int32)


def _cache(site: Site, name: str, cache: Tensor | None, q: Tensor, quantised: bool) -> Tensor:
    if cache is None:
        site.require(False, f"{name} to be given", None)
    assert cache is not None, "required above"
    width = packed_width(q.shape[-1], site.rules.rope_width) if quantised else q.shape[-1]
    site.dtype(name, cache, torch.float8_e4m3fn if quantised else q.dtype)
    site.require(
        cache.dim() == 4 and cache.shape[2] == 1 and cache.shape[3] == width,
        f"{name} of shape [pages,block,1,{width}]",
        tuple(cache.shape),
    )
    site.block(name, cache.shape[1])
    return cache


def _attend(quantised: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(site: Site, q: Tensor, **o: Any) -> tuple[Tensor, Tensor]:
        _options(site, o)
        site.dtype("q", q, torch.bfloat16, torch.float16)
        site.require(q.dim() == 3, "q of shape [T,N,D]", tuple(q.shape))
        site.query_heads(q.shape[1])
        site.size("the head width", q.shape[2], (_WIDTH,))
        site.absent(ori_sparse_indices=o["ori_sparse_indices"])
        site.fixed(return_softmax_lse=(o["return_softmax_lse"], False))
        site.require(o["softmax_scale"] > 0, "softmax_scale given", o["softmax_scale"])
        _quantised_options(site, o)
        starts, keys = _lengths(site, o["cu_seqlens_q"], o["seqused_kv"], len(q))
        sinks = site.tensor("sinks", o["sinks"], torch.float32, (q.shape[1],))
        window = _cache(site, "ori_kv", o["ori_kv"], q, quantised)
        table = site.pages("ori_block_table", o["ori_block_table"], keys, window.shape[1], len(window))
        picks, entries, entry_table = _compressed(site, o, q, keys, quantised)
        topk = 0 if picks is None else picks.shape[-1]
        facts = _facts(o, q.shape[1], q.shape[2], o["cu_seqlens_q"], o["seqused_kv"], topk, entries is not None)
        check_metadata(site, o["metadata"], "attention", facts)
        out = torch.empty_like(q)
        for request, n_keys in enumerate(keys):
            first, last = starts[request], starts[request + 1]
            for row in range(first, last):
                position = n_keys - (last - row)
                seen = torch.arange(max(0, position - o["ori_win_left"]), position + 1)
                rows = [_read(site, "ori_block_table", window, table[request], seen)]
                if entries is not None:
                    assert entry_table is not None, "comes with the entries"
                    visible = torch.arange((position + 1) // o["cmp_ratio"])
                    if picks is not None:
                        visible = _picked(site, picks[row, 0].long(), len(visible))
                    rows.append(_read(site, "cmp_block_table", entries, entry_table[request], visible))
                kv = torch.cat(rows)
                kv = unpack_rows(kv, q.shape[-1], o["rope_head_dim"]) if quantised else kv.float()
                out[row] = _with_sink(q[row].float(), kv, sinks, o["softmax_scale"]).to(q.dtype)
        return out, q.new_empty((0,), dtype=torch.float32)

    return run


def _compressed(
    site: Site, o: dict[str, Any], q: Tensor, keys: list[int], quantised: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Check what belongs to compressed entries: (picks, entries, their table)."""
    ratio, indices = o["cmp_ratio"], o["cmp_sparse_indices"]
    if ratio == 1:
        site.absent(cmp_kv=o["cmp_kv"], cmp_block_table=o["cmp_block_table"], cmp_sparse_indices=indices)
        return None, None, None
    entries = _cache(site, "cmp_kv", o["cmp_kv"], q, quantised)
    counts = [n // ratio for n in keys]
    table = site.pages("cmp_block_table", o["cmp_block_table"], counts, entries.shape[1], len(entries))
    if ratio == 128:
        site.absent(cmp_sparse_indices=indices)
    if indices is not None:
        site.tensor("cmp_sparse_indices", indices, torch.int32, (len(q), 1, indices.shape[-1]))
        if quantised:
            site.size("the number of picks", indices.shape[-1], (512,))
            empty = (indices < 0).int()
            last = torch.equal(empty, empty.sort(-1).values)
            site.require(last, "cmp_sparse_indices with the empty ones last", indices.tolist())
    return indices, entries, table


def _picked(site: Site, picks: Tensor, n_visible: int) -> Tensor:
    """Keep the picks that exist; each of them once."""
    picks = picks[(picks >= 0) & (picks < n_visible)]
    site.require(len(picks.unique()) == len(picks), "every entry picked once", picks.tolist())
    return picks


def _read(site: Site, name: str, cache: Tensor, table: Tensor, logical: Tensor) -> Tensor:
    """Read rows by logical number through one line of a block table: the cache's dtype, [X,width]."""
    block = cache.shape[1]
    pages = site.page_ids(name, table[logical // block], len(cache))
    return cache[pages, logical % block, 0]


def _with_sink(q: Tensor, kv: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Attend with the sink as one more logit that has no value: f32[N,D]."""
    logits = torch.cat((q @ kv.t() * scale, sinks.unsqueeze(-1)), -1)
    return torch.softmax(logits, -1)[:, :-1] @ kv


def _fake_attend(site: Site, q: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty((0,), dtype=torch.float32)


_PLAIN = Kernel(run=_attend(False), fake=_fake_attend)
_QUANTISED = Kernel(run=_attend(True), fake=_fake_attend)
_SCHEDULE = Kernel(run=_metadata, fake=_fake_metadata)

KERNELS = {
    "custom::npu_sparse_attn_sharedkv": _PLAIN,
    "_C_ascend::npu_sparse_attn_sharedkv": _PLAIN,
    "custom::npu_kv_quant_sparse_attn_sharedkv": _QUANTISED,
    "_C_ascend::npu_kv_quant_sparse_attn_sharedkv": _QUANTISED,
    "custom::npu_sparse_attn_sharedkv_metadata": _SCHEDULE,
    "_C_ascend::npu_sparse_attn_sharedkv_metadata": _SCHEDULE,
    "custom::npu_kv_quant_sparse_attn_sharedkv_metadata": _SCHEDULE,
    "_C_ascend::npu_kv_quant_sparse_attn_sharedkv_metadata": _SCHEDULE,
}
