"""Capture, replay and edit: records aligned to tokens, choices forced by records, rows changed by a caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import purestep as ps
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.checkpoints import random_tensors
from kit.configs import tiny_config
from kit.engine import engine_model
from kit.models import tiny_model
from kit.steps import ENDLESS, examples, fresh, ids_of, recompute
from oracle.model import oracle_logits
from oracle.ops import rope_frequencies, rotate_pairs, router_scores
from purestep.model.forward import embed_tokens
from purestep.model.stages import STAGES, stage_layers
from purestep.ops.dispatch import FUSED, REFERENCE
from torch import Tensor

RAW = tiny_config((4, 128, 4), hidden=32, head_dim=16, index_dim=16, index_heads=8, index_topk=3, window=8, vocab=32)
RAW |= {"hc_sinkhorn_iters": 2}
TENSORS = random_tensors(RAW, seed=3)
# Every row chooses among experts, and from position 15 on among entries.
INVARIANT = engine_model(RAW, TENSORS, numerics=ps.Numerics(invariant=True))
CHOOSING = {
    "fused": engine_model(RAW, TENSORS, kernels="fused"),
    "reference": engine_model(RAW, TENSORS, kernels="reference"),
    "invariant": INVARIANT,
}
NOT_CHOOSING = tiny_model()
CONFIG = INVARIANT.config
ALL = tuple(STAGES)
CHOICES = ("attn.picks", "ffn.expert_ids")
N = 26

Feed = Callable[..., tuple[ps.DecodeState, ps.StepOutput]]
Rows = dict[tuple[int, int], dict[str, Tensor]]


def opened(model: ps.Model, count: int = 1, *, page_size: int = 8) -> ps.DecodeState:
    """Build a state with open requests 0..count-1."""
    state = fresh(model, max(count, 2), page_size=page_size, context=160)
    for _ in range(count):
        state, _ = ps.open_request(state, ENDLESS)
    return state


def by_token(records: Sequence[ps.Captured]) -> Rows:
    """Cut records into rows: (request, position) -> full stage name -> row; logits where the step has them."""
    rows: Rows = {}
    for record in records:
        tokens = list(zip(record.request_ids, record.positions, strict=True))
        for row, token in enumerate(tokens):
            assert token not in rows, "a token is recorded once"
            rows[token] = {name: x[row] for name, x in record.stages.items()}
        for line, row in enumerate(record.logit_rows):
            rows[tokens[row]]["logits"] = record.logits[line]
    return rows


def prefill(model: ps.Model, ids: Sequence[int], state: ps.DecodeState | None = None, **how: Any) -> ps.StepOutput:
    """Feed a prompt to request 0 in one chunk."""
    return ps.extend_step(model, state or opened(model), {0: ids}, logits="all", **how)[1]


def feed(
    model: ps.Model, state: ps.DecodeState, ids: Sequence[int], cuts: Sequence[int], **how: Any
) -> list[ps.StepOutput]:
    """Feed request 0 chunk by chunk up to the last cut and by forced decodes from there."""
    outs, start = [], 0
    for cut in cuts:
        state, out = ps.extend_step(model, state, {0: ids[start:cut]}, sample=False, logits="all", **how)
        outs.append(out)
        start = cut
    for token in ids[start:]:
        state, out = ps.decode_step(model, state, only=[0], force={0: token}, **how)
        outs.append(out)
    return outs


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Tell whether two rows hold the same stages with the same bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# Up to six tokens are left for decodes.
cuts_of = st.tuples(st.sets(st.integers(1, N - 1), max_size=3), st.integers(N - 6, N)).map(
    lambda cuts: sorted({*cuts[0], cuts[1]})
)


# Capture.


@examples(5)
@given(cuts=cuts_of, page_size=st.sampled_from((4, 8, 12, 32)), seed=st.integers(0, 99))
def test_rows_belong_to_tokens(cuts: list[int], page_size: int, seed: int) -> None:
    """Prefill, chunks and decodes record every stage of every token with the same bits in invariant numerics."""
    ids = ids_of(N, seed=seed)
    whole = by_token([prefill(INVARIANT, ids, capture=ALL).captured])
    outs = feed(INVARIANT, opened(INVARIANT, page_size=page_size), ids, cuts, capture=ALL)
    parts = by_token([out.captured for out in outs])
    assert list(parts) == list(whole) == [(0, position) for position in range(N)]
    assert all(same(whole[token], parts[token]) for token in whole)


@examples(4)
@given(cuts=cuts_of, page_size=st.sampled_from((4, 8, 32)))
def test_rows_belong_to_tokens_by_default(cuts: list[int], page_size: int) -> None:
    """In default numerics the same holds within rounding."""
    ids = ids_of(N)
    whole = by_token([prefill(NOT_CHOOSING, ids, capture=ALL).captured])
    outs = feed(NOT_CHOOSING, opened(NOT_CHOOSING, page_size=page_size), ids, cuts, capture=ALL)
    for token, row in by_token([out.captured for out in outs]).items():
        assert row.keys() == whole[token].keys()
        for name, x in row.items():
            if name.endswith("ids"):  # both experts are chosen, in an order that rounding may turn
                assert torch.equal(x.sort().values, whole[token][name].sort().values)
            elif not name.endswith("weights"):
                torch.testing.assert_close(x, whole[token][name], atol=2e-5, rtol=2e-5)


@examples(5)
@given(data=st.data())
def test_mixed_batches(data: st.DataObject) -> None:
    """Requests in one step, chunks beside single tokens, in any order, record what each records alone."""
    prompts = {r: ids_of(N, seed=10 + r) for r in range(3)}
    alone = {r: by_token([prefill(INVARIANT, prompts[r], capture=ALL).captured.relabel({0: r})]) for r in prompts}
    state = opened(INVARIANT, 3, page_size=data.draw(st.sampled_from((4, 8, 12))))
    fed, records = dict.fromkeys(prompts, 0), []
    for _ in range(4):
        rows = data.draw(st.permutations([r for r in prompts if fed[r] < N]).map(lambda rows: rows[:2] or rows))
        if not rows:
            break
        sizes = {r: min(N - fed[r], data.draw(st.sampled_from((1, 1, 2, 9, 20)))) for r in rows}
        chunks = {r: prompts[r][fed[r] : fed[r] + n] for r, n in sizes.items()}
        state, out = ps.extend_step(INVARIANT, state, chunks, sample=False, logits="all", capture=ALL)
        assert out.captured.request_ids == tuple(r for r in rows for _ in range(sizes[r]))
        records.append(out.captured)
        fed |= {r: fed[r] + n for r, n in sizes.items()}
    for token, row in by_token(records).items():
        assert same(row, alone[token[0]][token])


@pytest.mark.parametrize("kernels", ["fused", "reference"])
def test_order_of_chunks_and_single_rows(kernels: str) -> None:
    """A chunk before, between or behind single rows leaves every row's record the same, picks included."""
    model, records = CHOOSING[kernels], []
    state, _ = ps.extend_step(model, opened(model, 3), {r: ids_of(16 + r, seed=r) for r in range(3)})
    for order in ((1, 2, 0), (0, 1, 2), (2, 0, 1)):
        chunks = {r: ids_of(9, seed=3) if r == 0 else () for r in order}
        _, out = ps.extend_step(model, state, chunks, logits="all", capture=ALL)
        records.append(by_token([out.captured]))
    for record in records[1:]:
        for token, row in record.items():
            for name, x in row.items():
                torch.testing.assert_close(x, records[0][token][name], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("model", [*CHOOSING.values(), NOT_CHOOSING], ids=[*CHOOSING, "not choosing"])
@examples(4)
@given(cut=st.integers(1, N - 1), seed=st.integers(0, 99))
def test_capture_changes_no_bit(model: ps.Model, cut: int, seed: int) -> None:
    """Logits, tokens and caches of steps of chunks and single rows are the same bits with and without capture."""
    ids, mate = ids_of(N, seed=seed), ids_of(12, seed=seed + 1)
    ends = []
    for capture in ((), ALL):
        state, first = ps.extend_step(model, opened(model, 2), {0: ids[:cut], 1: mate}, capture=capture)
        state, second = ps.extend_step(model, state, {1: (), 0: ids[cut:]}, capture=capture)
        state, third = ps.decode_step(model, state, capture=capture)
        with state.kv.handle.read() as buffers:
            caches = {name: x.clone() for name, x in buffers.items()}
        ends.append(({str(i): out.logits for i, out in enumerate((first, second, third))}, caches))
        assert (third.captured is None) == (not capture)
    (plain, plain_caches), (seen, seen_caches) = ends
    assert same(plain, seen)
    assert same(plain_caches, seen_caches)


def test_stages_are_as_the_table_says() -> None:
    """Every stage has the shape and dtype of the table, in the layers that the table says, and memory of its own."""
    record = prefill(INVARIANT, ids_of(N), capture=ALL).captured
    c = CONFIG
    sizes = {"T": N, "M": c.hc_mult, "H": c.hidden_size, "N": c.num_attention_heads, "D": c.head_dim}
    sizes |= {"P": c.index_topk, "E": c.n_routed_experts, "K": c.num_experts_per_tok}
    dtypes = {"float": torch.float32, "f32": torch.float32, "i64": torch.int64}
    expected = {}
    for name, stage in STAGES.items():
        dtype, axes = stage.shape.removesuffix("]").split("[")
        full = [f"{i}.{name}" for i in stage_layers(c, name)] if stage.is_in_layers else [name]
        expected |= dict.fromkeys(full, (dtypes[dtype], tuple(sizes[axis] for axis in axes.split(","))))
    assert {name: (x.dtype, tuple(x.shape)) for name, x in record.stages.items()} == expected
    assert [name for name in expected if "picks" in name] == ["0.attn.picks", "2.attn.picks"]
    assert len({x.untyped_storage().data_ptr() for x in record.stages.values()}) == len(expected)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in record.stages.values())


def test_names_and_layers_are_chosen() -> None:
    """A name without layer means all layers that have it, one with a layer that one, and nothing else is kept."""
    record = prefill(
        INVARIANT, ids_of(5), capture=["attn.picks", "1.streams", "0.attn.picks", "final.streams"]
    ).captured
    assert set(record.stages) == {"0.attn.picks", "2.attn.picks", "1.streams", "final.streams"}
    flat = tiny_model((0,))
    assert prefill(flat, ids_of(5), capture=["attn.picks"]).captured.stages == {}


def test_logits_of_a_record() -> None:
    """A record says which token rows the step's logits belong to: the last ones, all, or none."""
    ids, mate = ids_of(9), ids_of(4)
    state = opened(INVARIANT, 2)
    for how, rows in (({}, (8, 12)), ({"logits": "all"}, tuple(range(13))), ({"sample": False}, ())):
        _, out = ps.extend_step(INVARIANT, state, {0: ids, 1: mate}, capture=["streams"], **how)
        assert out.captured.logit_rows == rows
        assert torch.equal(out.captured.logits, out.logits)
        assert out.captured.positions == (*range(9), *range(4))


@pytest.mark.parametrize("model", CHOOSING.values(), ids=CHOOSING)
def test_streams_follow_layer_steps(model: ps.Model) -> None:
    """The streams entering a layer are what ``layer_step`` of the layer before it returns, bit for bit."""
    state = opened(model)
    record = prefill(model, ids_of(N), state, capture=["streams", "final.streams"]).captured
    prepared, batch = ps.prepare_extend(state, {0: ids_of(N)})
    view = ps.forward_batch(prepared, batch, rowwise=model.numerics.invariant)
    mhc, kv = embed_tokens(model, view), prepared.kv
    for i in range(CONFIG.num_hidden_layers):
        assert torch.equal(record.stages[f"{i}.streams"], mhc.streams)
        mhc, kv = ps.layer_step(model, i, mhc, kv, view)
    assert torch.equal(record.stages["final.streams"], mhc.streams)


def test_stages_match_the_oracle() -> None:
    """Every stage equals the plain reading of the formulas, with the same choices made."""
    ids = ids_of(N, seed=5)
    stages = prefill(CHOOSING["reference"], ids, capture=ALL).captured.stages
    choices: dict[int, dict[str, Tensor]] = {}
    for i in range(CONFIG.num_hidden_layers):
        choices[i] = {"expert_ids": stages[f"{i}.ffn.expert_ids"]}
        if f"{i}.attn.picks" in stages:
            choices[i]["entry_ids"] = stages[f"{i}.attn.picks"]
    trace: dict[str, Any] = {}
    oracle_logits(RAW, TENSORS, ids, trace=trace, replay=choices)
    for i, layer in enumerate(trace["layers"]):
        theta = RAW["compress_rope_theta"] if RAW["compress_ratios"][i] else RAW["rope_theta"]
        turns = rope_frequencies(8, theta, RAW["rope_scaling"] if RAW["compress_ratios"][i] else None)
        expected = {
            "streams": layer["streams_in"],
            "attn.input": layer["attn"]["x"],
            "attn.heads": rotate_pairs(layer["o"], torch.arange(N), turns),
            "attn.output": layer["attn"]["y"],
            "ffn.streams": layer["streams_mid"],
            "ffn.input": layer["ffn"]["x"],
            "ffn.expert_weights": layer["expert_weights"],
            "ffn.output": layer["ffn"]["y"],
        }
        for name, x in expected.items():
            torch.testing.assert_close(stages[f"{i}.{name}"], x, atol=5e-5, rtol=5e-5, msg=f"{i}.{name}")
        scores = router_scores(stages[f"{i}.ffn.router_logits"])
        torch.testing.assert_close(scores, layer["router_scores"], atol=5e-5, rtol=5e-5)
        if i >= CONFIG.num_hash_layers:
            best = (scores + TENSORS[f"layers.{i}.ffn.gate.bias"]).topk(CONFIG.num_experts_per_tok).indices
        else:
            best = TENSORS[f"layers.{i}.ffn.gate.tid2eid"][torch.tensor(ids)]
        assert torch.equal(stages[f"{i}.ffn.expert_ids"], best)
        if "entry_scores" in layer:
            seen = layer["entry_scores"].topk(3).values.sort(dim=-1).values  # -inf where there are fewer
            picks = stages[f"{i}.attn.picks"]
            chosen = torch.where(picks < 0, -torch.inf, layer["entry_scores"].gather(1, picks.clamp(min=0)))
            torch.testing.assert_close(chosen.sort(dim=-1).values, seen, atol=5e-5, rtol=5e-5)
    torch.testing.assert_close(stages["final.streams"], trace["layers"][-1]["streams_out"], atol=5e-5, rtol=5e-5)


def test_picks_are_ascending_and_all_when_they_fit() -> None:
    """Picks ascend, hold every visible entry while these fit, and are filled up with -1."""
    picks = prefill(INVARIANT, ids_of(N), capture=["attn.picks"]).captured.stages["0.attn.picks"]
    for position, row in enumerate(picks.tolist()):
        visible = (position + 1) // 4
        kept = [entry for entry in row if entry >= 0]
        assert row == sorted(kept) + [-1] * (3 - len(kept))
        assert len(kept) == min(visible, 3)
        assert visible > 3 or kept == list(range(visible))
        assert all(entry < visible for entry in kept)


def test_fork_records_under_its_own_id() -> None:
    """A fork records what its parent records, under its own id and from the fork's position on."""
    ids = ids_of(N)
    state, _ = ps.extend_step(INVARIANT, opened(INVARIANT), {0: ids[:20]}, sample=False)
    state, fork = ps.fork_request(state, 0)
    _, out = ps.extend_step(INVARIANT, state, {fork: ids[20:], 0: ids[20:25]}, logits="all", capture=ALL)
    rows, whole = by_token([out.captured]), by_token([prefill(INVARIANT, ids, capture=ALL).captured])
    assert list(rows) == [(fork, position) for position in range(20, N)] + [(0, position) for position in range(20, 25)]
    assert all(same(row, whole[0, position]) for (_, position), row in rows.items())


# Replay.


def stirred(record: ps.Captured, seed: int) -> ps.Captured:
    """Replace every choice of a record by a random one that its token could make."""
    generator = torch.Generator().manual_seed(seed)
    stages = {}
    for name, x in record.stages.items():
        if name.endswith("expert_ids"):
            order = torch.rand((len(x), CONFIG.n_routed_experts), generator=generator).argsort(-1)
            stages[name] = order[:, : CONFIG.num_experts_per_tok]
        else:
            stages[name] = torch.full_like(x, -1)
            for row, position in enumerate(record.positions):
                visible = torch.randperm((position + 1) // 4, generator=generator)
                kept = visible[: int(torch.randint(0, CONFIG.index_topk + 1, (), generator=generator))]
                stages[name][row, : len(kept)] = kept.sort().values
    return attrs.evolve(record, stages=stages)


@pytest.mark.parametrize("model", [*CHOOSING.values(), NOT_CHOOSING], ids=[*CHOOSING, "not choosing"])
def test_replay_of_the_own_record_changes_no_bit(model: ps.Model) -> None:
    """Forcing what a step chose anyway reproduces its logits and stages, in a step of chunks and of single rows."""
    start = opened(model, 2)
    state, first = ps.extend_step(model, start, {0: ids_of(N), 1: ids_of(7)}, logits="all", capture=ALL)
    _, second = ps.decode_step(model, state, capture=ALL)
    _, third = ps.extend_step(model, state, {1: (), 0: ids_of(9)}, capture=ALL)
    records = [first.captured, second.captured]
    for record in (first.captured, records, iter(records)):
        _, again = ps.extend_step(model, start, {0: ids_of(N), 1: ids_of(7)}, logits="all", capture=ALL, replay=record)
        assert torch.equal(again.logits, first.logits)
        assert same(again.captured.stages, first.captured.stages)
    _, again = ps.decode_step(model, state, replay=records, capture=ALL)
    assert same(again.captured.stages, second.captured.stages)
    _, again = ps.extend_step(model, state, {1: (), 0: ids_of(9)}, replay=third.captured)
    assert torch.equal(again.logits, third.logits)


@examples(4)
@given(cuts=cuts_of, seed=st.integers(0, 999), page_size=st.sampled_from((4, 8, 12)))
def test_replay_forces_in_any_phase(cuts: list[int], seed: int, page_size: int) -> None:
    """Foreign choices forced on a prefill give the same bits forced chunk by chunk and token by token."""
    ids = ids_of(N)
    record = stirred(prefill(INVARIANT, ids, capture=CHOICES).captured, seed)
    forced = prefill(INVARIANT, ids, capture=ALL, replay=record)
    for name, x in record.stages.items():
        assert torch.equal(forced.captured.stages[name], x)
    outs = feed(INVARIANT, opened(INVARIANT, page_size=page_size), ids, cuts, capture=ALL, replay=record)
    whole, parts = by_token([forced.captured]), by_token([out.captured for out in outs])
    assert all(same(whole[token], parts[token]) for token in whole)


@pytest.mark.parametrize("model", CHOOSING.values(), ids=CHOOSING)
@examples(4)
@given(seed=st.integers(0, 999))
def test_forced_choices_match_the_oracle(model: ps.Model, seed: int) -> None:
    """Foreign choices give the logits that the plain formulas give with these choices."""
    ids = ids_of(N, seed=seed)
    record = stirred(prefill(model, ids, capture=CHOICES).captured, seed)
    choices: dict[int, dict[str, Tensor]] = {}
    for name, x in record.stages.items():
        layer, _, stage = name.partition(".")
        choices.setdefault(int(layer), {})["entry_ids" if stage == "attn.picks" else "expert_ids"] = x
    got = prefill(model, ids, replay=record).logits
    torch.testing.assert_close(got, oracle_logits(RAW, TENSORS, ids, replay=choices), atol=2e-4, rtol=2e-4)


def test_replay_of_a_solo_record_in_a_batch() -> None:
    """A relabelled record forces one request of a batch; its mate and tokens without a record choose for themselves."""
    ids, mate = ids_of(N), ids_of(N, seed=1)
    record = stirred(prefill(INVARIANT, ids[:20], capture=CHOICES).captured, 1)
    alone = by_token([prefill(INVARIANT, ids, capture=ALL, replay=record).captured.relabel({0: 1})])
    free = by_token([prefill(INVARIANT, mate, capture=ALL).captured])
    _, out = ps.extend_step(
        INVARIANT,
        opened(INVARIANT, 2),
        {0: mate, 1: ids},
        logits="all",
        capture=ALL,
        replay=[record.relabel({0: 1})],
    )
    rows = by_token([out.captured])
    assert all(same(rows[token], (alone | free)[token]) for token in rows)


def test_the_last_record_of_a_token_counts() -> None:
    """Of two records of one token the later one is forced, and one that forces part of the layers leaves the rest."""
    ids = ids_of(N)
    record = prefill(INVARIANT, ids, capture=CHOICES).captured
    one, two = stirred(record, 1), stirred(record, 2)
    part = attrs.evolve(one, stages={"1.ffn.expert_ids": one.stages["1.ffn.expert_ids"]})
    used = prefill(INVARIANT, ids, capture=CHOICES, replay=[one, two, part]).captured.stages
    for name, x in two.stages.items():
        assert torch.equal(used[name], part.stages.get(name, x))


def test_a_replay_of_other_tokens_is_refused() -> None:
    """A record of another request, or of other positions, forces nothing: an error says what was fed and recorded."""
    start = opened(INVARIANT, 2)
    state, first = ps.extend_step(INVARIANT, start, {0: ids_of(N), 1: ids_of(7)}, capture=CHOICES)
    recorded = f"request 0 at 0-{N - 1}, request 1 at 0-6"
    for replay, step in (
        (first.captured, lambda **other: ps.decode_step(INVARIANT, state, **other)),
        ([first.captured] * 2, lambda **other: ps.extend_step(INVARIANT, state, {1: ids_of(3)}, **other)),
        (first.captured.relabel({0: 5, 1: 6}), lambda **other: ps.extend_step(INVARIANT, start, {0: [5]}, **other)),
    ):
        with pytest.raises(ps.RequestError, match="replay: expected records of tokens that this step is fed") as found:
            step(replay=replay)
        assert found.value.field == "replay"
        assert "relabel" in str(found.value)
    assert "(request 0 at 0)" in str(found.value)
    with pytest.raises(ps.RequestError, match=recorded):
        ps.decode_step(INVARIANT, state, replay=first.captured)
    # What names some of the tokens, or none at all, is served as before.
    _, free = ps.decode_step(INVARIANT, state)
    for replay in ([], [first.captured, ps.decode_step(INVARIANT, state, capture=CHOICES)[1].captured]):
        assert torch.equal(ps.decode_step(INVARIANT, state, replay=replay)[1].logits, free.logits)


# Edit.


class Calls:
    """Counts calls, and changes the rows in a way that shows."""

    def __init__(self) -> None:
        self.tokens: list[ps.FedToken] = []

    def same(self, x: Tensor, token: ps.FedToken) -> Tensor:
        self.tokens.append(token)
        return x

    def turn(self, x: Tensor, token: ps.FedToken) -> Tensor:
        self.tokens.append(token)
        if not x.is_floating_point():
            return x.flip(0) if token.stage == "ffn.expert_ids" else torch.full_like(x, -1)
        return x * -0.5


def full(stage: str) -> tuple[str, ...]:
    """Name a stage in every layer that has it."""
    return tuple(f"{i}.{stage}" for i in stage_layers(CONFIG, stage)) or (stage,)


@examples(5)
@given(cuts=cuts_of)
def test_calls_per_layer_are_tokens_fed(cuts: list[int]) -> None:
    """An edit is called once per fed token and layer, in order, in chunks, forced decodes and sampled ones."""
    calls = {stage: Calls() for stage in ALL}
    edit = {0: {stage: calls[stage].same for stage in ALL}}
    ids, start = ids_of(N), opened(INVARIANT, 2)
    feed(INVARIANT, start, ids, cuts, edit=edit)
    state, _ = ps.extend_step(INVARIANT, start, {1: ids[:3], 0: ids}, edit=edit)
    ps.decode_step(INVARIANT, state, edit=edit)
    for stage, seen in calls.items():
        for layer in stage_layers(CONFIG, stage) or (None,):
            fed = [token.position for token in seen.tokens if token.layer == layer]
            assert fed == [*range(N), *range(N + 1)]
        assert {(token.request_id, token.stage) for token in seen.tokens} == {(0, stage)}


@pytest.mark.parametrize("model", [*CHOOSING.values(), NOT_CHOOSING], ids=[*CHOOSING, "not choosing"])
def test_the_identity_changes_no_bit(model: ps.Model) -> None:
    """An edit that returns its row leaves every stage of every request as it was, in chunks and single rows."""
    start = opened(model, 2)
    edit = {0: {stage: lambda x, token: x for stage in ALL}}
    ends = []
    for how in ({}, {"edit": edit}):
        state, first = ps.extend_step(model, start, {0: ids_of(N), 1: ids_of(7)}, capture=ALL, **how)
        _, second = ps.decode_step(model, state, capture=ALL, **how)
        ends.append((first.captured.stages, second.captured.stages))
    assert all(same(plain, edited) for plain, edited in zip(*ends, strict=True))


@pytest.mark.parametrize("stage", ALL)
@examples(2)
@given(at=st.integers(0, N - 1), order=st.permutations([0, 1, 2]), data=st.data())
def test_an_edit_reaches_its_rows_alone(stage: str, at: int, order: list[int], data: st.DataObject) -> None:
    """Mates and earlier tokens keep every bit of every stage; the edited one shows and uses what the edit returned."""
    name = data.draw(st.sampled_from(full(stage)))
    prompts = {r: ids_of(N, seed=20 + r) for r in order}
    turn = Calls().turn

    def edit(x: Tensor, token: ps.FedToken) -> Tensor:
        return turn(x, token) if token.position >= at else x

    state = opened(INVARIANT, 3)
    plain, edited = (
        by_token([ps.extend_step(INVARIANT, state, prompts, logits="all", capture=ALL, **how)[1].captured])
        for how in ({}, {"edit": {1: {name: edit}}})
    )
    assert all(same(row, plain[token]) for token, row in edited.items() if token[0] != 1 or token[1] < at)
    used = turn(plain[1, at][name], ps.FedToken(request_id=1, position=at, layer=None, stage=stage))
    assert torch.equal(edited[1, at][name], used)
    if stage not in CHOICES:  # few entries to pick, or experts in another order, may come to the same
        assert not torch.equal(edited[1, at]["logits"], plain[1, at]["logits"])


def test_an_edit_of_streams_is_what_the_layer_runs_on() -> None:
    """Editing the streams of a layer equals running ``layer_step`` on streams changed by hand."""
    state, ids = opened(INVARIANT), ids_of(N)
    stages = prefill(INVARIANT, ids, state, capture=ALL, edit={0: {"1.streams": lambda x, _: x + 1}}).captured.stages
    prepared, batch = ps.prepare_extend(state, {0: ids})
    view = ps.forward_batch(prepared, batch, rowwise=True)
    mhc, kv = embed_tokens(INVARIANT, view), prepared.kv
    for i in range(3):
        mhc = attrs.evolve(mhc, streams=mhc.streams + 1) if i == 1 else mhc
        assert torch.equal(stages[f"{i}.streams"], mhc.streams)
        mhc, kv = ps.layer_step(INVARIANT, i, mhc, kv, view)
    assert torch.equal(stages["final.streams"], mhc.streams)


@examples(4)
@given(seed=st.integers(0, 99), cuts=cuts_of)
def test_edited_choices_are_replayed_ones(seed: int, cuts: list[int]) -> None:
    """Choices of an edit, in any order, and the same ones replayed give the same bits; the edit has the last word."""
    ids = ids_of(N)
    record = stirred(prefill(INVARIANT, ids, capture=CHOICES).captured, seed)

    def edit(x: Tensor, token: ps.FedToken) -> Tensor:
        wanted = record.stages[f"{token.layer}.{token.stage}"][token.position]
        return wanted.flip(0) if token.stage == "attn.picks" else wanted

    expected = by_token([prefill(INVARIANT, ids, capture=ALL, replay=record).captured])
    how = {"edit": {0: dict.fromkeys(CHOICES, edit)}, "replay": stirred(record, seed + 1)}
    outs = feed(INVARIANT, opened(INVARIANT), ids, cuts, capture=ALL, **how)
    rows = by_token([out.captured for out in outs])
    assert all(same(rows[token], expected[token]) for token in expected)


def test_forced_experts_are_weighed_by_the_router() -> None:
    """Experts put in by an edit get the weights of their router logits: score over sum of scores, times factor."""

    def last(x: Tensor, token: ps.FedToken) -> Tensor:
        return torch.tensor([5, 4])

    stages = prefill(NOT_HASHED, ids_of(9), capture=ALL, edit={0: {"ffn.expert_ids": last}}).captured.stages
    for i in range(2):
        scores = torch.nn.functional.softplus(stages[f"{i}.ffn.router_logits"]).sqrt()[:, [5, 4]]
        expected = scores / scores.sum(-1, keepdim=True) * NOT_HASHED.config.routed_scaling_factor
        torch.testing.assert_close(stages[f"{i}.ffn.expert_weights"], expected)


NOT_HASHED = tiny_model((0, 4), hash_layers=0, experts=6)


def test_a_row_is_a_copy() -> None:
    """Writing into the row that an edit is given, or keeping it, touches nothing."""
    kept = []

    def spoil(x: Tensor, token: ps.FedToken) -> Tensor:
        kept.append(x)
        result = x.clone()
        x.fill_(7)
        return result

    ids = ids_of(N)
    plain = prefill(INVARIANT, ids, capture=ALL)
    edited = prefill(INVARIANT, ids, capture=ALL, edit={0: dict.fromkeys(ALL, spoil)})
    assert same(plain.captured.stages, edited.captured.stages)
    assert all((x == 7).all() for x in kept)


# Errors and purity.


def usable(state: ps.DecodeState, act: Callable[[], object], error: type[Exception], match: str) -> None:
    """Assert that ``act`` raises and that the state then steps to the bits that it would have."""
    _, before = ps.decode_step(INVARIANT, state, force={0: 3})
    with pytest.raises(error, match=match):
        act()
    assert ps.invariants.check(state) == ()
    _, after = ps.decode_step(INVARIANT, state, force={0: 3})
    assert torch.equal(before.logits, after.logits)


def started(n: int = 21) -> ps.DecodeState:
    return ps.extend_step(INVARIANT, opened(INVARIANT, 2), {0: ids_of(n), 1: ids_of(5)})[0]


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (["attn.inputs"], r"capture: expected stages among streams, attn.input.*got 'attn.inputs'"),
        (["3.streams"], r"capture: expected a layer that has streams \(0, 1, 2\), got '3.streams'"),
        (["1.attn.picks"], r"expected a layer that has attn.picks \(0, 2\), got '1.attn.picks'"),
        (["0.final.streams"], r"got '0.final.streams'"),
        ([3], r"got 3"),
        ("streams", r"capture: expected several stage names, got 'streams'; write \('streams',\)"),
    ],
)
def test_unknown_stages_are_refused(names: Any, match: str) -> None:
    """An unknown stage or layer is a RequestError that lists the known ones, also where nothing would run."""
    state = started()
    usable(state, lambda: ps.decode_step(INVARIANT, state, capture=names), ps.RequestError, match)
    with pytest.raises(ps.RequestError, match=match):
        ps.decode_step(INVARIANT, opened(INVARIANT), capture=names)
    with pytest.raises(ps.RequestError, match=match):
        ps.extend_step(INVARIANT, state, {0: [3]}, capture=names)


def picks(*entries: int) -> Callable[[Tensor, ps.FedToken], Tensor]:
    return lambda x, token: torch.tensor(entries)


@pytest.mark.parametrize(
    ("stage", "edit", "error", "match"),
    [
        (
            "streams",
            lambda x, _: x[0],
            ps.ShapeError,
            r"request 0, position 21, layer 0, streams: expected .*4, 32",
        ),
        ("streams", lambda x, _: x.double(), ps.ShapeError, r"float32 .* got torch.float64"),
        ("ffn.output", lambda x, _: None, ps.ShapeError, r"got NoneType"),
        ("ffn.expert_ids", picks(0, 6), ps.RequestError, r"edit: .*distinct numbers in \[0, 6\), got \[0, 6\]"),
        ("ffn.expert_ids", picks(-1, 2), ps.RequestError, r"got \[-1, 2\]"),
        ("ffn.expert_ids", picks(2, 2), ps.RequestError, r"got \[2, 2\]"),
        ("2.attn.picks", picks(0, 1, 5), ps.RequestError, r"layer 2.*\[0, 5\), or -1 for none, got \[0, 1, 5\]"),
        ("attn.picks", picks(-1, -2, 1), ps.RequestError, r"got \[-1, -2, 1\]"),
        ("attn.picks", picks(1, 1, -1), ps.RequestError, r"got \[1, 1, -1\]"),
        ("ffn.inputs", lambda x, _: x, ps.RequestError, r"edit: expected stages among"),
        ("9.ffn.input", lambda x, _: x, ps.RequestError, r"edit: expected a layer that has ffn.input"),
        ("final.streams", lambda x, _: 1 / 0, ZeroDivisionError, "division"),
        ("streams", "not a function", ps.RequestError, r"edit: expected \{request: \{stage: function"),
    ],
)
def test_bad_edits_roll_back(stage: str, edit: Any, error: type[Exception], match: str) -> None:
    """What an edit must not return, and what it raises, undoes the step; the state it was given can be stepped."""
    state = started()
    usable(state, lambda: ps.decode_step(INVARIANT, state, edit={0: {stage: edit}}), error, match)


def test_edits_of_requests() -> None:
    """An edit of a request that is not open is refused; one of a request that does not run is left out."""
    state = started()
    with pytest.raises(ps.RequestError, match="request 7: not open"):
        ps.decode_step(INVARIANT, state, edit={7: {"streams": lambda x, _: x}})
    with pytest.raises(ps.RequestError, match=r"edit: expected \{request"):
        ps.decode_step(INVARIANT, state, edit={0: ["streams"]})
    _, plain = ps.decode_step(INVARIANT, state, only=[0])
    _, out = ps.decode_step(INVARIANT, state, only=[0], edit={1: {"streams": lambda x, _: x * 0}})
    assert torch.equal(plain.logits, out.logits)


def test_bad_records_are_refused() -> None:
    """Records of nothing that can be forced, of another shape, or with choices no token can make, change nothing."""
    state = started()
    _, out = ps.decode_step(INVARIANT, state, only=[0], capture=ALL)
    record = out.captured
    experts, entries = record.stages["1.ffn.expert_ids"], record.stages["0.attn.picks"]
    cases: list[tuple[dict[str, Tensor], type[Exception], str]] = [
        ({"0.streams": record.stages["0.streams"]}, ps.RequestError, "records with choices"),
        ({"1.ffn.expert_ids": experts[:, :1]}, ps.ShapeError, r"1.ffn.expert_ids: expected i64\[1, 2\]"),
        ({"1.ffn.expert_ids": experts.int()}, ps.ShapeError, "torch.int32"),
        ({"1.ffn.expert_ids": experts.repeat(2, 1)}, ps.ShapeError, "one row per recorded token"),
        ({"1.ffn.expert_ids": experts + 6}, ps.RequestError, r"replay: request 0, position 21, layer 1"),
        ({"1.ffn.expert_ids": experts * 0}, ps.RequestError, r"distinct numbers in \[0, 6\)"),
        ({"0.attn.picks": entries * 0 + 5}, ps.RequestError, r"\[0, 5\), or -1"),
        ({"8.ffn.expert_ids": experts}, ps.RequestError, "expected a layer that has ffn.expert_ids"),
    ]
    for stages, error, match in cases:
        bad = attrs.evolve(record, stages=stages)
        usable(state, lambda bad=bad: ps.decode_step(INVARIANT, state, replay=bad), error, match)
    with pytest.raises(ps.RequestError, match="expected what a step captured"):
        ps.decode_step(INVARIANT, state, replay=[{"0.ffn.expert_ids": experts}])


def test_steps_stay_pure() -> None:
    """Captured, replayed and edited steps leave state and record as they were; the same step gives the same record."""
    state, ids = started(), ids_of(30, seed=4)
    how = {"capture": ALL, "edit": {1: {"streams": lambda x, _: x.mul_(2)}}}
    after, first = ps.extend_step(INVARIANT, state, {0: ids, 1: ()}, **how)
    held = {name: x.clone() for name, x in first.captured.stages.items()}
    replayed, second = ps.extend_step(INVARIANT, state, {0: ids, 1: ()}, replay=first.captured, **how)
    ps.decode_step(INVARIANT, after, capture=ALL)
    assert same(first.captured.stages, held)
    assert same(second.captured.stages, held)
    assert ps.invariants.check(replayed) == ()
    leaves = torch.utils._pytree.tree_leaves(first.captured)
    assert sum(isinstance(leaf, Tensor) for leaf in leaves) == len(held) + 1


def test_a_step_from_inside_an_edit_is_refused() -> None:
    """A caller's function that steps the state it is called from gets a StateBusyError, and the step is undone."""
    state = started()

    def edit(x: Tensor, token: ps.FedToken) -> Tensor:
        ps.decode_step(INVARIANT, state)
        return x

    usable(
        state,
        lambda: ps.decode_step(INVARIANT, state, edit={0: {"streams": edit}}),
        ps.StateBusyError,
        "expected buffers at rest",
    )


def test_a_tap_of_the_pieces() -> None:
    """``forward`` and ``layer_step`` take any tap: it is called once a stage with the full name, and may replace."""
    state = opened(NOT_CHOOSING)
    prepared, batch = ps.prepare_extend(state, {0: ids_of(9)})
    view = ps.forward_batch(prepared, batch)
    names: list[str] = []

    def tap(name: str, x: Tensor) -> Tensor:
        names.append(name)
        return x * 0 if name == "final.streams" else x

    _, logits = ps.forward(NOT_CHOOSING, prepared.kv, view, tap=tap)
    assert len(set(names)) == len(names) == 3 * 10 + 1 + 1
    assert (logits == 0).all()
    one = len(names)
    ps.layer_step(NOT_CHOOSING, 1, embed_tokens(NOT_CHOOSING, view), prepared.kv, view, tap=tap)
    assert {name.split(".")[0] for name in names[one:]} == {"1"}
    assert [name.removeprefix("1.") for name in names[one:]] == list(STAGES)[:-1]


def test_default_batches_match_the_cache_free_model() -> None:
    """A captured step of default numerics still equals the model without a cache."""
    ids = ids_of(N)
    out = prefill(NOT_CHOOSING, ids, capture=ALL, edit={0: {stage: lambda x, _: x for stage in ALL}})
    torch.testing.assert_close(out.logits, recompute(NOT_CHOOSING, ids), atol=5e-5, rtol=5e-5)
    assert CHOOSING["fused"].ops is FUSED
    assert CHOOSING["reference"].ops is REFERENCE
