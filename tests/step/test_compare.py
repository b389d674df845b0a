"""Two runs are told apart at the first number that differs, however their tokens were batched and cut."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import purestep as ps
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from kit.checkpoints import random_tensors
from kit.configs import tiny_config
from kit.engine import engine_model
from kit.models import tiny_model
from kit.steps import ENDLESS, examples, fresh, ids_of
from oracle.model import comparable_rows, oracle_logits
from oracle.ops import rope_frequencies, rotate_pairs
from purestep.model.loading import build_model
from purestep.model.stages import STAGES, full_names, split_name
from purestep.step.compare import Comparison, compare_runs
from purestep.step.container import seal
from torch import Tensor

RAW = tiny_config((4, 128), hidden=32, head_dim=16, index_dim=16, index_heads=8, index_topk=3, window=8, vocab=32)
RAW |= {"hc_sinkhorn_iters": 2}
TENSORS = random_tensors(RAW, seed=3, storage=torch.bfloat16)
# Every row chooses among experts, and from position 15 on among entries.
INVARIANT = {
    dtype: engine_model(RAW, TENSORS, dtype=dtype, numerics=attrs.evolve(numerics, invariant=True))
    for dtype, numerics in (("float32", ps.Numerics.plain()), ("bfloat16", ps.Numerics.official()))
}
MODEL = INVARIANT["float32"]
NAMES = full_names(MODEL.config, STAGES, "stages")
N = 18
TEXTS = {request: ids_of(N, seed=request) for request in range(2)}

Plan = Sequence[Mapping[int, int]]
"""What every step feeds: request -> tokens."""


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Plan]:
    """Draw how both texts are fed: chunks in any company, then the last few tokens decoded in any company."""
    ends = {request: draw(st.integers(N - 4, N), label=f"prefill of {request}") for request in TEXTS}
    return _steps(draw, dict.fromkeys(TEXTS, 0), ends, 9), _steps(draw, ends, dict.fromkeys(TEXTS, N), 1)


def _steps(draw: st.DrawFn, starts: Mapping[int, int], ends: Mapping[int, int], most: int) -> Plan:
    left = {request: ends[request] - starts[request] for request in TEXTS}
    steps = []
    while going := [request for request in TEXTS if left[request]]:
        rows = draw(st.permutations(going))[: draw(st.integers(1, len(going)))]
        steps.append({r: min(left[r], draw(st.integers(min(2, most), most))) for r in rows})
        left = {r: n - steps[-1].get(r, 0) for r, n in left.items()}
    return steps


CHUNKED = ([{0: 7, 1: 5}, {0: 6}, {1: 9}], [{1: 1, 0: 1}] * 4 + [{0: 1}])


def run(
    model: ps.Model,
    plan: tuple[Plan, Plan] = CHUNKED,
    *,
    between: Callable[[ps.DecodeState], ps.DecodeState] = lambda state: state,
    **how: Any,
) -> list[ps.Captured]:
    """Feed the texts by a plan and return what the steps captured; ``between`` stands between chunks and decodes."""
    state, fed = fresh(model, 2, context=64), dict.fromkeys(TEXTS, 0)
    how = {"capture": STAGES} | how
    for _ in TEXTS:
        state, _ = ps.open_request(state, ENDLESS)
    records = []
    chunks, decodes = plan
    for number, step in enumerate([*chunks, *decodes]):
        if number == len(chunks):
            state = between(state)
        ids = {r: TEXTS[r][fed[r] : fed[r] + n] for r, n in step.items()}
        if number < len(chunks):
            state, out = ps.extend_step(model, state, ids, sample=False, logits="all", **how)
        else:
            state, out = ps.decode_step(model, state, only=step, force={r: one[0] for r, one in ids.items()}, **how)
        fed = {r: n + step.get(r, 0) for r, n in fed.items()}
        records.append(out.captured)
    return records


def step_of(plan: tuple[Plan, Plan], request: int, position: int) -> int:
    """Find the step of a plan that feeds a token."""
    n_fed = 0
    for number, step in enumerate([*plan[0], *plan[1]]):
        n_fed += step.get(request, 0)
        if position < n_fed:
            return number
    raise AssertionError("the plan feeds every token")


def add_one(at: int, position: int, seen: list[Tensor]) -> Callable[[Tensor, ps.FedToken], Tensor]:
    """Make an edit that adds 1 to one number of one token's row; a row of choices is turned or loses its last."""

    def edit(x: Tensor, token: ps.FedToken) -> Tensor:
        if token.position != position:
            return x
        if token.stage == "ffn.expert_ids":
            return x.roll(1)
        if token.stage == "attn.picks":
            return x.where(torch.arange(len(x)) != (x >= 0).sum() - 1, -1)
        seen.append(x)
        flat = x.flatten().clone()
        flat[at % len(flat)] += 1
        return flat.view_as(x)

    return edit


@examples(12)
@given(a=plans(), b=plans(), data=st.data())
def test_a_planted_perturbation_is_found_exactly_there(
    a: tuple[Plan, Plan], b: tuple[Plan, Plan], data: st.DataObject
) -> None:
    """Whatever the batches and chunks of the two runs, the edited step, layer, stage, token and number are named."""
    name = data.draw(st.sampled_from(NAMES), label="stage")
    request, position = data.draw(st.sampled_from([*TEXTS])), data.draw(st.integers(0, N - 1), label="position")
    at = data.draw(st.integers(0, 999), label="number")
    layer, stage = split_name(name)
    assume(stage != "attn.picks" or position >= 3)
    seen: list[Tensor] = []
    plain = run(MODEL, a)
    edited = run(MODEL, b, edit={request: {name: add_one(at, position, seen)}})
    found, mirrored = ps.first_difference(plain, edited), ps.first_difference(edited, plain)
    assert found is not None
    assert (found.layer, found.stage) == (layer, stage)
    assert (found.request_id, found.position) == (request, position)
    assert (found.step_a, found.step_b) == (step_of(a, request, position), step_of(b, request, position))
    assert mirrored is not None
    assert (mirrored.step_a, mirrored.step_b, mirrored.layer, mirrored.stage) == (
        found.step_b,
        found.step_a,
        layer,
        stage,
    )
    assert (mirrored.value_a, mirrored.value_b) == (found.value_b, found.value_a)
    if STAGES[stage].is_choice:
        assert found.n_differing == (1 if stage == "attn.picks" else 2)
        return
    (row,) = seen
    number = at % row.numel()
    assert found.index == tuple(int(i) for i in torch.unravel_index(torch.tensor(number), row.shape))
    assert found.value_a == row.flatten()[number].item()
    assert found.value_b == (row.flatten()[number] + 1).item()
    assert found.n_differing == 1
    assert found.largest_abs == abs(found.value_a - found.value_b)


@pytest.mark.parametrize("dtype", INVARIANT)
@examples(4)
@given(a=plans(), b=plans())
@example(a=([{1: N, 0: N}], []), b=CHUNKED)
def test_equal_runs_do_not_differ(dtype: str, a: tuple[Plan, Plan], b: tuple[Plan, Plan]) -> None:
    """In row-independent numerics any two ways of feeding the same texts agree in every number."""
    found = compare_runs(run(INVARIANT[dtype], a), run(INVARIANT[dtype], b))
    assert found.difference is None
    assert found.n_tokens == 2 * N
    assert {*found.stages} == {*NAMES, "logits"}


def test_solo_is_compared_with_batch() -> None:
    """A request alone in its run is compared with the one that it is mapped to; the other is left out."""
    batch = run(MODEL)
    alone = run(MODEL, ([{1: N}], []))
    alone = [record.relabel({1: 0}) for record in alone]
    found = compare_runs(alone, batch, requests={0: 1})
    assert (found.difference, found.requests, found.n_tokens) == (None, ((0, 1),), N)
    other = ps.first_difference(alone, batch)  # request 0 of the batch has another text
    assert other is not None
    assert (other.layer, other.stage) == (0, "streams")
    assert "same tokens" in str(other)


def test_reference_and_fused_agree_within_rounding() -> None:
    """The two kernel tables agree up to rounding, and at tolerance 0 their first rounding is found."""
    model = tiny_model((4, 128), hidden=64, inter=32)
    a, b = (run(build_model(model.config, model.params, kernels=name)) for name in ("reference", "fused"))
    assert ps.first_difference(a, b, atol=1e-4, rtol=1e-4) is None
    found = ps.first_difference(a, b)
    assert found is not None
    assert 0 < found.largest_abs < 1e-4


def test_cold_and_restored_runs_agree(tmp_path: Path) -> None:
    """A run that went through a file in the middle is the run that did not; what is planted after it is found."""

    def through_file(state: ps.DecodeState) -> ps.DecodeState:
        ps.save_state(state, tmp_path)
        return ps.restore_state(MODEL, tmp_path)

    cold = run(MODEL)
    assert ps.first_difference(cold, run(MODEL, between=through_file)) is None
    planted = {1: {"1.attn.output": add_one(0, 15, [])}}
    found = ps.first_difference(cold, run(MODEL, between=through_file, edit=planted))
    assert found is not None
    assert (found.step_a, found.layer, found.stage, found.position) == (step_of(CHUNKED, 1, 15), 1, "attn.output", 15)


FLOATS = ("streams", "attn.input", "attn.output", "ffn.streams", "ffn.output", "final.streams")


def test_float32_and_bfloat16_agree_within_a_tolerance() -> None:
    """Rounding to bfloat16 passes under a tolerance, is found without one, and hides no larger perturbation."""
    raw = RAW | {"index_topk": 64, "num_experts_per_tok": RAW["n_routed_experts"]}  # nothing to choose
    tensors = random_tensors(raw, seed=3, storage=torch.bfloat16)
    wide, narrow = (engine_model(raw, tensors, dtype=dtype) for dtype in ("float32", "bfloat16"))
    a = run(wide, capture=FLOATS)
    assert ps.first_difference(a, run(narrow, capture=FLOATS), atol=0.5) is None
    found = ps.first_difference(a, run(narrow, capture=FLOATS))
    assert found is not None
    assert (found.layer, found.stage) == (0, "attn.input")  # embeddings are the same numbers in both
    planted = {0: {"1.ffn.output": lambda x, token: x + 2 * (token.position == 11)}}
    found = ps.first_difference(a, run(narrow, capture=FLOATS, edit=planted), atol=0.5)
    assert found is not None
    assert (found.layer, found.stage, found.request_id, found.position) == (1, "ffn.output", 0, 11)


def oracle_run(tensors: Mapping[str, Tensor], request: int, at: Sequence[int] | None = None) -> ps.Captured:
    """Record the oracle's reading of a text as a run of one step, at the positions that can be compared."""
    trace: dict[str, Any] = {}
    logits = oracle_logits(RAW, tensors, TEXTS[request], torch.float64, trace)
    stages = {"final.streams": trace["layers"][-1]["streams_out"]}
    for layer, seen in enumerate(trace["layers"]):
        ratio = RAW["compress_ratios"][layer]
        theta = RAW["compress_rope_theta" if ratio else "rope_theta"]
        turns = rope_frequencies(RAW["qk_rope_head_dim"], theta, RAW["rope_scaling"] if ratio else None)
        found = {
            "streams": seen["streams_in"],
            "attn.input": seen["attn"]["x"],
            "attn.picks": seen.get("entry_ids"),
            "attn.heads": rotate_pairs(seen["o"], torch.arange(N), turns),  # before it is turned back
            "attn.output": seen["attn"]["y"],
            "ffn.streams": seen["streams_mid"],
            "ffn.input": seen["ffn"]["x"],
            "ffn.expert_ids": seen["expert_ids"],
            "ffn.expert_weights": seen["expert_weights"],
            "ffn.output": seen["ffn"]["y"],
        }
        stages |= {f"{layer}.{stage}": x for stage, x in found.items() if x is not None}
    rows = comparable_rows(trace).nonzero().flatten().tolist() if at is None else list(at)
    return ps.Captured(
        request_ids=(request,) * len(rows),
        positions=tuple(rows),
        stages={name: x[rows] for name, x in stages.items()},
        logits=logits[rows],
        logit_rows=tuple(range(len(rows))),
    )


def by_expert_id(record: ps.Captured) -> ps.Captured:
    """Order every token's experts by number; the product lists them by score, which the oracle does not."""
    stages = dict(record.stages)
    for layer in range(RAW["num_hidden_layers"]):
        names = f"{layer}.ffn.expert_ids", f"{layer}.ffn.expert_weights"
        order = stages[names[0]].argsort(-1)
        stages |= {name: stages[name].gather(-1, order) for name in names}
    return attrs.evolve(record, stages=stages)


def test_the_product_agrees_with_the_oracle() -> None:
    """A run agrees with an independent implementation in every stage that both have, and not with other weights."""
    product = [by_expert_id(record) for record in run(MODEL)]
    oracle = [by_expert_id(oracle_run(TENSORS, request)) for request in TEXTS]
    found = compare_runs(product, oracle, atol=5e-5)
    assert found.difference is None
    assert found.n_tokens > N
    assert len(found.stages) == len(NAMES) - 2 + 1  # no router logits, but logits
    wrong = dict(TENSORS) | {"layers.1.attn.wo_b.weight": 1.01 * TENSORS["layers.1.attn.wo_b.weight"].float()}
    other = [by_expert_id(oracle_run(wrong, record.request_ids[0], record.positions)) for record in oracle]
    difference = ps.first_difference(product, other, atol=5e-5)
    assert difference is not None
    assert (difference.layer, difference.stage) == (1, "attn.output")


# Runs made by hand, of a few numbers that meet often.
HAND = {"0.streams": (2, 2), "0.attn.picks": (3,), "1.ffn.input": (2,), "final.streams": (1, 2), "logits": (3,)}
NUMBERS = (0.0, -0.0, 1.0, 1.0078125, 1.375, -1.0, 2.0**26, math.inf, -math.inf, math.nan)
TOLERANCES = st.sampled_from((0.0, 0.01, 0.3))


@st.composite
def hand_made(draw: st.DrawFn) -> list[ps.Captured]:
    """Draw a run: any tokens in any order, some fed twice, some stages missing, numbers of one dtype."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    records = []
    for _ in range(draw(st.integers(1, 3))):
        token = st.tuples(st.integers(0, 1), st.integers(0, 2))
        tokens = draw(st.lists(token, min_size=1, max_size=4))
        rows = draw(st.lists(st.integers(0, len(tokens) - 1), unique=True, max_size=len(tokens)))
        names = draw(st.lists(st.sampled_from([*HAND][:-1]), unique=True))
        stages = {name: draw(_tensors(name, len(tokens), dtype)) for name in names}
        logits = draw(_tensors("logits", len(rows), dtype))
        ids, positions = zip(*tokens, strict=True)
        records.append(
            ps.Captured(request_ids=ids, positions=positions, stages=stages, logits=logits, logit_rows=tuple(rows))
        )
    return records


def _tensors(name: str, n_rows: int, dtype: torch.dtype) -> st.SearchStrategy[Tensor]:
    shape = (n_rows, *HAND[name])
    is_whole = name == "0.attn.picks"
    number = st.sampled_from((0, 0, 0, 1)) if is_whole else st.sampled_from((0.0,) * 8 + NUMBERS)
    numbers = st.lists(number, min_size=math.prod(shape), max_size=math.prod(shape))
    return numbers.map(lambda found: torch.tensor(found, dtype=torch.int64 if is_whole else dtype).reshape(shape))


def agree(x: float, y: float, atol: float, rtol: float) -> bool:
    """Compare two numbers as the documentation says."""
    if isinstance(x, int) or math.isinf(x) or math.isinf(y):
        return x == y
    return (math.isnan(x) and math.isnan(y)) or abs(x - y) <= atol + rtol * max(abs(x), abs(y))


def numbers_by_token(records: Sequence[ps.Captured]) -> list[dict[str, dict[tuple[int, int, int], Tensor]]]:
    """Cut a run into rows, step by step: stage -> (request, position, how often fed before) -> row."""
    n_fed, steps = Counter[tuple[int, int]](), []
    for record in records:
        tokens = []
        for token in zip(record.request_ids, record.positions, strict=True):
            tokens.append((*token, n_fed[token]))
            n_fed[token] += 1
        step = {name: dict(zip(tokens, record.stages[name], strict=True)) for name in HAND if name in record.stages}
        lines = {row: line for line, row in enumerate(record.logit_rows)}
        step["logits"] = {tokens[row]: record.logits[lines[row]] for row in sorted(lines)}
        steps.append(step)
    return steps


@examples(100)
@given(a=hand_made(), b=hand_made(), atol=TOLERANCES, rtol=TOLERANCES)
def test_it_is_what_loops_over_all_numbers_find(
    a: list[ps.Captured], b: list[ps.Captured], atol: float, rtol: float
) -> None:
    """For any two runs, NaN and infinities included, plain loops find the same tensor, counts and largest gap."""
    steps_a, steps_b = numbers_by_token(a), numbers_by_token(b)
    order = [*HAND]
    n_before = 0
    for number, step in enumerate(steps_a):
        for name in sorted(step, key=order.index):
            met = [
                (token, at, index, x, y)
                for token, row in step[name].items()
                for at, other in enumerate(steps_b)
                if token in other.get(name, {})
                for index, (x, y) in enumerate(zip(row.flatten(), other[name][token].flatten(), strict=True))
            ]
            wrong = [one for one in met if not agree(one[3].item(), one[4].item(), atol, rtol)]
            if wrong:
                found = ps.first_difference(a, b, atol=atol, rtol=rtol)
                assert found is not None
                gaps = [_gap(x.item(), y.item()) for *_, x, y in wrong]
                token, at, index, x, y = wrong[gaps.index(max(gaps))]
                assert (found.step_a, found.step_b) == (number, at)
                assert (found.layer, found.stage) == split_name(name)
                assert (found.request_id, found.position) == token[:2]
                shape = torch.Size(HAND[name])
                assert found.index == tuple(int(i) for i in torch.unravel_index(torch.tensor(index), shape))
                assert str((found.value_a, found.value_b)) == str((x.item(), y.item()))
                assert (found.n_differing, found.n_compared, found.n_before) == (len(wrong), len(met), n_before)
                assert found.largest_abs == max(gaps)
                assert str(found).startswith(f"First difference: step {number} ")
                return
            n_before += len(met)
    if not n_before:
        with pytest.raises(ps.RequestError, match="in common"):
            ps.first_difference(a, b)
    else:
        assert ps.first_difference(a, b, atol=atol, rtol=rtol) is None


def _gap(x: float, y: float) -> float:
    gap = abs(x - y)
    return math.inf if math.isnan(gap) else gap


def _share(gap: float, x: float, y: float) -> float:
    return math.inf if math.isinf(gap) else gap / max(abs(x), abs(y))


@examples(100)
@given(st.lists(st.tuples(*[st.sampled_from(NUMBERS)] * 2), min_size=1, max_size=6), TOLERANCES, TOLERANCES)
def test_numbers_agree_as_documented(pairs: list[tuple[float, float]], atol: float, rtol: float) -> None:
    """Two numbers are measured in double precision, by the larger of them, and either may be the first."""

    def recorded(numbers: Sequence[float]) -> list[ps.Captured]:
        stages = {"0.attn.input": torch.tensor([numbers], dtype=torch.float32)}
        none = torch.empty(0, 3)
        return [ps.Captured(request_ids=(0,), positions=(0,), stages=stages, logits=none, logit_rows=())]

    wrong = [(x, y) for x, y in pairs if not agree(x, y, atol, rtol)]
    a, b = (recorded(numbers) for numbers in zip(*pairs, strict=True))
    for found in (ps.first_difference(a, b, atol=atol, rtol=rtol), ps.first_difference(b, a, atol=atol, rtol=rtol)):
        assert (found is not None) == bool(wrong)
        if found is not None:
            gaps = [_gap(x, y) for x, y in wrong]
            shares = [_share(gap, x, y) for gap, (x, y) in zip(gaps, wrong, strict=True)]
            assert (found.n_differing, found.largest_abs) == (len(wrong), max(gaps))
            assert found.largest_rel == max(shares)


@examples(50)
@given(a=hand_made())
def test_a_run_does_not_differ_from_itself(a: list[ps.Captured]) -> None:
    """Compared with itself a run agrees, tokens that it fed twice included."""
    if any(x.numel() for record in a for x in (record.logits, *record.stages.values())):
        assert ps.first_difference(a, a) is None


RECORDS = run(MODEL, ([{0: 5, 1: 4}], [{0: 1}]))
RECORD = RECORDS[0]


def changed(record: ps.Captured = RECORD, **fields: Any) -> list[ps.Captured]:
    return [attrs.evolve(record, **fields)]


def renamed(old: str, new: str) -> list[ps.Captured]:
    return changed(stages={new: RECORD.stages[old]})


WRONG: dict[str, tuple[Any, dict[str, Any], type[ps.PurestepError], str]] = {
    "no steps": ([], {}, ps.RequestError, "one or more steps"),
    "one record": (RECORD, {}, ps.RequestError, "got Captured"),
    "a step without captures": ([RECORD, None], {}, ps.RequestError, "NoneType"),
    "unknown stage": (renamed("0.streams", "0.stream"), {}, ps.RequestError, "0.stream'"),
    "stage without layer": (renamed("0.streams", "streams"), {}, ps.RequestError, "full name"),
    "no token in common": ([RECORD.relabel({0: 5, 1: 6})], {}, ps.RequestError, "requests 5, 6"),
    "no stage in common": (
        changed(stages={"final.streams": RECORD.stages["final.streams"]}, logits=torch.empty(0, 32), logit_rows=()),
        {"of": ("0.streams",)},
        ps.RequestError,
        "in common",
    ),
    "unknown request of a": (RECORDS, {"requests": {3: 0}}, ps.RequestError, r"run_a \(0, 1\), got 3"),
    "unknown request of b": (RECORDS, {"requests": {0: 3}}, ps.RequestError, r"run_b \(0, 1\), got 3"),
    "negative tolerance": (RECORDS, {"atol": -1.0}, ps.RequestError, "atol"),
    "tolerance that is none": (RECORDS, {"rtol": math.nan}, ps.RequestError, "rtol"),
    "another width": (renamed("0.attn.input", "0.streams"), {}, ps.ShapeError, r"0\.streams.*one model"),
    "whole against floating": (renamed("0.attn.picks", "1.ffn.expert_weights"), {}, ps.ShapeError, "one model"),
    "a row too few": (changed(stages={"0.streams": RECORD.stages["0.streams"][1:]}), {}, ps.ShapeError, "per token"),
    "a number instead of rows": (changed(stages={"0.streams": torch.tensor(1.0)}), {}, ps.ShapeError, "per token"),
    "a request too few": (changed(request_ids=RECORD.request_ids[1:]), {}, ps.ShapeError, "request_ids"),
    "a logit row too few": (changed(logit_rows=RECORD.logit_rows[1:]), {}, ps.ShapeError, "logits"),
    "a logit row beyond": (changed(logit_rows=(*RECORD.logit_rows[1:], 9)), {}, ps.ShapeError, "logit_rows"),
    "positions as tensors": (changed(positions=tuple(torch.arange(9))), {}, ps.RequestError, "plain integers"),
    "two models": ([RECORD, *changed(logits=torch.zeros(9, 5))], {}, ps.ShapeError, "step 1: logits"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_pair_of_runs_is_refused(case: str) -> None:
    """Each mistake is named, with what was expected instead."""
    other, arguments, error, message = WRONG[case]
    names = arguments.pop("of", RECORD.stages) if case == "no stage in common" else RECORD.stages
    mine = [attrs.evolve(record, stages={name: record.stages[name] for name in names}) for record in RECORDS]
    with pytest.raises(error, match=message):
        ps.first_difference(mine, other, **arguments)


def test_comparison_is_public_data() -> None:
    """What is found is plain data that prints and compares."""
    found = compare_runs(RECORDS, run(MODEL, ([{0: 6, 1: 4}], []), edit={0: {"final.streams": add_one(3, 5, [])}}))
    assert isinstance(found, Comparison)
    assert json.loads(json.dumps(attrs.asdict(found)))["difference"]["stage"] == "final.streams"
    assert "final.streams (float[T,M,H]), request 0, position 5, index [0, 3]" in str(found.difference)


def bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)


@examples(60)
@given(a=hand_made())
def test_a_run_comes_back_from_a_folder(tmp_path_factory: pytest.TempPathFactory, a: list[ps.Captured]) -> None:
    """Tokens, stages and every bit of every number are those that were saved, in memory of their own."""
    folder = tmp_path_factory.mktemp("run")
    ps.save_run(a, folder)
    again = ps.load_run(folder)
    assert len(again) == len(a)
    for record, saved in zip(again, a, strict=True):
        for field in ("request_ids", "positions", "logit_rows"):
            assert getattr(record, field) == getattr(saved, field)
        assert list(record.stages) == list(saved.stages)
        for x, y in zip((record.logits, *record.stages.values()), (saved.logits, *saved.stages.values()), strict=True):
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert torch.equal(bits(x), bits(y))
            assert x.untyped_storage().nbytes() == x.nbytes


def test_a_newer_run_replaces_an_older(tmp_path: Path) -> None:
    """A folder holds the run that was written last."""
    ps.save_run(RECORDS, tmp_path / "run")
    ps.save_run(RECORDS[1:], tmp_path / "run")
    assert len(ps.load_run(tmp_path / "run")) == 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    ps.save_run(RECORDS, folder)
    return folder


@examples(40)
@given(data=st.data())
def test_damaged_runs_are_refused(saved: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A flipped bit or a cut file is a CheckpointError, never another run."""
    folder, name = tmp_path_factory.mktemp("damaged"), data.draw(st.sampled_from(["run.json", "run.safetensors"]))
    for file in saved.iterdir():
        content = bytearray(file.read_bytes())
        if file.name == name and data.draw(st.booleans(), label="cut"):
            content = content[: data.draw(st.integers(0, len(content) - 1))]
        elif file.name == name:
            content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        (folder / file.name).write_bytes(content)
    try:
        again = ps.load_run(folder)
    except ps.CheckpointError:
        return
    assert name == "run.json"  # only white space between the records may change unnoticed
    assert ps.first_difference(RECORDS, again) is None


FORGED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no steps": lambda records: records.update(steps=[]),
    "no list of steps": lambda records: records.update(steps=3),
    "a step too few": lambda records: records["steps"].pop(),
    "a token too many": lambda records: records["steps"][0]["positions"].append(9),
    "an unknown stage": lambda records: records["steps"][0]["stages"].append("9.streams"),
    "positions as words": lambda records: records["steps"][0].update(positions=[*"abcdefghi"]),
}


@pytest.mark.parametrize("case", FORGED)
def test_records_that_do_not_fit_their_tensors_are_refused(saved: Path, tmp_path: Path, case: str) -> None:
    """Records with a right checksum but a wrong content are a CheckpointError."""
    records = json.loads((saved / "run.json").read_text())
    FORGED[case](records)
    (tmp_path / "run.json").write_text(json.dumps(seal(records)))
    (tmp_path / "run.safetensors").write_bytes((saved / "run.safetensors").read_bytes())
    with pytest.raises(ps.CheckpointError):
        ps.load_run(tmp_path)


def test_foreign_folders_and_numbers_are_refused(tmp_path: Path) -> None:
    """A saved state is no run, an empty folder neither, a file is no folder, and complex numbers cannot be written."""
    state = fresh(MODEL, 1)
    ps.save_state(state, tmp_path / "state")
    for name in ("state", "none"):
        with pytest.raises(ps.CheckpointError, match="saved run"):
            ps.load_run(tmp_path / name)
    (tmp_path / "file").write_text("")
    with pytest.raises(ps.CheckpointError, match="folder"):
        ps.save_run(RECORDS, tmp_path / "file")
    with pytest.raises(ps.DtypeError, match="complex64"):
        ps.save_run(changed(logits=torch.zeros(9, 32, dtype=torch.complex64)), tmp_path / "new")
    assert not (tmp_path / "new").exists()
