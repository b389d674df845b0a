"""Forks, cuts, retractions, recycled slots, held and saved states on simulated Ascend kernels."""

from __future__ import annotations

from pathlib import Path

import attrs
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.ascend import CHIPS, on, pair_on_machine
from kit.steps import ENDLESS, examples, ids_of
from kit.twins import Twins
from purestep import invariants as inv
from purestep.step.release import layer_rows


@pytest.mark.parametrize("chip", CHIPS)
@examples(4)
@given(data=st.data(), seed=st.integers(0, 5))
def test_any_operations_agree(chip: str, data: st.DataObject, seed: int) -> None:
    """Whatever is opened, fed, decoded, forked, cut, retracted or closed, both models stay together."""
    with pair_on_machine(seed=seed, window=8, **on(chip)) as pair:
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
        twins.compare_caches()


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("n", [64, 128, 192])
def test_cut_at_a_page_that_a_chunk_ran_over(n: int, chip: str) -> None:
    """A history can go on from any page boundary, also from one that lay inside a chunk: its pooling state was kept."""
    with pair_on_machine((4, 4, 128), **on(chip)) as pair:
        twins = Twins.fresh(pair)
        a = twins.open()
        twins.extend({a: ids_of(250)})
        b = twins.fork(a, n)
        twins.extend({b: ids_of(70, seed=4)})
        twins.rewind(a, n)
        twins.extend({a: ids_of(9, seed=5), b: [3]})
        twins.compare_caches()


@pytest.mark.parametrize("chip", CHIPS)
def test_retracted_requests_resume(chip: str) -> None:
    """A request whose memory was taken back and given to another is fed anew and goes on."""
    with pair_on_machine(**on(chip)) as pair:
        twins = Twins.fresh(pair, requests=2, context=256)
        a = twins.open()
        twins.extend({a: ids_of(140)})
        twins.decode({a: 4})
        twins.retract(a)
        b = twins.open()
        twins.extend({b: ids_of(150, seed=2)})
        twins.decode({a: 5, b: 6})
        twins.decode({a: 7, b: 8})


@pytest.mark.parametrize("chip", CHIPS)
def test_recycled_slots_hold_nothing_of_before(chip: str) -> None:
    """BAT-03: a request on pages of a closed one equals, to the bit, the same request in a fresh state."""
    with pair_on_machine(**on(chip)) as pair:
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


@pytest.mark.parametrize("chip", CHIPS)
@examples(3)
@given(seed=st.integers(0, 99), n=st.integers(1, 140))
def test_held_states_step_again_to_the_same_bits(chip: str, seed: int, n: int) -> None:
    """A state that was stepped already gives the same logits again, and branches do not disturb each other."""
    with pair_on_machine(seed=seed % 4, **on(chip)) as pair:
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


@pytest.mark.parametrize("chip", CHIPS)
def test_states_are_saved_and_requests_travel(tmp_path: Path, chip: str) -> None:
    """A saved state and an exported request go on to the same bits, int8 keys and their scales included."""
    with pair_on_machine(**on(chip)) as pair:
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
        with pytest.raises(ps.CheckpointError, match=r"caches of the (ascend|packed) form"):
            ps.import_request(plain, ps.load_request(tmp_path / "request"))
        with pytest.raises(ps.CheckpointError, match=r"caches of the (ascend|packed) form"):
            ps.restore_state(pair.plain, tmp_path / "state")


@pytest.mark.parametrize("chip", CHIPS)
def test_poisoned_sinks_are_not_read(chip: str) -> None:
    """BAT-01: NaN in every sink changes no bit of any logits: what a table does not name is never read."""
    with pair_on_machine(**on(chip)) as pair:
        model, found = pair.kernels, []
        for poison in (False, True):
            state = ps.init_state(model, ps.Capacity(requests=2, tokens=512, context=256), page_size=64)
            if poison:
                kv = state.kv
                slots = {name: range(64 if name == "swa" else 16) for name in ("swa", "c4", "c128", "index_scale")}
                rows = {name: layer_rows(kv, name, torch.tensor(at).numpy()) for name, at in slots.items()}
                with kv.handle.write(rows) as write:
                    for name, at in rows.items():
                        buffer = write.tensors[name]
                        buffer[at] = torch.nan if buffer.is_floating_point() else 255  # NaN, packed or not
                state = attrs.evolve(state, kv=attrs.evolve(kv, handle=write.handle))
            state, a = ps.open_request(state, ENDLESS)
            state, b = ps.open_request(state, ENDLESS)
            state, out = ps.extend_step(model, state, {a: ids_of(130), b: ids_of(3)})
            found.append(out.logits)
            for _ in range(3):
                state, out = ps.decode_step(model, state)
                found.append(out.logits)
        assert all(torch.equal(x, y) for x, y in zip(found[:4], found[4:], strict=True))


@pytest.mark.parametrize("chip", CHIPS)
def test_greedy_prefixes_do_not_depend_on_the_limit(chip: str) -> None:
    """BAT-12: greedy decoding for 1 to 5 tokens gives prefixes of one text."""
    with pair_on_machine(**on(chip)) as pair:
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
