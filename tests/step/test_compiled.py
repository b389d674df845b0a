"""Compiled decode steps: the results of eager ones, in any company, and nothing else changed."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from typing import Any

import attrs
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.models import rounded_model, tiny_model
from kit.steps import ENDLESS, examples, fresh, ids_of
from purestep.model import packing
from purestep.model.paged import write_rows
from purestep.ops import blocks
from purestep.ops.dispatch import REFERENCE
from purestep.ops.experts import ExpertMath
from purestep.ops.graph import compile_drafts
from purestep.ops.packed import PackedStack
from purestep.step import compiled
from purestep.step.forward_batch import forward_batch
from purestep.step.padding import Bucket, as_buckets, pad_decode
from torch.profiler import profile

pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="graphs are compiled by a C++ compiler"
)

PAGE = 8

BUCKETS = ((1, 160), (6, 160))

TOLERANCE = {"atol": 5e-5, "rtol": 0}
"""Of float32 logits, as anywhere between two ways of computing them."""


@cache
def step_of(numerics: ps.Numerics | None = None, caches: Any = None, buckets: Any = BUCKETS) -> ps.CompiledStep:
    """Compile a tiny model once, in float32 or with the given numerics in bfloat16."""
    model = tiny_model(experts=4) if numerics is None else rounded_model(numerics=numerics)
    return ps.compile_step(model, buckets, page_size=PAGE, caches=caches)


@cache
def invariant_step(buckets: Any) -> ps.CompiledStep:
    """Compile the tiny model with row-independent arithmetic."""
    model = rounded_model(numerics=ps.Numerics(invariant=True), dtype=torch.float32)
    return ps.compile_step(model, buckets, page_size=PAGE)


def filled(model: ps.Model, lengths: Sequence[int], **state: Any) -> tuple[ps.DecodeState, tuple[int, ...]]:
    """Prefill one request of each length."""
    capacity = ps.Capacity(requests=max(8, len(lengths)), tokens=8 * 336, context=320)
    now = ps.init_state(model, capacity, page_size=PAGE, **state)
    found = []
    for n, length in enumerate(lengths):
        now, request = ps.open_request(now, ENDLESS)
        found.append(request)
        now, _ = ps.extend_step(model, now, {request: ids_of(length, seed=n)})
    return now, tuple(found)


def contents(state: ps.DecodeState) -> dict[str, torch.Tensor]:
    """Copy every cache buffer."""
    with state.kv.handle.read() as buffers:
        return {name: buffer.clone() for name, buffer in buffers.items()}


LENGTHS = st.lists(
    st.one_of(st.integers(1, 150), st.sampled_from([1, 3, 4, 7, 8, 9, 11, 12, 126, 127, 128, 131, 132])),
    min_size=1,
    max_size=6,
)


@given(lengths=LENGTHS, n_steps=st.integers(1, 6), rotate=st.integers(0, 5))
@examples(12)
def test_compiled_steps_are_eager_steps(lengths: list[int], n_steps: int, rotate: int) -> None:
    """Logits, samples, lengths and written caches agree, whatever the lengths, the number of rows and their order."""
    step = step_of()
    eager, requests = filled(step.model, lengths)
    order = requests[rotate % len(requests) :] + requests[: rotate % len(requests)]
    fast = copy.deepcopy(eager)
    for turn in range(n_steps):
        force = {request: 2 + (turn + request) % 30 for request in order}
        eager, a = ps.decode_step(step.model, eager, only=order, force=force)
        fast, b = step(step.model, fast, only=order, force=force)
        assert a.request_ids == b.request_ids == order
        torch.testing.assert_close(b.logits, a.logits, **TOLERANCE)
    assert [r.kv_len for r in eager.requests] == [r.kv_len for r in fast.requests]
    one, other = contents(eager), contents(fast)
    sinks = {name: fast.kv.layout.n_slots(name) for name in one}
    for name, expected in one.items():
        found = other[name].view(-1, sinks[name], expected.shape[-1])[:, PAGE:]
        torch.testing.assert_close(found, expected.view(-1, sinks[name], expected.shape[-1])[:, PAGE:], **TOLERANCE)


def test_a_long_run_samples_what_an_eager_one_samples() -> None:
    """Two requests that share a batch go on for 140 tokens, over every border of a group, as they do eagerly."""
    step = step_of()
    eager, _ = filled(step.model, [3, 14])
    fast = copy.deepcopy(eager)
    for _ in range(140):
        eager, a = ps.decode_step(step.model, eager)
        fast, b = step(step.model, fast)
        assert a.next_token_ids == b.next_token_ids
    torch.testing.assert_close(b.logits, a.logits, **TOLERANCE)


@pytest.mark.parametrize(
    "caches", ["fp4-online", pytest.param(None, marks=pytest.mark.slow), pytest.param("fp4", marks=pytest.mark.slow)]
)
def test_official_roundings_are_kept(caches: Any) -> None:
    """With bfloat16 and the official roundings a compiled step differs by few steps of the last place, in any form."""
    step = step_of(ps.Numerics.official(), caches, ((3, 160),))
    eager, _ = filled(step.model, [5, 127, 64], **({} if caches is None else {"caches": caches}))
    fast = copy.deepcopy(eager)
    for turn in range(4):
        force = {r.request_id: 3 + turn for r in eager.requests}
        eager, a = ps.decode_step(step.model, eager, force=force)
        fast, b = step(step.model, fast, force=force)
        scale = a.logits.abs().max().item()
        assert (a.logits - b.logits).abs().max().item() <= 0.02 * scale


@given(
    lengths=st.lists(st.integers(1, 140), min_size=1, max_size=10),
    at=st.integers(0, 9),
    cut=st.integers(1, 139),
)
@examples(8)
def test_invariant_bits_do_not_depend_on_company_or_bucket(lengths: list[int], at: int, cut: int) -> None:
    """Row-independent arithmetic: a row has the bits that it has alone, eager or in any bucket, however prefilled."""
    small, large = invariant_step(((1, 160),)), invariant_step(((11, 288),))
    model = small.model
    at %= len(lengths)
    prompt = ids_of(lengths[at], seed=at)
    alone, _ = filled(model, [])
    alone, request = ps.open_request(alone, ENDLESS)
    for part in (prompt[:cut], prompt[cut:]):
        if part:
            alone, _ = ps.extend_step(model, alone, {request: part}, sample=False)
    together, requests = filled(model, lengths)
    _, eager = ps.decode_step(model, alone, force={request: 7})
    _, narrow = small(model, alone, force={request: 7})
    _, wide = large(model, together, force=dict.fromkeys(requests, 7))
    assert torch.equal(eager.logits[0], narrow.logits[0])
    assert torch.equal(eager.logits[0], wide.logits[at])


def test_a_compiled_step_is_pure() -> None:
    """The state given keeps its content and steps again to the same bits, also when the step in between raised."""
    step = step_of()
    state, _ = filled(step.model, [5, 40])
    before = contents(state)
    _, first = step(step.model, state)
    with pytest.raises(ps.RequestError):
        step(step.model, state, only=[99])
    _, again = step(step.model, state)
    after = contents(state)
    assert torch.equal(first.logits, again.logits)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not ps.invariants.check(state)


def test_a_step_that_dies_inside_leaves_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever interrupts a graph, the caches are rolled back."""
    step = step_of()
    state, _ = filled(step.model, [5, 40])
    before = contents(state)
    _, expected = step(step.model, state)

    class Interrupted(BaseException):
        pass

    def die(*args: Any) -> Any:
        raise Interrupted

    key = next(key for key, one in step.graphs.items() if one.name == "head" and key[1] == 6)
    broken = attrs.evolve(step, graphs={**step.graphs, key: attrs.evolve(step.graphs[key], graph=die)})
    with pytest.raises(Interrupted):
        broken(step.model, state)
    after = contents(state)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(step(step.model, state)[1].logits, expected.logits)


def test_sinks_reach_no_row() -> None:
    """Whatever lies in the sinks, not-a-number included, no result changes."""
    step = step_of()
    state, _ = filled(step.model, [5, 40, 127])
    _, expected = step(step.model, state)
    layout = state.kv.layout
    rows = {
        name: torch.arange(layout.n_layers(name)) * layout.n_slots(name)
        for name in state.kv.handle.names
        if not name.endswith("scale")
    }
    with state.kv.handle.write(rows) as write:
        for name, at in rows.items():
            write.tensors[name][at] = torch.nan
    state = attrs.evolve(state, kv=attrs.evolve(state.kv, handle=write.handle))
    _, found = step(step.model, state)
    assert torch.equal(expected.logits, found.logits)


def test_one_step_serves_pools_of_any_size_and_copies_none() -> None:
    """The same graphs run over a pool a hundred times larger, give the same bits, and never hold as much as a pool."""
    step = step_of()
    small, _ = filled(step.model, [5, 40])
    capacity = ps.Capacity(requests=8, tokens=300_000, context=320)
    large = ps.init_state(step.model, capacity, page_size=PAGE)
    for n, length in enumerate([5, 40]):
        large, request = ps.open_request(large, ENDLESS)
        large, _ = ps.extend_step(step.model, large, {request: ids_of(length, seed=n)})
    large, expected = step(step.model, large)
    assert torch.equal(step(step.model, small)[1].logits, expected.logits)
    with profile(profile_memory=True) as seen:
        step(step.model, large)
    with large.kv.handle.read() as buffers:
        pool = min(buffer.nbytes for name, buffer in buffers.items() if not name.startswith("c128"))
    largest = max(event.cpu_memory_usage for event in seen.events())
    assert 0 < largest < pool / 10, (largest, pool)


def test_nothing_is_compiled_after_compile_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the buckets no step traces or generates code, whichever groups close."""
    step = step_of()
    state, _ = filled(step.model, [120, 3, 60])
    kernels = blocks._kernel.cache_info().currsize

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("a graph was compiled while serving")

    monkeypatch.setattr(compiled, "draft_graph", never)
    monkeypatch.setattr(blocks, "compile_graph", never)
    for _ in range(20):
        state, _ = step(step.model, state)
    assert blocks._kernel.cache_info().currsize == kernels


def test_a_second_start_traces_and_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled once for a model of these shapes is loaded, and steps to the same bits."""
    first = step_of()
    left: list[Any] = []

    def watched(drafts: Any, *rest: Any) -> Any:
        left.extend(drafts)
        return compile_drafts(drafts, *rest)

    monkeypatch.setattr(compiled, "compile_drafts", watched)
    again = ps.compile_step(first.model, BUCKETS, page_size=PAGE)
    assert left == []
    assert sorted((one.name, one.n_operators) for one in again.report) == sorted(
        (one.name, one.n_operators) for one in first.report
    )
    state, _ = filled(first.model, [5, 40, 127])
    assert torch.equal(first(first.model, state)[1].logits, again(again.model, state)[1].logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_weights_that_meet_many_rows_are_packed_one_by_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a bucket's rows multiply packed experts and packed output groups, a step is still an eager one."""
    monkeypatch.setattr(packing, "LARGE_WEIGHT", 1)
    model = tiny_model(experts=4) if dtype is torch.float32 else rounded_model(numerics=ps.Numerics.plain())
    rows = 8 * model.config.n_routed_experts // model.config.num_experts_per_tok
    step = ps.compile_step(model, ((rows, 160),), page_size=PAGE)
    weights = step.weights[step.buckets[0]].layers[0]
    assert isinstance(weights.ffn.tree[0].w13, PackedStack)
    assert isinstance(weights.attn.tree[0].wo_a, PackedStack)
    eager, requests = filled(model, [5, 40, 127, 9, 33, 12, 126])
    _, a = ps.decode_step(model, eager, force=dict.fromkeys(requests, 3))
    _, b = step(model, eager, force=dict.fromkeys(requests, 3))
    tolerance = TOLERANCE if dtype is torch.float32 else {"atol": 0.02 * a.logits.abs().max().item(), "rtol": 0}
    torch.testing.assert_close(b.logits, a.logits, **tolerance)


def test_large_weights_are_packed_for_few_rows_where_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows run on packed weights on processors with bfloat16 arithmetic, and one row never does."""
    for name, wanted in {"LARGE_WEIGHT": 1, "EMULATES_BF16": False, "_MANY": 1}.items():
        monkeypatch.setattr(packing, name, wanted)
    model = tiny_model(experts=2)
    step = ps.compile_step(model, ((1, 160), (2, 160)), page_size=PAGE)
    own, packed = (step.weights[bucket].layers[0] for bucket in step.buckets)
    assert own.ffn.tree[0].w13 is model.params.layers[0].ffn.w13
    assert isinstance(packed.ffn.tree[0].w13, PackedStack)
    assert step.n_bytes > 0
    assert ps.compile_step(model, ((1, 160),), page_size=PAGE).n_bytes == 0
    for lengths in ([127], [40, 127]):
        eager, requests = filled(model, lengths)
        _, a = ps.decode_step(model, eager, force=dict.fromkeys(requests, 3))
        _, b = step(model, eager, force=dict.fromkeys(requests, 3))
        torch.testing.assert_close(b.logits, a.logits, **TOLERANCE)


def test_what_fits_no_bucket_runs_eagerly() -> None:
    """More rows, longer requests, several unfed tokens and stages that are looked at give what decode_step gives."""
    step = step_of()
    model = step.model
    many, _ = filled(model, [5] * 7)
    long, _ = filled(model, [170])
    forked, requests = filled(model, [20])
    forked, _ = ps.fork_request(forked, requests[0], at=17)
    for state, options in ((many, {}), (long, {}), (forked, {}), (forked, {"capture": ("attn.input",)})):
        _, a = ps.decode_step(model, state, **options)
        _, b = step(model, state, **options)
        assert torch.equal(a.logits, b.logits)
        assert a.next_token_ids == b.next_token_ids
        assert (a.captured is None) == (b.captured is None)
    empty = fresh(model)
    assert step(model, empty)[1].request_ids == ()


def test_masks_and_finishes_are_those_of_decode_step() -> None:
    """A mask decides what is sampled, and a limit ends a request, as in an eager step."""
    step = step_of()
    state, (a, _) = filled(step.model, [5, 9])
    bits = torch.zeros(1, dtype=torch.int32)
    bits[0] = 1 << 17
    _, out = step(step.model, state, mask={a: bits})
    assert out.next_token_ids[0] == 17
    state, c = ps.open_request(state, attrs.evolve(ENDLESS, max_new_tokens=2))
    state, _ = ps.extend_step(step.model, state, {c: ids_of(4)})
    state, out = step(step.model, state, only=[c])
    assert out.finished == {c: "length"}


def test_the_report_says_what_was_compiled() -> None:
    """Every graph of every bucket stands in it once, with its operators, its seconds and no break."""
    step = step_of()
    names = [one.name for one in step.report]
    assert names.count("streams") == names.count("head") == len(BUCKETS)
    assert {"attention 0", "attention 4", "attention 128", "attention 128, closing"} <= set(names)
    assert {"experts, by token id", "experts, by score"} <= set(names)
    assert all(one.n_operators > 0 and one.seconds >= 0 for one in step.report)
    text = str(step)
    assert len(text.splitlines()) == len(names) + 1
    assert "breaks" in text


def test_progress_ends_where_it_said() -> None:
    """Compiling tells how many graphs are done, one by one, up to the number that it named first."""
    seen: list[tuple[int, int]] = []
    model = rounded_model(numerics=ps.Numerics(invariant=True), dtype=torch.float32)
    for caches in ("plain", "online"):
        seen.clear()
        step = ps.compile_step(
            model,
            ((2, 40), (2, 80)),
            page_size=PAGE,
            caches=caches,  # type: ignore[arg-type]
            progress=lambda done, total: seen.append((done, total)),
        )
        assert [done for done, _ in seen] == list(range(len(step.report) + 1))
        assert {total for _, total in seen} == {len(step.report)}


def test_a_machine_without_a_compiler_is_told_so() -> None:
    """Without a C++ compiler there is one clear error, and no graph that half works."""
    script = (
        "import purestep as ps\n"
        "try:\n    ps.compile_step(ps.load_model('tiny'), ((1, 64),))\n"
        "except ps.ConfigError as error:\n    print(error)"
    )
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": folder}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
        )
    assert "install g++" in done.stdout, done.stderr[-2000:]


@pytest.mark.parametrize(
    "buckets",
    [(), ((0, 5),), ((1, 0),), 3, "ab", ((1, 2, 3),), (("a", 1),), ((1.5, 20),), ((True, 20),), ((1, 10**9),)],
)
def test_bad_buckets_are_refused(buckets: Any) -> None:
    """Buckets that are no pairs of positive whole numbers get one clear error."""
    with pytest.raises(ps.ConfigError, match="buckets"):
        ps.compile_step(tiny_model(), buckets)


def test_other_models_and_states_are_refused() -> None:
    """Another model, another page size and another form of caches are named, before anything is changed."""
    step = step_of()
    state, _ = filled(step.model, [5])
    with pytest.raises(ps.ConfigError, match="compiled"):
        step(tiny_model(), state)
    capacity = ps.Capacity(requests=2, tokens=1024, context=320)
    with pytest.raises(ps.ConfigError, match="page"):
        step(step.model, ps.init_state(step.model, capacity, page_size=16))
    with pytest.raises(ps.ConfigError, match="online"):
        step(step.model, ps.init_state(step.model, capacity, page_size=PAGE, caches="online"))


def test_a_bucket_is_the_smallest_that_holds_a_step() -> None:
    """Buckets are tried by rows, then by context, and each is kept once."""
    assert as_buckets([(4, 64), (1, 99), Bucket(rows=4, context=32), (4, 64)], 99) == (
        Bucket(rows=1, context=99),
        Bucket(rows=4, context=32),
        Bucket(rows=4, context=64),
    )


@given(lengths=st.lists(st.integers(1, 140), min_size=1, max_size=4), more=st.integers(0, 3))
@examples(25)
def test_a_padded_step_writes_its_rows_and_the_sinks(lengths: list[int], more: int) -> None:
    """Padding adds no row to what a step writes but slot 0 of every layer."""
    model = tiny_model()
    state, requests = filled(model, lengths)
    state, batch = ps.prepare_decode(state, force=dict.fromkeys(requests, 3))
    view = forward_batch(state, batch)
    layout = state.kv.layout
    padded = pad_decode(view, Bucket(rows=len(lengths) + more, context=160), layout, model.config.sliding_window)
    plain, wide = (write_rows(layout, one.metadata, range(3)) for one in (view, padded))
    for name, rows in wide.items():
        sinks = {place * layout.n_slots(name) for place in range(layout.n_layers(name))}
        assert {*rows.tolist()} - sinks == {*plain.get(name, torch.empty(0)).tolist()}


@given(
    n_rows=st.integers(1, 12),
    n_chosen=st.integers(1, 4),
    seed=st.integers(0, 1000),
    how=st.sampled_from([ExpertMath(), ExpertMath(weighs_after=True), ExpertMath(rounds_steps=True)]),
)
@examples(20)
def test_experts_in_blocks_are_the_plain_experts(n_rows: int, n_chosen: int, seed: int, how: ExpertMath) -> None:
    """However rows share experts, their blocks give what expert by expert gives."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n_rows, 16, generator=draw)
    ids = torch.stack([torch.randperm(6, generator=draw)[:n_chosen] for _ in range(n_rows)])
    weights = torch.rand(n_rows, n_chosen, generator=draw)
    w13, w2 = torch.randn(6, 24, 16, generator=draw), torch.randn(6, 16, 12, generator=draw)
    plain = REFERENCE.experts(x, ids, weights, w13, w2, 2.0, how=how)
    found = blocks.experts_blocked(x, ids, weights, w13, w2, 2.0, how=how)
    torch.testing.assert_close(found, plain, atol=1e-4, rtol=1e-4)
