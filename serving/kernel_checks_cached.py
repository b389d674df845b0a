"""Checks of the kernels that read and write caches: scattered rows, compressor, indexer, attention."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from ..ops import attention, compressor, indexer, norms, quantize, rotary
from .kernel_bench import Bench, Check, Pair, draw, draw_int

__all__ = ["CACHE_CHECKS"]

_BF16: Final = torch.bfloat16
_I32: Final = torch.int32
_A3: Final = ("a2", "a3")
_A5: Final = ("a5",)
_PAGE: Final = 128
_HEADS: Final = 64
_WIDTH: Final = 512
_INDEX_WIDTH: Final = 128
_ROPE: Final = 64
_HIDDEN: Final = 1024
_WINDOW: Final = 128
_PACKED: Final = 640  # bytes of a packed row
_A5_PICKS: Final = 512  # the only number of picks that the A5's attention is documented for


def _write_rows(bench: Bench) -> Pair:
    cache, rows = draw(1, 2 * _PAGE, _INDEX_WIDTH, dtype=_BF16), draw(2, 3, _INDEX_WIDTH, dtype=_BF16)
    slots = torch.tensor([[200], [7], [128]])
    moved = bench.put(cache)
    bench.call("write_rows", cache=moved, slots=slots, rows=rows)
    return moved, cache.index_copy(0, slots[:, 0], rows)


def _compress(bench: Bench, width: int, ratio: int) -> Pair:
    """Feed a sequence in two calls, the second of them one token; the state is what connects them."""
    coff = 2 if ratio == 4 else 1
    length = 8 if ratio == 4 else ratio
    x = draw(1, length, _HIDDEN, dtype=_BF16)
    wkv, wgate = (draw(seed, coff * width, _HIDDEN, dtype=_BF16) / 32 for seed in (2, 3))
    ape, norm = draw(4, ratio, coff * width), draw(5, width)
    # The A5 wants a row for every position of a call.
    ring = coff * ratio + (length - 2 if bench.providers.chip == "a5" else 0)
    state = torch.zeros(3, ring, 2 * coff * width)
    state[..., coff * width :] = -math.inf
    moved = bench.put(state)
    frequencies = rotary.rotary_frequencies(_ROPE, 10000.0)
    found = []
    for start, count in ((0, length - 1), (length - 1, 1)):
        first = [g * ratio for g in range(start // ratio, (start + count) // ratio)]
        n_rows = min(count, count // ratio + 1)
        factors = rotary.rotary_factors(torch.tensor(first + [0] * (n_rows - len(first))), frequencies)
        rows = bench.call(
            "compress",
            x=x[start : start + count],
            wkv=wkv,
            wgate=wgate,
            state=moved,
            ape=ape,
            norm=norm,
            sin=factors.imag.repeat_interleave(2, -1),
            cos=factors.real.repeat_interleave(2, -1),
            table=_state_table(bench, start, count, coff * ratio, ring),
            cu_seqlens=torch.tensor([0, count], dtype=_I32),
            seqused=torch.tensor([count], dtype=_I32),
            start_pos=torch.tensor([start], dtype=_I32),
            rope_width=_ROPE,
            ratio=ratio,
            coff=coff,
            eps=1e-6,
        )
        found.append(rows[: len(first)].cpu())
    return torch.cat(found), _compressed(x, wkv, wgate, ape, norm, ratio, coff, frequencies)


def _state_table(bench: Bench, start: int, count: int, reach: int, ring: int) -> Tensor:
    """Point at the rows of bank 1; an A5 takes the bank's number, the others every row's, the last row being nobody's.

    Returns:
        i32[B] or i32[B,reach+count].
    """
    if bench.providers.chip == "a5":
        return torch.tensor([1], dtype=_I32)
    positions = range(start - reach, start + count)
    return torch.tensor([[ring + p % ring if p >= 0 else 3 * ring - 1 for p in positions]], dtype=_I32)


def _compressed(
    x: Tensor, wkv: Tensor, wgate: Tensor, ape: Tensor, norm: Tensor, ratio: int, coff: int, frequencies: Tensor
) -> Tensor:
    kv = x.float() @ wkv.float().t()
    scores = x.float() @ wgate.float().t() + ape[torch.arange(len(x)) % ratio]
    if coff == 2:
        kv, scores = (compressor.overlap_groups(part, ratio, fill) for part, fill in ((kv, 0.0), (scores, -math.inf)))
    else:
        kv, scores = (compressor.plain_groups(part, ratio) for part in (kv, scores))
    entries = norms.rms_norm(compressor.pool_group(kv, scores), norm, 1e-6)
    return rotary.apply_rotary(entries, rotary.rotary_factors(torch.arange(len(entries)) * ratio, frequencies))


def _index_codes(bench: Bench, seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Draw quantised rows and their scales, in the dtypes of the chip."""
    if bench.providers.chip == "a5":
        return (draw(seed, *shape) * 40).to(torch.float8_e4m3fn), draw(seed + 1, *shape[:-1]).abs() + 0.1
    return draw_int(seed, -127, 128, *shape).to(torch.int8), (draw(seed + 1, *shape[:-1]).abs() + 0.1).half()


def _pick(bench: Bench) -> Pair:
    """Compare the scores of what is picked, best first: the order inside the picks is nobody's promise."""
    lengths, count = torch.tensor([700, 90], dtype=_I32), 32
    query, query_scale = _index_codes(bench, 1, 2, _HEADS, _INDEX_WIDTH)
    query_scale = query_scale / 4096
    key, key_scale = _index_codes(bench, 3, 10, 32, 1, _INDEX_WIDTH)
    weights = draw(5, 2, _HEADS).to(query_scale.dtype)
    table = torch.tensor([[3, 1, 7, 2, 9, 5], [8, -1, -1, -1, -1, -1]], dtype=_I32)
    options = {"query_ends": torch.tensor([1, 2], dtype=_I32), "key_lens": lengths, "count": count}
    metadata = bench.call("index_metadata", n_heads=_HEADS, width=_INDEX_WIDTH, **options)
    picks, _ = bench.call(
        "pick_entries",
        query=query,
        key=key,
        weights=weights,
        query_scale=query_scale,
        key_scale=key_scale,
        table=table,
        metadata=metadata,
        **options,
    )
    rows = (table.long() * 32).unsqueeze(-1).add(torch.arange(32)).flatten(1).clamp(min=0)
    keys = (key.float() * key_scale.float().view(10, 32, 1, 1)).view(-1, _INDEX_WIDTH)[rows]
    scaled = query.float() * query_scale.float().unsqueeze(-1)
    scores = indexer.index_scores(scaled.unsqueeze(1), keys, weights.float().unsqueeze(1), rounding=False).squeeze(1)
    best = indexer.pick_entries(scores, lengths.long() // 4, count)
    return _picked_scores(scores, picks.cpu().view(2, count).long()), _picked_scores(scores, best)


def _picked_scores(scores: Tensor, picks: Tensor) -> Tensor:
    """Sort the scores of the picks; an absent one counts as far below all."""
    values = torch.where(picks >= 0, scores.gather(-1, picks.clamp(min=0)), -100.0)
    return values.sort(-1, descending=True).values


def _attention_case(ratio: int, count: int) -> dict[str, Any]:
    """Two requests that cross pages, one query each; ``count`` is the room for picks."""
    lengths = [300, 131]
    return {
        "q": draw(1, 2, _HEADS, _WIDTH, dtype=_BF16),
        "window": draw(2, 5, _PAGE, 1, _WIDTH, dtype=_BF16),
        "window_table": torch.tensor([[0, 1, 3], [4, 2, 0]], dtype=_I32),
        "entries": draw(3, 5, 32 if ratio == 4 else 16, 1, _WIDTH, dtype=_BF16),
        "entry_table": torch.tensor([[3, 1, 2], [4, 0, 0]], dtype=_I32),
        "lengths": lengths,
        "sinks": draw(4, _HEADS),
        "scale": _WIDTH**-0.5,
        "ratio": ratio,
        "n_picks": count if ratio == 4 else 0,
    }


def _attend(bench: Bench, ratio: int) -> Pair:
    is_a5 = bench.providers.chip == "a5"
    case = _attention_case(ratio, _A5_PICKS if is_a5 else 16)
    shared: dict[str, Any] = {
        "query_starts": torch.tensor([0, 1, 2], dtype=_I32),
        "key_lens": torch.tensor(case["lengths"], dtype=_I32),
        "ratio": ratio,
        "window_left": _WINDOW - 1,
    }
    window, entries = case["window"], case["entries"]
    if is_a5:
        shared["rope_width"] = _ROPE
        window, entries = (_packed(bench, rows) for rows in (window, entries))
    metadata = bench.call(
        "attention_metadata",
        n_heads=_HEADS,
        width=_WIDTH,
        n_picks=case["n_picks"],
        has_entries=ratio > 1,
        **shared,
    )
    given: dict[str, Any] = {"window": window, "window_table": case["window_table"]}
    if ratio > 1:
        given |= {"entries": entries, "entry_table": case["entry_table"]}
    if case["n_picks"]:
        given["picks"] = _picks(case)
    out, _ = bench.call(
        "attend", q=case["q"], sinks=case["sinks"], scale=case["scale"], metadata=metadata, **given, **shared
    )
    return out, _attended(case, rounded=is_a5)


def _picks(case: dict[str, Any]) -> Tensor:
    """Pick every other visible entry, as many as there is room for: i32[B,1,P]."""
    lines = [list(range(0, n // case["ratio"], 2))[: case["n_picks"]] for n in case["lengths"]]
    return torch.tensor([[line + [-1] * (case["n_picks"] - len(line))] for line in lines], dtype=_I32)


def _packed(bench: Bench, rows: Tensor) -> Tensor:
    """Write rows as the A5 keeps them, with the kernel that does it there."""
    flat = rows.view(-1, _WIDTH)
    cache = bench.put(torch.zeros(len(flat), _PACKED, dtype=torch.uint8)).view(torch.float8_e4m3fn)
    shaped = cache.unsqueeze(1) if bench.provider("write_window") == "vllm-ascend" else cache
    slots = torch.arange(1, len(flat), dtype=_I32)
    bench.call("write_window", cache=shaped, rows=flat[1:].contiguous(), slots=slots)
    return cache.view(*rows.shape[:-1], _PACKED)


def _attended(case: dict[str, Any], *, rounded: bool) -> Tensor:
    """Attend request by request with the reference."""
    out = []
    for r, n in enumerate(case["lengths"]):
        keys = _read(case["window"], case["window_table"][r], range(max(0, n - _WINDOW), n))
        if case["ratio"] > 1:
            picks = _picks(case)[r, 0].tolist() if case["n_picks"] else range(n // case["ratio"])
            keys = torch.cat((keys, _read(case["entries"], case["entry_table"][r], [i for i in picks if i >= 0])))
        if rounded:
            plain = quantize.round_fp8(keys[:, : _WIDTH - _ROPE], 64)
            keys = torch.cat((plain, keys[:, _WIDTH - _ROPE :]), -1)
        mask = torch.ones(1, len(keys), dtype=torch.bool)
        q = case["q"][r : r + 1]
        out.append(attention.attend(q, keys, mask, case["sinks"], scale=case["scale"], rounding=False))
    return torch.cat(out)


def _read(cache: Tensor, table: Tensor, rows: Any) -> Tensor:
    block = cache.shape[1]
    return torch.stack([cache[int(table[row // block]), row % block, 0] for row in rows])


def _write_index(bench: Bench) -> Pair:
    rows, slots = draw(1, 3, _INDEX_WIDTH, dtype=_BF16), torch.tensor([5, 40, 33], dtype=_I32)
    cache = bench.put(torch.zeros(64, _INDEX_WIDTH).to(torch.float8_e4m3fn))
    scales = bench.put(torch.zeros(64, 1))
    bench.call("write_index", cache=cache, scales=scales, rows=rows, slots=slots)
    return cache.cpu().float() * scales.cpu(), torch.zeros(64, _INDEX_WIDTH).index_copy(0, slots.long(), rows.float())


def _attention_checks() -> tuple[Check, ...]:
    found = []
    for chips, rows, needs in ((_A3, "bfloat16", ()), (_A5, "packed rows", ("write_window",))):
        for ratio, name in ((1, "window and sink"), (4, "picked entries"), (128, "all entries")):
            found.append(
                Check(
                    operator="attend",
                    case=f"{name}, {rows}",
                    tolerance=2e-2,
                    run=partial(_attend, ratio=ratio),
                    chips=chips,
                    needs=("attention_metadata", *needs),
                )
            )
    return tuple(found)


CACHE_CHECKS: Final[tuple[Check, ...]] = (
    Check(operator="write_rows", case="three rows", tolerance=0.0, run=_write_rows),
    Check(operator="write_index", case="fp8 keys", tolerance=4e-2, run=_write_index, chips=_A5),
    Check(operator="compress", case="C4, 512 wide", tolerance=3e-2, run=partial(_compress, width=512, ratio=4)),
    Check(operator="compress", case="C4, 128 wide", tolerance=3e-2, run=partial(_compress, width=128, ratio=4)),
    Check(operator="compress", case="C128, 512 wide", tolerance=3e-2, run=partial(_compress, width=512, ratio=128)),
    Check(operator="pick_entries", case="scores of the picks", tolerance=1e-3, run=_pick, needs=("index_metadata",)),
    *_attention_checks(),
)
"""Over caches."""
