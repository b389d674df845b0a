"""Every operator against the plain oracle and the published numbers; every kernel table against the plain one."""

from __future__ import annotations

import math
from typing import Any

import attrs
import oracle.ops as plain
import purestep.ops.attention as attention
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from purestep.ops import compressor, experts, indexer, norms, quantize, rotary, router, streams
from purestep.ops.dispatch import DIFFERENTIABLE, FUSED, INVARIANT, REFERENCE, Ops
from purestep.ops.selection import top_indices
from purestep.ops.vocabulary import cut_vocabulary, embed_rows, shard_rows
from torch import Tensor

CLOSE = {"atol": 2e-5, "rtol": 2e-5}  # float32, sums of up to a few thousand terms of scale 1


def draw(seed: int, *shape: int) -> Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("table", [REFERENCE, FUSED, INVARIANT, DIFFERENTIABLE], ids=lambda table: table.name)
@pytest.mark.parametrize("channel", [0, 5, 448, 449, 462, 511])
def test_rotation_turns_neighbours(table: Ops, channel: int) -> None:
    """MTH-11: a unit vector in the last 64 channels turns within its pair (2i, 2i+1); all other channels stay."""
    width, rotary_width, position = 512, 64, 3
    frequencies = rotary.rotary_frequencies(rotary_width, 10000.0)
    x = torch.zeros(1, 1, width)
    x[..., channel] = 1.0
    found = table.apply_rotary(x, rotary.rotary_factors(torch.tensor([[position]]), frequencies))[0, 0]
    expected = torch.zeros(width)
    if channel < width - rotary_width:
        expected[channel] = 1.0
    else:
        pair = (channel - (width - rotary_width)) // 2
        first, angle = width - rotary_width + 2 * pair, position * 10000.0 ** (-2 * pair / rotary_width)
        is_second = channel % 2 == 1
        expected[first] = -math.sin(angle) if is_second else math.cos(angle)
        expected[first + 1] = math.cos(angle) if is_second else math.sin(angle)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_mhc_matches_the_published_numbers() -> None:
    """The worked mHC example comes out: pre, post and all sixteen mixing weights."""
    m = torch.tensor(
        [0.3, -0.7, 1.1, 0.2, -1, 0.5, 0, 2, 1, -1, 0.5, 0, 0.2, 0.4, -0.6, 0.8, -0.3, 0.9, 0.1, -0.2, 0, 0, 1.5, -1.5]
    )
    comb = streams.sinkhorn(m[8:].view(1, 4, 4), 20, 1e-6)[0]
    expected = [
        [0.4813896, 0.0681083, 0.2086966, 0.2418045],
        [0.1966198, 0.2510570, 0.0631480, 0.4891743],
        [0.1419209, 0.4925881, 0.1513312, 0.2141588],
        [0.1800687, 0.1882455, 0.5768233, 0.0548614],
    ]
    torch.testing.assert_close(comb, torch.tensor(expected), atol=2e-7, rtol=0)
    # One stream set to sqrt(width) makes the normed row constant, so fn = m / value gives back m.
    fn = torch.zeros(24, 8)
    fn[:, 0] = m / 8**0.5
    state = torch.zeros(1, 4, 2)
    state[0, 0, 0] = 8**0.5
    pre, post, _ = streams.mix_weights(state, fn, torch.zeros(24), torch.ones(3), n_iters=20, eps=1e-6, norm_eps=0.0)
    torch.testing.assert_close(pre[0], torch.tensor([0.5744435, 0.3318132, 0.7502611, 0.5498350]), atol=1e-6, rtol=0)
    torch.testing.assert_close(post[0], torch.tensor([0.5378829, 1.2449187, 1.0, 1.7615941]), atol=1e-6, rtol=0)


@given(seed=st.integers(0, 999), spread=st.sampled_from([0.5, 1.0, 2.0, 6.0]))
def test_sinkhorn_normalises_columns(seed: int, spread: float) -> None:
    """Columns sum to one within 3e-6 at every scale, all weights are positive (rows are promised nothing so tight)."""
    comb = streams.sinkhorn(draw(seed, 7, 4, 4) * spread, 20, 1e-6)
    assert (comb > 0).all()
    assert (comb.sum(-2) - 1).abs().max() < 3e-6


def test_frequencies_match_the_published_numbers() -> None:
    """YaRN keeps, blends and stretches exactly the pairs that the sheet lists; the plain base is untouched."""
    yarn = rotary.rotary_frequencies(64, 160000.0, factor=16.0, original_context=65536)
    base = rotary.rotary_frequencies(64, 160000.0)
    listed = {0: 1.0, 1: 0.6876560, 15: 0.0036355385, 20: 2.9697779e-4, 25: 5.3723124e-6, 31: 5.6805294e-7}
    for pair, expected in listed.items():
        assert yarn[pair].item() == pytest.approx(expected, rel=1e-6)
    ratios = {0: 1.0, 15: 1.0, 16: 0.90625, 20: 0.53125, 24: 0.15625, 25: 0.0625, 31: 0.0625}
    for pair, expected in ratios.items():
        assert (yarn / base)[pair].item() == pytest.approx(expected, rel=1e-6)
    assert rotary.rotary_frequencies(64, 10000.0)[31].item() == pytest.approx(10000 ** (-62 / 64), rel=1e-6)


@given(seed=st.integers(0, 99), position=st.integers(0, 100000))
def test_rotation(seed: int, position: int) -> None:
    """Neighbouring pairs of the last channels turn, the others stay, and conjugated factors turn back."""
    x = draw(seed, 3, 12)
    frequencies = rotary.rotary_frequencies(8, 10000.0)
    factors = rotary.rotary_factors(torch.full((3,), position), frequencies)
    turned = rotary.apply_rotary(x, factors)
    assert torch.equal(turned[:, :4], x[:, :4])
    expected = plain.rotate_pairs(x, torch.full((3,), position), frequencies.tolist())
    torch.testing.assert_close(turned, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotary.apply_rotary(turned, factors.conj()), x, **CLOSE)
    unit = torch.zeros(1, 12)
    unit[0, 4] = 1.0
    moved = rotary.apply_rotary(unit, rotary.rotary_factors(torch.tensor([1]), frequencies))
    assert moved[0, 5].item() == pytest.approx(torch.tensor(1.0).sin().item())  # neighbours, not halves


@pytest.mark.parametrize(
    ("n_vocab", "ranks", "rows"),
    [(129280, 1, 129280), (129280, 8, 16160), (129280, 16, 8080), (129280, 3, 43136), (1000, 4, 256), (1000, 3, 384)],
)
def test_vocabulary_shards(n_vocab: int, ranks: int, rows: int) -> None:
    """H01: shards have the published sizes, their lookups sum to the dense one, and padding columns are cut."""
    assert shard_rows(n_vocab, ranks) == rows
    table, ids = draw(0, n_vocab, 2), torch.tensor([0, 1, n_vocab - 1, n_vocab // 2])
    padded = torch.cat((table, torch.zeros(rows * ranks - n_vocab, 2)))
    shards = [embed_rows(ids, padded[s * rows : (s + 1) * rows], s * rows) for s in range(ranks)]
    assert torch.equal(torch.stack(shards).sum(0), table[ids])
    assert all((torch.stack(shards).abs().sum(-1) > 0).sum(0) == 1)
    logits = cut_vocabulary(-torch.ones(2, 2) @ padded.abs().T, n_vocab)
    assert logits.shape == (2, n_vocab)
    assert (logits <= 0).all()


def test_pooling_matches_the_published_numbers() -> None:
    """The worked overlap example: entry 0 pools four tokens, entry 1 the a-halves before and its own b-halves."""
    t = torch.arange(8.0)
    kv = torch.stack((t, 10 + t), dim=-1)
    scores = torch.stack((0.1 * t, -0.1 * t), dim=-1)
    pooled = compressor.pool_group(
        compressor.overlap_groups(kv, 4, 0.0), compressor.overlap_groups(scores, 4, -torch.inf)
    )
    torch.testing.assert_close(pooled.flatten(), torch.tensor([11.3753529, 6.1872993]), atol=1e-6, rtol=0)


def test_routers_match_the_published_numbers() -> None:
    """Both worked examples: the bias chooses, the unbiased scores weigh."""
    ids, weights = router.route_scored(torch.tensor([[0.0, 1, -1, 2]]), torch.tensor([0.0, 0, 1, 0]), 2, 1.5)
    assert set(ids[0].tolist()) == {2, 3}
    found = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    assert found[2] == pytest.approx(0.4160091, abs=1e-6)
    assert found[3] == pytest.approx(1.0839909, abs=1e-6)
    ids, weights = router.route_scored(torch.tensor([[0.0, 1, -1, 2]]), torch.tensor([0.9, 0, 0.5, -0.6]), 2, 1.5)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.6312, 0.8688]]), atol=1e-4, rtol=0)
    hashed, weights = router.route_hash(torch.tensor([[0.0, 1, -1, 2]]), torch.tensor([[0, 1]]), 1.5)
    assert hashed.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.tensor([[0.6312, 0.8688]]), atol=1e-4, rtol=0)


@given(seed=st.integers(0, 999), shift=st.floats(-3, 3))
def test_bias_only_selects(seed: int, shift: float) -> None:
    """A bias shared by all experts changes nothing; weights sum to the factor and never contain the bias."""
    logits, bias = draw(seed, 5, 8), draw(seed + 1, 8)
    ids, weights = router.route_scored(logits, bias, 3, 1.5)
    assert all(len(set(row)) == 3 for row in ids.tolist())
    torch.testing.assert_close(weights.sum(-1), torch.full((5,), 1.5), **CLOSE)
    by_hash = router.route_hash(logits, ids, 1.5)[1]
    assert torch.equal(weights, by_hash)
    margin = (plain.router_scores(logits) + bias).sort(-1).values.diff(dim=-1).min()
    if margin > 1e-4:
        moved, moved_weights = router.route_scored(logits, bias + shift, 3, 1.5)
        assert torch.equal(moved, ids)
        torch.testing.assert_close(moved_weights, weights, **CLOSE)


def test_quantisation_matches_the_published_example() -> None:
    """The worked FP8 group, and FP4's ties to the even code."""
    x = torch.tensor([0.1, -3, 0.007, 448, -1000] + [0.0] * 59)
    expected = [0.1015625, -3, 0.0078125, 448, -1024]
    assert quantize.round_fp8(x, 64)[:5].tolist() == expected
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] + [0.0] * 24)
    assert quantize.round_fp4(ties, 32)[:8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]


@given(seed=st.integers(0, 999), exponent=st.integers(-20, 20), width=st.sampled_from([24, 32, 64, 80]))
def test_quantisation_equals_the_tables(seed: int, exponent: int, width: int) -> None:
    """Rounding through FP8 and FP4 equals the nearest entry of their tables, group by group, short groups included."""
    x = draw(seed, 3, width) * 2.0**exponent
    assert torch.equal(quantize.round_fp8(x, 64), plain.qdq8(x, 64))
    assert torch.equal(quantize.round_fp4(x, 32), plain.qdq4(x, 32))


@pytest.mark.parametrize("width", [1, 2, 16, 128])
def test_hadamard_is_sylvesters(width: int) -> None:
    """The rotation equals the matrix in natural order and is its own inverse."""
    x = draw(0, 5, width)
    torch.testing.assert_close(quantize.hadamard(x), x @ plain.hadamard_matrix(width), **CLOSE)
    torch.testing.assert_close(quantize.hadamard(quantize.hadamard(x)), x, **CLOSE)


@given(seed=st.integers(0, 999), rows=st.integers(0, 3), n=st.integers(0, 9))
def test_index_scores_clip_every_head(seed: int, rows: int, n: int) -> None:
    """A score is the sum over heads of weight times the clipped product; an entry that all heads dislike scores 0."""
    q, keys, weights = draw(seed, rows, 4, 8), draw(seed + 1, n, 8), draw(seed + 2, rows, 4)
    got = indexer.index_scores(q, keys, weights, rounding=False)
    for t in range(rows):
        for j in range(n):
            expected = sum(w * max(0.0, p) for w, p in zip(weights[t].tolist(), (q[t] @ keys[j]).tolist(), strict=True))
            assert got[t, j].item() == pytest.approx(expected, abs=1e-4)
    if rows:
        assert not indexer.index_scores(q, -q[:1, 0] * 0, weights, rounding=False).any()


@pytest.mark.parametrize("ops", [REFERENCE, FUSED], ids=lambda ops: ops.name)
@given(n=st.integers(0, 40), count=st.integers(1, 12), seed=st.integers(0, 99), levels=st.integers(1, 5))
def test_picks(ops: Ops, n: int, count: int, seed: int, levels: int) -> None:
    """Picks are the best visible entries, lowest index first on a tie, always ``count`` wide, -1 where missing."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-levels, levels, (3, n), generator=generator) / 2 * torch.tensor([1.0, -0.0, 0.5])[:, None]
    visible = torch.randint(0, n + 1, (3,), generator=generator)
    picks = ops.pick_entries(scores, visible, count)
    assert picks.shape == (3, count)
    for row, seen, got in zip(scores.tolist(), visible.tolist(), picks.tolist(), strict=True):
        best = sorted(range(seen), key=lambda j: (-row[j], j))[:count]
        assert got == best + [-1] * (count - len(best))


@pytest.mark.parametrize("n", [511, 512, 513, 2047, 2049, 8193, 20000])
def test_picks_have_no_capacity(n: int) -> None:
    """No number of candidates changes the rule, a plateau of zeros at the border included."""
    scores = draw(n, 2, n).relu() * (draw(n + 1, 2, n) > 0)
    visible = torch.tensor([n, n - 3])
    expected = indexer.pick_entries(scores, visible, 512)
    for _ in range(3):
        assert torch.equal(FUSED.pick_entries(scores, visible, 512), expected)
    row = scores[0].tolist()
    assert expected[0].tolist()[: min(n, 512)] == sorted(range(n), key=lambda j: (-row[j], j))[:512]


def test_top_indices_prefers_the_lower_index() -> None:
    """Equal scores are taken in order of index, -0.0 and 0.0 being equal."""
    assert top_indices(torch.tensor([0.0, -0.0, 1.0, 0.0]), 3).tolist() == [2, 0, 1]


@given(seed=st.integers(0, 999), x=st.integers(1, 9), hidden=st.integers(0, 8))
def test_attention_with_sink(seed: int, x: int, hidden: int) -> None:
    """Attention equals the formula with the sink in the divisor; masked keys, whatever they hold, count for nothing."""
    q, keys, sink = draw(seed, 2, 3, 4), draw(seed + 1, x, 4), draw(seed + 2, 3)
    mask = torch.arange(x) < max(1, x - hidden)
    got = attention.attend(q, keys, mask.expand(2, x), sink, scale=0.5, rounding=False)
    scores = torch.einsum("tnd,xd->tnx", q.double(), keys.double()) * 0.5
    weights = scores.exp() * mask
    expected = (weights @ keys.double()) / (weights.sum(-1) + sink.double().exp())[..., None]
    torch.testing.assert_close(got, expected.float(), **CLOSE)
    empty = attention.attend(q, keys, torch.zeros(2, x, dtype=torch.bool), sink, scale=0.5, rounding=False)
    assert not empty.any()  # only the sink is left, and its value is zero


@given(seed=st.integers(0, 999), n_rows=st.integers(0, 9), chosen=st.integers(1, 4))
def test_expert_routes_agree(seed: int, n_rows: int, chosen: int) -> None:
    """Sorted, thin, tiled and dense experts equal a loop over rows and choices."""
    x, w13, w2 = draw(seed, n_rows, 6), draw(seed + 1, 4, 10, 6), draw(seed + 2, 4, 6, 5)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(n_rows, 4, generator=generator).argsort(-1)[:, :chosen]
    weights = torch.rand(n_rows, chosen, generator=generator)
    expected = torch.zeros(n_rows, 6)
    for t in range(n_rows):
        for j, e in enumerate(ids[t].tolist()):
            expected[t] += weights[t, j] * plain.clamped_swiglu(x[t], w13[e, :5], w2[e], w13[e, 5:], 0.6)
    for ops in (REFERENCE, FUSED, INVARIANT, DIFFERENTIABLE):
        torch.testing.assert_close(ops.experts(x, ids, weights, w13, w2, 0.6), expected, atol=1e-4, rtol=1e-4)
    shared = experts.expert(x, w13[0], w2[0], None)
    torch.testing.assert_close(
        shared, plain.clamped_swiglu(x, w13[0, :5], w2[0], w13[0, 5:], None), atol=1e-4, rtol=1e-4
    )


def _arguments(seed: int, n: int) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Arguments for every operator on ``n`` rows, shaped as the paged path calls it."""
    factors = rotary.rotary_factors(torch.arange(n), rotary.rotary_frequencies(4, 100.0))
    ids = torch.rand(n, 4, generator=torch.Generator().manual_seed(seed)).argsort(-1)[:, :2]
    mhc = {"n_iters": 20, "eps": 1e-6, "norm_eps": 1e-6}
    mask = torch.arange(150) < torch.arange(1, n + 1).view(n, 1, 1)
    return {
        "embed_rows": ((torch.arange(n) % 7, draw(1, 5, 16), 2), {}),
        "cut_vocabulary": ((draw(seed, n, 9), 7), {}),
        "linear": ((draw(seed, n, 16), draw(1, 12, 16)), {}),
        "grouped_linear": ((draw(seed, n, 2, 16), draw(1, 2, 12, 16)), {}),
        "rms_norm": ((draw(seed, n, 16), draw(1, 16), 1e-6), {}),
        "normalize_query": ((draw(seed, n, 3, 8), 1e-6), {"rounding": False}),
        "rotary_factors": ((torch.arange(n) * 977, rotary.rotary_frequencies(4, 100.0)), {}),
        "apply_rotary": ((draw(seed, n, 3, 8), factors.unsqueeze(1)), {}),
        "enter_streams": ((draw(seed, n, 4, 16), draw(1, 24, 64), draw(2, 24), draw(3, 3)), mhc),
        "join_streams": ((draw(seed, n, 4, 16), draw(1, n, 4)), {}),
        "update_streams": ((draw(seed, n, 4, 16), draw(1, n, 16), draw(2, n, 4), draw(3, n, 4, 4)), {}),
        "head_weights": (
            (draw(seed, n, 4, 16), draw(1, 4, 64), draw(2, 4), draw(3, 1)),
            {"eps": 1e-6, "norm_eps": 1e-6},
        ),
        "pool_group": ((draw(seed, n, 8, 16), draw(1, n, 8, 16)), {}),
        "fold_member": ((draw(seed, n, 48), draw(1, n, 16), draw(2, n, 16)), {}),
        "index_scores": ((draw(seed, n, 1, 4, 8), draw(1, n, 150, 8), draw(2, n, 1, 4)), {"rounding": False}),
        "pick_entries": ((draw(seed, n, 20), torch.arange(n), 7), {}),
        "attend": (
            (draw(seed, n, 1, 3, 8), draw(1, n, 150, 8), mask, draw(3, 3)),
            {"scale": 0.3, "rounding": False},
        ),
        "route_scored": ((draw(seed, n, 4), draw(1, 4), 2, 1.5), {}),
        "route_hash": ((draw(seed, n, 4), ids, 1.5), {}),
        "experts": ((draw(seed, n, 16), ids, draw(1, n, 2), draw(2, 4, 24, 16), draw(3, 4, 16, 12), 0.6), {}),
        "expert": ((draw(seed, n, 16), draw(1, 24, 16), draw(2, 16, 12), 0.6), {}),
        "hadamard": ((draw(seed, n, 8),), {}),
        "round_fp8": ((draw(seed, n, 64), 64), {}),
        "round_fp8_rows": ((draw(seed, n, 32),), {}),
        "round_int8_rows": ((draw(seed, n, 32),), {}),
        "round_fp4": ((draw(seed, n, 32), 32), {}),
    }


EXACT = ("pick_entries", "round_fp8", "round_fp8_rows", "round_int8_rows", "round_fp4", "embed_rows", "cut_vocabulary")
"""Operators whose rows are data movement or rounding: nothing is summed."""

OPERATORS = [field.name for field in attrs.fields(Ops) if field.name not in ("name", "paged", "attend_chunk")]
"""Those whose rows are rows of the step; the rows of ``attend_chunk`` share their keys (``test_chunks.py``)."""


@pytest.mark.parametrize("ops", [REFERENCE, FUSED, INVARIANT], ids=lambda ops: ops.name)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("n", [0, 1, 5, 33])
def test_operators_keep_the_contract(ops: Ops, name: str, n: int) -> None:
    """Every operator of every table equals the plain one, changes no argument, repeats itself and accepts no rows."""
    args, options = _arguments(7, n)[name]
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    got, again = getattr(ops, name)(*args, **options), getattr(ops, name)(*args, **options)
    expected = getattr(REFERENCE, name)(*args, **options)
    for one, two, plain_one in zip(*map(_parts, (got, again, expected)), strict=True):
        assert torch.equal(one, two)
        assert one.dtype == plain_one.dtype
        torch.testing.assert_close(one, plain_one, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True) if isinstance(a, Tensor))


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in EXACT])
@given(seed=st.integers(0, 999), n=st.integers(1, 40), place=st.integers(0, 39), mates=st.integers(1000, 1999))
def test_invariant_operators_see_one_row(name: str, seed: int, n: int, place: int, mates: int) -> None:
    """In the row-independent table a row's bits are the same alone and anywhere among any others."""
    place %= n
    alone, options = _arguments(seed, 1)[name]
    many, _ = _arguments(mates, n)[name]
    joined = []
    for one, all_rows in zip(alone, many, strict=True):
        if not isinstance(one, Tensor) or (one.shape == all_rows.shape and n > 1):
            joined.append(one)  # a weight: the same for every row
            continue
        row_wise = all_rows.clone()
        row_wise[place] = one[0]
        joined.append(row_wise)
    operator = getattr(INVARIANT, name)
    for single, batch in zip(_parts(operator(*alone, **options)), _parts(operator(*joined, **options)), strict=True):
        assert torch.equal(single[0], batch[place])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(data=st.data(), width=st.integers(1, 40), n_out=st.integers(1, 20), n=st.integers(1, 20))
def test_invariant_products_of_any_width_see_one_row(
    dtype: torch.dtype, data: st.DataObject, width: int, n_out: int, n: int
) -> None:
    """Matrix products of the row-independent table keep a row's bits at every place, whatever the widths."""
    place = data.draw(st.integers(0, n - 1))
    x, w = draw(0, n, width).to(dtype), draw(1, n_out, width).to(dtype)
    assert torch.equal(INVARIANT.linear(x, w)[place], INVARIANT.linear(x[place : place + 1], w)[0])
    grouped, weights = torch.stack((x, x.flip(0)), dim=1), torch.stack((w, w.flip(0)))
    many, alone = (INVARIANT.grouped_linear(rows, weights) for rows in (grouped, grouped[place : place + 1]))
    assert torch.equal(many[place], alone[0])


def _parts(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_round_once(dtype: torch.dtype) -> None:
    """Norms compute in float32 and round once, to the dtype of their input."""
    x, w = draw(0, 4, 6).to(dtype), draw(1, 6).to(dtype)
    got = norms.rms_norm(x, w, 1e-6)
    wide = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w.double()
    assert got.dtype == dtype
    torch.testing.assert_close(got, wide.to(dtype), atol=1e-6, rtol=0.01 if dtype is torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("rows", [1, 8, 9])
def test_few_rows_meet_large_groups(rows: int) -> None:
    """Groups so large that few rows meet them one at a time give the plain product, in both dtypes."""
    x, w = draw(0, rows, 2, 1024), draw(1, 2, 1024, 1024) / 32
    for dtype, close in ((torch.float32, CLOSE), (torch.bfloat16, {"atol": 4e-2, "rtol": 1e-2})):
        found = FUSED.grouped_linear(x.to(dtype), w.to(dtype))
        torch.testing.assert_close(found, REFERENCE.grouped_linear(x.to(dtype), w.to(dtype)), **close)
