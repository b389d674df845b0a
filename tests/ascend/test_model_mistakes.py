"""Mistakes that are easily made on Ascend, planted one at a time: each is caught, and by the check that is named.

``TWINS`` is the comparison with the plain model; everything else is a rule of the simulator. What is planted changes an
argument on its way to a kernel, or the tables of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import purestep as ps
import pytest
import torch
from ascend_sim.rules import SimulatorError
from kit.ascend import Pair, machine_for, pair_on_machine
from kit.steps import ids_of
from kit.twins import Twins
from purestep.model.paged import write_rows
from purestep.ops.ascend.providers import choose_providers, installed_schemas
from purestep.state.batch import AttentionMetadata
from purestep.state.paged_tables import AscendTables
from purestep.step import forward_batch as step_forward_batch
from torch import Tensor

TWINS = "rows differ by"


def story(pair: Pair) -> None:
    """Feed, decode over the end of groups of 4 and 128, fork, fork inside a chunk, go on; compare every step."""
    twins = Twins.fresh(pair, requests=5)
    a, b = twins.open(), twins.open()
    twins.extend({b: ids_of(6, seed=1)})
    twins.extend({a: ids_of(125), b: ids_of(1)})
    for step in range(6):
        twins.decode({a: 3 + step, b: 9 + step})
    c = twins.fork(a, 64)
    twins.extend({a: ids_of(70, seed=2), c: ids_of(5, seed=3)})
    for step in range(4):
        twins.decode({a: 13 + step, b: 9 + step, c: 2 + step})
    d = twins.open()
    twins.extend({d: ids_of(200, seed=4)})
    e = twins.fork(d, 128)
    twins.extend({e: ids_of(9, seed=5)})


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


@pytest.mark.parametrize("name", PLANTED_IN_TABLES)
def test_mistakes_in_tables_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong table is caught by the named check."""
    plant, check = PLANTED_IN_TABLES[name]
    build = step_forward_batch.ascend_metadata

    def wrong(*args: Any, **options: Any) -> AttentionMetadata:
        meta = build(*args, **options)
        return attrs.evolve(meta, tables=plant(meta.tables))

    monkeypatch.setattr(step_forward_batch, "ascend_metadata", wrong)
    with pair_on_machine(window=8) as pair, pytest.raises((SimulatorError, AssertionError), match=check):
        story(pair)


def test_rows_that_only_a_kernel_could_write_are_not_saved_by_accident() -> None:
    """A write that the step did not announce would survive a rollback: every changed row is an announced one."""
    with pair_on_machine(window=8) as pair:
        model = pair.kernels
        state = ps.init_state(model, ps.Capacity(requests=2, tokens=512, context=256), page_size=64)
        state, a = ps.open_request(state, ps.SamplingParams(temperature=0, ignore_eos=True))
        state, _ = ps.extend_step(model, state, {a: ids_of(70)})
        state, batch = ps.prepare_extend(state, {a: ids_of(150)})
        view = ps.forward_batch(state, batch)
        rows = write_rows(state.kv.layout, view.metadata, range(len(state.kv.layout.kinds)))
        with state.kv.handle.read() as tensors:
            before = {name: x.clone() for name, x in tensors.items()}
        kv, _ = ps.forward(model, state.kv, view)
        with kv.handle.read() as tensors:
            for name, x in tensors.items():
                old, new = (y.view(torch.uint8 if y.dtype is torch.int8 else torch.int16) for y in (before[name], x))
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
