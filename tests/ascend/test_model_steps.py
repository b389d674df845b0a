"""Decode and extend on simulated Ascend kernels equal the plain model, whatever the model and the batch."""

from __future__ import annotations

import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.ascend import CHIPS, machine_for, model_pair, on, pair_on_machine
from kit.steps import ENDLESS, examples, ids_of
from kit.twins import TOLERANCE, Twins, row_errors
from purestep import invariants as inv
from purestep.model.forward import embed_tokens
from purestep.state.table import read_table


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


@pytest.mark.parametrize("chip", CHIPS)
@examples(4)
@given(
    shape=shapes(),
    lengths=st.lists(st.sampled_from([1, 2, 3, 4, 7, 64, 127, 128, 131]), min_size=1, max_size=3),
    chunk=st.sampled_from([3, 16, 200]),
    decodes=st.integers(0, 3),
)
def test_random_models_agree(chip: str, shape: dict[str, object], lengths: list[int], chunk: int, decodes: int) -> None:
    """Ragged prompts in chunks, then ragged decodes beside a request that joins late, equal the plain model's."""
    with pair_on_machine(**shape, **on(chip)) as pair:
        twins = Twins.fresh(pair)
        twins.is_choosing = True
        texts = {twins.open(): ids_of(n, seed=n) for n in lengths}
        for start in range(0, max(lengths), chunk):
            twins.extend({i: ids[start : start + chunk] for i, ids in texts.items() if start < len(ids)})
        late = twins.open()
        for step in range(decodes):
            twins.decode({i: 3 + step for i in texts})
        twins.extend({late: ids_of(5), **{i: [9] for i in texts}})
        twins.compare_caches()
        assert inv.check(twins.kernels) == ()


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("n", [3, 4, 63, 64, 127, 128])
def test_boundaries_of_groups_and_pages(n: int, chip: str) -> None:
    """A prompt that ends just before, at or after the end of a group or page goes on as the plain model does."""
    with pair_on_machine(seed=n, **on(chip)) as pair:
        twins = Twins.fresh(pair)
        a, b = twins.open(), twins.open()
        twins.extend({a: ids_of(n - 1), b: ids_of(2)})
        for step in range(5):
            twins.decode({a: 5 + step, b: 6 + step})
        twins.compare_caches()


@pytest.mark.parametrize("chip", CHIPS)
def test_boundaries_of_a_c128_page(chip: str) -> None:
    """Position 2048 ends the first C128 page's tokens and 2175 opens the second page: decodes across both agree."""
    with pair_on_machine((4, 128), index_topk=2048, **on(chip)) as pair:
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


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("lengths", [(1, 129), (14, 400)])
def test_mixed_lengths_equal_the_requests_alone(lengths: tuple[int, int], chip: str) -> None:
    """BAT-07: requests of very different lengths, fed and decoded together, get what each gets alone."""
    with pair_on_machine(**on(chip)) as pair:
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


@pytest.mark.parametrize("chip", CHIPS)
def test_a_long_and_a_short_request_decode_together(chip: str) -> None:
    """BAT-07: lengths 2734 and 14 decoded together are complete, and give what each gives alone."""
    with pair_on_machine((128,), **on(chip)) as pair:

        def decoded(lengths: tuple[int, ...]) -> torch.Tensor:
            state = ps.init_state(pair.kernels, ps.Capacity(requests=2, tokens=4096, context=3072), page_size=128)
            for n in lengths:
                state, i = ps.open_request(state, ENDLESS)
                for start in range(0, n, 700):
                    chunk = ids_of(n, seed=n)[start : start + 700]
                    state, _ = ps.extend_step(pair.kernels, state, {i: chunk}, sample=False)
            found = []
            for step in range(2):
                force = {r.request_id: 5 + step for r in state.requests}
                state, out = ps.decode_step(pair.kernels, state, force=force)
                found.append(out.logits)
            return torch.stack(found, 1)

        both = decoded((2734, 14))
        for row, n in zip(both, (2734, 14), strict=True):
            assert float(row_errors(row, decoded((n,))[0]).max()) < TOLERANCE / 2


@pytest.mark.parametrize("chip", CHIPS)
def test_traces_of_kernel_steps(chip: str) -> None:
    """A traced step tells the same slots and picks as the plain model's, and samples what an untraced one does."""
    with pair_on_machine(**on(chip)) as pair:
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
    with pair_on_machine(seed=seed, numerics=ps.Numerics.ascend(int8_weights=True)) as pair:
        twins = Twins.fresh(pair)
        # A last bit of an input may move a code by one step: 1/127 of the largest value in its row.
        twins.tolerance = 2 * TOLERANCE
        a, b = twins.open(), twins.open()
        twins.extend({a: ids_of(70), b: ids_of(3)})
        for step in range(3):
            twins.decode({a: 4 + step, b: 9 + step})
        c = twins.fork(a)
        twins.decode({a: 3, c: 4, b: 5})


@pytest.mark.parametrize("chip", CHIPS)
def test_layers_one_at_a_time_are_the_whole_step(chip: str) -> None:
    """Layer by layer from outside gives the streams that the whole step ends with."""
    with pair_on_machine(**on(chip)) as pair:
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


@pytest.mark.parametrize("mx_experts", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_products_in_blocks(seed: int, mx_experts: bool) -> None:
    """With weights in MX blocks, prompts, decodes and forks equal plain operators that round the same products."""
    with pair_on_machine(chip="a5", seed=seed, numerics=ps.Numerics.ascend_a5(mx_experts=mx_experts)) as pair:
        twins = Twins.fresh(pair)
        # A last bit of an input may move a code by one step: an eighth of its value.
        twins.tolerance = 3 * TOLERANCE
        a, b = twins.open(), twins.open()
        twins.extend({a: ids_of(70), b: ids_of(3)})
        for step in range(3):
            twins.decode({a: 4 + step, b: 9 + step})
        c = twins.fork(a)
        twins.decode({a: 3, c: 4, b: 5})


def test_the_a5_takes_so_many_tokens_of_a_request_at_once() -> None:
    """More tokens of a request in one step than a ring of pooling state can hold are refused, and nothing changes."""
    with pair_on_machine((0, 4, 128), **on("a5")) as pair:
        model = pair.kernels
        state = ps.init_state(model, ps.Capacity(requests=1, tokens=1024, context=1024), page_size=64)
        state, a = ps.open_request(state, ENDLESS)
        mark = inv.digest(state)
        with pytest.raises(ps.ConfigError, match="at most 897 of a request in one step on Ascend A5 kernels, got 898"):
            ps.extend_step(model, state, {a: ids_of(898)})
        assert inv.digest(state) == mark
        ps.extend_step(model, state, {a: ids_of(897)})


def test_pages_that_kernels_refuse() -> None:
    """A page size that would make blocks of other than a multiple of 16 rows is refused when the state is built."""
    for chip in CHIPS:
        with machine_for(chip=chip):
            model = model_pair(**on(chip)).kernels
        for page_size in (4, 32, 2048):
            with pytest.raises(ps.ConfigError, match="page_size: expected a multiple of 64"):
                ps.init_state(model, ps.Capacity(requests=1, tokens=64, context=64), page_size=page_size)


@pytest.mark.parametrize("chip", CHIPS)
def test_states_belong_to_their_kernels(chip: str) -> None:
    """A state of the other form is refused by steps and by the forward alone, both ways."""
    with pair_on_machine(**on(chip)) as pair:
        for model, other in ((pair.kernels, pair.plain), (pair.plain, pair.kernels)):
            state = ps.init_state(other, ps.Capacity(requests=1, tokens=64, context=64), page_size=64)
            state, a = ps.open_request(state, ENDLESS)
            with pytest.raises(ps.ConfigError, match="form"):
                ps.extend_step(model, state, {a: [3]})
            state, batch = ps.prepare_extend(state, {a: [3]})
            with pytest.raises(ps.ConfigError, match="form"):
                ps.forward(model, state.kv, ps.forward_batch(state, batch))
