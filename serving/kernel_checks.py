"""Checks of the kernels that work row by row: streams, norm, rotary, products, routing, experts, sampling filter."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ..ops import experts, norms, rotary, router, streams
from .kernel_bench import Bench, Check, Pair, draw, draw_int

__all__ = ["ROW_CHECKS"]

_BF16: Final = torch.bfloat16
_A3: Final = ("a2", "a3")
_A5: Final = ("a5",)
_ROWS: Final = 5
_HIDDEN: Final = 4096
_E4M3: Final = 292
_E8M0: Final = 293


def _mix(bench: Bench) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run the mix of the streams: what the kernel gives and what the reference gives, by name."""
    x = draw(1, _ROWS, 4, _HIDDEN, dtype=_BF16)
    fn, scale, base = draw(2, 24, 4 * _HIDDEN) / _HIDDEN**0.5, draw(3, 3), draw(4, 24)
    out = bench.call("mix_streams", x=x, fn=fn, scale=scale, base=base, n_iters=20, norm_eps=1e-6, eps=1e-6)
    pre, post, comb = streams.mix_weights(x, fn, base, scale, n_iters=20, eps=1e-6, norm_eps=1e-6)
    expected = {"y": streams.join_streams(x, pre), "post": post, "comb": comb}
    return dict(zip(expected, out, strict=True)), expected


def _mixed_rows(bench: Bench) -> Pair:
    got, expected = _mix(bench)
    return got["y"], expected["y"]


def _mixes(bench: Bench) -> Pair:
    got, expected = _mix(bench)
    both = [torch.cat((one["post"].cpu().flatten(), one["comb"].cpu().flatten())) for one in (got, expected)]
    return both[0], both[1]


def _update(bench: Bench) -> Pair:
    x, residual = draw(1, _ROWS, _HIDDEN, dtype=_BF16), draw(2, _ROWS, 4, _HIDDEN, dtype=_BF16)
    post, comb = draw(3, _ROWS, 4), draw(4, _ROWS, 4, 4)
    given = {"x": x, "residual": residual, "post": post, "comb": comb}
    out = bench.call("update_streams", **{name: value.unsqueeze(0) for name, value in given.items()})
    return out.squeeze(0), streams.update_streams(residual, x, post, comb)


def _norm(bench: Bench) -> Pair:
    x, weight = draw(1, _ROWS, _HIDDEN, dtype=_BF16), draw(2, _HIDDEN, dtype=_BF16)
    out, _ = bench.call("rms_norm", x=x, weight=weight, eps=1e-6)
    return out, norms.rms_norm(x, weight, 1e-6)


def _rotate(bench: Bench, width: int, inverse: bool) -> Pair:
    x = draw(1, _ROWS, 1, 64, width, dtype=_BF16)
    factors = rotary.rotary_factors(torch.arange(_ROWS) * 977, rotary.rotary_frequencies(64, 10000.0))
    factors = factors.conj().resolve_conj() if inverse else factors
    cos, sin = (part.repeat_interleave(2, -1).view(_ROWS, 1, 1, 64) for part in (factors.real, factors.imag))
    moved = bench.put(x)
    bench.call("rotate", x=moved, cos=cos, sin=sin, partial_slice=[width - 64, width])
    return moved, rotary.apply_rotary(x, factors.view(_ROWS, 1, 1, 32))


def _quantize(bench: Bench) -> Pair:
    x = draw(1, _ROWS, 64, 128, dtype=_BF16)
    codes, scales = bench.call("quantize_rows", x=x)
    return codes.cpu().float() * scales.cpu().view(_ROWS, 64, 1), x


def _quantize_blocks(bench: Bench) -> Pair:
    x = draw(1, _ROWS, 64, 128, dtype=_BF16)
    codes, scales = bench.call("quantize_rows", x=x)
    return codes.cpu().float() * scales.cpu(), x


def _groups(bench: Bench) -> Pair:
    x, w = draw(1, _ROWS, 8, 512, dtype=_BF16), draw(2, 8, 512, 128, dtype=_BF16)
    out = bench.call("project_groups", x=x, w=w)
    return out, torch.einsum("tgk,gkn->tgn", x.float(), w.float())


def _mx_factors(codes: Tensor, exponents: Tensor) -> Tensor:
    """Undo a quantisation in blocks of 32: f32 like the codes."""
    powers = torch.ldexp(torch.ones(exponents.shape), exponents.cpu().view(torch.uint8).int() - 127)
    return codes.cpu().float() * powers.flatten(-2).repeat_interleave(32, -1)


def _quantize_groups(bench: Bench) -> Pair:
    x = draw(1, _ROWS, 8, 512, dtype=_BF16)
    codes, exponents = bench.call("quantize_groups", x=x, dst_type=_E4M3)
    return _mx_factors(codes, exponents), x


def _groups_of_blocks(bench: Bench) -> Pair:
    x, w = draw(1, _ROWS, 8, 512, dtype=_BF16), draw(2, 8, 128, 512, dtype=_BF16)
    codes, scale = bench.call("quantize_groups", x=x, dst_type=_E4M3)
    w_codes, w_scale = bench.call("quantize_groups", x=w, dst_type=_E4M3)
    out = bench.call(
        "project_groups",
        x=codes,
        w=w_codes.transpose(1, 2).contiguous(),
        x_scale=scale,
        w_scale=w_scale.transpose(1, 2).contiguous(),
        dtype=_BF16,
    )
    return out, torch.einsum("tgk,gnk->tgn", _mx_factors(codes, scale), _mx_factors(w_codes, w_scale))


def _sorted_routes(ids: Tensor, weights: Tensor) -> Tensor:
    """Put a row's experts in order of their number, each beside its weight: f32[T,2*K]."""
    ordered, places = ids.cpu().long().sort(-1)
    return torch.cat((ordered.float(), weights.cpu().float().gather(-1, places)), -1)


def _route(bench: Bench) -> Pair:
    logits, bias = draw(1, _ROWS, 256), draw(2, 256)
    weights, ids, _ = bench.call("route", logits=logits, bias=bias, count=6, factor=1.5)
    return _sorted_routes(ids, weights), _sorted_routes(*router.route_scored(logits, bias, 6, 1.5))


def _route_hash(bench: Bench) -> Pair:
    logits, tokens = draw(1, _ROWS, 256), draw_int(3, 0, 1000, _ROWS)
    table = draw(2, 1000, 256).argsort(-1)[:, :6].int().contiguous()
    weights, ids, _ = bench.call("route", logits=logits, count=6, factor=1.5, input_ids=tokens, table=table)
    return _sorted_routes(ids, weights), _sorted_routes(*router.route_hash(logits, table[tokens].long(), 1.5))


def _routing() -> dict[str, Any]:
    ids = draw(2, _ROWS, 8).argsort(-1)[:, :3].int().contiguous()
    return {"ids": ids, "n_experts": 8, "expert_range": [0, 8], "active_num": ids.numel(), "quant_mode": -1}


def _init_routing(bench: Bench) -> Pair:
    x, routing = draw(1, _ROWS, 512, dtype=_BF16), _routing()
    rows, index, counts, _ = bench.call("init_routing", x=x, **routing)
    flat = routing["ids"].flatten().long()
    place = flat.argsort(stable=True).argsort()
    expected = x[flat.argsort(stable=True) // 3].float()
    extra = torch.cat((place.float(), torch.bincount(flat, minlength=8).float()))
    got = torch.cat((index.cpu().float(), counts.cpu().float()))
    return torch.cat((rows.cpu().float().flatten(), got)), torch.cat((expected.flatten(), extra))


def _grouped(bench: Bench) -> Pair:
    x, w, counts = draw(1, 9, 512, dtype=_BF16), draw(2, 4, 512, 256, dtype=_BF16), torch.tensor([2, 0, 4, 3])
    (out,) = bench.call("grouped_matmul", x=[x], w=[w], counts=counts)
    owner = torch.arange(4).repeat_interleave(counts)
    return out, torch.einsum("tk,tkn->tn", x.float(), w.float()[owner])


def _grouped_int8(bench: Bench) -> Pair:
    x, w = draw_int(1, -127, 128, 9, 512).to(torch.int8), draw_int(2, -127, 128, 4, 512, 256).to(torch.int8)
    counts, channel, row = torch.tensor([2, 0, 4, 3]), draw(3, 4, 256).abs() / 99, draw(4, 9).abs() / 99
    given = {"counts": counts, "scale": [channel], "x_scale": [row], "output_dtype": _BF16}
    (out,) = bench.call("grouped_matmul", x=[x], w=[w], **given)
    owner = torch.arange(4).repeat_interleave(counts)
    return out, torch.einsum("tk,tkn->tn", x.float(), w.float()[owner]) * channel[owner] * row.unsqueeze(-1)


def _grouped_blocks(bench: Bench) -> Pair:
    x, w, counts = draw(1, 9, 512, dtype=_BF16), draw(2, 4, 256, 512, dtype=_BF16), torch.tensor([2, 0, 4, 3])
    codes, scale = bench.call("quantize_groups", x=x, dst_type=_E4M3)
    w_codes, w_scale = bench.call("quantize_groups", x=w, dst_type=_E4M3)
    given = {"counts": counts, "scale_dtype": _E8M0, "per_token_scale_dtype": _E8M0, "output_dtype": _BF16}
    (out,) = bench.call(
        "grouped_matmul", x=[codes], w=[w_codes.mT], scale=[w_scale.transpose(1, 2)], x_scale=[scale], **given
    )
    owner = torch.arange(4).repeat_interleave(counts)
    return out, torch.einsum("tk,tnk->tn", _mx_factors(codes, scale), _mx_factors(w_codes, w_scale)[owner])


def _activate_blocks(bench: Bench) -> Pair:
    x, counts = draw(1, _ROWS, 512, dtype=_BF16) * 4, torch.tensor([2, 3])
    codes, exponents, _ = bench.call("activate_blocks", x=x, counts=counts, limit=3.0)
    return _mx_factors(codes, exponents), experts.gate_up(x, 3.0)


def _activate(bench: Bench) -> Pair:
    x = draw(1, _ROWS, 1024, dtype=_BF16) * 4
    return bench.call("activate", x=x, limit=3.0), experts.gate_up(x, 3.0)


def _activate_quantised(bench: Bench) -> Pair:
    sums, width = draw_int(1, -9999, 9999, _ROWS, 256).int(), 128
    scale, row, counts = draw(2, 2, 256).abs() / 999, draw(3, _ROWS).abs(), torch.tensor([2, 3])
    wide = sums.float() * scale.repeat_interleave(counts, 0) * row.unsqueeze(-1)
    # The clamped mode of torch-npu takes gate and up from neighbouring channels, vllm-ascend's from halves.
    halves = (
        torch.cat((wide[:, 0::2], wide[:, 1::2]), -1) if bench.provider("activate_quantised") == "torch-npu" else wide
    )
    codes, scales = bench.call("activate_quantised", x=sums, w_scale=scale, x_scale=row, group_index=counts, limit=3.0)
    expected = experts.gate_up(halves, 3.0)
    return codes.cpu().float() * scales.cpu().view(_ROWS, 1), expected.view(_ROWS, width)


def _combine(bench: Bench) -> Pair:
    rows, index = draw(1, 3 * _ROWS, 512, dtype=_BF16), draw(2, 3 * _ROWS).argsort().int()
    weights = draw(3, _ROWS, 3).softmax(-1).to(_BF16)
    out = bench.call("combine_rows", rows=rows, row_idx=index, weights=weights)
    picked = rows[index.long()].float().view(_ROWS, 3, 512)
    return out, (picked * weights.float().unsqueeze(-1)).sum(1)


def _quantised_linear(bench: Bench) -> Pair:
    x, w = draw_int(1, -127, 128, _ROWS, 512).to(torch.int8), draw_int(2, -127, 128, 512, 256).to(torch.int8)
    channel, row = draw(3, 256).abs() / 99, draw(4, _ROWS).abs() / 99
    out = bench.call("quantised_linear", x=x, w=w, w_scale=channel, x_scale=row, output_dtype=_BF16)
    return out, x.float() @ w.float() * channel * row.unsqueeze(-1)


def _format(bench: Bench) -> Pair:
    w = draw(1, 512, 256, dtype=_BF16)
    return bench.call("format_weight", w=w), w


def _filter(bench: Bench) -> Pair:
    logits = draw(1, _ROWS, 4096) * 3
    k, p = torch.full((_ROWS,), 40, dtype=torch.int32), torch.full((_ROWS,), 0.9)
    kept = bench.call("keep_top", logits=logits, p=p, k=k)
    values, order = logits.sort(-1)
    values[:, :-40] = -torch.inf
    values[values.softmax(-1).cumsum(-1) <= 0.1] = -torch.inf
    expected = torch.empty_like(values).scatter_(-1, order, values)
    low = -1e4  # differences of infinities say nothing
    return kept.cpu().clamp(min=low), expected.clamp(min=low)


ROW_CHECKS: Final[tuple[Check, ...]] = (
    Check(operator="mix_streams", case="rows that the sublayer reads", tolerance=2e-2, run=_mixed_rows),
    Check(operator="mix_streams", case="mixes back, in HF32", tolerance=1e-2, run=_mixes),
    Check(operator="update_streams", case="four streams", tolerance=1e-2, run=_update),
    Check(operator="rms_norm", case="hidden rows", tolerance=1e-2, run=_norm),
    Check(operator="rotate", case="attention width", tolerance=1e-2, run=partial(_rotate, width=512, inverse=False)),
    Check(operator="rotate", case="indexer width", tolerance=1e-2, run=partial(_rotate, width=128, inverse=False)),
    Check(operator="rotate", case="back again", tolerance=1e-2, run=partial(_rotate, width=512, inverse=True)),
    Check(operator="quantize_rows", case="int8 rows", tolerance=5e-3, run=_quantize, chips=_A3),
    Check(operator="quantize_rows", case="fp8 blocks", tolerance=4e-2, run=_quantize_blocks, chips=_A5),
    Check(operator="project_groups", case="eight groups", tolerance=1e-2, run=_groups, chips=_A3),
    Check(operator="quantize_groups", case="blocks of 32", tolerance=0.13, run=_quantize_groups, chips=_A5),
    Check(
        operator="project_groups",
        case="eight groups in blocks of 32",
        tolerance=1e-2,
        run=_groups_of_blocks,
        chips=_A5,
        needs=("quantize_groups",),
    ),
    Check(operator="route", case="by score", tolerance=1e-4, run=_route),
    Check(operator="route", case="by token", tolerance=1e-4, run=_route_hash),
    Check(operator="init_routing", case="rows, index and counts", tolerance=0.0, run=_init_routing),
    Check(operator="grouped_matmul", case="bfloat16", tolerance=1e-2, run=_grouped),
    Check(operator="grouped_matmul", case="int8", tolerance=1e-2, run=_grouped_int8),
    Check(
        operator="grouped_matmul",
        case="blocks of 32",
        tolerance=1e-2,
        run=_grouped_blocks,
        chips=_A5,
        needs=("quantize_groups",),
    ),
    Check(operator="activate", case="clamped", tolerance=1e-2, run=_activate),
    Check(operator="activate_blocks", case="clamped, blocks of 32", tolerance=7e-2, run=_activate_blocks, chips=_A5),
    Check(operator="activate_quantised", case="clamped, two groups", tolerance=1e-2, run=_activate_quantised),
    Check(operator="combine_rows", case="three experts a row", tolerance=1e-2, run=_combine),
    Check(operator="quantised_linear", case="int8", tolerance=1e-2, run=_quantised_linear),
    Check(operator="format_weight", case="values stay", tolerance=0.0, run=_format),
    Check(operator="keep_top", case="k = 40, p = 0.9", tolerance=0.0, run=_filter),
)
"""Row by row."""
