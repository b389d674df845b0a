"""Mistakes that are easily made on Ascend, planted one at a time: each is caught, and by the check that is named.

``TWINS`` is the comparison with the plain model, of logits and of what the caches hold; everything else is a rule of
the simulator. What is planted changes an argument on its way to a kernel, or the tables of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import attrs
import purestep as ps
import pytest
import torch
from ascend_sim.rules import SimulatorError
from kit.ascend import Pair, machine_for, on, pair_on_machine
from kit.steps import ids_of
from kit.twins import TOLERANCE, Twins
from purestep.model.paged import write_rows
from purestep.ops.ascend.providers import choose_providers, installed_schemas
from purestep.ops.quantize import MXWeight
from purestep.state.batch import AttentionMetadata
from purestep.state.paged_tables import AscendTables, CompressorTables
from purestep.step import forward_batch as step_forward_batch
from torch import Tensor

TWINS = "rows differ by"  # rows of logits, or what the caches hold

A5_TOLERANCE = 0.06
"""Of the story on the A5, where it measures 0.041."""


def story(pair: Pair, tolerance: float = TOLERANCE) -> None:
    """Feed, decode over the end of groups of 4 and 128, fork, fork inside a chunk, go on; compare every step."""
    twins = Twins.fresh(pair, requests=5)
    twins.tolerance = tolerance
    a, b = twins.open(), twins.open()
    twins.extend({b: ids_of(6, seed=1)})
    twins.extend({a: ids_of(125), b: ids_of(1)})
    for step in range(7):
        twins.decode({a: 3 + step, b: 9 + step})
    c = twins.fork(a, 64)
    twins.extend({a: ids_of(70, seed=2), c: ids_of(5, seed=3)})
    for step in range(4):
        twins.decode({a: 13 + step, b: 9 + step, c: 2 + step})
    d = twins.open()
    twins.extend({d: ids_of(200, seed=4)})
    e = twins.fork(d, 128)
    twins.extend({e: ids_of(9, seed=5)})
    twins.compare_caches()


def test_the_story_holds_without_a_mistake() -> None:
    """Nothing planted, nothing caught."""
    with pair_on_machine(window=8) as pair:
        story(pair)


def paged(pair: Pair, name: str, change: Callable[..., Any]) -> Pair:
    """Run one paged function through ``change(function, *args, **options)``."""
    ops = pair.kernels.ops
    run = getattr(ops.paged, name)
    table = attrs.evolve(ops.paged, **{name: lambda *args, **options: change(run, *args, **options)})
    return attrs.evolve(pair, kernels=attrs.evolve(pair.kernels, ops=attrs.evolve(ops, paged=table)))


def operator(pair: Pair, name: str, change: Callable[..., Any]) -> Pair:
    """Run one operator through ``change(operator, *args, **options)``."""
    ops = pair.kernels.ops
    run = getattr(ops, name)
    table = attrs.evolve(ops, **{name: lambda *args, **options: change(run, *args, **options)})
    return attrs.evolve(pair, kernels=attrs.evolve(pair.kernels, ops=table))


def with_option(name: str, change: Callable[[Any], Any]) -> Callable[..., Any]:
    """Change one named argument."""
    return lambda run, *args, **options: run(*args, **(options | {name: change(options[name])}))


def swapped(first: int, second: int) -> Callable[..., Any]:
    """Exchange two positional arguments."""

    def change(run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        order = list(args)
        order[first], order[second] = order[second], order[first]
        return run(*order, **options)

    return change


def wider_window(pair: Pair) -> Pair:
    """See one token more than the window, in attention and its metadata alike."""
    pair = paged(pair, "attend", with_option("window_size", lambda w: w + 1))
    return paged(pair, "attention_metadata", with_option("window", lambda w: w + 1))


def forward_rotation(pair: Pair) -> Pair:
    """Rotate the output onwards instead of back."""

    def change(run: Callable[..., Any], x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        back = x.dim() == 3 and x.shape[-2:] == (4, 16) and (sin[:, 0] <= 0).all() and (sin[:, -1] <= 0).all()
        return run(x, cos, -sin if back else sin)

    return paged(pair, "rotate", change)


def first_metadata_for_ever(name: str) -> Callable[[Pair], Pair]:
    """Compute the split of the work once and use it in every later step."""

    def plant(pair: Pair) -> Pair:
        kept: dict[Any, Tensor] = {}

        def change(run: Callable[..., Any], *args: Any, **options: Any) -> Tensor:
            return kept.setdefault(options.get("ratio"), run(*args, **options))

        return paged(pair, name, change)

    return plant


def lengths_in_entries(pair: Pair) -> Pair:
    """Give the indexer lengths in entries instead of tokens."""

    def shorter(run: Callable[..., Any], *args: Any, **options: Any) -> Tensor:
        if "key_lens" in options:
            return run(*args, **(options | {"key_lens": options["key_lens"] // 4}))
        return run(args[0], args[1] // 4, **options)

    return paged(paged(pair, "index_metadata", shorter), "pick_entries", shorter)


def experts_by_choice(run: Callable[..., Tensor], x: Tensor, ids: Tensor, weights: Tensor, *rest: Any) -> Tensor:
    """Read the weights choice by choice instead of row by row."""
    return run(x, ids, weights.t().reshape(weights.shape), *rest)


PLANTED_IN_KERNELS: dict[str, tuple[Callable[[Pair], Pair], str]] = {
    "sine and cosine swapped in the rotation": (lambda p: paged(p, "rotate", swapped(1, 2)), TWINS),
    "sine and cosine swapped in the compressor": (lambda p: paged(p, "compress", swapped(6, 7)), TWINS),
    "output not rotated back": (forward_rotation, TWINS),
    "window one token too wide": (wider_window, TWINS),
    "window of 128 meant as 127 to the left": (
        lambda p: paged(p, "attend", with_option("window_size", lambda w: w + 1)),
        "metadata made for this call",
    ),
    "stale split of the attention": (first_metadata_for_ever("attention_metadata"), "metadata"),
    "stale split of the indexer": (first_metadata_for_ever("index_metadata"), "metadata"),
    "no leading zero for the attention": (
        lambda p: paged(p, "attend", with_option("query_starts", lambda x: x[1:].contiguous())),
        "cu_seqlens_q",
    ),
    "a leading zero for the indexer": (
        lambda p: paged(p, "pick_entries", with_option("query_ends", lambda x: torch.cat((x.new_zeros(1), x[:-1])))),
        "without a leading zero",
    ),
    "comb transposed": (
        lambda p: operator(p, "update_streams", lambda run, s, y, post, comb: run(s, y, post, comb.mT.contiguous())),
        TWINS,
    ),
    "residual and output swapped": (lambda p: operator(p, "update_streams", swapped(0, 1)), "residual of rank 3"),
    "routed experts without their clamp": (
        lambda p: operator(p, "experts", lambda run, *args: run(*args[:-1], 1e6)),
        TWINS,
    ),
    "shared expert without its clamp": (
        lambda p: operator(p, "expert", lambda run, *args: run(*args[:-1], 1e6)),
        TWINS,
    ),
    "weights of experts read choice by choice": (lambda p: operator(p, "experts", experts_by_choice), TWINS),
    "routing factor left out": (
        lambda p: operator(p, "route_scored", lambda run, x, bias, k, factor: run(x, bias, k, 1.0)),
        TWINS,
    ),
    "lengths in entries for the indexer": (lengths_in_entries, TWINS),
    "attention sink left out": (
        lambda p: paged(
            p, "attend", lambda run, q, w, e, k, sink, **o: run(q, w, e, k, torch.full_like(sink, -100.0), **o)
        ),
        TWINS,
    ),
    "softmax not scaled": (lambda p: paged(p, "attend", with_option("scale", lambda s: 1.0)), TWINS),
    "state written to a copy": (
        lambda p: paged(p, "compress", lambda run, *a, **o: run(*a[:3], a[3].clone(), *a[4:], **o)),
        TWINS,
    ),
    "scales of the indexer in float32": (
        lambda p: paged(
            p, "pick_entries", lambda run, q, qs, k, ks, w, **o: run(q, qs.float(), k, ks.float(), w.float(), **o)
        ),
        "dtype torch.float16",
    ),
    "state table of another chip": (
        lambda p: paged(p, "compress", with_option("table", lambda t: t[:, 0].contiguous())),
        "state rows, not banks",
    ),
    "state table in int64": (
        lambda p: paged(p, "compress", with_option("table", lambda t: t.long())),
        "state_block_table of dtype torch.int32",
    ),
    "lengths in int64": (
        lambda p: paged(p, "attend", with_option("key_lens", lambda x: x.long())),
        "seqused_kv of dtype torch.int32",
    ),
    "queries with a stride": (
        lambda p: paged(p, "attend", lambda run, q, *a, **o: run(q.mT.contiguous().mT, *a, **o)),
        "q contiguous",
    ),
}


@pytest.mark.parametrize("name", PLANTED_IN_KERNELS)
def test_mistakes_in_calls_are_caught(name: str) -> None:
    """A wrong argument on its way to a kernel is caught by the named check."""
    plant, check = PLANTED_IN_KERNELS[name]
    with pair_on_machine(window=8) as pair, pytest.raises((SimulatorError, AssertionError), match=check):
        story(plant(pair))


def compressors(t: AscendTables, ratio: int = 4, **changes: Callable[[Tensor], Tensor]) -> AscendTables:
    """Change tables of one compressor."""
    own = t.compressors[ratio]
    changed = attrs.evolve(own, **{name: change(getattr(own, name)) for name, change in changes.items()})
    return attrs.evolve(t, compressors={**t.compressors, ratio: changed})


def by_row(t: AscendTables) -> AscendTables:
    """Put each entry's slot at its row instead of at the front (decode)."""
    own = t.compressors[4]
    closes = (t.key_lens % 4 == 0) & (t.used == 1)
    if len(own.loc) != len(closes):
        return t
    place = closes.cumsum(0) - 1
    loc = torch.where(closes, own.loc[place.clamp(min=0)], 0)
    return compressors(t, loc=lambda _: loc)


PLANTED_IN_TABLES: dict[str, tuple[Callable[[AscendTables], AscendTables], str]] = {
    "dense list indexed by row": (by_row, "finite scores"),
    "sentinel -1 at the tail of a slot list": (
        lambda t: compressors(t, loc=lambda x: torch.where(x == 0, -1, x)),
        "indices in 0",
    ),
    "rope positions not padded": (
        lambda t: compressors(t, first_pos=lambda x: x[: int((t.compressors[4].loc > 0).sum())]),
        "rope_sin of shape",
    ),
    "rope position of the last token of a group": (lambda t: compressors(t, first_pos=lambda x: x + 3), TWINS),
    "slots not divided by the ratio": (lambda t: compressors(t, loc=lambda x: x * 4), "indices in 0|" + TWINS),
    "page table of slots": (lambda t: attrs.evolve(t, c4_table=t.c4_table * 64), "cmp_block_table|block_table"),
    "C4 pages looked up as window pages": (lambda t: attrs.evolve(t, c4_table=t.window_table), "finite scores"),
    "-1 where history before the first token is looked up": (
        lambda t: compressors(t, state_table=lambda x: torch.where(x == x.max(), -1, x)),
        "state rows 0",
    ),
    "row 0 for history before the first token": (
        lambda t: compressors(t, state_table=lambda x: torch.where(x == x.max(), 0, x)),
        "a cleared row",
    ),
    "state table one column too short": (
        lambda t: compressors(t, state_table=lambda x: x[:, :-1].contiguous()),
        "state_block_table of shape",
    ),
    "state table shifted by a column": (lambda t: compressors(t, state_table=lambda x: x.roll(1, 1)), "cleared row"),
    "start position counts the new token": (lambda t: attrs.evolve(t, start_pos=t.start_pos + t.used), TWINS),
    "lengths without the new token": (
        lambda t: attrs.evolve(t, key_lens=(t.key_lens - 1).clamp(min=1)),
        "its own tokens count|" + TWINS,
    ),
    "page table in int64": (lambda t: attrs.evolve(t, window_table=t.window_table.long()), "ori_block_table of dtype"),
    "page table too narrow": (
        lambda t: attrs.evolve(t, window_table=t.window_table[:, :1].contiguous()),
        "ori_block_table at least",
    ),
    "state that only a cut needs not kept": (
        lambda t: compressors(t, rest=lambda x: x[:0], rest_loc=lambda x: x[:0]),
        TWINS,
    ),
}


def planting(
    build: Callable[..., AttentionMetadata], plant: Callable[[AscendTables], AscendTables]
) -> Callable[..., AttentionMetadata]:
    """Build metadata with changed tables."""

    def wrong(*args: Any, **options: Any) -> AttentionMetadata:
        meta = build(*args, **options)
        assert meta.tables is not None
        return attrs.evolve(meta, tables=plant(meta.tables))

    return wrong


@pytest.mark.parametrize("name", PLANTED_IN_TABLES)
def test_mistakes_in_tables_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong table is caught by the named check."""
    plant, check = PLANTED_IN_TABLES[name]
    monkeypatch.setattr(step_forward_batch, "ascend_metadata", planting(step_forward_batch.ascend_metadata, plant))
    with pair_on_machine(window=8) as pair, pytest.raises((SimulatorError, AssertionError), match=check):
        story(pair)


def banks(t: AscendTables, change: Callable[[CompressorTables], dict[str, Any]], ratio: int = 4) -> AscendTables:
    """Change several tables of one compressor."""
    own = t.compressors[ratio]
    return attrs.evolve(t, compressors={**t.compressors, ratio: attrs.evolve(own, **change(own))})


def small_rings(own: CompressorTables) -> dict[str, Any]:
    """Take rings of 8 rows for a step that feeds several tokens."""
    if not own.ring:
        return {}
    return {"ring": 8, "carried_to": own.carried_to // own.ring * 8 + own.carried_to % own.ring % 8}


PLANTED_IN_BANKS: dict[str, tuple[Callable[[AscendTables], AscendTables], str]] = {
    "state table of the A3": (
        lambda t: banks(t, lambda own: {"state_table": own.state_table.unsqueeze(1).expand(-1, 9).contiguous()}),
        "state_block_table of shape",
    ),
    "banks in int64": (
        lambda t: banks(t, lambda own: {"state_table": own.state_table.long()}),
        "state_block_table of dtype",
    ),
    "one bank for all rows": (
        lambda t: banks(t, lambda own: {"state_table": torch.ones_like(own.state_table)}),
        "one request per bank",
    ),
    "the next bank": (lambda t: banks(t, lambda own: {"state_table": own.state_table + 1}), "where read|" + TWINS),
    "a page's bank where a request's belongs": (
        lambda t: banks(t, lambda own: {"state_table": t.compressors[4].state_table}, ratio=128),
        TWINS,
    ),
    "a request's bank where a page's belongs": (
        lambda t: banks(t, lambda own: {"state_table": t.compressors[128].state_table}),
        TWINS,
    ),
    "state of the page before not carried along": (
        lambda t: banks(t, lambda own: {} if own.ring else {"carried": own.carried[:0], "carried_to": own.carried[:0]}),
        TWINS,
    ),
    "history not brought into the rings of a step": (
        lambda t: banks(t, lambda own: {"carried": own.carried[:0], "carried_to": own.carried[:0]} if own.ring else {}),
        TWINS,
    ),
    "history brought to the places of the caches": (
        lambda t: banks(t, lambda own: {"carried_to": own.carried_to // own.ring * own.ring} if own.ring else {}),
        TWINS,
    ),
    "state of a chunk not kept": (
        lambda t: banks(t, lambda own: {"saved": own.saved[:0], "saved_loc": own.saved[:0]}),
        TWINS,
    ),
    "state of a chunk kept under other positions": (
        lambda t: banks(t, lambda own: {"saved": own.saved.flip(0)}),
        TWINS,
    ),
    "C128 state of a chunk not kept": (
        lambda t: banks(t, lambda own: {"saved": own.saved[:0], "saved_loc": own.saved[:0]}, ratio=128),
        TWINS,
    ),
    "state that only a cut needs not kept": (
        lambda t: banks(t, lambda own: {"rest": own.rest[:0], "rest_loc": own.rest[:0]}),
        TWINS,
    ),
    "rings with no room for a chunk": (lambda t: banks(t, small_rings), "rings of"),
}


@pytest.mark.parametrize("name", PLANTED_IN_BANKS)
def test_mistakes_in_tables_of_the_a5_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong bank, or state left behind on the way into a bank or out of it, is caught by the named check."""
    plant, check = PLANTED_IN_BANKS[name]
    monkeypatch.setattr(step_forward_batch, "ascend_metadata", planting(step_forward_batch.ascend_metadata, plant))
    with pair_on_machine(window=8, **on("a5")) as pair, pytest.raises((SimulatorError, AssertionError), match=check):
        story(pair, A5_TOLERANCE)


def without_batch_axis(pair: Pair) -> Pair:
    """Call the mix of the streams as the A3 does."""

    def change(run: Callable[..., Tensor], streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        mixed: Tensor = torch.ops.custom.npu_hc_post(*(x.contiguous() for x in (y, streams, post, comb)))
        return mixed

    return operator(pair, "update_streams", change)


PLANTED_IN_THE_A5: dict[str, tuple[Callable[[Pair], Pair], str]] = {
    "streams without a batch axis": (without_batch_axis, "a leading batch axis"),
    "window rows written as they are": (
        lambda p: paged(
            p, "write_window", lambda run, cache, slots, rows: cache.index_copy_(0, slots.long(), bytes_of(rows, cache))
        ),
        "got nan|" + TWINS,
    ),
    "entries packed twice as large": (
        lambda p: paged(p, "write_entries", lambda run, cache, slots, rows: run(cache, slots, rows * 2)),
        TWINS,
    ),
    "slots of the window in int64": (
        lambda p: paged(p, "write_window", lambda run, cache, slots, rows: run(cache, slots.long(), rows)),
        "slot_mapping of dtype",
    ),
    "another rotary width than the rows have": (
        lambda p: paged(p, "attend", with_option("rope_width", lambda w: 2 * w)),
        "rope_head_dim",
    ),
    "another rotary width in the split of the work": (
        lambda p: paged(p, "attention_metadata", with_option("rope_width", lambda w: 2 * w)),
        "rope_head_dim",
    ),
    "window one token too wide": (wider_window, TWINS),
    "stale split of the attention": (first_metadata_for_ever("attention_metadata"), "metadata"),
    "a leading zero for the indexer": (
        lambda p: paged(p, "pick_entries", with_option("query_ends", lambda x: torch.cat((x.new_zeros(1), x[:-1])))),
        "without a leading zero",
    ),
    "index queries in int8": (
        lambda p: paged(p, "quantize_query", lambda run, x: (run(x)[0].to(torch.int8), run(x)[1])),
        "query of dtype",
    ),
    "scales of index queries in f16": (
        lambda p: paged(p, "quantize_query", lambda run, x: (run(x)[0], run(x)[1].half())),
        "query_dequant_scale of dtype",
    ),
    "weights of index heads in f16": (
        lambda p: paged(p, "pick_entries", lambda run, q, qs, k, ks, w, **o: run(q, qs, k, ks, w.half(), **o)),
        "weights of dtype",
    ),
    "index keys written nowhere": (
        lambda p: paged(p, "write_keys", lambda run, keys, scales, slots, rows: run(keys, scales, slots * 0, rows)),
        "index: rows differ by",
    ),
    "picks with the empty ones first": (
        lambda p: paged(
            p,
            "attend",
            lambda run, q, w, e, picks, s, **o: run(
                q, w, e, picks if picks is None else picks.flip(-1).contiguous(), s, **o
            ),
        ),
        "the empty ones last",
    ),
}


def bytes_of(rows: Tensor, cache: Tensor) -> Tensor:
    """The bytes of rows in bfloat16, cut or filled to the width of a cache."""
    raw = rows.contiguous().view(torch.uint8)
    return torch.nn.functional.pad(raw, (0, max(0, cache.shape[1] - raw.shape[1])))[:, : cache.shape[1]]


@pytest.mark.parametrize("name", PLANTED_IN_THE_A5)
def test_mistakes_in_calls_of_the_a5_are_caught(name: str) -> None:
    """A wrong argument on its way to a kernel of the A5 is caught by the named check."""
    plant, check = PLANTED_IN_THE_A5[name]
    with pair_on_machine(window=8, **on("a5")) as pair, pytest.raises((SimulatorError, AssertionError), match=check):
        story(plant(pair), A5_TOLERANCE)


def exponents(change: Callable[[Tensor], Tensor]) -> Callable[[Pair], Pair]:
    """Change the exponents of the grouped weight."""

    def plant(pair: Pair) -> Pair:
        return operator(pair, "grouped_linear", lambda run, x, w: run(x, w._replace(exponents=change(w.exponents))))

    return plant


def expert_weights(change: Callable[[MXWeight], MXWeight]) -> Callable[[Pair], Pair]:
    """Change the first matrices of the routed experts."""
    return lambda pair: operator(
        pair, "experts", lambda run, x, ids, weights, w13, *rest: run(x, ids, weights, change(w13), *rest)
    )


def in_blocks() -> contextlib.AbstractContextManager[Pair]:
    """A pair with products in MX blocks and experts that matter beside the residual streams."""
    numerics = ps.Numerics.ascend_a5(mx_experts=True)
    return pair_on_machine((4,), chip="a5", numerics=numerics, hidden=128, route_scale=6.0)


PLANTED_IN_BLOCKS: dict[str, tuple[Callable[[Pair], Pair], str]] = {
    "exponents of the weight one too high": (exponents(lambda e: e + 1), TWINS),
    "exponents of the weight in another order": (
        exponents(lambda e: e.transpose(1, 2).contiguous()),
        "x2_scale of shape",
    ),
    "a weight that is not in blocks": (
        lambda p: operator(p, "grouped_linear", lambda run, x, w: run(x, w._replace(codes=w.codes.to(torch.bfloat16)))),
        "x2 of dtype",
    ),
    "experts' exponents in another order": (
        expert_weights(lambda w: w._replace(exponents=w.exponents.transpose(1, 2).contiguous().transpose(1, 2))),
        "scale stored in the order of the weight",
    ),
    "experts' exponents one too low": (expert_weights(lambda w: w._replace(exponents=w.exponents - 1)), TWINS),
    "gate and up exchanged": (
        expert_weights(lambda w: MXWeight(*(torch.cat(part.chunk(2, 1)[::-1], 1) for part in w))),
        TWINS,
    ),
    "routed experts without their clamp": (
        lambda p: operator(p, "experts", lambda run, *args: run(*args[:-1], 1e6)),
        TWINS,
    ),
}


@pytest.mark.parametrize("name", PLANTED_IN_BLOCKS)
def test_mistakes_in_products_of_blocks_are_caught(name: str) -> None:
    """A weight in MX blocks whose codes, exponents or order are wrong is caught by the named check."""
    plant, check = PLANTED_IN_BLOCKS[name]
    with in_blocks() as pair, pytest.raises((SimulatorError, AssertionError), match=check):
        story(plant(pair), 3 * TOLERANCE)


@pytest.mark.parametrize("mx", [False, True])
def test_the_story_holds_on_the_a5_without_a_mistake(mx: bool) -> None:
    """Nothing planted, nothing caught, with and without products in blocks."""
    with in_blocks() if mx else pair_on_machine(window=8, **on("a5")) as pair:
        story(pair, 3 * TOLERANCE if mx else A5_TOLERANCE)


@pytest.mark.parametrize(("chip", "n"), [("a3", 150), ("a5", 150), ("a5", 1)])
def test_rows_that_only_a_kernel_could_write_are_not_saved_by_accident(chip: str, n: int) -> None:
    """A write that the step did not announce would survive a rollback: every changed row is an announced one."""
    with pair_on_machine(window=8, **on(chip)) as pair:
        model = pair.kernels
        state = ps.init_state(model, ps.Capacity(requests=2, tokens=512, context=256), page_size=64)
        state, a = ps.open_request(state, ps.SamplingParams(temperature=0, ignore_eos=True))
        # Position 67 closes the first group of the second page.
        state, _ = ps.extend_step(model, state, {a: ids_of(70 if n > 1 else 67)}, sample=False)
        state, batch = ps.prepare_extend(state, {a: ids_of(n)})
        view = ps.forward_batch(state, batch)
        rows = write_rows(state.kv.layout, view.metadata, range(len(state.kv.layout.kinds)))
        with state.kv.handle.read() as tensors:
            before = {name: x.clone() for name, x in tensors.items()}
        kv, _ = ps.forward(model, state.kv, view)
        with kv.handle.read() as tensors:
            for name, x in tensors.items():
                old, new = (y.view(torch.uint8 if y.itemsize == 1 else torch.int16) for y in (before[name], x))
                changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
                assert set(changed) <= set(rows[name].tolist()), name


def test_p_and_k_swapped() -> None:
    """The sampling filter takes p before k; the other order is refused by the types of the two."""
    with machine_for():
        keep_top = choose_providers("a3", installed_schemas())["keep_top"]
        logits = torch.randn(2, 8)
        p, k = torch.full((2,), 0.9), torch.full((2,), 3, dtype=torch.int32)
        keep_top(logits=logits, p=p, k=k)
        with pytest.raises(SimulatorError, match="dtype"):
            keep_top(logits=logits, p=k, k=p)


def test_heads_that_the_kernel_does_not_take() -> None:
    """A model whose heads the kernels do not take is refused by them, not answered with garbage."""
    with pair_on_machine(machine={"heads": 64}) as pair, pytest.raises(SimulatorError, match="64 query heads"):
        story(pair)
