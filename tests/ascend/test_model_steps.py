"""Decode and extend on simulated Ascend kernels equal the plain model, whatever the batch and the history."""

from __future__ import annotations

from pathlib import Path

import attrs
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.ascend import machine_for, model_pair, pair_on_machine
from kit.steps import ENDLESS, examples, ids_of
from kit.twins import TOLERANCE, Twins, row_errors
from purestep import invariants as inv
from purestep.model.forward import embed_tokens
from purestep.state.table import read_table
from purestep.step.release import layer_rows


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, object]:
    """Draw the sizes of a pair; choices that could flip are forced by a replay."""
    ratios = draw(st.lists(st.sampled_from([0, 4, 128]), min_size=1, max_size=3))
    experts = draw(st.sampled_from([4, 6]))
    return {
        "ratios": tuple(ratios),
        "seed": draw(st.integers(0, 9)),
        "window": draw(st.sampled_from([128, 8, 5, 1])),
        "heads": draw(st.sampled_from([4, 8])),
        "experts": experts,
        "topk": draw(st.integers(1, experts)),
        "index_topk": draw(st.sampled_from([1024, 3, 8])),
        "hash_layers": draw(st.integers(0, len(ratios))),
        "swiglu_limit": draw(st.sampled_from([0.6, 10.0])),
        "route_scale": draw(st.sampled_from([1.5, 2.5])),
    }


@examples(6)
@given(
    shape=shapes(),
    lengths=st.lists(st.sampled_from([1, 2, 3, 4, 7, 64, 127, 128, 131]), min_size=1, max_size=3),
    chunk=st.sampled_from([3, 16, 200]),
    decodes=st.integers(0, 3),
)
def test_random_models_agree(shape: dict[str, object], lengths: list[int], chunk: int, decodes: int) -> None:
    """Ragged prompts in chunks, then ragged decodes beside a request that joins late, equal the plain model's."""
    with pair_on_machine(**shape) as pair:
        twins = Twins.fresh(pair)
        twins.is_choosing = True
        texts = {twins.open(): ids_of(n, seed=n) for n in lengths}
        for start in range(0, max(lengths), chunk):
            twins.extend({i: ids[start : start + chunk] for i, ids in texts.items() if start < len(ids)})
        late = twins.open()
        for step in range(decodes):
            twins.decode({i: 3 + step for i in texts})
        twins.extend({late: ids_of(5), **{i: [9] for i in texts}})
        assert inv.check(twins.kernels) == ()


@pytest.mark.parametrize("n", [3, 4, 63, 64, 127, 128])
def test_boundaries_of_groups_and_pages(n: int) -> None:
    """A prompt that ends just before, at or after the end of a group or page goes on as the plain model does."""
    with pair_on_machine(seed=n) as pair:
        twins = Twins.fresh(pair)
        a, b = twins.open(), twins.open()
        twins.extend({a: ids_of(n - 1), b: ids_of(2)})
        for step in range(4):
            twins.decode({a: 5 + step, b: 6 + step})


def test_boundaries_of_a_c128_page() -> None:
    """Position 2048 ends the first C128 page's tokens and 2175 opens the second page: decodes across both agree."""
    with pair_on_machine((4, 128), index_topk=2048) as pair:
        twins = Twins.fresh(pair, requests=2, context=2304, page_size=128)
        a, b = twins.open(), twins.open()
        twins.extend({b: ids_of(14)})
        for start, end in ((0, 700), (700, 1400), (1400, 2046), (2050, 2174)):
            twins.extend({a: ids_of(end - start, seed=start)})
            if end > 2000:
                for step in range(4):
                    twins.decode({a: 3 + step, b: 4 + step})
        with read_table(twins.kernels.table) as tables:
            pages = tables["sidecar"].reshape(3, -1)[1]
            assert len({0, *pages[:2].tolist()}) == 3


@examples(6)
@given(data=st.data(), seed=st.integers(0, 5))
def test_any_operations_agree(data: st.DataObject, seed: int) -> None:
    """Whatever is opened, fed, decoded, forked, cut, retracted or closed, both models stay together."""
    with pair_on_machine(seed=seed, window=8) as pair:
        twins = Twins.fresh(pair, requests=3, context=400)
        live: dict[int, int] = {}
        for _ in range(data.draw(st.integers(3, 8))):
            running = [i for i, n in live.items() if n]
            kinds = (
                ["open"] * (len(live) < 3)
                + ["extend"] * bool(live)
                + ["decode", "fork", "rewind", "close"] * bool(running)
            )
            kind = data.draw(st.sampled_from(kinds))
            if kind == "open":
                live[twins.open()] = 0
            elif kind == "extend":
                chosen = data.draw(st.lists(st.sampled_from(sorted(live)), min_size=1, unique=True))
                chunks = {i: ids_of(data.draw(st.sampled_from([1, 5, 61, 70]))) for i in chosen}
                chunks = {i: ids for i, ids in chunks.items() if live[i] + len(ids) <= 300}
                if chunks:
                    twins.extend(chunks)
                live |= {i: live[i] + len(ids) for i, ids in chunks.items()}
            elif kind == "decode":
                twins.decode({i: 7 for i in running})
                live |= {i: live[i] + 1 for i in running}
            elif kind == "fork" and len(live) < 3:
                parent = data.draw(st.sampled_from(running))
                at = data.draw(st.integers(0, live[parent]))
                live[twins.fork(parent, at)] = at
            elif kind == "rewind":
                i = data.draw(st.sampled_from(running))
                live[i] = data.draw(st.integers(0, live[i]))
                twins.rewind(i, live[i])
            elif kind == "close":
                i = data.draw(st.sampled_from(running))
                twins.close(i)
                del live[i]
            assert inv.check(twins.kernels) == ()
        if live:
            twins.extend({i: [11] for i in live})


@pytest.mark.parametrize("lengths", [(1, 129), (14, 400)])
def test_mixed_lengths_equal_the_requests_alone(lengths: tuple[int, int]) -> None:
    """Requests of very different lengths, fed and decoded together, get what each gets alone."""
    with pair_on_machine() as pair:
        alone = []
        for n in lengths:
            twins = Twins.fresh(pair, requests=1)
            a = twins.open()
            alone.append([twins.extend({a: ids_of(n, seed=n)}), *(twins.decode({a: 5 + i}) for i in range(2))])
        twins = Twins.fresh(pair, requests=2)
        both = [twins.open(), twins.open()]
        fed = twins.extend({i: ids_of(n, seed=n) for i, n in zip(both, lengths, strict=True)}).split(lengths)
        decoded = [twins.decode({i: 5 + step for i in both}) for step in range(2)]
        for row, own in enumerate(alone):
            found = torch.cat([fed[row], *(out[row : row + 1] for out in decoded)])
            assert float(row_errors(found, torch.cat(own)).max()) < TOLERANCE / 2


def test_traces_of_kernel_steps() -> None:
    """A traced step tells the same slots and picks as the plain model's, and samples what an untraced one does."""
    with pair_on_machine() as pair:
        found = []
        for model in (pair.kernels, pair.plain):
            state = ps.init_state(model, ps.Capacity(requests=1, tokens=256, context=256), page_size=64)
            state, a = ps.open_request(state, ENDLESS)
            state, _ = ps.extend_step(model, state, {a: ids_of(127)})
            _, out, trace = ps.trace_step(model, state)
            assert torch.equal(out.logits, ps.decode_step(model, state)[1].logits)
            found.append([(stage.name, stage.reads, stage.writes) for stage in trace.stages])
        assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(3))
def test_int8_weights(seed: int) -> None:
    """With int8 weights, prompts, decodes and forks equal plain operators that round the same products."""
    with pair_on_machine(seed=seed, int8_weights=True) as pair:
        twins = Twins.fresh(pair)
        # A last bit of an input may move a code by one step: 1/127 of the largest value in its row.
        twins.tolerance = 2 * TOLERANCE
        a, b = twins.open(), twins.open()
        twins.extend({a: ids_of(70), b: ids_of(3)})
        for step in range(3):
            twins.decode({a: 4 + step, b: 9 + step})
        c = twins.fork(a)
        twins.decode({a: 3, c: 4, b: 5})


@pytest.mark.parametrize("n", [64, 128, 192])
def test_cut_at_a_page_that_a_chunk_ran_over(n: int) -> None:
    """A history can go on from any page boundary, also from one that lay inside a chunk: its pooling state was kept."""
    with pair_on_machine((4, 4, 128)) as pair:
        twins = Twins.fresh(pair)
        a = twins.open()
        twins.extend({a: ids_of(250)})
        b = twins.fork(a, n)
        twins.extend({b: ids_of(70, seed=4)})
        twins.rewind(a, n)
        twins.extend({a: ids_of(9, seed=5), b: [3]})


def test_retracted_requests_resume() -> None:
    """A request whose memory was taken back and given to another is fed anew and goes on."""
    with pair_on_machine() as pair:
        twins = Twins.fresh(pair, requests=2, context=256)
        a = twins.open()
        twins.extend({a: ids_of(140)})
        twins.decode({a: 4})
        twins.retract(a)
        b = twins.open()
        twins.extend({b: ids_of(150, seed=2)})
        twins.decode({a: 5, b: 6})
        twins.decode({a: 7, b: 8})


def test_recycled_slots_hold_nothing_of_before() -> None:
    """A request on pages of a closed one equals, to the bit, the same request in a fresh state."""
    with pair_on_machine() as pair:
        twins = Twins.fresh(pair, requests=1, context=192)
        a = twins.open()
        used = [twins.extend({a: ids_of(150, seed=8)}), twins.decode({a: 9})]
        twins.close(a)
        b = twins.open()
        used = [twins.extend({b: ids_of(133)}), *(twins.decode({b: 3 + i}) for i in range(5))]
        anew = Twins.fresh(pair, requests=1, context=192)
        c = anew.open()
        fresh = [anew.extend({c: ids_of(133)}), *(anew.decode({c: 3 + i}) for i in range(5))]
        assert all(torch.equal(x, y) for x, y in zip(used, fresh, strict=True))


@examples(4)
@given(seed=st.integers(0, 99), n=st.integers(1, 140))
def test_held_states_step_again_to_the_same_bits(seed: int, n: int) -> None:
    """A state that was stepped already gives the same logits again, and branches do not disturb each other."""
    with pair_on_machine(seed=seed % 4) as pair:
        model = pair.kernels
        state = ps.init_state(model, ps.Capacity(requests=2, tokens=512, context=256), page_size=64)
        state, a = ps.open_request(state, ENDLESS)
        held, _ = ps.extend_step(model, state, {a: ids_of(n, seed=seed)})
        mark = inv.digest(held)
        once, first = ps.decode_step(model, held)
        ps.decode_step(model, held, force={a: 5})
        _, further = ps.decode_step(model, once)
        assert inv.digest(held) == mark
        again, second = ps.decode_step(model, held)
        assert torch.equal(first.logits, second.logits)
        assert torch.equal(ps.decode_step(model, again)[1].logits, further.logits)


def test_states_are_saved_and_requests_travel(tmp_path: Path) -> None:
    """A saved state and an exported request go on to the same bits, int8 keys and their scales included."""
    with pair_on_machine() as pair:
        model = pair.kernels
        state = ps.init_state(model, ps.Capacity(requests=2, tokens=512, context=256), page_size=64)
        state, a = ps.open_request(state, ENDLESS)
        state, _ = ps.extend_step(model, state, {a: ids_of(135)})
        ps.save_state(state, tmp_path / "state")
        _, out = ps.decode_step(model, state)
        _, restored = ps.decode_step(model, ps.restore_state(model, tmp_path / "state"))
        ps.save_request(ps.export_request(state, a), tmp_path / "request")
        other = ps.init_state(model, ps.Capacity(requests=1, tokens=256, context=256), page_size=128)
        other, _ = ps.import_request(other, ps.load_request(tmp_path / "request"))
        _, moved = ps.decode_step(model, other)
        assert torch.equal(out.logits, restored.logits)
        assert torch.equal(out.logits, moved.logits)
        plain = ps.init_state(pair.plain, ps.Capacity(requests=1, tokens=256, context=256), page_size=64)
        with pytest.raises(ps.CheckpointError, match="caches of the ascend form"):
            ps.import_request(plain, ps.load_request(tmp_path / "request"))


def test_poisoned_sinks_are_not_read() -> None:
    """NaN in every sink changes no bit of any logits: what a table does not name for a row is never read."""
    with pair_on_machine() as pair:
        model, found = pair.kernels, []
        for poison in (False, True):
            state = ps.init_state(model, ps.Capacity(requests=2, tokens=512, context=256), page_size=64)
            if poison:
                kv = state.kv
                slots = {name: range(64 if name == "swa" else 16) for name in ("swa", "c4", "c128", "index_scale")}
                rows = {name: layer_rows(kv, name, torch.tensor(at).numpy()) for name, at in slots.items()}
                with kv.handle.write(rows) as write:
                    for name, at in rows.items():
                        write.tensors[name][at] = torch.nan
                state = attrs.evolve(state, kv=attrs.evolve(kv, handle=write.handle))
            state, a = ps.open_request(state, ENDLESS)
            state, b = ps.open_request(state, ENDLESS)
            state, out = ps.extend_step(model, state, {a: ids_of(130), b: ids_of(3)})
            found.append(out.logits)
            for _ in range(3):
                state, out = ps.decode_step(model, state)
                found.append(out.logits)
        assert all(torch.equal(x, y) for x, y in zip(found[:4], found[4:], strict=True))


def test_greedy_prefixes_do_not_depend_on_the_limit() -> None:
    """Greedy decoding for 1 to 5 tokens gives prefixes of one text."""
    with pair_on_machine() as pair:
        texts = []
        for n in range(1, 6):
            state = ps.init_state(pair.kernels, ps.Capacity(requests=1, tokens=128, context=128), page_size=64)
            state, a = ps.open_request(state, ps.SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=n))
            state, out = ps.extend_step(pair.kernels, state, {a: ids_of(9)})
            text = [*out.next_token_ids]
            while not out.finished:
                state, out = ps.decode_step(pair.kernels, state)
                text += out.next_token_ids
            texts.append(text)
        assert all(len(text) == n and texts[-1][:n] == text for n, text in enumerate(texts, 1))


def test_layers_one_at_a_time_are_the_whole_step() -> None:
    """Layer by layer from outside gives the streams that the whole step ends with."""
    with pair_on_machine() as pair:
        model = pair.kernels
        state = ps.init_state(model, ps.Capacity(requests=1, tokens=256, context=256), page_size=64)
        state, a = ps.open_request(state, ENDLESS)
        state, batch = ps.prepare_extend(state, {a: ids_of(130)})
        view = ps.forward_batch(state, batch)
        seen = {}

        def look(name: str, x: torch.Tensor) -> torch.Tensor:
            seen[name] = x.clone()
            return x

        ps.forward(model, state.kv, view, tap=look)
        mhc, kv = embed_tokens(model, view), state.kv
        for i in range(model.config.num_hidden_layers):
            mhc, kv = ps.layer_step(model, i, mhc, kv, view)
        assert torch.equal(mhc.streams, seen["final.streams"])
        assert set(seen) >= {"1.attn.picks", "0.attn.heads", "2.ffn.expert_ids"}


def test_pages_that_kernels_refuse() -> None:
    """A page size that would make blocks of other than a multiple of 16 rows is refused when the state is built."""
    with machine_for():
        model = model_pair().kernels
        for page_size in (4, 32, 2048):
            with pytest.raises(ps.ConfigError, match="page_size: expected a multiple of 64"):
                ps.init_state(model, ps.Capacity(requests=1, tokens=64, context=64), page_size=page_size)


def test_states_belong_to_their_kernels() -> None:
    """A state of the other form is refused by steps and by the forward alone, both ways."""
    with pair_on_machine() as pair:
        for model, other in ((pair.kernels, pair.plain), (pair.plain, pair.kernels)):
            state = ps.init_state(other, ps.Capacity(requests=1, tokens=64, context=64), page_size=64)
            state, a = ps.open_request(state, ENDLESS)
            with pytest.raises(ps.ConfigError, match="form"):
                ps.extend_step(model, state, {a: [3]})
            state, batch = ps.prepare_extend(state, {a: [3]})
            with pytest.raises(ps.ConfigError, match="form"):
                ps.forward(model, state.kv, ps.forward_batch(state, batch))
