"""Every set of numeric choices against the plain restatement of what that implementation rounds, stage by stage."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import purestep as ps
import pytest
import torch
from attrs import evolve
from kit.checkpoints import peer_logits, peer_model, random_tensors, stored_tensors
from kit.configs import tiny_config
from kit.engine import GREEDY, engine_model, random_ids
from oracle.rounded import OFFICIAL, SGLANG, TRANSFORMERS, VLLM_ASCEND, VLLM_ASCEND_NEWEST, Rules, Sublayers
from purestep.model.attention import round_index
from purestep.model.checkpoint import official_tensors
from purestep.ops.dispatch import FUSED, REFERENCE, Ops
from purestep.ops.router import route_scored
from torch import Tensor

CONFIG = tiny_config(
    (0, 4, 128),
    hidden=64,
    head_dim=128,
    rope_dim=16,
    q_lora=48,
    index_dim=32,
    index_topk=8,
    inter=64,
    yarn_factor=16,
    torch_dtype="bfloat16",
)
TENSORS = random_tensors(CONFIG, seed=1, storage=torch.bfloat16)
N = 132
IDS, OTHER_IDS = (random_ids(N, CONFIG["vocab_size"], seed=seed) for seed in (2, 9))
FLIPS = 0.03
"""Share of numbers that may fall to the other side of a rounding: one entry that does is read by many tokens."""
SCORED = ((2, 3, 4, 16), (2, 9, 16), (2, 3, 4))
COLUMNS = {
    "official": (ps.Numerics.official(), OFFICIAL),
    "transformers": (ps.Numerics.transformers(), TRANSFORMERS),
    "sglang": (ps.Numerics.sglang(), SGLANG),
    "vllm-ascend": (ps.Numerics.vllm_ascend(), VLLM_ASCEND),
    "vllm-ascend newest": (ps.Numerics.vllm_ascend(newest=True), VLLM_ASCEND_NEWEST),
}


@cache
def captured(numerics: ps.Numerics, is_other: bool = False) -> dict[str, Tensor]:
    """Everything that a prefill computes on the way."""
    return stages_of(engine_model(CONFIG, TENSORS, numerics=numerics), OTHER_IDS if is_other else IDS)


def stages_of(model: ps.Model, ids: list[int] = IDS) -> dict[str, Tensor]:
    """Run a prefill: what it computes on the way in float32 (choices as they are), and the logits."""
    state = ps.init_state(model, ps.Capacity(1, N, N))
    state, request = ps.open_request(state, GREEDY)
    stages = ("streams", "attn.input", "attn.picks", "attn.output", "ffn.streams", "ffn.input", "ffn.expert_ids")
    stages = (*stages, "ffn.output", "final.streams")
    _, out = ps.extend_step(model, state, {request: ids}, sample=False, logits="all", capture=stages)
    assert out.captured is not None
    seen = {name: x.float() if x.is_floating_point() else x for name, x in out.captured.stages.items()}
    return seen | {"logits": out.logits}


def unequal(got: Tensor, expected: Tensor) -> float:
    """Return the share of numbers that differ in bfloat16; all of them if one is off by more than a few percent."""
    assert got.shape == expected.shape
    if (got - expected).abs().max() > 0.06 * expected.abs().max():
        return 1.0
    return float((got.bfloat16() != expected.bfloat16()).float().mean())


def stages_off(
    numerics: ps.Numerics,
    rules: Rules,
    *,
    seen: dict[str, Tensor] | None = None,
    tensors: Any = TENSORS,
    ids: list[int] = IDS,
) -> dict[str, float]:
    """Run the restatement from the engine's own inputs, stage by stage: share of unequal numbers by stage."""
    seen, plain = seen or captured(numerics), Sublayers(rules, CONFIG, tensors)
    last = CONFIG["num_hidden_layers"] - 1
    off = {}
    for layer, ratio in enumerate(CONFIG["compress_ratios"][: last + 1]):
        stage = {name: seen[f"{layer}.{name}"] for name in ("streams", "attn.input", "attn.output", "ffn.streams")}
        stage |= {name: seen[f"{layer}.{name}"] for name in ("ffn.input", "ffn.expert_ids", "ffn.output")}
        after = seen["final.streams"] if layer == last else seen[f"{layer + 1}.streams"]
        picks = seen.get(f"{layer}.attn.picks")
        y, scores = plain.attention(layer, stage["attn.input"], picks)
        off[f"{layer} attention"] = unequal(stage["attn.output"], y)
        if ratio == 4:
            assert picks is not None
            assert scores is not None
            off["picks"] = picks_off(picks, scores, 1e-2 if rules.scores_rounded else 1e-4)
        y, _ = plain.experts(layer, stage["ffn.input"], torch.tensor(ids), stage["ffn.expert_ids"])
        off[f"{layer} experts"] = unequal(stage["ffn.output"], y)
        off[f"{layer} enter"] = unequal(stage["attn.input"], plain.enter(layer, "attn", stage["streams"]))
        off[f"{layer} leave"] = unequal(after, plain.leave(layer, "ffn", stage["ffn.streams"], stage["ffn.output"]))
    off["logits"] = float(((seen["logits"] - plain.logits(seen["final.streams"])).abs() > 1e-5).float().mean())
    return off


def picks_off(picks: Tensor, scores: Tensor, margin: float) -> float:
    """Return the share of picks that the scores would not make, ties and near ties aside."""
    count = (picks >= 0).sum(-1, keepdim=True)
    ranked = scores.sort(-1, descending=True).values
    border = ranked.gather(-1, (count - 1).clamp(min=0))
    chosen = scores.gather(-1, picks.clamp(min=0))
    return float(((chosen < border - margin * border.abs()) & (picks >= 0)).float().mean())


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_is_what_the_sheet_says(name: str) -> None:
    """From the same inputs, each stage of a column's numerics has the restatement's bits, but for rare flips."""
    off = stages_off(*COLUMNS[name])
    assert max(off.values()) < FLIPS, off


CHOICES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "kv": ({"kv_qdq": True}, {"kv": "fp8"}),
    "kv wide": ({"kv_qdq": "wide"}, {"kv": "fp8 of wide"}),
    "index fp4": ({"indexer_qdq": True}, {"index": "fp4"}),
    "query steps": ({"query_norm_rounding": True}, {"query_norm": "all"}),
    "query factor": ({"query_norm_rounding": "factor"}, {"query_norm": "factor"}),
    "probabilities": ({"probability_rounding": True}, {"probabilities": "unnormalised"}),
    "normalised": ({"probability_rounding": "normalised"}, {"probabilities": "normalised"}),
    "no clamp": ({"clamp_shared_expert": False}, {"clamp_shared": False}),
    "no rounding between": ({"entry_norm_rounding": False}, {"between": False}),
    "turns": ({"rotary_rounding": True}, {"turn_rounded": True}),
    "window yarn": ({"window_yarn": True}, {"window_yarn": True}),
    "pooling all": ({"pooling_rounding": "all"}, {"pooling": "rounded"}),
    "pooling none": ({"pooling_rounding": "none"}, {"pooling": "wide"}),
    "router": ({"router_rounding": True}, {"router_rounded": True}),
    "weights after": ({"routing_weight": "after"}, {"weigh": "after"}),
    "weights summed": ({"routing_weight": "summed"}, {"weigh": "on the sum"}),
    "expert steps": ({"expert_rounding": True}, {"steps_rounded": True}),
    "streams": ({"stream_rounding": True}, {"streams_rounded": True}),
    "activations": ({"activation_qdq": True}, {"activations": True}),
    "wo_a": ({"wo_a_qdq": True}, {"wo_a_activations": True}),
    "head": ({"head_rounding": True}, {"head_rounded": True}),
}


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_is_seen(name: str) -> None:
    """Each choice alone does what the restatement does with it, and not what it does without."""
    numbers, rules = CHOICES[name]
    numerics, restated = ps.Numerics(**numbers), replace(Rules(), **rules)
    off = stages_off(numerics, restated)
    if max(off.values()) >= FLIPS:
        # A key that lies between two bfloat16 numbers to within float32 rounding goes the other way on some
        # processors, and every token of its window reads it; no other text has that key.
        off = stages_off(numerics, restated, seen=captured(numerics, is_other=True), ids=OTHER_IDS)
    assert max(off.values()) < FLIPS, off
    without = stages_off(numerics, Rules())
    assert max(without.values()) > 2 * FLIPS, without


@pytest.mark.parametrize("form", ["fp4", "fp8"])
def test_rows_that_meet_stored_weights_are_rounded(form: str) -> None:
    """Over weights in a released form official numerics round the rows that meet them, and over expanded ones not."""
    stored = stored_tensors(CONFIG, TENSORS, form)
    expanded = engine_model(CONFIG, stored, dtype="bfloat16")
    tensors = official_tensors(expanded.config, expanded.params)
    wanted, without = replace(OFFICIAL, activations=True), OFFICIAL
    for model, rules, other in (
        (engine_model(CONFIG, stored), wanted, without),
        (expanded, without, wanted),
    ):
        assert model.numerics == ps.Numerics.official()
        seen = stages_of(model)
        off = stages_off(model.numerics, rules, seen=seen, tensors=tensors)
        assert max(off.values()) < FLIPS, off
        assert max(stages_off(model.numerics, other, seen=seen, tensors=tensors).values()) > 0.5


def test_rounded_rows_are_the_same_over_every_table() -> None:
    """Sequences without a cache and the plain, fast and row-independent kernels agree over stored weights."""
    stored = stored_tensors(CONFIG, TENSORS, "fp4")
    rows = []
    for options in ({}, {"kernels": "reference"}, {"numerics": evolve(ps.Numerics.official(), invariant=True)}):
        model = engine_model(CONFIG, stored, **options)
        rows.append(stages_of(model)["0.ffn.output"])
    for other in rows[1:]:
        assert unequal(other, rows[0]) < FLIPS
    with torch.no_grad():
        logits = ps.forward_sequence(model, torch.tensor(IDS[:24]))
    paged = stages_of(model)["logits"][:24]
    assert (logits - paged).abs().mean() < 0.02 * paged.abs().mean()


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize(("choice", "rule"), [(False, "none"), (True, "fp4"), ("fp8", "fp8"), ("int8", "int8")])
def test_index_rows_round_as_the_sheet_says(choice: Any, rule: str, hadamard: bool) -> None:
    """Index queries and keys are rotated and rounded like those of the restatement, rows of zeros included."""
    model = engine_model(CONFIG, TENSORS, numerics=ps.Numerics(indexer_qdq=choice, indexer_hadamard=hadamard))
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[3] = 0
    got = round_index(model, x)
    assert got.dtype is model.key_dtype
    for other in ("none", "fp4", "fp8", "int8"):
        expected = Sublayers(Rules(index=other, hadamard=hadamard), CONFIG, TENSORS).index_row(x.float())
        off = ((got.float() - expected).abs() > 1e-6 * expected.abs()).float().mean()
        assert off < FLIPS if other == rule else off > 0.2


@pytest.mark.parametrize("ops", [REFERENCE, FUSED], ids=lambda ops: ops.name)
def test_a_rounded_query_norm_does_not_depend_on_its_place(ops: Ops) -> None:
    """Every head has the bits of the restatement wherever it stands, also behind the last full vector of a tensor."""
    q = torch.randn(300, 1, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = Sublayers(OFFICIAL, CONFIG, TENSORS).query(q.float())
    for n in (1, 3, 9, 31, 300):
        got = torch.cat([ops.normalize_query(part, 1e-6, rounding=True) for part in q.split(n)])
        assert torch.equal(got.float(), expected)


def test_index_scores_round_in_the_dtype() -> None:
    """Rounded index scores are bfloat16 numbers, others are not."""
    model = engine_model(CONFIG, TENSORS, numerics=ps.Numerics(index_score_rounding=True))
    q, keys, weights = (torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16() for shape in SCORED)
    rounded = model.ops.index_scores(q, keys, weights, rounding=True)
    assert torch.equal(rounded, rounded.bfloat16().float())
    plain = model.ops.index_scores(q, keys, weights, rounding=False)
    assert not torch.equal(plain, rounded)
    torch.testing.assert_close(plain, rounded, atol=0.05 * float(plain.abs().max()), rtol=0)


def test_epsilon_keeps_tiny_scores_from_mattering() -> None:
    """Where all scores vanish, 1e-20 in the sum leaves weights that vanish as well."""
    logits = torch.full((1, 4), -100.0)
    _, plain = route_scored(logits, torch.zeros(4), 2, 1.5)
    _, floored = route_scored(logits, torch.zeros(4), 2, 1.5, epsilon=1e-20)
    torch.testing.assert_close(plain, torch.full((1, 2), 0.75))
    assert floored.max() < 0.3
    assert ps.Numerics.transformers().router_epsilon == ps.Numerics.sglang().router_epsilon == 1e-20


def peer_stages(config: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Run transformers in bfloat16: what goes into and comes out of its sublayers and its head, by layer."""
    peer = peer_model(config, TENSORS, torch.bfloat16)
    seen: dict[str, list[Tensor]] = {
        name: [] for name in ("attn.input", "attn.output", "ffn.input", "ffn.output", "final.streams")
    }

    def keep(name: str) -> Any:
        return lambda _module, args, kwargs, out: (
            seen[f"{name}.input"].append((args[0] if args else kwargs["hidden_states"])[0]),
            seen[f"{name}.output"].append((out[0] if isinstance(out, tuple) else out)[0]),
            None,
        )[-1]

    for layer in peer.model.layers:
        layer.self_attn.register_forward_hook(keep("attn"), with_kwargs=True)
        layer.mlp.register_forward_hook(keep("ffn"), with_kwargs=True)
    peer.model.hc_head.register_forward_pre_hook(lambda _module, args: seen["final.streams"].append(args[0][0]))
    return seen | {"logits": [peer_logits(peer, IDS)]}


def test_transformers_numerics_are_those_of_transformers() -> None:
    """From the inputs that transformers has in bfloat16, its sublayers and its head come out, but for rare flips."""
    config = CONFIG | {"index_topk": 64}
    peer = peer_stages(config)

    def put(stage: str) -> Any:
        return lambda _x, token: peer[stage][token.layer or 0][token.position]

    outs = {}
    for numerics in (ps.Numerics.transformers(), ps.Numerics()):
        model = engine_model(config, TENSORS, numerics=numerics)
        state = ps.init_state(model, ps.Capacity(1, N, N))
        state, request = ps.open_request(state, GREEDY)
        edit = {request: {stage: put(stage) for stage in ("attn.input", "ffn.input", "final.streams")}}
        stages = ("attn.output", "ffn.output")
        _, out = ps.extend_step(model, state, {request: IDS}, sample=False, logits="all", capture=stages, edit=edit)
        assert out.captured is not None
        found = out.captured.stages
        off = {
            f"{layer} {stage}": unequal(found[f"{layer}.{stage}"], peer[stage][layer])
            for layer in range(config["num_hidden_layers"])
            for stage in stages
        }
        outs[numerics] = off | {"logits": float((out.logits != peer["logits"][0]).float().mean())}
    ours, plain = outs.values()
    assert max(ours.values()) < FLIPS, ours
    assert min(plain.values()) > 2 * FLIPS, plain


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_qdq": "narrow"},
        {"indexer_qdq": "fp4"},
        {"query_norm_rounding": 1},
        {"router_epsilon": -1.0},
        {"invariant": "yes"},
    ],
)
def test_choices_that_do_not_exist_are_refused(wrong: dict[str, Any]) -> None:
    """A value that no implementation has is an error that names the field."""
    with pytest.raises(ps.ConfigError, match=next(iter(wrong))):
        ps.Numerics(**wrong)
