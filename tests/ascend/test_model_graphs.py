"""Decodes replayed from graphs equal eager ones, whatever the padding; what a capture must not do is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import attrs
import purestep as ps
import pytest
import torch
from ascend_sim.recorder import HostReadError
from ascend_sim.rules import SimulatorError
from hypothesis import given
from hypothesis import strategies as st
from kit.ascend import CHIPS, on, pair_on_machine
from kit.graphs import RecordedGraph, RecordingTool
from kit.steps import ENDLESS, examples, ids_of
from purestep import invariants as inv
from purestep.model.forward import layer_operands, run_model
from purestep.model.paged import write_rows
from purestep.step import graphs as step_graphs
from purestep.step.forward_batch import forward_batch
from purestep.step.graphs import capture_decode, graph_decode_step, graph_forward
from purestep.step.release import layer_rows
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

TOOL = RecordingTool()


def room(model: ps.Model, requests: int = 4, context: int = 192) -> ps.DecodeState:
    """An empty state with pages of 64."""
    capacity = ps.Capacity(requests=requests, tokens=requests * (context + 64), context=context)
    return ps.init_state(model, capacity, page_size=64)


def fed(model: ps.Model, state: ps.DecodeState, lengths: list[int]) -> ps.DecodeState:
    """Open requests and feed their prompts."""
    chunks = {}
    for n in lengths:
        state, i = ps.open_request(state, ENDLESS)
        chunks[i] = ids_of(n, seed=n)
    return ps.extend_step(model, state, chunks)[0]


def close_to(x: Tensor, y: Tensor) -> None:
    """Compare logits of one row in batches of different sizes: sums may be taken in another order."""
    torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-4)


@contextmanager
def small_model(chip: str = "a3", **changes: Any) -> Iterator[ps.Model]:
    """A model of two layers on a simulated machine: one of each compressor."""
    with pair_on_machine((4, 128), **on(chip), **changes) as pair:
        yield pair.kernels


@pytest.mark.parametrize("chip", CHIPS)
@examples(3)
@given(lengths=st.lists(st.sampled_from([1, 2, 3, 62, 63, 126, 127]), min_size=1, max_size=3), data=st.data())
def test_replays_equal_eager_decodes(chip: str, lengths: list[int], data: st.DataObject) -> None:
    """Step by step over the ends of groups and pages, with any of the requests, a replay gives what eager does."""
    with small_model(chip, window=8) as model:
        state = room(model)
        graphs = capture_decode(model, state, (1, 3), TOOL)
        replayed = eager = fed(model, state, lengths)
        for _ in range(4):
            ids = [r.request_id for r in eager.requests]
            only = data.draw(st.lists(st.sampled_from(ids), min_size=1, unique=True))
            eager, one = ps.decode_step(model, eager, only=only)
            replayed, other = graph_decode_step(graphs, model, replayed, only=only)
            close_to(one.logits, other.logits)
            assert one.next_token_ids == other.next_token_ids
            assert inv.check(replayed) == ()
        used = [graph.graph.n_replays for graph in graphs.graphs]
        assert sum(used) == 4


@pytest.mark.parametrize("chip", CHIPS)
def test_padding_changes_no_real_row(chip: str) -> None:
    """The same rows in graphs of 2, 3 and 5 rows, and eagerly, give the same logits and the same cache rows."""
    with small_model(chip) as model:
        state = room(model, 5)
        graphs = capture_decode(model, state, (2, 3, 5), TOOL)
        state = fed(model, state, [127, 3])
        state, batch = ps.prepare_decode(state)
        view = forward_batch(state, batch)
        kv, expected = ps.forward(model, state.kv, view)
        rows = write_rows(kv.layout, view.metadata, range(2))
        for graph in graphs.graphs:
            padded = forward_batch(state, batch, bucket=graph.bucket)
            replayed, logits = graph_forward(graph, state.kv, padded)
            close_to(logits, expected)
            for name, at in rows.items():
                # The sink of each layer is nobody's.
                at = at[at % kv.layout.n_slots(name) != 0]
                x, y = kv.handle.rows(name, at).float(), replayed.handle.rows(name, at).float()
                torch.testing.assert_close(x, y, atol=1.0 if name == "index" else 0.02, rtol=0.02)


@pytest.mark.parametrize("chip", CHIPS)
def test_idle_rows_write_to_sinks_alone(chip: str) -> None:
    """A replay with idle rows changes the announced rows and nothing else, state rows of nobody included."""
    with small_model(chip) as model:
        state = room(model)
        graphs = capture_decode(model, state, (4,), TOOL)
        state = fed(model, state, [127])
        state, batch = ps.prepare_decode(state)
        view = forward_batch(state, batch, bucket=4)
        with state.kv.handle.read() as tensors:
            before = {name: bits(x).clone() for name, x in tensors.items()}
        kv, _ = graph_forward(graphs.graphs[0], state.kv, view)
        rows = write_rows(kv.layout, view.metadata, range(2))
        with kv.handle.read() as tensors:
            for name, x in tensors.items():
                changed = (before[name] != bits(x)).flatten(1).any(1).nonzero().flatten()
                assert set(changed.tolist()) <= set(rows[name].tolist()), name


def bits(x: Tensor) -> Tensor:
    """A buffer as integers."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


@pytest.mark.parametrize("chip", CHIPS)
def test_held_states_replay_again(chip: str) -> None:
    """A graph serves every version of the state: older ones are brought back into the same buffers before a replay."""
    with small_model(chip) as model:
        state = room(model)
        graphs = capture_decode(model, state, (2,), TOOL)
        held = fed(model, state, [126, 5])
        mark = inv.digest(held)
        texts = []
        for _ in range(2):
            now, text = held, []
            for _ in range(4):
                now, out = graph_decode_step(graphs, model, now)
                text.append(out.logits)
            texts.append(torch.cat(text))
        assert torch.equal(*texts)
        assert inv.digest(held) == mark


@pytest.mark.parametrize("chip", CHIPS)
def test_recycled_pages_after_padded_steps(chip: str) -> None:
    """BAT-03: after padded steps and the end of all, a request on the recycled pages equals one in a fresh state."""
    with small_model(chip) as model:
        state = room(model, 2)
        graphs = capture_decode(model, state, (2,), TOOL)
        used = fed(model, state, [130])
        for _ in range(3):
            used, _ = graph_decode_step(graphs, model, used)
        used = fed(model, ps.close_request(used, 0), [61])
        fresh = fed(model, state, [61])
        for _ in range(5):
            used, one = graph_decode_step(graphs, model, used)
            fresh, other = graph_decode_step(graphs, model, fresh)
            assert torch.equal(one.logits, other.logits)


@pytest.mark.parametrize("chip", CHIPS)
def test_poisoned_sinks_and_idle_rows(chip: str) -> None:
    """BAT-01: NaN in every sink changes no bit of a real row, although idle rows look there."""
    with small_model(chip) as model:
        state = room(model)
        graphs = capture_decode(model, state, (4,), TOOL)
        state = fed(model, state, [127])
        found = []
        for poison in (False, True):
            now = state
            if poison:
                rows = {name: layer_rows(now.kv, name, torch.arange(16).numpy()) for name in ("swa", "c4", "c128")}
                with now.kv.handle.write(rows) as write:
                    for name, at in rows.items():
                        buffer = write.tensors[name]
                        buffer[at] = torch.nan if buffer.is_floating_point() else 255  # NaN, packed or not
                now = attrs.evolve(now, kv=attrs.evolve(now.kv, handle=write.handle))
            for _ in range(2):
                now, out = graph_decode_step(graphs, model, now)
                found.append(out.logits)
        assert torch.equal(torch.cat(found[:2]), torch.cat(found[2:]))
        assert found[0].isfinite().all()


@pytest.mark.parametrize("chip", CHIPS)
def test_idle_rows_have_no_expert_weight(chip: str) -> None:
    """What joins the experts' outputs gets weight 0 for idle rows, and expert ids that exist."""
    with small_model(chip) as model:
        state = room(model)
        graphs = capture_decode(model, state, (3,), TOOL)
        state = fed(model, state, [5])
        graph_decode_step(graphs, model, state)
        graph = graphs.graphs[0].graph
        joins = [
            kwargs | named(operator, args)
            for operator, args, kwargs, _ in graph.calls
            if is_named(operator, "unpermute")
        ]
        assert len(joins) == 2
        for call in joins:
            assert (call["probs"][0] > 0).all()
            assert not call["probs"][1:].any()


def is_named(operator: Any, part: str) -> bool:
    """Tell whether a recorded operator has a name with some part."""
    return part in operator._schema.name


def named(operator: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Name the positional arguments of a recorded call."""
    return dict(zip((a.name for a in operator._schema.arguments), args, strict=False))


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("stale", "check"),
    [
        ("operands", "metadata made for this call"),
        ("tables", "metadata made for this call|a cleared row"),
        ("input_ids", "not close"),
        ("swa_loc", "not close"),
    ],
)
def test_stale_inputs_are_caught(stale: str, check: str, monkeypatch: pytest.MonkeyPatch, chip: str) -> None:
    """A replay over inputs of the step before is caught: the split of the work, the tables, the tokens, the slots."""
    fresh_inputs = step_graphs._inputs

    def without(view: ps.ForwardBatch, operands: Any) -> list[Tensor]:
        left_out = {
            "operands": (operands.attention, operands.index),
            "tables": (view.metadata.tables, operands.slots),
            "input_ids": view.input_ids,
            "swa_loc": (view.metadata.swa_loc, operands.window_slots),
        }[stale]
        hidden = {id(leaf) for leaf in pytree.tree_leaves(left_out)}
        return [x for x in fresh_inputs(view, operands) if id(x) not in hidden]

    with small_model(chip, window=8) as model:
        state = room(model)
        graphs = capture_decode(model, state, (2,), TOOL)
        state = fed(model, state, [9, 6])
        monkeypatch.setattr(step_graphs, "_inputs", without)
        with pytest.raises((SimulatorError, AssertionError), match=check):
            side_by_side(graphs, model, state)


def side_by_side(graphs: step_graphs.DecodeGraphs, model: ps.Model, state: ps.DecodeState) -> None:
    """Decode the same forced tokens by replays and eagerly, and compare every step."""
    replayed = eager = state
    for _ in range(4):
        eager, one = ps.decode_step(model, eager, force={0: 3, 1: 4})
        replayed, other = graph_decode_step(graphs, model, replayed, force={0: 3, 1: 4})
        close_to(one.logits, other.logits)


@pytest.mark.parametrize("chip", CHIPS)
def test_nothing_stale_nothing_caught(chip: str) -> None:
    """The comparison that finds stale inputs holds for fresh ones, and where a page's first group closes."""
    with small_model(chip, window=8) as model:
        state = room(model)
        graphs = capture_decode(model, state, (2,), TOOL)
        for lengths in ([9, 6], [65, 127]):
            side_by_side(graphs, model, fed(model, state, lengths))


@pytest.mark.parametrize("chip", CHIPS)
def test_captured_texts_do_not_depend_on_their_limit(chip: str) -> None:
    """BAT-12: replays for 1, 2, 3, 4 or 5 tokens give prefixes of the text that eager decodes give."""
    with small_model(chip) as model:
        state = room(model)
        graphs = capture_decode(model, state, (1,), TOOL)

        def said(most: int, *, replayed: bool) -> list[int]:
            params = ps.SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=most)
            now, a = ps.open_request(state, params)
            now, out = ps.extend_step(model, now, {a: ids_of(9)})
            text = [*out.next_token_ids]
            while not out.finished:
                now, out = graph_decode_step(graphs, model, now) if replayed else ps.decode_step(model, now)
                text += out.next_token_ids
            return text

        texts = [said(most, replayed=True) for most in range(1, 6)]
        assert [len(text) for text in texts] == [1, 2, 3, 4, 5]
        assert all(text == said(5, replayed=False)[: len(text)] for text in texts)
        assert graphs.graphs[0].graph.n_replays == 10


@pytest.mark.parametrize("chip", CHIPS)
def test_a_capture_needs_its_caches(chip: str) -> None:
    """ASC-07: a capture before there is a state is a typed error that says what comes first; nothing ran until then."""

    def running(*args: Any, **options: Any) -> Tensor:
        raise AssertionError("a kernel ran")

    with small_model(chip) as model:
        idle = attrs.evolve(model, ops=attrs.evolve(model.ops, rms_norm=running))
        for missing in (None, ps.Capacity(requests=1, tokens=64, context=64), room(model).kv):
            with pytest.raises(ps.ConfigError, match=r"build it with init_state\(model, capacity\) first"):
                capture_decode(idle, missing, (1,), TOOL)


def test_host_reads_in_a_capture_are_caught() -> None:
    """A value that Python looks at inside the captured region would be that of the capture for ever: it is refused."""
    with small_model() as model:
        norm = model.ops.rms_norm

        def reading(x: Tensor, weight: Tensor, eps: float) -> Tensor:
            return norm(x, weight, eps) if float(x.float().abs().max()) >= 0 else x

        wrong = attrs.evolve(model, ops=attrs.evolve(model.ops, rms_norm=reading))
        with pytest.raises(HostReadError):
            capture_decode(wrong, room(model), (1,), TOOL)


@pytest.mark.parametrize("chip", CHIPS)
def test_the_captured_region_runs_on_shapes_alone(chip: str) -> None:
    """Under fake tensors, which have no values, the region runs through and gives logits of the bucket's rows."""
    with small_model(chip) as model:
        state = room(model)
        prepared, batch = ps.prepare_decode(state, only=())
        view = forward_batch(prepared, batch, bucket=3)
        operands = layer_operands(model, state.kv.layout, view)
        with state.kv.handle.read() as tensors, FakeTensorMode() as fake, torch.no_grad():
            buffers, view, operands, params = pytree.tree_map_only(
                Tensor, fake.from_tensor, (dict(tensors), view, operands, model.params)
            )
            logits = run_model(attrs.evolve(model, params=params), buffers, state.kv.layout, view, operands)
        assert tuple(logits.shape) == (3, model.config.vocab_size)


def test_kernels_are_warm_before_they_are_captured() -> None:
    """Every size runs twice before its capture."""
    with small_model() as model:
        runs = []
        head = model.ops.head_weights

        def counting(*args: Any, **options: Any) -> Tensor:
            runs.append(len(args[0]))
            return head(*args, **options)

        capture_decode(
            attrs.evolve(model, ops=attrs.evolve(model.ops, head_weights=counting)), room(model), (3, 1), TOOL
        )
        assert runs == [1, 1, 1, 3, 3, 3]


@pytest.mark.parametrize("chip", CHIPS)
def test_a_replay_that_raises_changes_nothing(chip: str) -> None:
    """The state before a broken replay is what it was, and can be stepped."""
    with small_model(chip) as model:
        state = room(model)
        graphs = capture_decode(model, state, (1,), TOOL)
        state = fed(model, state, [3])
        mark = inv.digest(state)
        calls = graphs.graphs[0].graph.calls
        broken = RecordedGraph(calls=[*calls[: len(calls) // 2], (_fail, (), {}, ())])
        wrong = attrs.evolve(graphs, graphs=(attrs.evolve(graphs.graphs[0], graph=broken),))
        with pytest.raises(RuntimeError, match="broken"):
            graph_decode_step(wrong, model, state)
        assert inv.digest(state) == mark
        expected = ps.decode_step(model, state)[1].logits
        close_to(graph_decode_step(graphs, model, state)[1].logits, expected)


def _fail() -> None:
    raise RuntimeError("broken")


def test_steps_that_fit_no_graph_run_eagerly() -> None:
    """More rows than any graph has, or a row with several tokens to feed, run as they do without graphs."""
    with small_model() as model:
        state = room(model)
        graphs = capture_decode(model, state, (1,), TOOL)
        state = fed(model, state, [5, 6])
        assert torch.equal(graph_decode_step(graphs, model, state)[1].logits, ps.decode_step(model, state)[1].logits)
        state = ps.rewind_request(state, 0, 3)
        one, other = (step(state) for step in (_eager(model), lambda s: graph_decode_step(graphs, model, s)))
        assert torch.equal(one[1].logits, other[1].logits)
        assert graphs.graphs[0].graph.n_replays == 0
        empty = ps.close_request(ps.close_request(state, 0), 1)
        assert graph_decode_step(graphs, model, empty)[1].request_ids == ()


def _eager(model: ps.Model) -> Callable[[ps.DecodeState], tuple[ps.DecodeState, ps.StepOutput]]:
    return lambda state: ps.decode_step(model, state)


def test_what_graphs_refuse() -> None:
    """Plain kernels, no sizes, other buffers, another padding: each is a typed error."""
    with pair_on_machine((0,)) as pair:
        model, state = pair.kernels, room(pair.kernels)
        with pytest.raises(ps.ConfigError, match="expected a model on Ascend kernels"):
            capture_decode(pair.plain, room(pair.plain), (1,), TOOL)
        with pytest.raises(ps.ConfigError, match="init_state"):
            capture_decode(model, None, (1,), TOOL)
        for sizes in ((), (0,)):
            with pytest.raises(ps.ConfigError, match="buckets"):
                capture_decode(model, state, sizes, TOOL)
        with pytest.raises(ps.ConfigError, match="form"):
            capture_decode(model, room(pair.plain), (1,), TOOL)
        graphs = capture_decode(model, state, (2,), TOOL)
        with pytest.raises(ps.ConfigError, match="captured over"):
            graph_decode_step(graphs, model, fed(model, room(model), [3]))
        prepared, batch = ps.prepare_decode(fed(model, state, [3]))
        with pytest.raises(ps.ConfigError, match="padded to 2 rows, got 1"):
            graph_forward(graphs.graphs[0], prepared.kv, forward_batch(prepared, batch))
        plain, batch = ps.prepare_decode(fed(pair.plain, room(pair.plain), [3]))
        with pytest.raises(ps.ConfigError, match="bucket"):
            forward_batch(plain, batch, bucket=2)
