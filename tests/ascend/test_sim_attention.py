"""The simulated attention and indexer against loops over whole histories; every rule planted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from ascend_sim.packed import pack_rows, packed_width, unpack_rows
from ascend_sim.rules import SimulatorError
from ascend_sim.simulator import simulate
from hypothesis import given
from hypothesis import strategies as st
from kit.steps import examples
from purestep.ops import attention, quantize
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

BF16, I32 = torch.bfloat16, torch.int32
HEADS, WIDTH, ROPE, WINDOW, PAGE = 4, 16, 4, 128, 64
Arguments = dict[str, Any]
ALL = ("torch-npu", "cann-recipes", "sgl-kernel-npu", "vllm-ascend")


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def machine(chip: str = "a3", **options: Any) -> Any:
    """A machine for small models with every package."""
    return simulate(chip=chip, providers=ALL, heads=4, strict_sizes=False, rope_width=ROPE, **options)


def ints(*numbers: int) -> Tensor:
    """An int32 vector."""
    return torch.tensor(numbers, dtype=I32)


@attrs.frozen(eq=False, kw_only=True)
class History:
    """Requests with their keys and entries, laid out in pages that no two of them share.

    Attributes:
        lengths: tokens per request, those of this step included.
        queries: tokens of this step per request.
        window: per request bf16[L,D].
        entries: per request bf16[L//ratio,D].
        q: bf16[T,N,D].
        sinks: f32[N].
        ratio: 1, 4 or 128.
    """

    lengths: list[int]
    queries: list[int]
    window: list[Tensor]
    entries: list[Tensor]
    q: Tensor
    sinks: Tensor
    ratio: int


def history(lengths: list[int], queries: list[int], ratio: int, seed: int = 0) -> History:
    """Draw histories."""
    return History(
        lengths=lengths,
        queries=queries,
        window=[draw(seed + i, n, WIDTH, dtype=BF16) for i, n in enumerate(lengths)],
        entries=[draw(seed + 50 + i, n // ratio, WIDTH, dtype=BF16) for i, n in enumerate(lengths)],
        q=draw(seed + 100, sum(queries), HEADS, WIDTH, dtype=BF16),
        sinks=draw(seed + 101, HEADS),
        ratio=ratio,
    )


def paged(rows: list[Tensor], block: int, spare: int = 0) -> tuple[Tensor, Tensor]:
    """Lay rows out in pages from page 1 on, the dummy page and everything unused NaN: (cache, block table)."""
    n_pages = [-(-len(r) // block) for r in rows]
    cache = torch.full((1 + sum(n_pages), block, 1, rows[0].shape[-1]), math.nan, dtype=rows[0].dtype)
    table = torch.full((len(rows), max(*n_pages, 1) + spare), -1, dtype=I32)
    page = 1
    for line, (r, n) in enumerate(zip(rows, n_pages, strict=True)):
        table[line, :n] = torch.arange(page, page + n, dtype=I32)
        cache[page : page + n].view(-1, rows[0].shape[-1])[: len(r)] = r
        page += n
    return cache, table


def picks_for(h: History, k: int, seed: int = 0) -> Tensor:
    """Random sets of visible entries, with absent and invisible ones in between: i32[T,1,K]."""
    lines = []
    row = 0
    for n, m in zip(h.lengths, h.queries, strict=True):
        for i in range(m):
            visible = (n - m + i + 1) // h.ratio
            order = torch.randperm(visible, generator=torch.Generator().manual_seed(seed + row))[: k - 2].tolist()
            line = [-1, *order, visible + 3]
            lines.append(line + [-1] * (k - len(line)))
            row += 1
    return torch.tensor(lines, dtype=I32).unsqueeze(1)


def attention_call(h: History, picks: Tensor | None = None, spare: int = 0, window: int = WINDOW) -> Arguments:
    """Arguments of npu_sparse_attn_sharedkv but its metadata."""
    ori, ori_table = paged(h.window, PAGE, spare)
    arguments: Arguments = {
        "q": h.q,
        "ori_kv": ori,
        "ori_block_table": ori_table,
        "cu_seqlens_q": torch.tensor([0, *h.queries]).cumsum(0).int(),
        "seqused_kv": torch.tensor(h.lengths, dtype=I32),
        "sinks": h.sinks,
        "softmax_scale": WIDTH**-0.5,
        "cmp_ratio": h.ratio,
        "ori_mask_mode": 4,
        "cmp_mask_mode": 3,
        "ori_win_left": window - 1,
        "ori_win_right": 0,
        "layout_q": "TND",
        "layout_kv": "PA_ND",
    }
    if h.ratio > 1:
        arguments["cmp_kv"], arguments["cmp_block_table"] = paged(h.entries, 16, spare)
    if picks is not None:
        arguments["cmp_sparse_indices"] = picks
    return arguments


def attention_metadata(a: Arguments, name: str = "custom", **changes: Any) -> Tensor:
    """The metadata that belongs to a call."""
    shared = ("cu_seqlens_q", "seqused_kv", "cmp_ratio", "ori_mask_mode", "cmp_mask_mode")
    shared += ("ori_win_left", "ori_win_right", "layout_q", "layout_kv")
    options = {key: a[key] for key in shared} | {
        "cmp_topk": a["cmp_sparse_indices"].shape[-1] if "cmp_sparse_indices" in a else 0,
        "has_ori_kv": True,
        "has_cmp_kv": a["cmp_ratio"] != 1,
    }
    namespace = getattr(torch.ops, name)
    return namespace.npu_sparse_attn_sharedkv_metadata(HEADS, 1, WIDTH, **(options | changes))


def expected(h: History, picks: Tensor | None, window: int = WINDOW) -> Tensor:
    """Attend in float64, query by query, key by key."""
    out, row = [], 0
    for r, (n, m) in enumerate(zip(h.lengths, h.queries, strict=True)):
        for position in range(n - m, n):
            keys = [h.window[r][p] for p in range(n) if position - window < p <= position]
            if h.ratio > 1:
                visible = range((position + 1) // h.ratio)
                chosen = set(visible) if picks is None else set(picks[row, 0].tolist()) & set(visible)
                keys += [h.entries[r][j] for j in sorted(chosen)]
            for head in range(HEADS):
                q = h.q[row, head].double().numpy()
                logits = np.array([WIDTH**-0.5 * float(q @ k.double().numpy()) for k in keys])
                top = max(logits.max(), float(h.sinks[head]))
                e = np.exp(logits - top)
                total = e.sum() + math.exp(float(h.sinks[head]) - top)
                out.append(sum(w * k.double().numpy() for w, k in zip(e / total, keys, strict=True)))
            row += 1
    return torch.tensor(np.array(out)).view(row, HEADS, WIDTH)


@given(
    seed=st.integers(0, 999),
    ratio=st.sampled_from([1, 4, 128]),
    lengths=st.lists(st.sampled_from([1, 3, 4, 5, 63, 64, 65, 127, 128, 129, 260]), min_size=1, max_size=3),
    picked=st.booleans(),
    data=st.data(),
)
@examples(20)
def test_attention_sees_window_entries_and_sink(
    seed: int, ratio: int, lengths: list[int], picked: bool, data: st.DataObject
) -> None:
    """Ragged batches of decode and extend rows equal loops over the history; NaN elsewhere in the pools is not read."""
    queries = [data.draw(st.integers(1, min(n, 3))) for n in lengths]
    h = history(lengths, queries, ratio, seed)
    picks = picks_for(h, 8, seed) if ratio == 4 and picked else None
    a = attention_call(h, picks, spare=data.draw(st.integers(0, 2)))
    with machine():
        out, second = torch.ops.custom.npu_sparse_attn_sharedkv(**a, metadata=attention_metadata(a))
        vllm = {k: v for k, v in a.items()}
        other, _ = torch.ops._C_ascend.npu_sparse_attn_sharedkv(**vllm, metadata=attention_metadata(a, "_C_ascend"))
    assert torch.equal(out, other)
    assert not second.numel()
    torch.testing.assert_close(out.double(), expected(h, picks), atol=0.01, rtol=0.01)


def test_attention_equals_the_reference_operator() -> None:
    """The reference operator on gathered keys gives the same."""
    h = history([200], [1], 4, 3)
    a = attention_call(h)
    with machine():
        out, _ = torch.ops.custom.npu_sparse_attn_sharedkv(**a, metadata=attention_metadata(a))
    keys = torch.cat((h.window[0][-WINDOW:], h.entries[0]))
    mask = torch.ones(1, len(keys), dtype=torch.bool)
    same = attention.attend(h.q, keys, mask, h.sinks, scale=WIDTH**-0.5, rounding=False)
    torch.testing.assert_close(out, same)


@pytest.mark.parametrize("left", [126, 128])
def test_a_window_off_by_one_shows(left: int) -> None:
    """One token more or less in the window is another result; the default of one package is not that of another."""
    h = history([200], [1], 1, 3)
    a = attention_call(h)
    wrong = a | {"ori_win_left": left}
    with machine():
        out, _ = torch.ops.custom.npu_sparse_attn_sharedkv(**a, metadata=attention_metadata(a))
        shifted, _ = torch.ops.custom.npu_sparse_attn_sharedkv(**wrong, metadata=attention_metadata(wrong))
        plain = {k: v for k, v in a.items() if k != "ori_win_left"}
        default, _ = torch.ops.custom.npu_sparse_attn_sharedkv(**plain, metadata=attention_metadata(a))
        with pytest.raises(SimulatorError, match="metadata made for this call"):
            torch.ops._C_ascend.npu_sparse_attn_sharedkv(**plain, metadata=attention_metadata(a, "_C_ascend"))
    assert torch.equal(out, default)
    assert not torch.equal(out, shifted)


def test_a_read_of_the_dummy_page_shows() -> None:
    """BAT-01: a table that points at page 0 where it is read gives NaN, not something plausible."""
    h = history([70], [1], 1)
    a = attention_call(h)
    a["ori_block_table"][0, 0] = 0
    with machine():
        out, _ = torch.ops.custom.npu_sparse_attn_sharedkv(**a, metadata=attention_metadata(a))
    assert out.isnan().all()


def test_pages_behind_the_window_are_not_read() -> None:
    """Evicted pages may be 0 in the table."""
    h = history([260], [1], 1)
    a = attention_call(h)
    with machine():
        out, _ = torch.ops.custom.npu_sparse_attn_sharedkv(**a, metadata=attention_metadata(a))
        a["ori_block_table"][0, :2] = ints(0, -1)
        same, _ = torch.ops.custom.npu_sparse_attn_sharedkv(**a, metadata=attention_metadata(a))
    assert torch.equal(out, same)


Change = Callable[[Arguments], Arguments]


def _wide(a: Arguments) -> Arguments:
    h = history([10, 300, 40], [1, 2, 1], 4)
    return a | {"metadata": attention_metadata(attention_call(h, picks_for(h, 8)))}


ATTENTION: list[tuple[str, Change, str]] = [
    ("q in float32", lambda a: {"q": a["q"].float()}, "q of dtype"),
    ("q of rank 4", lambda a: {"q": a["q"].unsqueeze(0)}, "q of shape"),
    ("three heads", lambda a: {"q": a["q"][:, :3].contiguous()}, "multiple of 4 query heads"),
    ("strided q", lambda a: {"q": a["q"].transpose(0, 1).contiguous().transpose(0, 1)}, "contiguous"),
    ("no rows", lambda a: {"q": a["q"][:0]}, "no empty tensors"),
    ("cache of another dtype", lambda a: {"ori_kv": a["ori_kv"].half()}, "ori_kv of dtype"),
    ("cache without head axis", lambda a: {"ori_kv": a["ori_kv"].squeeze(2)}, "ori_kv of shape"),
    ("no window", lambda a: {"ori_kv": None}, "ori_kv to be given"),
    ("blocks of 40", lambda a: {"ori_kv": a["ori_kv"][:, :40].contiguous()}, "multiple of 16"),
    ("entries in blocks of 8", lambda a: {"cmp_kv": a["cmp_kv"][:, :8].contiguous()}, "multiple of 16"),
    ("no entries", lambda a: {"cmp_kv": None}, "cmp_kv to be given"),
    ("int64 table", lambda a: {"ori_block_table": a["ori_block_table"].long()}, "ori_block_table of dtype"),
    ("narrow table", lambda a: {"ori_block_table": a["ori_block_table"][:, :2].contiguous()}, "pages wide"),
    ("table of another batch", lambda a: {"ori_block_table": a["ori_block_table"][:2]}, "ori_block_table of shape"),
    ("no table", lambda a: {"ori_block_table": None}, "ori_block_table to be given"),
    ("no page where read", lambda a: {"ori_block_table": a["ori_block_table"] * 0 - 1}, "where read"),
    ("pages beyond the pool", lambda a: {"cmp_block_table": a["cmp_block_table"] + 90}, "where read"),
    ("int64 entry table", lambda a: {"cmp_block_table": a["cmp_block_table"].long()}, "cmp_block_table of dtype"),
    ("no leading zero", lambda a: {"cu_seqlens_q": a["cu_seqlens_q"][1:].clone()}, "leading zero"),
    ("int64 lengths", lambda a: {"cu_seqlens_q": a["cu_seqlens_q"].long()}, "cu_seqlens_q of dtype"),
    ("int64 keys", lambda a: {"seqused_kv": a["seqused_kv"].long()}, "seqused_kv of dtype"),
    ("keys without the new tokens", lambda a: {"seqused_kv": a["seqused_kv"] * 0 + 1}, "its own tokens count"),
    ("no keys", lambda a: {"seqused_kv": a["seqused_kv"] * 0}, "seqused_kv of at least"),
    ("bfloat16 sinks", lambda a: {"sinks": a["sinks"].bfloat16()}, "sinks of dtype"),
    ("no sinks", lambda a: {"sinks": None}, "sinks to be given"),
    ("no metadata", lambda a: {"metadata": None}, "metadata to be given"),
    ("metadata of other lengths", lambda a: _wide(a), "metadata made for this call"),
    ("default scale", lambda a: {"softmax_scale": 0.0}, "softmax_scale given"),
    ("default ratio", lambda a: {"cmp_ratio": 0}, "cmp_ratio among"),
    ("entries of a window layer", lambda a: {"cmp_ratio": 1}, "left out"),
    ("picks of a C128 layer", lambda a: {"cmp_ratio": 128}, "cmp_sparse_indices left out"),
    ("int64 picks", lambda a: {"cmp_sparse_indices": a["cmp_sparse_indices"].long()}, "cmp_sparse_indices of dtype"),
    ("picks without head axis", lambda a: {"cmp_sparse_indices": a["cmp_sparse_indices"][:, 0]}, "indices of shape"),
    ("picks twice", lambda a: {"cmp_sparse_indices": a["cmp_sparse_indices"] * 0}, "picked once"),
    ("mask mode 3", lambda a: {"ori_mask_mode": 3}, "ori_mask_mode=4"),
    ("mask mode 4", lambda a: {"cmp_mask_mode": 4}, "cmp_mask_mode=3"),
    ("a look ahead", lambda a: {"ori_win_right": 1}, "ori_win_right=0"),
    ("default layout", lambda a: {"layout_q": "BSND"}, "layout_q='TND'"),
    ("lse", lambda a: {"return_softmax_lse": True}, "return_softmax_lse=False"),
    ("entry lengths", lambda a: {"cu_seqlens_cmp_kv": a["cu_seqlens_q"]}, "cu_seqlens_cmp_kv left out"),
    ("window lengths", lambda a: {"cu_seqlens_ori_kv": a["cu_seqlens_q"]}, "cu_seqlens_ori_kv left out"),
    ("used queries", lambda a: {"seqused_q": a["seqused_kv"]}, "seqused_q left out"),
    ("picks of the window", lambda a: {"ori_sparse_indices": a["cmp_sparse_indices"]}, "ori_sparse_indices left out"),
    ("keys without pages", lambda a: {"layout_kv": "TND"}, "layout_kv='PA_ND'"),
    ("a window of nothing", lambda a: {"ori_win_left": -1}, "ori_win_left of 0 or more"),
    ("lengths that fall", lambda a: {"cu_seqlens_q": ints(0, 3, 1, 4)}, "not decreasing"),
    ("lengths of other rows", lambda a: {"cu_seqlens_q": ints(0, 1, 3, 5)}, "to end at the 4 rows"),
    ("lengths of rank 2", lambda a: {"cu_seqlens_q": a["cu_seqlens_q"].unsqueeze(0)}, "cu_seqlens_q of shape"),
    ("keys of two requests", lambda a: {"seqused_kv": a["seqused_kv"][:2]}, "seqused_kv of shape"),
    ("two sinks", lambda a: {"sinks": a["sinks"][:2]}, "sinks of shape"),
    ("int64 metadata", lambda a: {"metadata": a["metadata"].long()}, "metadata of dtype"),
    ("cut metadata", lambda a: {"metadata": a["metadata"][:512]}, "metadata of shape"),
]


@pytest.mark.parametrize(("fault", "change", "rule"), ATTENTION, ids=[p[0] for p in ATTENTION])
def test_attention_refuses_every_fault(fault: str, change: Change, rule: str) -> None:
    """A valid call passes; with one fault it is refused by the rule that names it."""
    h = history([9, 300, 40], [1, 2, 1], 4)
    a = attention_call(h, picks_for(h, 8))
    with machine():
        a["metadata"] = attention_metadata(a)
        torch.ops.custom.npu_sparse_attn_sharedkv(**a)
        with pytest.raises(SimulatorError, match=rule):
            torch.ops.custom.npu_sparse_attn_sharedkv(**a | change(a))


OPTIONS = [
    *({"cmp_topk": 4}, {"ori_win_left": 128}, {"seqused_kv": ints(9, 300, 41)}, {"cu_seqlens_q": ints(0, 2, 3, 4)}),
]


@pytest.mark.parametrize("change", OPTIONS, ids=[next(iter(c)) for c in OPTIONS])
def test_metadata_is_good_for_one_call_only(change: Arguments) -> None:
    """A buffer made with one other length or option is refused; a copy of the right one is not."""
    h = history([9, 300, 40], [1, 2, 1], 4)
    a = attention_call(h, picks_for(h, 8))
    with machine():
        copied = torch.zeros(1024, dtype=I32).copy_(attention_metadata(a))
        torch.ops.custom.npu_sparse_attn_sharedkv(**a, metadata=copied)
        copied.copy_(attention_metadata(a, **change))
        with pytest.raises(SimulatorError, match="metadata made for this call"):
            torch.ops.custom.npu_sparse_attn_sharedkv(**a, metadata=copied)


METADATA = [
    ({"has_cmp_kv": False}, "has_cmp_kv unless"),
    ({"cmp_ratio": -1}, "cmp_ratio among"),
    ({"batch_size": 2}, "batch_size 3"),
    ({"max_seqlen_kv": 299}, "max_seqlen_kv 300"),
    ({"max_seqlen_q": 1}, "max_seqlen_q 2"),
    ({"layout_q": "BSND"}, "layout_q='TND'"),
    ({"cu_seqlens_q": None}, "cu_seqlens_q to be given"),
    ({"seqused_kv": None}, "seqused_kv to be given"),
    ({"ori_topk": 1}, "ori_topk=0"),
    ({"has_ori_kv": False}, "has_ori_kv=True"),
    ({"seqused_kv": ints(9, 300)}, "seqused_kv of shape"),
]


@pytest.mark.parametrize(("change", "rule"), METADATA, ids=[next(iter(p[0])) for p in METADATA])
def test_metadata_refuses_every_fault(change: Arguments, rule: str) -> None:
    """The metadata operator checks what it is told."""
    h = history([9, 300, 40], [1, 2, 1], 4)
    a = attention_call(h, picks_for(h, 8))
    with machine(), pytest.raises(SimulatorError, match=rule):
        attention_metadata(a, **change)


@pytest.mark.parametrize("name", ["cmp_kv", "cmp_block_table", "cmp_sparse_indices"])
def test_a_window_layer_has_no_entries(name: str) -> None:
    """With ratio 1 whatever belongs to compressed entries is refused."""
    other = history([9], [1], 4)
    given_too = attention_call(other, picks_for(other, 8))[name]
    a = attention_call(history([9], [1], 1))
    with machine():
        a["metadata"] = attention_metadata(a)
        torch.ops.custom.npu_sparse_attn_sharedkv(**a)
        with pytest.raises(SimulatorError, match=f"{name} left out"):
            torch.ops.custom.npu_sparse_attn_sharedkv(**a | {name: given_too})


def test_metadata_is_for_one_key_head() -> None:
    """Keys are shared by all heads, of which there is a number that the kernels take."""
    lengths = {"cu_seqlens_q": ints(0, 1), "seqused_kv": ints(9), "cmp_ratio": 1, "has_cmp_kv": False}
    with machine():
        make = torch.ops.custom.npu_sparse_attn_sharedkv_metadata
        make(HEADS, 1, WIDTH, layout_q="TND", **lengths)
        with pytest.raises(SimulatorError, match="num_heads_kv=1"):
            make(HEADS, 2, WIDTH, layout_q="TND", **lengths)
        with pytest.raises(SimulatorError, match="multiple of 4 query heads"):
            make(3, 1, WIDTH, layout_q="TND", **lengths)


def test_widths_of_attention_and_indexer_are_the_documented_ones() -> None:
    """Strict sizes refuse other heads than those of 512 and 128 channels, in both operators and their metadata."""
    h = history([9], [1], 1)
    a, i = attention_call(h), index_call([9], [1])
    with machine():
        attention, index = attention_metadata(a), index_metadata(i)
    with simulate(providers=ALL, heads=4):
        with pytest.raises(SimulatorError, match="the head width"):
            torch.ops.custom.npu_sparse_attn_sharedkv(**a, metadata=attention)
        with pytest.raises(SimulatorError, match="head_dim"):
            attention_metadata(a)
        with pytest.raises(SimulatorError, match="the index width"):
            torch.ops.custom.npu_quant_lightning_indexer(**i, metadata=index)
        with pytest.raises(SimulatorError, match="head_dim"):
            index_metadata(i)


QUANTISED = {"kv_quant_mode": 1, "tile_size": 64, "rope_head_dim": ROPE}
PACKED = [({"kv_quant_mode": 0}, "kv_quant_mode=1"), ({"tile_size": 0}, "tile_size=64"), ({"rope_head_dim": 0}, "rope")]


@pytest.mark.parametrize(("change", "rule"), PACKED, ids=[next(iter(p[0])) for p in PACKED])
def test_packed_rows_have_one_layout(change: Arguments, rule: str) -> None:
    """The A5's operator and its metadata both refuse another mode, tile or rotary width than the rows have."""
    a = attention_call(history([9], [1], 1))
    a["ori_kv"] = torch.zeros(*a["ori_kv"].shape[:3], packed_width(WIDTH, ROPE)).to(torch.float8_e4m3fn)
    shared = ("cu_seqlens_q", "seqused_kv", "cmp_ratio", "ori_mask_mode", "cmp_mask_mode", "ori_win_left")
    options = {name: a[name] for name in (*shared, "layout_q", "layout_kv")} | {"has_cmp_kv": False}
    with machine("a5"):
        make = torch.ops.custom.npu_kv_quant_sparse_attn_sharedkv_metadata
        attend = torch.ops.custom.npu_kv_quant_sparse_attn_sharedkv
        metadata = make(HEADS, 1, WIDTH, **options, **QUANTISED)
        attend(**a, **QUANTISED, metadata=metadata)
        with pytest.raises(SimulatorError, match=rule):
            make(HEADS, 1, WIDTH, **options, **QUANTISED | change)
        with pytest.raises(SimulatorError, match=rule):
            attend(**a, **QUANTISED | change, metadata=metadata)


def test_sixty_four_heads_are_required_unless_relaxed() -> None:
    """By default attention and indexer take 64 heads."""
    h = history([9], [1], 1)
    a = attention_call(h)
    with simulate(strict_sizes=False), pytest.raises(SimulatorError, match="64 query heads"):
        attention_metadata(a)
    with simulate(strict_sizes=False), pytest.raises(SimulatorError, match="64 query heads"):
        torch.ops.custom.npu_sparse_attn_sharedkv(**a, metadata=torch.zeros(1024, dtype=I32))


@given(seed=st.integers(0, 999), width=st.sampled_from([16, 68, 200, 512]))
@examples(10)
def test_packed_rows_keep_what_fp8_keeps(seed: int, width: int) -> None:
    """A packed row gives back the rotary tail exactly and the rest as the reference rounds it."""
    rope = 64 if width == 512 else ROPE
    x = draw(seed, 3, width, dtype=BF16) * 3
    rows = pack_rows(x, rope)
    assert rows.shape == (3, packed_width(width, rope))
    back = unpack_rows(rows, width, rope)
    assert torch.equal(back[:, width - rope :], x[:, width - rope :].float())
    torch.testing.assert_close(back[:, : width - rope], quantize.round_fp8(x[:, : width - rope].float(), 64))
    assert packed_width(512, 64) == 640


def test_scales_that_are_powers_of_two_stay() -> None:
    """A largest value of 448 times a power of two is coded as 448 exactly, one bit more takes the next scale."""
    x = torch.zeros(2, WIDTH, dtype=BF16)
    x[:, 0] = torch.tensor([448 * 2.0**-3, 450 * 2.0**-3])
    rows = pack_rows(x, ROPE)
    exponents = rows[:, WIDTH - ROPE + 2 * ROPE].tolist()
    assert exponents == [127 - 3, 127 - 2]
    assert rows[0, 0].item() == torch.tensor(448.0).to(torch.float8_e4m3fn).view(torch.uint8).item()


@given(seed=st.integers(0, 99), ratio=st.sampled_from([1, 4, 128]), n=st.sampled_from([1, 64, 130, 260]))
@examples(10)
def test_attention_of_the_a5_reads_packed_rows(seed: int, ratio: int, n: int) -> None:
    """Rows written by the epilog operator are read as fp8 would leave them."""
    h = history([n], [1], ratio, seed)
    rounded = [unpack_rows(pack_rows(x, ROPE), WIDTH, ROPE).to(BF16) for x in h.window]
    entries = [unpack_rows(pack_rows(x, ROPE), WIDTH, ROPE).to(BF16) if len(x) else x for x in h.entries]
    a = attention_call(h)
    bytes_per_row = packed_width(WIDTH, ROPE)
    quantised = {"kv_quant_mode": 1, "tile_size": 64, "rope_head_dim": ROPE}
    with machine("a5"):
        for name, rows in (("ori_kv", h.window[0]), ("cmp_kv", h.entries[0])):
            if name in a:
                shape = (*a[name].shape[:3], bytes_per_row)
                cache = torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
                slots = torch.arange(a[name].shape[1], a[name].shape[1] + len(rows), dtype=I32)
                if len(rows):
                    torch.ops.custom.kv_compress_epilog(cache.view(-1, bytes_per_row), rows, slots)
                a[name] = cache
        shared = {k: a[k] for k in ("cu_seqlens_q", "seqused_kv", "cmp_ratio", "ori_win_left", "layout_q")}
        metadata = torch.ops.custom.npu_kv_quant_sparse_attn_sharedkv_metadata(
            HEADS, 1, WIDTH, **quantised, **shared, has_cmp_kv=ratio != 1
        )
        out, _ = torch.ops.custom.npu_kv_quant_sparse_attn_sharedkv(**a, **quantised, metadata=metadata)
        with pytest.raises(SimulatorError, match="tile_size=64"):
            torch.ops.custom.npu_kv_quant_sparse_attn_sharedkv(**a, **quantised | {"tile_size": 0}, metadata=metadata)
    same = attrs.evolve(h, window=rounded, entries=entries)
    torch.testing.assert_close(out.double(), expected(same, None), atol=0.02, rtol=0.02)


def packed_call(n: int, picks: list[int]) -> Arguments:
    """A call of the A5's attention over zeroed packed rows, ratio 4, one token."""
    a = attention_call(history([n], [1], 4))
    for name in ("ori_kv", "cmp_kv"):
        a[name] = torch.zeros(*a[name].shape[:3], packed_width(WIDTH, ROPE), dtype=torch.uint8).view(
            torch.float8_e4m3fn
        )
    return a | QUANTISED | {"cmp_sparse_indices": torch.tensor([[picks]], dtype=I32)}


def packed_metadata(a: Arguments) -> Tensor:
    """The split of the work of a call."""
    shared = ("cu_seqlens_q", "seqused_kv", "cmp_ratio", "ori_mask_mode", "cmp_mask_mode", "ori_win_left", "layout_q")
    options = {name: a[name] for name in (*shared, "layout_kv")} | QUANTISED
    picks = a["cmp_sparse_indices"].shape[-1]
    made: Tensor = torch.ops.custom.npu_kv_quant_sparse_attn_sharedkv_metadata(
        a["q"].shape[1], 1, a["q"].shape[2], cmp_topk=picks, has_cmp_kv=True, **options
    )
    return made


def test_the_a5_takes_picks_with_the_empty_ones_last() -> None:
    """Picks in any order are taken, an empty one between them is not, and bytes are no FP8."""
    with machine("a5"):
        attend = torch.ops.custom.npu_kv_quant_sparse_attn_sharedkv
        good = packed_call(20, [3, 0, 2, -1])
        attend(**good, metadata=packed_metadata(good))
        bad = packed_call(20, [3, -1, 2, 0])
        with pytest.raises(SimulatorError, match="the empty ones last"):
            attend(**bad, metadata=packed_metadata(bad))
        with pytest.raises(SimulatorError, match="ori_kv of dtype"):
            attend(**good | {"ori_kv": good["ori_kv"].view(torch.uint8)}, metadata=packed_metadata(good))


def test_the_a5_takes_512_picks_and_a_window_of_128_unless_relaxed() -> None:
    """Documented sizes are required where sizes are strict."""
    a = packed_call(20, [3, 0, 2, -1])
    with machine("a5"):
        metadata = packed_metadata(a)
    with simulate(chip="a5", heads=HEADS, rope_width=ROPE), pytest.raises(SimulatorError, match="head width"):
        torch.ops.custom.npu_kv_quant_sparse_attn_sharedkv(**a, metadata=metadata)
    wide = a | {"q": torch.ones(1, HEADS, 512, dtype=BF16), "rope_head_dim": 64}
    for name in ("ori_kv", "cmp_kv"):
        wide[name] = torch.zeros(*a[name].shape[:3], 640, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for change, rule in (({"ori_win_left": 128}, "ori_win_left among"), ({"ori_win_left": 127}, "number of picks")):
        with simulate(chip="a5", heads=HEADS), pytest.raises(SimulatorError, match=rule):
            torch.ops.custom.npu_kv_quant_sparse_attn_sharedkv(**wide | change, metadata=metadata)


# --- the indexer ---------------------------------------------------------------------------------------------------

J = 16


def index_call(lengths: list[int], queries: list[int], count: int = 8, seed: int = 0, chip: str = "a3") -> Arguments:
    """Arguments of npu_quant_lightning_indexer but its metadata; key pages of 16 rows, the dummy's scale NaN."""
    scale = torch.float32 if chip == "a5" else torch.float16
    n_rows = sum(queries)

    def codes(seed: int, *shape: int) -> Tensor:
        x = draw(seed, *shape) * 40
        return x.to(torch.float8_e4m3fn) if chip == "a5" else x.round().clamp(-127, 127).to(torch.int8)

    n_pages = [-(-(n // 4) // 16) for n in lengths]
    table = torch.full((len(lengths), max(1, *n_pages)), -1, dtype=I32)
    page = 1
    for line, n in enumerate(n_pages):
        table[line, :n] = torch.arange(page, page + n, dtype=I32)
        page += n
    key_scale = draw(seed + 3, page, 16, 1).abs().add(0.1).to(scale)
    key_scale[0] = math.nan
    return {
        "query": codes(seed, n_rows, HEADS, J),
        "key": codes(seed + 1, page, 16, 1, J),
        "weights": draw(seed + 2, n_rows, HEADS).to(scale),
        "query_dequant_scale": draw(seed + 4, n_rows, HEADS).abs().add(0.1).div(40).to(scale),
        "key_dequant_scale": key_scale,
        "query_quant_mode": 0,
        "key_quant_mode": 0,
        "actual_seq_lengths_query": torch.tensor(queries).cumsum(0).int(),
        "actual_seq_lengths_key": torch.tensor(lengths, dtype=I32),
        "block_table": table,
        "layout_query": "TND",
        "layout_key": "PA_BSND",
        "sparse_count": count,
        "sparse_mode": 3,
        "cmp_ratio": 4,
    }


def index_metadata(a: Arguments, namespace: str = "custom", **changes: Any) -> Tensor:
    """The metadata that belongs to a call."""
    names = ("actual_seq_lengths_query", "actual_seq_lengths_key", "layout_query", "layout_key", "sparse_count")
    options = {k: a[k] for k in (*names, "sparse_mode", "cmp_ratio")} | changes
    name = "npu_quant_lightning_indexer_metadata"
    name = name if namespace == "custom" else name.replace("npu_", "npu_vllm_")
    return getattr(getattr(torch.ops, namespace), name)(HEADS, 1, J, 0, 0, **options)


def index_scores(a: Arguments) -> list[dict[int, float]]:
    """Scores of every visible entry per row, number by number in float64."""
    out, row, ends = [], 0, [0, *a["actual_seq_lengths_query"].tolist()]
    for r, n in enumerate(a["actual_seq_lengths_key"].tolist()):
        for i in range(ends[r], ends[r + 1]):
            position = n - (ends[r + 1] - i)
            scores = {}
            for j in range((position + 1) // 4):
                page, offset = int(a["block_table"][r, j // 16]), j % 16
                total = 0.0
                for head in range(HEADS):
                    dot = float(a["query"][i, head].double() @ a["key"][page, offset, 0].double())
                    dot *= float(a["query_dequant_scale"][i, head]) * float(a["key_dequant_scale"][page, offset, 0])
                    total += float(a["weights"][i, head]) * max(dot, 0.0)
                scores[j] = total
            out.append(scores)
            row += 1
    return out


@pytest.mark.parametrize("chip", ["a3", "a5"])
@given(
    seed=st.integers(0, 999),
    lengths=st.lists(st.sampled_from([1, 3, 4, 7, 63, 64, 65, 130]), min_size=1, max_size=3),
    count=st.sampled_from([1, 4, 8]),
    data=st.data(),
)
@examples(10)
def test_indexer_picks_the_best_visible_entries(
    chip: str, seed: int, lengths: list[int], count: int, data: st.DataObject
) -> None:
    """The set per row holds the largest scores among ``(position + 1) // 4`` entries, -1 where there are fewer."""
    queries = [data.draw(st.integers(1, min(n, 3))) for n in lengths]
    a = index_call(lengths, queries, count, seed, chip)
    with machine(chip):
        out, second = torch.ops.custom.npu_quant_lightning_indexer(**a, metadata=index_metadata(a))
        named = a | {"metadata": index_metadata(a, "_C_ascend")}
        other, _ = torch.ops._C_ascend.npu_vllm_quant_lightning_indexer(**named)
    assert out.shape == (sum(queries), 1, count)
    assert out.dtype is I32
    assert second.isnan().all()
    assert torch.equal(out, other)
    for line, scores in zip(out[:, 0].tolist(), index_scores(a), strict=True):
        found = [j for j in line if j >= 0]
        assert len(found) == len(set(found)) == min(count, len(scores))
        assert set(found) <= set(scores)
        rest = [s for j, s in scores.items() if j not in found]
        assert not rest or min(scores[j] for j in found) >= max(rest) - 1e-4


INDEX: list[tuple[str, Change, str]] = [
    ("query in bfloat16", lambda a: {"query": a["query"].bfloat16()}, "query of dtype"),
    ("keys in fp8", lambda a: {"key": a["key"].float().to(torch.float8_e4m3fn)}, "key of dtype"),
    (
        "float32 scale",
        lambda a: {"query_dequant_scale": a["query_dequant_scale"].float()},
        "query_dequant_scale of dtype",
    ),
    ("float32 weights", lambda a: {"weights": a["weights"].float()}, "weights of dtype"),
    (
        "key scale with head axis",
        lambda a: {"key_dequant_scale": a["key_dequant_scale"].unsqueeze(-1)},
        "scale of shape",
    ),
    ("keys in blocks of 8", lambda a: {"key": a["key"][:, :8].contiguous()}, "multiple of 16"),
    ("keys without head axis", lambda a: {"key": a["key"].squeeze(2)}, "key of shape"),
    ("three heads", lambda a: {"query": a["query"][:, :3].contiguous()}, "multiple of 4 query heads"),
    ("a leading zero", lambda a: {"actual_seq_lengths_query": ints(0, 1, 3, 4)}, "without a leading zero"),
    ("int64 lengths", lambda a: {"actual_seq_lengths_query": a["actual_seq_lengths_query"].long()}, "_query of dtype"),
    ("lengths of another batch", lambda a: {"actual_seq_lengths_query": ints(1, 2, 3)}, "to end at"),
    ("int64 keys", lambda a: {"actual_seq_lengths_key": a["actual_seq_lengths_key"].long()}, "_key of dtype"),
    ("keys of two requests", lambda a: {"actual_seq_lengths_key": a["actual_seq_lengths_key"][:2]}, "_key of shape"),
    ("int64 table", lambda a: {"block_table": a["block_table"].long()}, "block_table of dtype"),
    ("narrow table", lambda a: {"block_table": a["block_table"][:, :2].contiguous()}, "pages wide"),
    ("no page where read", lambda a: {"block_table": a["block_table"] * 0 - 1}, "where read"),
    ("dummy page where read", lambda a: {"block_table": a["block_table"] * 0}, "finite scores"),
    ("no table", lambda a: {"block_table": None}, "block_table to be given"),
    ("no metadata", lambda a: {"metadata": None}, "metadata to be given"),
    ("compressed lengths", lambda a: {"actual_seq_lengths_key": a["actual_seq_lengths_key"] // 4}, "metadata made for"),
    ("metadata of attention", lambda a: {"metadata": a["metadata"].roll(1)}, "metadata made for"),
    ("default ratio", lambda a: {"cmp_ratio": 1}, "cmp_ratio=4"),
    ("default layout", lambda a: {"layout_query": "BSND"}, "layout_query='TND'"),
    ("quant mode 1", lambda a: {"key_quant_mode": 1}, "key_quant_mode=0"),
    ("sparse mode 0", lambda a: {"sparse_mode": 0}, "sparse_mode=3"),
    ("too many picks", lambda a: {"sparse_count": 4096}, "sparse_count in"),
    ("values", lambda a: {"return_value": True}, "return_value=False"),
    ("no picks", lambda a: {"sparse_count": 0}, "sparse_count in"),
    ("query quant mode 1", lambda a: {"query_quant_mode": 1}, "query_quant_mode=0"),
    ("keys without pages", lambda a: {"layout_key": "BSND"}, "layout_key='PA_BSND'"),
    ("few tokens before", lambda a: {"pre_tokens": 8}, "pre_tokens"),
    ("few tokens after", lambda a: {"next_tokens": 8}, "next_tokens"),
    ("another query dtype", lambda a: {"query_dtype": 1}, "query_dtype left out"),
    ("another key dtype", lambda a: {"key_dtype": 1}, "key_dtype left out"),
    ("query of rank 4", lambda a: {"query": a["query"].unsqueeze(0)}, "query of shape"),
    ("weights of half the heads", lambda a: {"weights": a["weights"][:, :2].contiguous()}, "weights of shape"),
    ("one scale a row", lambda a: {"query_dequant_scale": a["query_dequant_scale"][:, :1].contiguous()}, "e of shape"),
    (
        "float32 key scale",
        lambda a: {"key_dequant_scale": a["key_dequant_scale"].float()},
        "key_dequant_scale of dtype",
    ),
    ("negative keys", lambda a: {"actual_seq_lengths_key": ints(9, -1, 40)}, "_key of 0 or more"),
    ("lengths that fall", lambda a: {"actual_seq_lengths_query": ints(3, 1, 4)}, "not decreasing"),
    ("lengths of rank 2", lambda a: {"actual_seq_lengths_query": ints(1, 3, 4).unsqueeze(0)}, "_query of shape"),
    ("no query lengths", lambda a: {"actual_seq_lengths_query": None}, "_query to be given"),
    ("no key lengths", lambda a: {"actual_seq_lengths_key": None}, "_key to be given"),
    (
        "overflow",
        lambda a: {"weights": a["weights"] * 0 + 6e4, "query_dequant_scale": a["query_dequant_scale"] * 0 + 9},
        "within",
    ),
]


@pytest.mark.parametrize(("fault", "change", "rule"), INDEX, ids=[p[0] for p in INDEX])
def test_indexer_refuses_every_fault(fault: str, change: Change, rule: str) -> None:
    """A valid call passes; with one fault it is refused by the rule that names it."""
    a = index_call([9, 300, 40], [1, 2, 1])
    with machine():
        a["metadata"] = index_metadata(a)
        torch.ops.custom.npu_quant_lightning_indexer(**a)
        with pytest.raises(SimulatorError, match=rule):
            torch.ops.custom.npu_quant_lightning_indexer(**a | change(a))


@pytest.mark.parametrize("change", [{"sparse_count": 4}, {"actual_seq_lengths_key": ints(9, 300, 41)}])
def test_indexer_metadata_is_good_for_one_call_only(change: Arguments) -> None:
    """A buffer made with another length or option is refused."""
    a = index_call([9, 300, 40], [1, 2, 1])
    with machine(), pytest.raises(SimulatorError, match="metadata made for this call"):
        torch.ops.custom.npu_quant_lightning_indexer(**a, metadata=index_metadata(a, **change))


INDEX_METADATA = [
    ({"actual_seq_lengths_query": None}, "_query to be given"),
    ({"batch_size": 2}, "batch_size 3"),
    ({"sparse_count": 0}, "sparse_count in"),
    ({"cmp_ratio": 1}, "cmp_ratio=4"),
]


@pytest.mark.parametrize(("change", "rule"), INDEX_METADATA, ids=[next(iter(p[0])) for p in INDEX_METADATA])
def test_indexer_metadata_refuses_every_fault(change: Arguments, rule: str) -> None:
    """The metadata operator checks what it is told, heads included."""
    a = index_call([9, 300, 40], [1, 2, 1])
    with machine():
        index_metadata(a, batch_size=3)
        with pytest.raises(SimulatorError, match=rule):
            index_metadata(a, **change)
        options = {"layout_query": "TND", "layout_key": "PA_BSND", "cmp_ratio": 4}
        lengths = {name: a[name] for name in ("actual_seq_lengths_query", "actual_seq_lengths_key")}
        with pytest.raises(SimulatorError, match="num_heads_k=1"):
            torch.ops.custom.npu_quant_lightning_indexer_metadata(HEADS, 2, J, 0, 0, **lengths, **options)
        with pytest.raises(SimulatorError, match="multiple of 4 query heads"):
            torch.ops.custom.npu_quant_lightning_indexer_metadata(3, 1, J, 0, 0, **lengths, **options)


@pytest.mark.parametrize("kind", ["attention", "attention metadata", "indexer", "indexer metadata"])
def test_shapes_are_known_without_values(kind: str) -> None:
    """Under fake tensors attention, indexer and their metadata give shape and dtype of their real results."""
    h = history([9, 300, 40], [1, 2, 1], 4)
    a, i = attention_call(h, picks_for(h, 8)), index_call([9, 300, 40], [1, 2, 1])
    with machine():
        calls: dict[str, tuple[Callable[..., Any], Arguments]] = {
            "attention": (
                lambda **o: torch.ops.custom.npu_sparse_attn_sharedkv(**o)[:1],  # nobody may use the second result
                a | {"metadata": attention_metadata(a)},
            ),
            "attention metadata": (lambda **o: [attention_metadata(o)], a),
            "indexer": (torch.ops.custom.npu_quant_lightning_indexer, i | {"metadata": index_metadata(i)}),
            "indexer metadata": (lambda **o: [index_metadata(o)], i),
        }
        run, arguments = calls[kind]
        real = [(tuple(r.shape), r.dtype) for r in run(**arguments)]
        with FakeTensorMode() as fake:
            given = {k: fake.from_tensor(v) if isinstance(v, Tensor) else v for k, v in arguments.items()}
            assert [(tuple(r.shape), r.dtype) for r in run(**given)] == real


def test_indexer_of_vllm_takes_512_picks_on_the_a5() -> None:
    """One package limits the picks on one chip."""
    a = index_call([9], [1], 513, chip="a5")
    with machine("a5"):
        torch.ops.custom.npu_quant_lightning_indexer(**a, metadata=index_metadata(a))
        with pytest.raises(SimulatorError, match=r"sparse_count in 1\.\.512"):
            index_metadata(a, "_C_ascend")
