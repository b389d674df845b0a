"""The simulated compressor, called token by token and in chunks, against pooling of whole sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from ascend_sim.rules import SimulatorError
from ascend_sim.simulator import simulate
from hypothesis import given
from hypothesis import strategies as st
from kit.steps import examples
from purestep.ops import compressor, norms, rotary
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

BF16, I32 = torch.bfloat16, torch.int32
HIDDEN, ROPE, EPS = 16, 4, 1e-6
Arguments = dict[str, Any]
ALL = ("torch-npu", "cann-recipes", "sgl-kernel-npu", "vllm-ascend")


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@attrs.frozen(eq=False, kw_only=True)
class Weights:
    """One compressor: ratio 4 pools two groups, ratio 128 one."""

    ratio: int
    coff: int
    width: int
    wkv: Tensor
    wgate: Tensor
    ape: Tensor
    norm: Tensor
    frequencies: Tensor

    @property
    def reach(self) -> int:
        """Tokens that one entry sees."""
        return self.ratio * self.coff


def weights(ratio: int, seed: int = 0, width: int = 8) -> Weights:
    """Draw a small compressor."""
    coff = 2 if ratio == 4 else 1
    return Weights(
        ratio=ratio,
        coff=coff,
        width=width,
        wkv=draw(seed, coff * width, HIDDEN, dtype=BF16),
        wgate=draw(seed + 1, coff * width, HIDDEN, dtype=BF16),
        ape=draw(seed + 2, ratio, coff * width),
        norm=draw(seed + 3, width),
        frequencies=rotary.rotary_frequencies(ROPE, 100.0),
    )


def whole(w: Weights, x: Tensor) -> Tensor:
    """Compress a whole sequence with the reference operators: bf16[T//ratio,D]."""
    n = len(x) // w.ratio
    if not n:
        return x.new_empty((0, w.width))
    kv = x.float() @ w.wkv.float().t()
    scores = x.float() @ w.wgate.float().t() + w.ape[torch.arange(len(x)) % w.ratio]
    if w.coff == 2:
        kv = compressor.overlap_groups(kv, w.ratio, 0.0)
        scores = compressor.overlap_groups(scores, w.ratio, -math.inf)
    else:
        kv, scores = compressor.plain_groups(kv, w.ratio), compressor.plain_groups(scores, w.ratio)
    entries = norms.rms_norm(compressor.pool_group(kv, scores), w.norm, EPS)
    factors = rotary.rotary_factors(torch.arange(n) * w.ratio, w.frequencies)
    return rotary.apply_rotary(entries, factors).to(BF16)


def rope_rows(w: Weights, positions: list[int], n_rows: int) -> tuple[Tensor, Tensor]:
    """Sines and cosines of first positions, padded with position 0."""
    padded = torch.tensor(positions + [0] * (n_rows - len(positions)))
    factors = rotary.rotary_factors(padded, w.frequencies)
    return factors.imag.repeat_interleave(2, -1), factors.real.repeat_interleave(2, -1)


def empty_state(w: Weights, banks: int, ring: int) -> Tensor:
    """Cleared state: kv 0, score -inf."""
    state = torch.zeros(banks, ring, 2 * w.coff * w.width)
    state[..., w.coff * w.width :] = -math.inf
    return state


def explicit_table(w: Weights, state: Tensor, start: list[int], used: list[int], first_bank: int = 0) -> Tensor:
    """Rows of the state by position; the last row of all is the dummy."""
    ring, dummy = state.shape[1], state.shape[0] * state.shape[1] - 1
    table = []
    for request, (begin, count) in enumerate(zip(start, used, strict=True)):
        line = []
        for position in range(begin - w.reach, begin + max(1, *used)):
            is_token = count > 0 and 0 <= position < begin + count
            line.append((first_bank + request) * ring + position % ring if is_token else dummy)
        table.append(line)
    return torch.tensor(table, dtype=I32)


def step(w: Weights, state: Tensor, table: Tensor, xs: list[Tensor], start: list[int], room: int = 0) -> Arguments:
    """Arguments for tokens ``xs`` that begin at ``start``; idle requests hold ``room`` unused tokens."""
    used = [len(x) for x in xs]
    filled = [x if len(x) else x.new_zeros((room, HIDDEN)) for x in xs]
    x = torch.cat(filled)
    first = [
        g * w.ratio
        for begin, n in zip(start, used, strict=True)
        for g in range(begin // w.ratio, (begin + n) // w.ratio)
    ]
    n_rows = min(len(x), len(x) // w.ratio + len(xs))
    sin, cos = rope_rows(w, first, n_rows)
    return {
        "x": x,
        "wkv": w.wkv,
        "wgate": w.wgate,
        "state_cache": state,
        "ape": w.ape,
        "norm_weight": w.norm,
        "rope_sin": sin,
        "rope_cos": cos,
        "state_block_table": table,
        "cu_seqlens": torch.tensor([0, *[len(f) for f in filled]], dtype=I32).cumsum(0, dtype=I32),
        "seqused": torch.tensor(used, dtype=I32),
        "start_pos": torch.tensor(start, dtype=I32),
        "rope_head_dim": ROPE,
        "cmp_ratio": w.ratio,
        "coff": w.coff,
        "norm_eps": EPS,
        "rotary_mode": 2,
    }


def machine(chip: str = "a3") -> Any:
    """A machine for small models with every package."""
    return simulate(chip=chip, providers=ALL, strict_sizes=False)


MODES = ["npu-1", "npu-2", "vllm-1", "custom-1", "custom-2"]


def invoke(mode: str, arguments: Arguments) -> Tensor:
    """Call the operator of a package in a cache mode."""
    arguments = arguments | {"cache_mode": int(mode[-1])}
    namespace = {"npu": "npu", "vllm": "_C_ascend", "custom": "custom"}[mode[:-2]]
    return getattr(torch.ops, namespace).compressor(**arguments)


def table_of(mode: str, w: Weights, state: Tensor, start: list[int], used: list[int]) -> Tensor:
    """The state table in a mode's format, for a state with one spare bank at either end."""
    if mode == "custom-2":
        return torch.arange(1, 1 + len(start), dtype=I32)
    if mode == "npu-2":
        return explicit_table(w, state, start, used, first_bank=1)
    n = 64  # blocks of every request, from block 1 on
    return torch.arange(1, 1 + n * len(start), dtype=I32).view(len(start), n)


def state_for(mode: str, w: Weights, n_requests: int) -> Tensor:
    """A state large enough for a mode: rings, or blocks of 8 rows; banks have room for a whole call."""
    if mode[-1] == "1":
        return empty_state(w, 1 + 64 * n_requests, 8)
    if mode == "custom-2":
        return empty_state(w, n_requests + 2, 128 + 270 if w.coff == 1 else 8 + 22)
    return empty_state(w, n_requests + 2, 128 if w.coff == 1 else 8)


@pytest.mark.parametrize("mode", MODES)
@given(seed=st.integers(0, 999), ratio=st.sampled_from([4, 4, 128]), data=st.data())
@examples(8)
def test_any_cut_into_calls_gives_the_whole_sequence(mode: str, seed: int, ratio: int, data: st.DataObject) -> None:
    """Chunks of any length, single tokens and idle rows give the entries of one pass, packed in batch order."""
    w = weights(ratio, seed)
    lengths = data.draw(st.lists(st.integers(1, 22 if ratio == 4 else 270), min_size=1, max_size=3))
    sequences = [draw(seed + 10 + i, n, HIDDEN, dtype=BF16) for i, n in enumerate(lengths)]
    expected = [whole(w, x) for x in sequences]
    state = state_for(mode, w, len(lengths))
    done = [0] * len(lengths)
    with machine("a5" if mode == "custom-2" else "a3"):
        while done != lengths:
            left = [n - d for n, d in zip(lengths, done, strict=True)]
            chunk = [min(n, data.draw(st.sampled_from(sorted({0, 1, 2, 5, ratio, n})))) for n in left]
            if not any(chunk):
                chunk = left
            ends = [d + c for d, c in zip(done, chunk, strict=True)]
            xs = [x[d:e] for x, d, e in zip(sequences, done, ends, strict=True)]
            out = invoke(mode, step(w, state, table_of(mode, w, state, done, chunk), xs, done, room=1))
            closed = torch.cat([y[d // ratio : e // ratio] for y, d, e in zip(expected, done, ends, strict=True)])
            torch.testing.assert_close(out[: len(closed)], closed, atol=0.02, rtol=0.02)
            assert out[len(closed) :].isnan().all()
            done = ends


@pytest.mark.parametrize("ratio", [4, 128])
@given(seed=st.integers(0, 99), begin=st.integers(0, 300), count=st.integers(1, 9))
@examples(10)
def test_explicit_tables_save_what_a_later_group_needs(ratio: int, seed: int, begin: int, count: int) -> None:
    """Mode 2 writes the open group and, with an overlap, the one before it; a closing token of C128 is not stored."""
    w = weights(ratio, seed)
    ring = 512
    state = empty_state(w, 2, ring)
    x = draw(seed, count, HIDDEN, dtype=BF16)
    table = explicit_table(w, state, [begin], [count])
    state.view(-1, state.shape[-1])[:-1] = 7.0  # anything but the dummy
    before = state.clone()
    with machine():
        invoke("npu-2", step(w, state, table, [x], [begin]))
    changed = [i for i, same in enumerate((state == before).all(-1).flatten().tolist()) if not same]
    oldest = (begin + count) // ratio * ratio - (ratio if ratio == 4 else 0)
    assert sorted(changed) == sorted(p % ring for p in range(begin, begin + count) if p // ratio * ratio >= oldest)


def test_paged_blocks_never_write_block_zero() -> None:
    """Mode 1 skips writes to block 0 and stores every other new position as kv and biased score."""
    w = weights(4)
    x = draw(1, 6, HIDDEN, dtype=BF16)
    for block in (0, 2):
        state = empty_state(w, 4, 16)
        before = state.clone()
        with machine():
            invoke("npu-1", step(w, state, torch.tensor([[block]], dtype=I32), [x], [0]))
        if block == 0:
            assert torch.equal(state, before)
        else:
            kv = x.float() @ w.wkv.float().t()
            score = x.float() @ w.wgate.float().t() + w.ape[torch.arange(6) % 4]
            torch.testing.assert_close(state[block, :6], torch.cat((kv, score), -1))
            state[block, :6] = before[block, :6]
            assert torch.equal(state, before)


def test_paged_blocks_read_block_zero() -> None:
    """Mode 1 reads block 0 like any other."""
    w = weights(4)
    state = empty_state(w, 4, 16)
    x = draw(1, 4, HIDDEN, dtype=BF16)
    kv = torch.cat((x.float() @ w.wkv.float().t(), x.float() @ w.wgate.float().t() + w.ape), -1)
    state[0, :3] = kv[:3]
    with machine():
        out = invoke("npu-1", step(w, state, torch.zeros(1, 1, dtype=I32), [x[3:]], [3]))
    torch.testing.assert_close(out, whole(w, x), atol=0.02, rtol=0.02)


def test_sine_comes_before_cosine() -> None:
    """Swapped sines and cosines give another result."""
    w = weights(4)
    x = draw(1, 8, HIDDEN, dtype=BF16)
    state = empty_state(w, 3, 8)
    arguments = step(w, state, explicit_table(w, state, [0], [8]), [x], [0])
    with machine():
        right = invoke("npu-2", arguments)
        swapped = arguments | {"rope_sin": arguments["rope_cos"], "rope_cos": arguments["rope_sin"]}
        wrong = invoke("npu-2", swapped | {"state_cache": empty_state(w, 3, 8)})
    torch.testing.assert_close(right[:2], whole(w, x), atol=0.02, rtol=0.02)
    assert (right[:2] - wrong[:2]).abs().max() > 0.1


def decode_call(positions: tuple[int, ...] = (3, 6, 7), ratio: int = 4) -> Arguments:
    """A valid decode step: one token per request, the last request idle."""
    w = weights(ratio)
    state = empty_state(w, len(positions) + 1, 8 if ratio == 4 else 128)
    start = [*positions[:-1], 0]
    xs = [draw(i, 1, HIDDEN, dtype=BF16) for i in range(len(positions) - 1)] + [draw(9, 0, HIDDEN, dtype=BF16)]
    table = explicit_table(w, state, start, [len(x) for x in xs])
    return step(w, state, table, xs, start, room=1) | {"cache_mode": 2}


def _first_dummy(a: Arguments, value: int) -> Tensor:
    table = a["state_block_table"].clone()
    table[0, 0] = value  # position -5
    return table


def _shared_row(a: Arguments) -> Tensor:
    table = a["state_block_table"].clone()
    table[1, 8] = table[0, 8]  # the new token of either request
    return table


Change = Callable[[Arguments], Arguments]
PLANTED: list[tuple[str, Change, str]] = [
    ("x in float32", lambda a: {"x": a["x"].float()}, "x of dtype"),
    ("no tokens", lambda a: {"x": a["x"][:0]}, "no empty tensors"),
    ("weight of another dtype", lambda a: {"wkv": a["wkv"].float()}, "wkv of dtype"),
    ("gate of half the width", lambda a: {"wgate": a["wgate"][:8].contiguous()}, "wgate of shape"),
    ("bfloat16 state", lambda a: {"state_cache": a["state_cache"].bfloat16()}, "state_cache of dtype"),
    ("flat state", lambda a: {"state_cache": a["state_cache"].flatten(0, 1)}, "state_cache of shape"),
    ("strided state", lambda a: {"state_cache": a["state_cache"].transpose(0, 1)}, "contiguous"),
    ("bfloat16 bias", lambda a: {"ape": a["ape"].bfloat16()}, "ape of dtype"),
    ("bfloat16 norm", lambda a: {"norm_weight": a["norm_weight"].bfloat16()}, "norm_weight of dtype"),
    ("unpadded rope rows", lambda a: {"rope_sin": a["rope_sin"][:1]}, "rope_sin of shape"),
    ("half-width cosines", lambda a: {"rope_cos": a["rope_cos"][:, ::2].contiguous()}, "rope_cos of shape"),
    ("sines by halves", lambda a: {"rope_sin": _halves()}, "pairs"),
    ("int64 lengths", lambda a: {"cu_seqlens": a["cu_seqlens"].long()}, "cu_seqlens of dtype"),
    ("no leading zero", lambda a: {"cu_seqlens": a["cu_seqlens"][1:].clone()}, "leading zero"),
    ("lengths of another batch", lambda a: {"cu_seqlens": a["cu_seqlens"] * 2}, "to end at"),
    ("no lengths", lambda a: {"cu_seqlens": None}, "cu_seqlens to be given"),
    ("no seqused", lambda a: {"seqused": None}, "seqused to be given"),
    ("int64 seqused", lambda a: {"seqused": a["seqused"].long()}, "seqused of dtype"),
    ("more used than there", lambda a: {"seqused": a["seqused"] + 1}, "seqused within"),
    ("no start", lambda a: {"start_pos": None}, "start_pos to be given"),
    ("negative start", lambda a: {"start_pos": a["start_pos"] - 1}, "start_pos of 0 or more"),
    ("no table", lambda a: {"state_block_table": None}, "state_block_table to be given"),
    ("int64 table", lambda a: {"state_block_table": a["state_block_table"].long()}, "state_block_table of dtype"),
    ("narrow table", lambda a: {"state_block_table": a["state_block_table"][:, 1:].contiguous()}, "or more"),
    ("banks for rows", lambda a: {"state_block_table": torch.arange(3, dtype=I32)}, "state rows, not banks"),
    ("minus one", lambda a: {"state_block_table": _first_dummy(a, -1)}, "state rows 0"),
    ("beyond the state", lambda a: {"state_block_table": _first_dummy(a, 1000)}, "state rows 0"),
    ("dummy zero", lambda a: {"state_block_table": _first_dummy(a, 0)}, "cleared row"),
    ("dirty dummy", lambda a: {"state_cache": a["state_cache"] + 1}, "cleared row"),
    ("idle row with live columns", lambda a: {"seqused": a["seqused"] * 0}, "cleared row|state_block_table of shape"),
    ("default rotary mode", lambda a: {"rotary_mode": 1}, "rotary_mode=2"),
    ("wrong coff", lambda a: {"coff": 1}, "ratio 4 with coff 2"),
    ("wrong ratio", lambda a: {"cmp_ratio": 8}, "ratio 4 with coff 2"),
    ("unknown mode", lambda a: {"cache_mode": 3}, "cache_mode among"),
    ("odd rope", lambda a: {"rope_head_dim": 3}, "even rope_head_dim"),
    ("no rope", lambda a: {"rope_head_dim": 0}, "even rope_head_dim"),
    ("rope above the width", lambda a: {"rope_head_dim": 10}, "even rope_head_dim"),
    ("x of rank 4", lambda a: {"x": a["x"].view(1, 1, *a["x"].shape)}, "x of rank 2 or 3"),
    ("lengths of batched rows", lambda a: {"x": a["x"].unsqueeze(1)}, "cu_seqlens left out"),
    ("seqused of another batch", lambda a: {"seqused": a["seqused"][:2]}, "seqused of shape"),
    ("negative seqused", lambda a: {"seqused": a["seqused"] - 1}, "seqused within"),
    ("start of another batch", lambda a: {"start_pos": a["start_pos"][:2]}, "start_pos of shape"),
    ("int64 start", lambda a: {"start_pos": a["start_pos"].long()}, "start_pos of dtype"),
    ("bias of another ratio", lambda a: {"ape": a["ape"][:2]}, "ape of shape"),
    ("norm of rank 2", lambda a: {"norm_weight": a["norm_weight"].unsqueeze(0)}, "of shape|ratio"),
    (
        "state of other width",
        lambda a: {"state_cache": a["state_cache"][..., :16].contiguous()},
        "state_cache of shape",
    ),
    ("a stride", lambda a: {"state_cache_stride_dim0": 8}, "state_cache_stride_dim0=0"),
    ("bfloat16 sines", lambda a: {"rope_sin": a["rope_sin"].bfloat16()}, "rope_sin of dtype"),
    (
        "table of another batch",
        lambda a: {"state_block_table": a["state_block_table"][:2]},
        "state_block_table of shape",
    ),
    ("two tokens in a row", lambda a: {"state_block_table": _shared_row(a)}, "one token per state row"),
]


def _halves() -> Tensor:
    half = torch.arange(6.0).view(3, 2)
    return torch.cat((half, half), -1)


@pytest.mark.parametrize(("fault", "change", "rule"), PLANTED, ids=[p[0] for p in PLANTED])
def test_every_rule_refuses_its_fault(fault: str, change: Change, rule: str) -> None:
    """A valid decode step passes; with one fault it is refused by the rule that names it, before any write."""
    with machine():
        torch.ops.npu.compressor(**decode_call())
        arguments = decode_call()
        faulty = arguments | change(arguments)
        kept = faulty["state_cache"].clone()
        with pytest.raises(SimulatorError, match=rule):
            torch.ops.npu.compressor(**faulty)
    assert torch.equal(faulty["state_cache"], kept)


@pytest.mark.parametrize(("mode", "chip"), [("custom-2", "a3"), ("vllm-2", "a3"), ("vllm-2", "a5")])
def test_packages_refuse_modes_they_lack(mode: str, chip: str) -> None:
    """The recipes' package has banks on the A5 only; vllm-ascend has blocks only."""
    arguments = decode_call()
    with machine(chip), pytest.raises(SimulatorError, match="cache_mode among"):
        invoke(mode, arguments)


def test_the_a5_refuses_the_tables_of_the_a3() -> None:
    """A table of rows is not a list of banks, and two requests may not share a bank."""
    arguments = decode_call()
    with machine("a5"):
        with pytest.raises(SimulatorError, match="state_block_table of shape"):
            invoke("custom-2", arguments)
        shared = torch.tensor([1, 1, 0], dtype=I32)
        with pytest.raises(SimulatorError, match="where read"):
            invoke("custom-2", arguments | {"state_block_table": torch.arange(2, 5, dtype=I32)})
        with pytest.raises(SimulatorError, match="state_block_table of dtype"):
            invoke("custom-2", arguments | {"state_block_table": torch.arange(3)})
        with pytest.raises(SimulatorError, match="one request per bank"):
            invoke("custom-2", arguments | {"state_block_table": shared})
        short = arguments | {"state_cache": arguments["state_cache"][:, :4].contiguous()}
        banks = {"state_block_table": torch.arange(1, 4, dtype=I32)}
        with pytest.raises(SimulatorError, match="rings of 8 to 1024 rows"):
            invoke("custom-2", short | banks)
        few = arguments | {"state_cache": arguments["state_cache"][:2].contiguous()}
        with pytest.raises(SimulatorError, match="at least 3 banks"):
            invoke("custom-2", few | {"state_block_table": torch.tensor([0, 1, 0], dtype=I32)})


@pytest.mark.parametrize(("ratio", "ring"), [(4, 8), (128, 128)])
def test_rings_have_a_row_for_every_position_of_a_call(ratio: int, ring: int) -> None:
    """A ring that holds one call's token and the history takes no second token, and one of a row more does."""
    w = weights(ratio)
    xs, banks = [draw(0, 2, HIDDEN, dtype=BF16)], torch.tensor([1], dtype=I32)
    with machine("a5"):
        invoke("custom-2", step(w, empty_state(w, 2, ring + 1), banks, xs, [5]))
        with pytest.raises(SimulatorError, match=f"rings of {ring + 1} to 1024 rows"):
            invoke("custom-2", step(w, empty_state(w, 2, ring), banks, xs, [5]))
        with pytest.raises(SimulatorError, match="rings of"):
            invoke("custom-2", step(w, empty_state(w, 2, 1025), banks, xs, [5]))


def test_documented_sizes_are_required_unless_relaxed() -> None:
    """Strict sizes refuse a small compressor."""
    with simulate(), pytest.raises(SimulatorError, match="width, ratio, coff"):
        torch.ops.npu.compressor(**decode_call())


def test_hidden_widths_are_the_documented_ones() -> None:
    """Strict sizes refuse a hidden width that is no multiple of 512."""
    w = attrs.evolve(weights(4, width=512), wkv=draw(0, 1024, 600, dtype=BF16), wgate=draw(1, 1024, 600, dtype=BF16))
    state = empty_state(w, 2, 8)
    arguments = step(w, state, explicit_table(w, state, [0], [1]), [draw(0, 1, 600, dtype=BF16)], [0])
    with simulate(), pytest.raises(SimulatorError, match="the hidden width"):
        torch.ops.npu.compressor(**arguments, cache_mode=2)


def test_blocks_beyond_the_state_are_refused() -> None:
    """In mode 1 a block id must exist where a position is."""
    w = weights(4)
    state = state_for("npu-1", w, 1)
    arguments = step(w, state, torch.full((1, 64), 999, dtype=I32), [draw(0, 2, HIDDEN, dtype=BF16)], [0])
    with machine(), pytest.raises(SimulatorError, match="state blocks 0"):
        invoke("npu-1", arguments)


def test_shapes_are_known_without_values() -> None:
    """Under fake tensors the compressor gives as many rows as may close, for either ratio and rank."""
    with machine():
        plain = decode_call()
        batched = plain | {"x": plain["x"].unsqueeze(1), "cu_seqlens": None}
        for arguments in (plain, decode_call((127, 6, 7), ratio=128), batched):
            with FakeTensorMode() as fake:
                given_call = {k: fake.from_tensor(v) if isinstance(v, Tensor) else v for k, v in arguments.items()}
                shape = torch.ops.npu.compressor(**given_call)
            real = torch.ops.npu.compressor(**arguments)
            assert (shape.shape, shape.dtype) == (real.shape, real.dtype)


def test_rows_may_come_as_a_batch() -> None:
    """Rows of shape [B,S,H] without lengths are what they are one after the other with them."""
    with machine():
        plain = decode_call()
        batched = decode_call()
        rows = torch.ops.npu.compressor(**plain)
        same = torch.ops.npu.compressor(**batched | {"x": batched["x"].unsqueeze(1), "cu_seqlens": None})
    torch.testing.assert_close(same, rows, equal_nan=True, atol=0, rtol=0)
    assert torch.equal(batched["state_cache"], plain["state_cache"])
