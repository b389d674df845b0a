"""The simulated gate against numbers computed one by one; every rule planted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ascend_sim.rules import SimulatorError
from ascend_sim.simulator import simulate
from hypothesis import given
from hypothesis import strategies as st
from kit.steps import examples
from purestep.ops import router
from torch import Tensor

I32 = torch.int32
Arguments = dict[str, Any]
ALL = ("torch-npu", "cann-recipes", "vllm-ascend")


def draw(seed: int, *shape: int) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gate_call(seed: int = 0, rows: int = 3, experts: int = 8, k: int = 2) -> Arguments:
    """A valid call of the gate as V4 needs it."""
    return {
        "x": draw(seed, rows, experts),
        "k": k,
        "bias": draw(seed + 1, experts),
        "routed_scaling_factor": 1.5,
        "norm_type": 2,
    }


@given(seed=st.integers(0, 999), rows=st.integers(1, 5), k=st.integers(1, 6), norm=st.sampled_from([0, 1, 2]))
@examples(20)
def test_gate_selects_with_bias_and_weighs_without(seed: int, rows: int, k: int, norm: int) -> None:
    """Selection sees score plus bias; the weights are bare scores, summing to the factor unless softmax."""
    a = gate_call(seed, rows, 8, k) | {"norm_type": norm}
    with simulate(providers=ALL):
        weights, ids, scores = torch.ops.custom.npu_moe_gating_top_k(**a, out_flag=True)
    assert ids.dtype is I32
    for t in range(rows):
        x = a["x"][t].double().tolist()
        total = sum(map(math.exp, x))
        score = {
            0: [math.exp(v) / total for v in x],
            1: [1 / (1 + math.exp(-v)) for v in x],
            2: [math.sqrt(math.log1p(math.exp(v))) for v in x],
        }[norm]
        biased = [s + b for s, b in zip(score, a["bias"].tolist(), strict=True)]
        best = sorted(range(8), key=lambda e: -biased[e])[:k]
        assert ids[t].tolist() == best
        divisor = sum(score[e] for e in best) + 1e-20 if norm else 1.0
        assert weights[t].tolist() == pytest.approx([score[e] / divisor * 1.5 for e in best], rel=1e-5)
        assert scores[t].tolist() == pytest.approx(score, rel=1e-5)


@given(seed=st.integers(0, 999), rows=st.integers(1, 5))
@examples(10)
def test_gate_equals_the_reference_operators(seed: int, rows: int) -> None:
    """Scored and hashed routing are those of the reference, in both packages."""
    a = gate_call(seed, rows)
    table = torch.randint(0, 8, (20, 2), generator=torch.Generator().manual_seed(seed)).int()
    tokens = torch.randint(0, 20, (rows,), generator=torch.Generator().manual_seed(seed + 1))
    hashed = {key: v for key, v in a.items() if key != "bias"} | {"input_ids": tokens, "tid2eid": table}
    ids_ref, weights_ref = router.route_scored(a["x"], a["bias"], 2, 1.5)
    with simulate(providers=ALL):
        for run in (torch.ops.custom.npu_moe_gating_top_k, torch.ops._C_ascend.moe_gating_top_k_hash):
            weights, ids, rest = run(**a)
            assert torch.equal(ids.long(), ids_ref)
            torch.testing.assert_close(weights, weights_ref)
            assert rest.isnan().all()
            assert rest.shape == a["x"].shape
            weights, ids, _ = run(**hashed)
            by_token, weights_hash = router.route_hash(a["x"], table[tokens].long(), 1.5)
            assert torch.equal(ids.long(), by_token)
            torch.testing.assert_close(weights, weights_hash)
        plain = torch.ops._C_ascend.moe_gating_top_k
        weights, ids, _ = plain(a["x"], 2, 1, 1, 0, 0, 2, False, 1.5, 1e-20, bias_opt=a["bias"])
    assert torch.equal(ids.long(), ids_ref)
    torch.testing.assert_close(weights, weights_ref)


IDS, TABLE = torch.zeros(3, dtype=torch.int64), torch.zeros(20, 2, dtype=I32)
PLANTED: list[tuple[str, Callable[[Arguments], Arguments], str]] = [
    ("integer logits", lambda a: {"x": a["x"].int()}, "x of dtype"),
    ("no rows", lambda a: {"x": a["x"][:0]}, "no empty tensors"),
    ("strided logits", lambda a: {"x": a["x"].t().contiguous().t()}, "contiguous"),
    ("rank 3", lambda a: {"x": a["x"].unsqueeze(0)}, "x of shape"),
    ("bias of another dtype", lambda a: {"bias": a["bias"].bfloat16()}, "bias of dtype"),
    ("bias of other experts", lambda a: {"bias": a["bias"][:4]}, "bias of shape"),
    ("renorm", lambda a: {"renorm": 1}, "renorm=0"),
    ("groups", lambda a: {"group_count": 2}, "group_count=1"),
    ("no experts", lambda a: {"k": 0}, "k in 1"),
    ("too many experts chosen", lambda a: {"k": 9}, "k in 1"),
    ("too many experts", lambda a: {"x": torch.zeros(1, 2049), "bias": torch.zeros(2049)}, "at most 2048"),
    ("unknown score", lambda a: {"norm_type": 3}, "norm_type 0, 1 or 2"),
    ("ids without table", lambda a: {"input_ids": IDS}, "both or neither"),
    ("table without ids", lambda a: {"tid2eid": TABLE}, "both or neither"),
    ("int32 ids", lambda a: {"input_ids": IDS.int(), "tid2eid": TABLE}, "input_ids of dtype"),
    ("int64 table", lambda a: {"input_ids": IDS, "tid2eid": TABLE.long()}, "tid2eid of dtype"),
    ("table of other width", lambda a: {"input_ids": IDS, "tid2eid": TABLE[:, :1].contiguous()}, "tid2eid of shape"),
    ("unknown token", lambda a: {"input_ids": IDS + 20, "tid2eid": TABLE}, "token ids below"),
]


@pytest.mark.parametrize(("fault", "change", "rule"), PLANTED, ids=[p[0] for p in PLANTED])
def test_gate_refuses_every_fault(fault: str, change: Callable[[Arguments], Arguments], rule: str) -> None:
    """A valid call passes; with one fault it is refused by the rule that names it."""
    a = gate_call()
    with simulate():
        torch.ops.custom.npu_moe_gating_top_k(**a)
        with pytest.raises(SimulatorError, match=rule):
            torch.ops.custom.npu_moe_gating_top_k(**a | change(a))
