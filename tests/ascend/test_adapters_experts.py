"""Expert parallelism in one process: all ranks together give what one rank with all experts gives."""

from __future__ import annotations

import attrs
import pytest
import torch
from ascend_sim.ranks import Group
from ascend_sim.simulator import simulate
from hypothesis import given
from hypothesis import strategies as st
from kit.steps import examples
from purestep.ops.ascend.experts import Ranks, Received, combine_rows, dispatch_rows, experts_here, run_experts
from purestep.ops.ascend.providers import Providers, choose_providers, installed_schemas
from purestep.ops.dispatch import REFERENCE
from purestep.ops.quantize import Int8Weight, int8_weight
from torch import Tensor

BF16 = torch.bfloat16


def draw(seed: int, *shape: int) -> Tensor:
    """Normal numbers in bfloat16 that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def chosen_experts(seed: int, rows: int, n_experts: int, k: int) -> Tensor:
    """Distinct experts of every row."""
    scores = torch.rand(rows, n_experts, generator=torch.Generator().manual_seed(seed))
    return scores.argsort(-1)[:, :k]


def share(w: Tensor | Int8Weight, rank: int, n_local: int) -> Tensor | Int8Weight:
    """The matrices of one rank's experts."""
    part = slice(rank * n_local, (rank + 1) * n_local)
    return Int8Weight(*(p[part] for p in w)) if isinstance(w, Int8Weight) else w[part]


def over_ranks(
    xs: list[Tensor],
    ids: list[Tensor],
    weights: list[Tensor],
    w13: Tensor | Int8Weight,
    w2: Tensor | Int8Weight,
    active: list[Tensor] | None,
) -> list[Tensor]:
    """Run all ranks, one after the other in each phase."""
    size, n_experts = len(xs), 4
    n_local, most = n_experts // size, max(map(len, xs))
    places = [Ranks(group="ep", size=size, rank=r, n_experts=n_experts, most_rows=most) for r in range(size)]
    is_int8 = isinstance(w13, Int8Weight)
    masks = [None] * size if active is None else active
    group = Group(x=tuple(xs), expert_ids=tuple(i.int() for i in ids), active=tuple(active or ()))

    def providers() -> Providers:
        return choose_providers("a3", installed_schemas())

    def answer(r: int, received: Received) -> Tensor:
        own = (share(w13, r, n_local), share(w2, r, n_local))
        return run_experts(providers(), received.rows, received.scales, received.counts, *own, 0.6, BF16)

    with simulate(strict_sizes=False, groups={"ep": group}):
        received = [
            dispatch_rows(providers(), xs[r], ids[r], places[r], active=masks[r], is_int8=is_int8) for r in range(size)
        ]
        outputs = [answer(r, arrived) for r, arrived in enumerate(received)]
    group = attrs.evolve(group, outputs=tuple(outputs))
    with simulate(strict_sizes=False, groups={"ep": group}):
        return [
            combine_rows(providers(), outputs[r], received[r], ids[r], weights[r], places[r], active=masks[r])
            for r in range(size)
        ]


@examples(10)
@given(seed=st.integers(0, 99), rows=st.lists(st.integers(1, 5), min_size=1, max_size=2), k=st.integers(1, 3))
def test_ranks_together_are_one_rank(seed: int, rows: list[int], k: int) -> None:
    """Whatever rows each of one or two ranks has, every row gets what all experts on one rank would give it."""
    w13, w2 = draw(1, 4, 24, 32) / 6, draw(2, 4, 32, 12) / 4
    xs = [draw(seed + r, n, 32) for r, n in enumerate(rows)]
    ids = [chosen_experts(seed + r, n, 4, k) for r, n in enumerate(rows)]
    weights = [draw(seed + 9 + r, n, k).float().abs() for r, n in enumerate(rows)]
    for r, found in enumerate(over_ranks(xs, ids, weights, w13, w2, None)):
        expected = REFERENCE.experts(xs[r], ids[r], weights[r], w13, w2, 0.6)
        assert float((found - expected).abs().max()) <= 0.02 * float(expected.abs().max())


def test_int8_over_ranks_is_int8_on_one() -> None:
    """Rows quantised on their way give what rows quantised at home give."""
    w13, w2 = int8_weight(draw(1, 4, 24, 32) / 6), int8_weight(draw(2, 4, 32, 12) / 4)
    xs, ids = [draw(r, 3, 32) for r in range(2)], [chosen_experts(r, 3, 4, 2) for r in range(2)]
    weights = [draw(r + 5, 3, 2).float().abs() for r in range(2)]
    found = over_ranks(xs, ids, weights, w13, w2, None)
    with simulate(strict_sizes=False):
        for r in range(2):
            providers = choose_providers("a3", installed_schemas())
            expected = experts_here(providers, xs[r], ids[r], weights[r], w13, w2, 0.6)
            assert float((found[r] - expected).abs().max()) <= 0.02 * float(expected.abs().max())


@pytest.mark.parametrize("live", [(2, 3), (3, 1), (0, 3)])
def test_rows_that_take_no_part(live: tuple[int, int]) -> None:
    """Masked rows, a whole idle rank's among them, come back as zeros and change nothing for the others."""
    w13, w2 = draw(1, 4, 24, 32) / 6, draw(2, 4, 32, 12) / 4
    xs, ids = [draw(r, 3, 32) for r in range(2)], [chosen_experts(r, 3, 4, 2) for r in range(2)]
    weights = [draw(r + 5, 3, 2).float().abs() for r in range(2)]
    active = [torch.arange(3) < n for n in live]
    whole = over_ranks(xs, ids, weights, w13, w2, None)
    for r, found in enumerate(over_ranks(xs, ids, weights, w13, w2, active)):
        torch.testing.assert_close(found[: live[r]], whole[r][: live[r]])
        assert not found[live[r] :].any()
